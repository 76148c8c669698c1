/* arena_chunks.h: the chunks of an arena as arena.c (allocating), commit.c (growing) and
 * arena_check.c see them. Nobody else includes this: it is how the allocator keeps its books, not
 * what it promises (arena.h). */
#ifndef SR_ARENA_CHUNKS_H
#define SR_ARENA_CHUNKS_H

#include "arena.h"
#include "huge.h"
#include "lock.h"

/* How the bytes lie: chunks tile [start + 48, committed_end - 16), each a multiple of 64 bytes, so
 * that every payload (16 bytes after its header) starts on a cache line. The last 16 bytes are the
 * header of an end marker: size 0, never free. Adding an extent turns the marker into an ordinary
 * chunk. */
#define FIRST_CHUNK 48u
#define OVERHEAD (FIRST_CHUNK + SR_CHUNK_HEAD)
#define CHUNK_MIN 64u
#define KIND_SHIFT 56
#define RESERVED_BITS 0x3cull
#define FL_SHIFT 6u /* the first class starts at 2^6 */
#define SL_LOG2 4u  /* 16 second-level classes */

/* ------------------------------------------------------------------ reading and writing chunks */

static inline sr_arena *arenas(const sr_store *st) { return sr_known(st, st->shape.arenas_off); }
static inline sr_chunk *chunk_at(const sr_store *st, uint64_t c) { return sr_ptr(st, c); }
static inline sr_free_links *links_at(const sr_store *st, uint64_t c) {
    return sr_ptr(st, c + SR_CHUNK_HEAD);
}

/* SYNC POINT: written under the arena lock; read without it by whoever holds the chunk
 * (sr_alloc_bytes), while a neighbour may be flipping SR_CHUNK_PREV_FREE in the same word. Relaxed:
 * size and kind do not change while it is held. */
static inline uint64_t flags_get(const sr_chunk *c) {
    return __atomic_load_n(&c->size_flags, __ATOMIC_RELAXED);
}
static inline void flags_set(sr_chunk *c, uint64_t v) {
    __atomic_store_n(&c->size_flags, v, __ATOMIC_RELAXED);
}
/* SYNC POINT: the same for the end of the committed range; it never falls below a chunk that is
 * held. */
static inline uint64_t committed_end(const sr_arena *a) {
    return __atomic_load_n(&a->committed_end, __ATOMIC_RELAXED);
}

static inline uint64_t size_of(uint64_t flags) { return flags & SR_CHUNK_SIZE_MASK; }
static inline uint32_t kind_of(uint64_t flags) { return (uint32_t)(flags >> KIND_SHIFT); }

/* Could a chunk header of this arena lie at c? (Not: does one.) */
static inline int in_arena(const sr_store *st, const sr_arena *a, uint64_t c) {
    uint64_t end = committed_end(a);
    return c % SR_LINE == FIRST_CHUNK && c >= a->start + FIRST_CHUNK && end <= st->bytes &&
           c < end && end - c > SR_CHUNK_HEAD;
}
static inline int size_fits(const sr_arena *a, uint64_t c, uint64_t size) {
    return size >= CHUNK_MIN && size <= committed_end(a) - SR_CHUNK_HEAD - c;
}

static inline void class_of(uint64_t size, uint32_t *fl, uint32_t *sl) {
    uint32_t top = 63u - (uint32_t)__builtin_clzll(size);
    *fl = top - FL_SHIFT;
    *sl = (uint32_t)(size >> (top - SL_LOG2)) & (SR_SL_COUNT - 1);
}

/* Everything that unlinking this free chunk will rely on. */
static inline int free_chunk_ok(const sr_store *st, const sr_arena *a, uint64_t c) {
    if (!in_arena(st, a, c)) return 0;
    uint64_t flags = flags_get(chunk_at(st, c)), size = size_of(flags);
    if (flags != (size | SR_CHUNK_FREE) || !size_fits(a, c, size)) return 0;
    sr_free_links *l = links_at(st, c);
    uint32_t fl, sl;
    class_of(size, &fl, &sl);
    if (fl >= SR_FL_COUNT) return 0;
    if (l->prev == 0 ? a->head[fl][sl] != c
                     : (!in_arena(st, a, l->prev) || links_at(st, l->prev)->next != c)) {
        return 0;
    }
    return l->next == 0 || (in_arena(st, a, l->next) && links_at(st, l->next)->prev == c);
}

