/* steps.h: reference counts of blocks, trajectories and episodes, for the layers inside the
 * core. */
#ifndef SR_STEPS_H
#define SR_STEPS_H

#include "internal.h"

/* The count of references to what `ref` says. It begins with its kind; what else it says is checked
 * where it is read. */
static inline _Atomic uint32_t *sr_refs_of(const sr_store *st, uint64_t ref) {
    _Static_assert(offsetof(sr_block, refs) == 8 && offsetof(sr_traj, refs) == 8 &&
                       offsetof(sr_packed, refs) == 8 && offsetof(sr_episode, refs) == 4,
                   "where counts are");
    uint32_t kind = SR_REF_KIND(ref);
    SR_ASSERT(sr_fits(st, SR_REF_OFF(ref), SR_LINE));
    _Atomic uint32_t *object = sr_known(st, SR_REF_OFF(ref));
    SR_ASSERT(atomic_load_explicit(object, memory_order_relaxed) == kind);
    SR_ASSERT((1u << kind & (1u << SR_KIND_BLOCK | 1u << SR_KIND_TRAJ | 1u << SR_KIND_EPISODE |
                             1u << SR_KIND_PACKED)) != 0);
    return object + (kind == SR_KIND_EPISODE ? 1 : 2);
}
/* One more reference to something that is known to be alive. */
static inline void sr_ref_retain(const sr_store *st, uint64_t ref) {
    uint32_t before = atomic_fetch_add_explicit(sr_refs_of(st, ref), 1, memory_order_relaxed);
    SR_ASSERT(before > 0);
}
/* Nothing refers to it any more: free it, and drop what it refers to (arena locks). Results as of
 * sr_ref_drop. */
int sr_ref_free(sr_store *st, uint64_t ref);
/* One reference less; the last one frees it and what it refers to (arena locks). SR_OK, SR_CORRUPT,
 * or SR_DIRTY: something that nothing refers to any more is left for the repair to free. */
static inline int sr_ref_drop(sr_store *st, uint64_t ref) {
    uint32_t before = atomic_fetch_sub_explicit(sr_refs_of(st, ref), 1, memory_order_acq_rel);
    SR_ASSERT(before > 0);
    return SR_LIKELY(before > 1) ? SR_OK : sr_ref_free(st, ref);
}

/* An item enters (leaves) a table: count it at each episode whose rows it refers to. An item
 * that spans more than 64 episodes is counted at 64 of them, the same ones when it leaves. */
void sr_episodes_enter(const sr_store *st, sr_table *t, uint32_t table, uint64_t ref,
                       uint32_t row_start, uint32_t row_count);
void sr_episodes_leave(const sr_store *st, sr_table *t, uint32_t table, uint64_t ref,
                       uint32_t row_start, uint32_t row_count, int count_deleted);

/* As sr_block_new, of a block that has no rows yet, neither here nor elsewhere. */
int sr_block_new_head(sr_ses *ses, uint32_t n_cols, const uint64_t *row_bytes, uint32_t rows_cap,
                      uint64_t *off, uint32_t *position);
/* Bytes of a block before the episodes of its rows: of itself, its columns, and the tables. */
static inline uint64_t sr_block_head_bytes(uint32_t n_tables, uint32_t n_cols) {
    return sizeof(sr_block) + (uint64_t)n_cols * sizeof(sr_block_col) +
           (uint64_t)n_tables * sizeof(uint32_t);
}

/* Does what lies there look like a block whose head is whole: is everything that it says of itself
 * inside of it, and all of it in the segment? Its columns are for sr_block_rows to check. */
static inline int sr_block_sound(const sr_store *st, uint64_t off) {
    if (SR_UNLIKELY(!sr_fits(st, off, sizeof(sr_block)))) return 0;
    const sr_block *b = (const sr_block *)(const void *)(st->base + off);
    uint64_t head = sizeof *b + (uint64_t)b->n_cols * sizeof(sr_block_col);
    uint64_t episodes = (uint64_t)b->rows_cap * sizeof(uint64_t);
    return b->kind == SR_KIND_BLOCK && b->n_cols - 1 < SR_COLUMNS_MAX &&
           b->bytes <= st->bytes - off && head <= b->episodes_off &&
           b->episodes_off <= b->bytes && episodes <= b->bytes - b->episodes_off &&
           b->episodes_off % sizeof(uint64_t) == 0 &&
           atomic_load_explicit(&b->published, memory_order_relaxed) <= b->rows_cap;
}
/* Rows [start, start + count) of a column of a sound block, and the bytes of one; NULL where they
 * are not in the block: it is damaged, or they lie apart (sr_lies_apart). */
