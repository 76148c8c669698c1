/* test_arena_damage.c: bad offsets, damaged books, and an owner that died: the allocator refuses,
 * changes nothing, and its check finds what is wrong. */
#include "arena_fixture.h"

#include <sys/wait.h>

/* ---------------------------------------------------------------- bad offsets */

static void test_bad_offsets(void) {
    sr_store st = store_open(2 * MIB, 2 * MIB, 2);
    uint64_t off[5];
    for (uint32_t i = 0; i < 5; i++) {
        off[i] = alloc_ok(&st, 0, 300);
        memset(sr_ptr(&st, off[i]), 0xff, 300);
    }
    sr_arena before = *arena_at(&st, 0);
    uint64_t in_payload = off[2] + 64;
    const uint64_t bad[] = {0, 1, 64, FIXED, FIXED + 64 + 1, off[1] + 8, off[1] - 16, in_payload,
                            arena_at(&st, 0)->committed_end, arena_at(&st, 0)->committed_end - 64,
                            arena_at(&st, 1)->start + 64, arena_at(&st, 1)->end, st.bytes + 64,
                            UINT64_MAX, UINT64_MAX - 63, (1ull << 63)};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        CHECK(sr_free(&st, bad[i]) == SR_CORRUPT);
        CHECK(sr_alloc_bytes(&st, bad[i]) == 0 && sr_alloc_kind(&st, bad[i]) == SR_KIND_NONE);
    }
    CHECK(memcmp(&before.start, &arena_at(&st, 0)->start, sizeof before - sizeof before.lock) == 0);
    /* Freed twice: while isolated, after joining the chunk before, the chunk after, and both. */
    const uint32_t order[] = {1, 2, 4, 3, 0};
    for (uint32_t i = 0; i < 5; i++) {
        CHECK(sr_free(&st, off[order[i]]) == SR_OK);
        for (uint32_t j = 0; j <= i; j++) CHECK(sr_free(&st, off[order[j]]) == SR_CORRUPT);
        CHECK(sr_alloc_bytes(&st, off[order[i]]) == 0);
        CHECK(sr_arena_check(&st, 0, NULL, NULL) == 0);
    }
    check_empty(&st, 0);
    store_close(&st);
}

/* ---------------------------------------------------------------- damage */

/* Layout at the start: used u0, free f0, used u1, free f1 (same class), used u2, free rest. */
typedef struct {
    sr_store st;
    sr_arena *a;
    uint64_t u0, f0, u1, f1, u2, rest;
} scene;

static scene scene_open(void) {
    scene s = {.st = store_open(2 * MIB, 2 * MIB, 1)};
    s.a = arena_at(&s.st, 0);
    s.u0 = alloc_ok(&s.st, 0, 240);
    s.f0 = alloc_ok(&s.st, 0, 496);
    s.u1 = alloc_ok(&s.st, 0, 240);
    s.f1 = alloc_ok(&s.st, 0, 496);
    s.u2 = alloc_ok(&s.st, 0, 240);
    CHECK(sr_free(&s.st, s.f0) == SR_OK && sr_free(&s.st, s.f1) == SR_OK);
    s.rest = s.u2 + 256;
    CHECK(sr_arena_check(&s.st, 0, NULL, NULL) == 0);
    return s;
}

static int damage_seen(sr_store *st, uint64_t *word, uint64_t value) {
    uint64_t old = *word;
    CHECK(old != value);
    *word = value;
    int rc = sr_arena_check(st, 0, NULL, NULL);
    *word = old;
    CHECK(sr_arena_check(st, 0, NULL, NULL) == 0);
    return rc < 0;
}