static inline void list_remove(sr_store *st, sr_arena *a, uint64_t c, uint64_t size) {
    sr_free_links *l = links_at(st, c);
    if (l->next != 0) links_at(st, l->next)->prev = l->prev;
    if (l->prev != 0) {
        links_at(st, l->prev)->next = l->next;
        return;
    }
    uint32_t fl, sl;
    class_of(size, &fl, &sl);
    a->head[fl][sl] = l->next;
    if (l->next == 0) {
        a->sl_bitmap[fl] &= ~(1u << sl);
        if (a->sl_bitmap[fl] == 0) a->fl_bitmap &= ~(1ull << fl);
    }
}

/* Write the header of a free chunk, tell the chunk after it, and put it on its list. */
static inline void list_add(sr_store *st, sr_arena *a, uint64_t c, uint64_t size) {
    sr_chunk *after = chunk_at(st, c + size);
    flags_set(chunk_at(st, c), size | SR_CHUNK_FREE);
    flags_set(after, flags_get(after) | SR_CHUNK_PREV_FREE);
    after->prev_size = size;
    uint32_t fl, sl;
    class_of(size, &fl, &sl);
    uint64_t old = a->head[fl][sl];
    SR_ASSERT(old == 0 || in_arena(st, a, old));
    *links_at(st, c) = (sr_free_links){.next = old, .prev = 0};
    if (old != 0) links_at(st, old)->prev = c;
    a->head[fl][sl] = c;
    a->sl_bitmap[fl] |= 1u << sl;
    a->fl_bitmap |= 1ull << fl;
}

/* ------------------------------------------------------------------ growing (commit.c) */

static inline uint64_t capacity_left(const sr_store *st) {
    uint64_t have = atomic_load_explicit(&st->hdr->committed_bytes, memory_order_relaxed);
    return have < st->shape.capacity_bytes ? st->shape.capacity_bytes - have : 0;
}

/* Bytes of the extent that begins at `end`. Extents that are no smaller than a huge page end where
 * one does. */
static inline uint64_t extent_bytes(const sr_store *st, uint64_t end) {
    uint64_t bytes = sr_align(st->shape.extent_bytes, SR_PAGE);
    return bytes < SR_HUGE_PAGE ? bytes : sr_align(end + bytes, SR_HUGE_PAGE) - end;
}

/* What the committer should add to this arena now; 0: nothing. Under the lock. */
static inline uint64_t ahead_bytes(const sr_store *st, const sr_arena *a) {
    if (SR_LIKELY(a->free_bytes >= st->shape.extent_bytes / 2)) return 0;
    uint64_t end = committed_end(a), step = extent_bytes(st, end), room = a->end - end;
    if (step > room) step = room;
    return step <= capacity_left(st) ? step : 0;
}

/* Commit so much that the last chunk before committed_end is free and has `size` bytes: *found.
 * Under the lock, system call and all: whoever comes for memory while there is none has to wait for
 * it anyway. SR_OK, SR_FULL, SR_NOSPACE, SR_CORRUPT, SR_SYS. */
int sr_arena_grow(sr_store *st, sr_arena *a, uint64_t size, uint64_t *found);

/* Is the arena where it was laid out, and its committed end in it? Under the lock. */
static inline int arena_placed(const sr_store *st, const sr_arena *a) {
    uint64_t start = st->arena_start + (uint64_t)(a - arenas(st)) * st->arena_span;
    return a->start == start && a->end == start + st->arena_span && a->committed_end >= start &&
           a->committed_end <= a->end && a->end <= st->bytes && a->committed_end % SR_PAGE == 0;
}
/* As sr_lock_inner, and SR_CORRUPT where it is not. */
static inline int lock_arena(sr_store *st, sr_arena *a) {
    int rc = sr_lock_inner(st, &a->lock);
    if (SR_UNLIKELY(rc == SR_OK && !arena_placed(st, a))) {
        sr_suspect(st);
        sr_unlock(&a->lock);
        rc = SR_CORRUPT;
    }
    return rc;
}

/* Fill sr_last_detail() and give the status. */
static inline int sr_fail(int status, uint64_t asked, uint64_t available, int sys_errno) {
    sr_detail *d = sr_last_detail();
    *d = (sr_detail){.asked = asked, .available = available, .sys_errno = sys_errno};
    return status;
}

/* The arena whose range holds `off`, NULL if none. Ranges are constant, of one size, one after the
 * other. */
static inline sr_arena *arena_of(const sr_store *st, uint64_t off) {
    uint64_t at = off - st->arena_start; /* below the first one: wraps to far beyond the last */
    if (at < st->arena_span) return arenas(st);
    uint64_t i = st->arena_span == 0 ? UINT64_MAX : at / st->arena_span;
    return i < st->shape.n_arenas ? arenas(st) + i : NULL;
}

#endif