static inline char *sr_block_rows(const sr_block *b, uint32_t c, uint64_t start, uint64_t count,
                                  uint64_t *row_bytes) {
    const sr_block_col *col = (const sr_block_col *)(b + 1) + c;
    uint64_t end;
    if (SR_UNLIKELY(c >= b->n_cols || __builtin_mul_overflow(col->row_bytes, start + count, &end) ||
                    col->off > b->bytes || end > b->bytes - col->off)) {
        return NULL;
    }
    *row_bytes = col->row_bytes;
    return (char *)b + col->off + col->row_bytes * start;
}
/* Do the rows of this sound block lie elsewhere? */
static inline int sr_lies_apart(const sr_block *b) {
    return ((const sr_block_col *)(b + 1))->off == SR_APART;
}
/* Are `count` rows from `start` on, each `stride` after the one before, published? */
static inline int sr_rows_ok(const sr_block *b, uint32_t start, uint32_t count, int32_t stride) {
    uint32_t rows = atomic_load_explicit(&b->published, memory_order_relaxed);
    int64_t last = (int64_t)start + (int64_t)stride * ((int64_t)count - 1);
    return count > 0 && count <= SR_COL_LENGTH(UINT32_MAX) && start < rows && last >= 0 &&
           last < (int64_t)rows;
}
/* The same of a trajectory: its arrays are all that it has. Its segments are for
 * sr_segment_block to check. */
static inline int sr_traj_sound(const sr_store *st, uint64_t off) {
    if (SR_UNLIKELY(!sr_fits(st, off, sizeof(sr_traj)))) return 0;
    const sr_traj *t = (const sr_traj *)(const void *)(st->base + off);
    uint64_t bytes = sizeof *t + (uint64_t)t->n_blocks * sizeof(uint64_t) +
                     (t->n_cols + 1ull) * sizeof(sr_traj_col) +
                     (uint64_t)t->n_segs * sizeof(sr_seg);
    return t->kind == SR_KIND_TRAJ && t->n_cols - 1 < SR_COLUMNS_MAX && bytes == t->bytes &&
           bytes <= st->bytes - off;
}

/* Bytes of a block whose rows lie apart. */
static inline uint64_t sr_block_apart_bytes(uint32_t n_tables, uint32_t n_cols,
                                            uint32_t rows_cap) {
    return sr_align(sr_block_head_bytes(n_tables, n_cols), SR_LINE) +
           (uint64_t)rows_cap * sizeof(uint64_t);
}
/* Make an empty block, with one reference, of an allocation of sr_block_bytes. */
sr_block *sr_block_format(const sr_store *st, uint64_t off, uint32_t n_cols,
                          const uint64_t *row_bytes, uint32_t rows_cap, int apart);

/* They are sound, or the call ends here. */
static inline sr_block *sr_block_at(const sr_store *st, uint64_t off) {
    SR_ASSERT(sr_block_sound(st, off));
    return (sr_block *)(void *)(st->base + off);
}
static inline sr_traj *sr_traj_at(const sr_store *st, uint64_t off) {
    SR_ASSERT(sr_traj_sound(st, off));
    return (sr_traj *)(void *)(st->base + off);
}
static inline sr_episode *sr_episode_at(const sr_store *st, uint64_t off) {
    SR_ASSERT(sr_fits(st, off, sizeof(sr_episode) + st->shape.n_tables * sizeof(uint32_t)));
    sr_episode *e = (sr_episode *)(void *)(st->base + off);
    SR_ASSERT(e->kind == SR_KIND_EPISODE);
    return e;
}

static inline uint64_t *sr_traj_blocks(sr_traj *t) { return (uint64_t *)(t + 1); }
static inline sr_traj_col *sr_traj_cols(sr_traj *t) {
    return (sr_traj_col *)(sr_traj_blocks(t) + t->n_blocks);
}
static inline sr_seg *sr_traj_segs(sr_traj *t) {
    return (sr_seg *)(sr_traj_cols(t) + t->n_cols + 1);
}
/* The block of a segment of a sound trajectory; NULL where its rows are not in one. */
static inline sr_block *sr_segment_block(const sr_store *st, sr_traj *t, const sr_seg *g) {
    if (SR_UNLIKELY(g->block >= t->n_blocks)) return NULL;
    uint64_t off = sr_traj_blocks(t)[g->block];
    if (SR_UNLIKELY(!sr_block_sound(st, off))) return NULL;
    sr_block *b = (sr_block *)(void *)(st->base + off);
    return sr_rows_ok(b, g->start, g->count, g->stride) && g->col < b->n_cols ? b : NULL;
}
static inline sr_block_col *sr_block_cols(sr_block *b) { return (sr_block_col *)(b + 1); }

#endif
