/* account.h: where every byte of a store is, and what things will take. A part of shmreplay.h. */
#ifndef SR_ACCOUNT_H
#define SR_ACCOUNT_H

#include <stdint.h>

#include "handles.h"
#include "layout.h"

/* Bytes by use, of one moment, under all locks of the store:
 *
 *   committed = fixed + index_committed + arena_committed
 *   index_committed = the sum of index_bytes, by table: slots, selectors, ring of events
 *   arena_committed = arena_used + arena_free + margin
 *   arena_used = blocks (and packed rows) + trajectories + pinned + episodes + ledgers + schemas
 *   arena_free = fragmented (between allocations) + tail (at the ends of arenas)
 *
 * pinned: blocks and trajectories that only sessions refer to, as samples or for writing. */
typedef struct {
    uint64_t capacity, committed, fixed, index_committed, arena_committed, arena_used, arena_free,
        arena_allocs;
    uint64_t packed_raw, packed_stored; /* of packed rows: uncompressed, and as they are stored */
    uint64_t margin, blocks, trajectories, pinned, episodes, ledgers, schemas, fragmented, tail;
    uint64_t index_bytes[SR_TABLES_MAX];
    uint64_t repairs;
    uint32_t participants, sessions;
    uint32_t poisoned; /* tables */
    uint32_t closed;
    /* What was ever done, by all sessions together; bytes of steps that were written. */
    uint64_t inserts, samples, updates, bytes_in;
} sr_store_stats;
/* SR_OK, SR_CORRUPT, SR_SYS (no memory in this process). */
int sr_store_get_stats(sr_store *st, sr_store_stats *out);
/* What things take, without a store: a block, a trajectory record and an episode's record in an
 * arena. */
uint64_t sr_size_block(uint32_t n_tables, uint32_t n_cols, const uint64_t *row_bytes,
                       uint32_t rows);
uint64_t sr_size_traj(uint32_t n_cols, uint32_t n_blocks, uint32_t n_segs);
uint64_t sr_size_episode(uint32_t n_tables);

#endif
