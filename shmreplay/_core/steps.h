/* steps.h: reference counts of blocks, trajectories and episodes, for the layers inside the
 * core. */
#ifndef SR_STEPS_H
#define SR_STEPS_H

#include "internal.h"

/* One more reference to a block or trajectory that is known to be alive. */
void sr_ref_retain(const sr_store *st, uint64_t ref);
/* One reference less; the last one frees it and what it refers to (arena locks). SR_OK, SR_CORRUPT,
 * or SR_DIRTY: something that nothing refers to any more is left for the repair to free. */
int sr_ref_drop(sr_store *st, uint64_t ref);

/* An item enters (leaves) a table: count it at each episode whose rows it refers to. An item
 * that spans more than 64 episodes is counted at 64 of them, the same ones when it leaves. */
void sr_episodes_enter(const sr_store *st, sr_table *t, uint32_t table, uint64_t ref,
                       uint32_t row_start, uint32_t row_count);
void sr_episodes_leave(const sr_store *st, sr_table *t, uint32_t table, uint64_t ref,
                       uint32_t row_start, uint32_t row_count, int count_deleted);

static inline uint64_t *sr_traj_blocks(sr_traj *t) { return (uint64_t *)(t + 1); }
static inline sr_traj_col *sr_traj_cols(sr_traj *t) {
    return (sr_traj_col *)(sr_traj_blocks(t) + t->n_blocks);
}
static inline sr_seg *sr_traj_segs(sr_traj *t) {
    return (sr_seg *)(sr_traj_cols(t) + t->n_cols + 1);
}
static inline sr_block_col *sr_block_cols(sr_block *b) { return (sr_block_col *)(b + 1); }

#endif