static void test_damage_words(void) {
    scene s = scene_open();
    sr_store *st = &s.st;
    uint64_t *u0 = &chunk_of(st, s.u0)->size_flags, *f0 = &chunk_of(st, s.f0)->size_flags;
    sr_chunk *u1 = chunk_of(st, s.u1), *end = chunk_of(st, s.a->committed_end);
    sr_free_links *l0 = sr_ptr(st, s.f0), *l1 = sr_ptr(st, s.f1);
    CHECK(l1->next == s.f0 - HEAD && l0->prev == s.f1 - HEAD); /* last freed, first on the list */
    /* Sizes: too small, past the end, tiling broken, swallowing a neighbour; bits that mean
     * nothing. */
    CHECK(damage_seen(st, u0, *u0 & ~SR_CHUNK_SIZE_MASK));
    CHECK(damage_seen(st, u0, *u0 + 4 * MIB));
    CHECK(damage_seen(st, u0, *u0 + 64));
    CHECK(damage_seen(st, u0, *u0 + 512));
    CHECK(damage_seen(st, u0, *u0 | 4));
    CHECK(damage_seen(st, f0, *f0 + 64));
    /* Kinds and flags. */
    CHECK(damage_seen(st, u0, *u0 & SR_CHUNK_SIZE_MASK));
    CHECK(damage_seen(st, u0, (*u0 & SR_CHUNK_SIZE_MASK) | (uint64_t)SR_KIND_END << 56));
    CHECK(damage_seen(st, f0, *f0 | (uint64_t)SR_KIND_BLOCK << 56));
    CHECK(damage_seen(st, u0, *u0 | SR_CHUNK_FREE));
    CHECK(damage_seen(st, u0, *u0 | SR_CHUNK_PREV_FREE));
    CHECK(damage_seen(st, &u1->size_flags, u1->size_flags & ~SR_CHUNK_PREV_FREE));
    CHECK(damage_seen(st, &u1->prev_size, u1->prev_size + 64));
    CHECK(damage_seen(st, &end->size_flags, end->size_flags & ~SR_CHUNK_PREV_FREE));
    CHECK(damage_seen(st, &end->size_flags, end->size_flags | 64));
    CHECK(damage_seen(st, &end->prev_size, 64));
    /* Lists: links, a circle, a loss, a head in the wrong class, a head out of range. */
    CHECK(damage_seen(st, &l0->prev, 0));
    CHECK(damage_seen(st, &l0->next, s.f1 - HEAD));
    CHECK(damage_seen(st, &l1->next, 0));
    CHECK(damage_seen(st, &l1->next, s.a->end + 48));
    CHECK(damage_seen(st, &s.a->head[3][0], s.f0 - HEAD)); /* class of 512 */
    CHECK(damage_seen(st, &s.a->head[3][0], UINT64_MAX - 15));
    CHECK(damage_seen(st, &s.a->head[3][0], s.rest - HEAD));
    CHECK(damage_seen(st, &s.a->head[5][1], s.f0 - HEAD));
    s.a->head[3][8] = s.a->head[3][0]; /* the list and its bit moved as a whole */
    s.a->head[3][0] = 0;
    s.a->sl_bitmap[3] = 1u << 8;
    CHECK(sr_arena_check(st, 0, NULL, NULL) < 0);
    s.a->head[3][0] = s.a->head[3][8];
    s.a->head[3][8] = 0;
    s.a->sl_bitmap[3] = 1;
    /* Bitmaps and counts. */
    CHECK(damage_seen(st, &s.a->fl_bitmap, s.a->fl_bitmap & ~(1ull << 3)));
    CHECK(damage_seen(st, &s.a->fl_bitmap, s.a->fl_bitmap | 1ull << 20));
    CHECK(damage_seen(st, &s.a->fl_bitmap, s.a->fl_bitmap | 1ull << 50));
    CHECK(damage_seen(st, &s.a->used_bytes, s.a->used_bytes + 64));
    CHECK(damage_seen(st, &s.a->free_bytes, s.a->free_bytes - 64));
    CHECK(damage_seen(st, &s.a->n_allocs, s.a->n_allocs + 1));
    CHECK(damage_seen(st, &s.a->committed_end, s.a->committed_end + SR_PAGE));
    CHECK(damage_seen(st, &s.a->committed_end, s.a->end + SR_PAGE));
    for (uint32_t bit = 1; bit < 32; bit += 15) {
        s.a->sl_bitmap[3] ^= 1u << bit;
        CHECK(sr_arena_check(st, 0, NULL, NULL) < 0);
        s.a->sl_bitmap[3] ^= 1u << bit;
    }
    store_close(st);
}

/* Damage that takes more than one word, and whether alloc and free notice what they would stumble
 * over. */
