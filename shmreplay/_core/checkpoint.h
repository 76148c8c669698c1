/* checkpoint.h: the contract of what saves and restores a store; see shmreplay.h for the rest.
 *
 * Saving: sr_hold_claim, sr_hold_prepare for each stripe, sr_snapshot; then, without locks and
 * while everybody goes on, sr_image_... for what the copied slots refer to; at last
 * sr_hold_release. What is read in between is alive and does not change. Rows that lie apart, raw,
 * are held by a session of the saver's besides, as their writer may pack them meanwhile; closing
 * it lets go of them. Crash: whoever reclaims the participant does both.
 *
 * Restoring: into a store that was just formatted and that nobody else has, between
 * sr_restore_begin and sr_restore_end. Crash: a store that says to be closed, which the next
 * creator replaces. */
#ifndef SR_CHECKPOINT_H
#define SR_CHECKPOINT_H

#include "shmreplay.h"

/* The right to write a checkpoint. SR_OK, SR_WOULD_BLOCK: somebody has it. No lock. */
int sr_hold_claim(sr_store *st, uint32_t participant);
/* Memory for what slots below `slots` of a stripe, counted over all tables, leave behind. SR_OK,
 * SR_NOSPACE, SR_SYS, SR_INVALID: there is no such stripe. */
int sr_hold_prepare(sr_store *st, uint32_t stripe, uint64_t slots);
/* Give back all that was left behind, and the right. Idempotent. Takes stripe and arena locks.
 * SR_OK, SR_CORRUPT, SR_SYS. */
int sr_hold_release(sr_store *st);
/* Ask whoever writes a checkpoint to give up, as memory is needed. 1: somebody does. */
int sr_hold_ask_back(sr_store *st);
int sr_hold_unwanted(const sr_store *st);
/* Bytes of memory, not charged to the store, that the checkpoint being written takes. */
uint64_t sr_hold_memory(const sr_store *st);

/* A copy of one stripe. */
typedef struct {
    sr_slot *slots;     /* given: memory for `room` of them, touched */
    uint32_t *order[2]; /* given: of each selector, the same */
    uint64_t room;
    uint64_t n_slots;
    uint64_t n_order[2]; /* uniform and epoch: slots in the order in which draws number them */
    uint32_t head[2];    /* epoch: how many of these are still to be drawn */
    uint32_t free_head, _pad;
    uint64_t touch_next;
} sr_stripe_image;
typedef struct {
    int64_t inserts, samples, deletes, num_deleted_episodes, num_unique_samples;
    uint64_t rng, next_seq, missed_updates, max_priority_bits;
    uint32_t slot_bits, poisoned;
} sr_table_image;
/* Slots that a stripe, counted over all tables, has used. No lock: as a guess. */
uint64_t sr_slots_used(const sr_store *st, uint32_t stripe);
/* Copy all slots and counters under all locks, as of one instant, and begin to hold. *held_ns: how
 * long others were held up. SR_OK; SR_WOULD_BLOCK: a stripe has outgrown its room, nothing is held;
 * SR_CORRUPT. */
int sr_snapshot(sr_store *st, sr_stripe_image *stripes, sr_table_image *tables, uint64_t *held_ns);

/* Of what is held. Each gives SR_OK, or SR_CORRUPT where an object is not what it should be. */
typedef struct {
    uint32_t n_cols, n_blocks, n_segs;
} sr_traj_head;
int sr_image_traj_heads(const sr_store *st, uint64_t n, const uint64_t *offs, sr_traj_head *out);
/* One after the other: blocks by offset, n_cols + 1 columns, segments. */
int sr_image_trajs(const sr_store *st, uint64_t n, const uint64_t *offs, const sr_traj_head *heads,
                   uint64_t *blocks, sr_traj_col *cols, sr_seg *segs);
enum sr_saved_rows {
    SR_SAVED_RAW = 0, /* the rows, columns one after the other */
    SR_SAVED_PACKED   /* an sr_packed with all that belongs to it; refs and serial mean nothing */
};
typedef struct {
    uint64_t uid, bytes; /* of its published rows, encoded like this */
    uint32_t n_cols, rows, n_runs, encoding;
} sr_block_head;
/* rows[]: where the rows of each are, as of now and for as long as the session is open. Takes
 * session and arena locks. Also SR_FULL, SR_NOSPACE: no room to note what is held. */
