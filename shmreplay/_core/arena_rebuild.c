/* arena_rebuild.c: an arena's books, made anew from what is alive. */
#include "arena_chunks.h"

int sr_arena_bounds_ok(const sr_store *st, const sr_arena *a) {
    return a->start % SR_PAGE == 0 && a->end % SR_PAGE == 0 && a->committed_end % SR_PAGE == 0 &&
           a->start <= a->committed_end && a->committed_end <= a->end && a->end <= st->bytes;
}

/* Do the live chunks lie in the arena, one behind the other? Their headers are read, nothing is
 * changed. */
static int chunks_ok(const sr_store *st, const sr_arena *a, sr_next_live next, void *ctx) {
    uint64_t end = a->committed_end - SR_CHUNK_HEAD, c = a->start + FIRST_CHUNK;
    for (;;) {
        uint64_t off = next(ctx, c, end);
        if (off == 0) return 1;
        uint64_t live = off - SR_CHUNK_HEAD, flags;
        if (live < c || !in_arena(st, a, live)) return 0;
        flags = flags_get(chunk_at(st, live));
        uint32_t kind = kind_of(flags);
        if ((flags & (SR_CHUNK_FREE | RESERVED_BITS)) != 0 || kind <= SR_KIND_NONE ||
            kind >= SR_KIND_END || !size_fits(a, live, size_of(flags))) {
            return 0;
        }
        c = live + size_of(flags);
    }
}

int sr_arena_rebuild(sr_store *st, sr_arena *a, sr_next_live next, void *ctx) {
    if (!sr_arena_bounds_ok(st, a)) return SR_CORRUPT;
    int empty = a->committed_end == a->start;
    if (!empty && !chunks_ok(st, a, next, ctx)) return SR_CORRUPT;
    a->used_bytes = a->free_bytes = a->n_allocs = a->fl_bitmap = 0;
    memset(a->kind_bytes, 0, sizeof a->kind_bytes);
    memset(a->sl_bitmap, 0, sizeof a->sl_bitmap);
    memset(a->head, 0, sizeof a->head);
    if (empty) return SR_OK;
    uint64_t end = a->committed_end - SR_CHUNK_HEAD, c = a->start + FIRST_CHUNK;
    flags_set(chunk_at(st, end), (uint64_t)SR_KIND_END << KIND_SHIFT);
    while (c < end) {
        uint64_t off = next(ctx, c, end);
        uint64_t live = off == 0 ? end : off - SR_CHUNK_HEAD, size = 0;
        if (off != 0) {
            uint64_t flags = flags_get(chunk_at(st, live));
            size = size_of(flags);
            /* SYNC POINT: one store, which leaves size and kind as they are: the holder reads them
             * without a lock. */
            flags_set(chunk_at(st, live), flags & ~SR_CHUNK_PREV_FREE);
            a->used_bytes += size;
            a->kind_bytes[kind_of(flags)] += size;
            a->n_allocs++;
        }
        if (live > c) {
            list_add(st, a, c, live - c);
            a->free_bytes += live - c;
        }
        c = live + size;
    }
    return SR_OK;
}