static void test_damage_structures(void) {
    scene s = scene_open();
    sr_store *st = &s.st;
    /* f1 split into two free chunks side by side, counts and lists otherwise right: they should be
     * one. */
    uint64_t half = s.f1 + 256, off = 0;
    CHECK(alloc_ok(st, 0, 496) == s.f1);
    *chunk_of(st, s.f1) = (sr_chunk){.size_flags = 256 | (uint64_t)SR_KIND_BLOCK << 56};
    *chunk_of(st, half) = (sr_chunk){.size_flags = 256 | (uint64_t)SR_KIND_BLOCK << 56};
    s.a->n_allocs++;
    CHECK(sr_arena_check(st, 0, NULL, NULL) == 0);
    CHECK(sr_free(st, half) == SR_OK);
    chunk_of(st, s.f1)->size_flags = 256 | SR_CHUNK_FREE;
    sr_free_links *l = sr_ptr(st, s.f1), *lh = sr_ptr(st, half);
    *l = (sr_free_links){.next = half - HEAD};
    lh->prev = s.f1 - HEAD;
    s.a->head[2][0] = s.f1 - HEAD;
    *chunk_of(st, half) = (sr_chunk){256 | SR_CHUNK_FREE | SR_CHUNK_PREV_FREE, 256};
    s.a->n_allocs--;
    s.a->used_bytes -= 256;
    s.a->free_bytes += 256;
    CHECK(sr_arena_check(st, 0, NULL, NULL) < 0);
    store_close(st);

    s = scene_open();
    uint64_t old = s.a->head[3][0];
    s.a->head[3][0] = UINT64_MAX - 15;
    CHECK(sr_alloc(st, 0, SR_KIND_BLOCK, 496, NULL, &off) == SR_OK); /* from elsewhere */
    s.a->head[3][0] = s.u0 - HEAD; /* not free */
    CHECK(sr_alloc(st, 0, SR_KIND_BLOCK, 240, NULL, &off) == SR_CORRUPT);
    s.a->head[3][0] = old;
    s.a->sl_bitmap[3] = 0;
    CHECK(sr_alloc(st, 0, SR_KIND_BLOCK, 240, NULL, &off) == SR_CORRUPT);
    s.a->sl_bitmap[3] = 1;
    ((sr_free_links *)sr_ptr(st, s.f0))->prev = s.rest - HEAD;
    CHECK(sr_free(st, s.u0) == SR_CORRUPT && sr_free(st, s.u1) == SR_CORRUPT);
    ((sr_free_links *)sr_ptr(st, s.f0))->prev = s.f1 - HEAD;
    chunk_of(st, s.u1)->prev_size = 1024;
    CHECK(sr_free(st, s.u1) == SR_CORRUPT);
    chunk_of(st, s.u1)->prev_size = 512;
    s.a->used_bytes -= 256 * 4 + 64;
    CHECK(sr_free(st, s.u1) == SR_CORRUPT);
    s.a->used_bytes += 256 * 4 + 64;
    chunk_of(st, s.u1)->size_flags |= SR_CHUNK_FREE;
    CHECK(sr_free(st, s.u1) == SR_CORRUPT && sr_alloc_bytes(st, s.u1) == 0);
    chunk_of(st, s.u1)->size_flags &= ~SR_CHUNK_FREE;
    chunk_of(st, s.f1)->size_flags |= SR_CHUNK_PREV_FREE;
    CHECK(sr_free(st, s.u1) == SR_CORRUPT);
    chunk_of(st, s.f1)->size_flags &= ~SR_CHUNK_PREV_FREE;
    CHECK(sr_free(st, off) == SR_OK && sr_free(st, s.u0) == SR_OK && sr_free(st, s.u1) == SR_OK);
    CHECK(sr_free(st, s.u2) == SR_OK);
    check_empty(st, 0);
    chunk_of(st, s.a->committed_end)->size_flags = 0;
    CHECK(sr_alloc(st, 0, SR_KIND_BLOCK, EXTENT, NULL, &off) == SR_CORRUPT);
    store_close(st);
}

/* A process that dies inside an arena's lock: everybody is told to repair first, whatever they come
 * for, and nobody waits. */
static void test_dead_owner(void) {
    sr_store st = store_open(2 * MIB, 2 * MIB, 2);
    uint64_t mine = alloc_ok(&st, 0, 100), off = 0;
    pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) _exit(sr_lock_inner(&st, &arena_at(&st, 0)->lock) == SR_OK ? 0 : 1);
    int status;
    CHECK(waitpid(pid, &status, 0) == pid && status == 0);
    CHECK(sr_alloc(&st, 0, SR_KIND_BLOCK, 8, NULL, &off) == SR_DIRTY && off == 0);
    CHECK(atomic_load(&st.hdr->dirty) == 1);
    CHECK(sr_free(&st, mine) == SR_DIRTY);
    CHECK(sr_commit_ahead(&st) == SR_DIRTY);
    CHECK(sr_arena_check(&st, 0, NULL, NULL) == SR_DIRTY);
    CHECK(sr_alloc(&st, 1, SR_KIND_BLOCK, 8, NULL, &off) == SR_DIRTY);
    store_close(&st);
}

int main(void) {
    test_bad_offsets();
    test_damage_words();
    test_damage_structures();
    test_dead_owner();
    printf("test_arena_damage: ok\n");
    return 0;
}
