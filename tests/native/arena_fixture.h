/* arena_fixture.h: a segment with nothing but a header and arenas, for tests of the allocator. */
#ifndef SR_ARENA_FIXTURE_H
#define SR_ARENA_FIXTURE_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "arena.h"
#include "check.h"
#include "lock.h"

#ifndef HAVE_STORE
static _Thread_local sr_detail detail;
sr_detail *sr_last_detail(void) { return &detail; }
#endif

#define FIXED (32u * SR_PAGE) /* header and arena array */
#define EXTENT (64u * 1024)
#define MIB (1ull << 20)
#define HEAD 16u     /* chunk header */
#define OVERHEAD 64u /* of an arena: 48 bytes before the first header, 16 for the end marker */

/* ---------------------------------------------------------------- a segment */

static inline void store_map(sr_store *st, int fd, uint64_t bytes, uint64_t capacity,
                             uint64_t extent, uint32_t n_arenas) {
    CHECK(fd >= 0);
    CHECK(ftruncate(fd, (off_t)bytes) == 0);
    CHECK(posix_fallocate(fd, 0, FIXED) == 0);
    void *base = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
    CHECK(base != MAP_FAILED);
    *st = (sr_store){.base = base, .bytes = bytes, .fd = fd, .hdr = base};
    st->shape.capacity_bytes = capacity;
    st->shape.extent_bytes = extent;
    st->shape.arenas_off = SR_PAGE;
    st->shape.n_arenas = n_arenas;
    uint64_t span = (bytes - FIXED) / n_arenas / SR_PAGE * SR_PAGE;
    for (uint32_t i = 0; i < n_arenas; i++) {
        sr_arena *a = (sr_arena *)sr_ptr(st, st->shape.arenas_off) + i;
        sr_arena_init(st, a, FIXED + i * span, FIXED + (i + 1) * span);
    }
}

static inline sr_store store_open(uint64_t bytes, uint64_t capacity, uint32_t n_arenas) {
    sr_store st;
    store_map(&st, memfd_create("test_arena", MFD_CLOEXEC | MFD_ALLOW_SEALING), FIXED + bytes,
              capacity, EXTENT, n_arenas);
    return st;
}

static inline void store_close(sr_store *st) {
    CHECK(munmap(st->base, st->bytes) == 0);
    CHECK(close(st->fd) == 0);
}

static inline sr_arena *arena_at(const sr_store *st, uint32_t i) {
    return (sr_arena *)sr_ptr(st, st->shape.arenas_off) + i;
}
static inline sr_chunk *chunk_of(const sr_store *st, uint64_t off) {
    return sr_ptr(st, off - HEAD);
}

static inline uint64_t alloc_ok(sr_store *st, uint32_t arena, uint64_t bytes) {
    uint64_t off = 0;
    CHECK(sr_alloc(st, arena, SR_KIND_BLOCK, bytes, NULL, &off) == SR_OK);
    return off;
}

/* Everything was freed: one chunk holds all that was committed. */
static inline void check_empty(sr_store *st, uint32_t i) {
    sr_arena *a = arena_at(st, i);
    CHECK(sr_arena_check(st, i, NULL, NULL) == 0);
    CHECK(a->n_allocs == 0 && a->used_bytes == 0);
    if (a->committed_end == a->start) return;
    CHECK(a->free_bytes == a->committed_end - a->start - OVERHEAD);
    CHECK(chunk_of(st, a->start + 64)->size_flags == (a->free_bytes | SR_CHUNK_FREE));
}

static inline void check_charges(const sr_store *st) {
    uint64_t sum = 0;
    for (uint32_t i = 0; i < st->shape.n_arenas; i++) {
        sum += arena_at(st, i)->committed_end - arena_at(st, i)->start;
    }
    CHECK(sum == atomic_load(&st->hdr->committed_bytes));
}

#endif
