/* bytes.h: what the items of a table keep in memory, for tables that are bounded by it.
 *
 * The bytes of a table: the trajectory record of each item, each block that any item refers to,
 * once, and each episode that an item has rows of, once; all as they lie in an arena, with their
 * chunk's header. A block counts its table's items, so that the first and the last of them tell
 * when it comes and goes. What slots and selectors take is not among them.
 *
 * Crash: counts change under a stripe's lock; a repair counts anew. */
#ifndef SR_BYTES_H
#define SR_BYTES_H

#include "internal.h"

static inline int sr_counts_bytes(const sr_table *t) {
    return atomic_load_explicit(&t->count_bytes, memory_order_relaxed) != 0;
}
/* 0: no bound. */
static inline int64_t sr_max_bytes(const sr_table *t) {
    return atomic_load_explicit(&t->max_bytes, memory_order_relaxed);
}

/* The bytes of a table that counts them. No lock. */
int64_t sr_bytes_of(const sr_store *st, const sr_table *t);
static inline int sr_bytes_over(const sr_store *st, const sr_table *t) {
    int64_t most = sr_max_bytes(t);
    return most > 0 && sr_bytes_of(st, t) > most;
}
/* Bytes that an object's payload takes in its arena. */
static inline uint64_t sr_charge(uint64_t payload) {
    return sr_align(payload + SR_CHUNK_HEAD, SR_LINE);
}

/* An item with this reference enters (leaves) a table that counts bytes. Under its stripe's lock,
 * the reference being alive. */
/* A block's rows lie elsewhere from now on, in what takes so many more bytes. Under the lock of the
 * arena in which the block lies, where whoever counts it looks. */
void sr_bytes_moved(const sr_store *st, sr_block *b, int64_t more);
/* Bytes of a block with its rows, which may lie apart: then under that lock, or by the block's
 * writer. */
uint64_t sr_block_charge(const sr_store *st, const sr_block *b);
void sr_bytes_enter(const sr_store *st, sr_table *t, uint32_t table, uint64_t ref);
void sr_bytes_leave(const sr_store *st, sr_table *t, uint32_t table, uint64_t ref);

/* Under all locks of the table: count all that is there, whatever was counted before; and count
 * nothing any more. The table is one that counts already, or still. */
void sr_bytes_recount(const sr_store *st, sr_table *t, uint32_t table);
void sr_bytes_forget(const sr_store *st, sr_table *t, uint32_t table);
/* The first, and NULL or what is wrong: under all locks of the store. */
void sr_bytes_recount_locked(const sr_store *st, sr_table *t, uint32_t table);
const char *sr_bytes_check(const sr_store *st, sr_table *t, uint32_t table);

#endif