int sr_image_block_heads(sr_ses *ses, uint64_t n, const uint64_t *offs, sr_block_head *out,
                         uint64_t *rows);
typedef struct {
    uint64_t episode; /* offset, or number */
    uint32_t rows, _pad;
} sr_run_of_rows;
/* One after the other: bytes of a row, column by column; runs of rows of one episode. */
int sr_image_blocks(const sr_store *st, uint64_t n, const uint64_t *offs,
                    const sr_block_head *heads, uint64_t *row_bytes, sr_run_of_rows *runs);
int sr_image_episodes(const sr_store *st, uint64_t n, const uint64_t *offs, uint64_t *ids);

/* Where in the rows of blocks, each of them column by column, reading or writing has come to. */
typedef struct {
    uint64_t block, done; /* number in the list; bytes of it */
} sr_rows_cursor;
/* Copy the next rows of these blocks, which are at rows[], at most `room` bytes of them. *got: how
 * many. */
int sr_image_rows(const sr_store *st, uint64_t n, const uint64_t *offs, const uint64_t *rows,
                  const sr_block_head *heads, sr_rows_cursor *at, char *dst, uint64_t room,
                  uint64_t *got);

/* The store is not to be used yet. */
void sr_restore_begin(sr_store *st);
/* Make objects; offs[] says where they are. SR_OK, SR_FULL, SR_NOSPACE, SR_CORRUPT, SR_INVALID. */
int sr_restore_episodes(sr_store *st, uint64_t n, const uint64_t *ids, uint64_t *offs);
int sr_restore_blocks(sr_store *st, uint64_t n, const sr_block_head *heads,
                      const uint64_t *row_bytes, const sr_run_of_rows *runs, uint64_t n_episodes,
                      const uint64_t *episodes, uint64_t *offs);
int sr_restore_trajs(sr_store *st, uint64_t n, const sr_traj_head *heads, const uint32_t *blocks,
                     const sr_traj_col *cols, const sr_seg *segs, uint64_t n_blocks,
                     const uint64_t *block_offs, uint64_t *offs);
/* The bytes [from, from + bytes) of a file: what of them belongs to blocks, the rows of block i
 * lying at where[i], is put there. Blocks before *next are done; where[] does not fall. SR_OK;
 * SR_CORRUPT, SR_INVALID: the packed rows of block *next are not what its head says. */
int sr_restore_rows(const sr_store *st, uint64_t n, const uint64_t *offs,
                    const sr_block_head *heads, const uint64_t *where, uint64_t *next,
                    const char *src, uint64_t from, uint64_t bytes);
/* Slots of a stripe of a table, whose `ref` are references in this store; 0: free. A live slot
 * whose key is 0 gets one. SR_OK, SR_FULL, SR_NOSPACE, SR_INVALID. */
int sr_restore_slots(sr_store *st, uint32_t table, uint32_t stripe, uint64_t n,
                     const sr_slot *slots, uint64_t touch_next);
/* Counters; `seeded`: the random numbers go on where they were. */
int sr_restore_table(sr_store *st, uint32_t table, const sr_table_image *image, int seeded);
/* Make all that follows from that. SR_OK; SR_CORRUPT: it does not hold together. */
int sr_restore_derive(sr_store *st);
/* The order in which draws number the slots, of selector k; and that of the free slots. What does
 * not fit is SR_INVALID, with nothing changed. */
int sr_restore_order(sr_store *st, uint32_t table, uint32_t stripe, uint32_t k, uint64_t n,
                     const uint32_t *slots, uint32_t head);
int sr_restore_free(sr_store *st, uint32_t table, uint32_t stripe, uint64_t n,
                    const uint32_t *slots);
/* Evict down to the size that was declared, count the limiter anew if `reset`, and let everybody
 * in. *evicted: of all tables. */
int sr_restore_end(sr_store *st, int reset, uint64_t *evicted);

/* The schema, plus 1, that says where checkpoints of this store go; 0: nowhere. */
uint32_t sr_checkpointer(const sr_store *st);
void sr_checkpointer_set(sr_store *st, uint32_t schema);

#endif
