/* peek.h: looking into a store without locks. Part of the contract, as shmreplay.h. */
#ifndef SR_PEEK_H
#define SR_PEEK_H

#include "shmreplay.h"

/* For people, and for what a dead or damaged store still holds: nothing here takes a lock or
 * believes an offset, so all of it works on a store whose locks are broken. Numbers may be of
 * different moments. What is copied of an item is whole if sr_peek_same says so afterwards. */
void sr_peek_store(const sr_store *st, sr_store_stats *out);
int sr_peek_table(const sr_store *st, uint32_t table, sr_table_info *out);
uint32_t sr_peek_stripes(const sr_store *st, uint32_t table);
/* Slots of a stripe that were ever used. */
uint64_t sr_peek_slots(const sr_store *st, uint32_t table, uint32_t stripe);
/* 1 if the slot has an item: fills all of *out but probability, size and pin. */
int sr_peek_slot(const sr_store *st, uint32_t table, uint32_t stripe, uint32_t slot,
                 sr_sampled *out, uint64_t *seq);
/* 1 if the slot still has this very item. */
int sr_peek_same(const sr_store *st, uint32_t table, uint32_t stripe, uint32_t slot,
                 const sr_sampled *item);
/* Number of an item's columns; of one, its length and bytes; its rows. SR_CORRUPT where a
 * reference leads out of committed memory. */
int sr_peek_columns(const sr_store *st, const sr_sampled *item);
int sr_peek_column(const sr_store *st, const sr_sampled *item, uint32_t c, uint32_t *length_flags,
                   uint64_t *bytes);
int sr_peek_copy(const sr_store *st, const sr_sampled *item, uint32_t c, char *dst,
                 uint64_t bytes);
/* Where sr_peek_copy gives SR_ELSEWHERE: as sr_item_run; see sr_peek_rows. If sr_block_rows_ref
 * gives the same afterwards, what was copied in between is what was there. */
int sr_peek_run(const sr_store *st, const sr_sampled *item, uint32_t c, uint32_t number,
                sr_run *out);

#endif
