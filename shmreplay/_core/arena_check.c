/* arena_check.c: walking an arena and everything it says of itself. */
#include "arena_chunks.h"
#include "lock.h"

typedef struct {
    uint64_t used, free, n_allocs, by_kind[SR_KIND_END];
    uint64_t free_mark; /* sum of the free chunks' scrambled offsets: a set in a word */
} arena_count;

#define REQUIRE(cond)                  \
    do {                               \
        if (!(cond)) return -__LINE__; \
    } while (0)

static uint64_t scramble(uint64_t off) { return sr_splitmix64(&off); }

static int check_chunks(const sr_store *st, const sr_arena *a, sr_visit visit, void *ctx,
                        arena_count *n) {
    uint64_t c = a->start + FIRST_CHUNK, end = a->committed_end - SR_CHUNK_HEAD, before = 0;
    while (c < end) {
        const sr_chunk *chunk = chunk_at(st, c);
        uint64_t flags = flags_get(chunk), size = size_of(flags);
        uint32_t kind = kind_of(flags);
        int is_free = (flags & SR_CHUNK_FREE) != 0;
        REQUIRE((flags & RESERVED_BITS) == 0);
        REQUIRE(size_fits(a, c, size));
        REQUIRE(((flags & SR_CHUNK_PREV_FREE) != 0) == (before != 0));
        REQUIRE(before == 0 || chunk->prev_size == before);
        if (is_free) {
            REQUIRE(kind == SR_KIND_NONE);
            REQUIRE(before == 0); /* else the two should be one */
            n->free += size;
            n->free_mark += scramble(c);
        } else {
            REQUIRE(kind > SR_KIND_NONE && kind < SR_KIND_END);
            n->used += size;
            n->by_kind[kind] += size;
            n->n_allocs++;
            if (visit != NULL) {
                visit(ctx, c + SR_CHUNK_HEAD, (enum sr_kind)kind, size - SR_CHUNK_HEAD);
            }
        }
        before = is_free ? size : 0;
        c += size;
    }
    const sr_chunk *marker = chunk_at(st, end);
    REQUIRE((flags_get(marker) & ~SR_CHUNK_PREV_FREE) == (uint64_t)SR_KIND_END << KIND_SHIFT);
    REQUIRE(((flags_get(marker) & SR_CHUNK_PREV_FREE) != 0) == (before != 0));
    REQUIRE(before == 0 || marker->prev_size == before);
    return 0;
}

/* `n`: what the walk over the chunks found; the lists must hold exactly the same free chunks. */
static int check_lists(const sr_store *st, const sr_arena *a, const arena_count *n) {
    uint64_t mark = 0;
    REQUIRE(a->fl_bitmap >> SR_FL_COUNT == 0);
    for (uint32_t fl = 0; fl < SR_FL_COUNT; fl++) {
        REQUIRE(a->sl_bitmap[fl] >> SR_SL_COUNT == 0);
        REQUIRE((a->fl_bitmap >> fl & 1) == (a->sl_bitmap[fl] != 0));
        for (uint32_t sl = 0; sl < SR_SL_COUNT; sl++) {
            REQUIRE((a->sl_bitmap[fl] >> sl & 1) == (a->head[fl][sl] != 0));
            uint64_t before = 0;
            for (uint64_t c = a->head[fl][sl]; c != 0; c = links_at(st, c)->next) {
                uint32_t own_fl, own_sl;
                REQUIRE(in_arena(st, a, c));
                uint64_t flags = flags_get(chunk_at(st, c));
                REQUIRE((flags & SR_CHUNK_FREE) && size_fits(a, c, size_of(flags)));
                class_of(size_of(flags), &own_fl, &own_sl);
                REQUIRE(own_fl == fl && own_sl == sl);
                REQUIRE(links_at(st, c)->prev == before); /* also ends a circle */
                mark += scramble(c);
                before = c;
            }
        }
    }
    REQUIRE(mark == n->free_mark);
    return 0;
}

int sr_arena_check_locked(const sr_store *st, const sr_arena *a, sr_visit visit, void *ctx) {
    arena_count n = {0};
    REQUIRE(a->start % SR_PAGE == 0 && a->end % SR_PAGE == 0 && a->committed_end % SR_PAGE == 0);
    REQUIRE(a->start <= a->committed_end && a->committed_end <= a->end && a->end <= st->bytes);
    int rc = a->committed_end == a->start ? 0 : check_chunks(st, a, visit, ctx, &n);
    if (rc == 0) rc = check_lists(st, a, &n);
    if (rc != 0) return rc;
    REQUIRE(a->used_bytes == n.used);
    REQUIRE(memcmp(a->kind_bytes, n.by_kind, sizeof n.by_kind) == 0);
    REQUIRE(a->free_bytes == n.free);
    REQUIRE(a->n_allocs == n.n_allocs);
    return 0;
}

int sr_arena_check(sr_store *st, uint32_t arena, sr_visit visit, void *ctx) {
    if (arena >= st->shape.n_arenas) return SR_INVALID;
    sr_arena *a = &arenas(st)[arena];
    int rc = lock_arena(st, a);
    if (rc != SR_OK) return rc;
    rc = sr_arena_check_locked(st, a, visit, ctx);
    sr_unlock(&a->lock);
    return rc;
}
