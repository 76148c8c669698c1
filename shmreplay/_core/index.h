/* index.h: the six selectors as five structures over the slots of one stripe. All calls: under the
 * stripe's lock.
 *
 *   list     fifo and lifo: doubly linked in insertion order
 *   uniform  dense array of slots and each slot's position; removal swaps with the last
 *   epoch    the same arrays, parted into slots that are still to be drawn and those that were
 *   sumtree  prioritized: weights in an 8-ary tree of doubles, a node one cache line; a parent is
 *            always recomputed from its children, in child order, so there is no drift and a
 *            rebuild gives the same bits
 *   heap     binary heap on (priority, touch), touch deciding ties, lowest first; max heap negates
 *            the priority
 *
 * Every structure is a cache of the slots: it can be rebuilt from them. A slot number is the
 * slot's place in its stripe. `prio` is the item's priority as the user gave it. */
#ifndef SR_INDEX_H
#define SR_INDEX_H

#include "internal.h"

/* Bytes of address space that the arrays need for slots_max slots, page-aligned pieces included. */
uint64_t sr_index_region_bytes(enum sr_selector kind, uint64_t slots_max);
/* Lay the arrays out at `region` (page-aligned) and make the index empty. Commits nothing. */
void sr_index_init(sr_index *ix, enum sr_selector kind, double exponent, uint64_t region,
                   uint64_t slots_max);
/* Commit memory so that slot numbers below `slots` may be used (new memory is zero: tmpfs).
 * SR_OK or what sr_commit says; after an error what was there before still works. Commits in
 * steps as the caller asks; caller asks in steps of >= 1024. */
int sr_index_grow(sr_store *st, sr_index *ix, uint64_t slots);

/* The slot is not in the index. */
void sr_index_insert(sr_store *st, sr_index *ix, uint32_t slot, double prio, uint64_t touch);
/* The slot is in the index. */
void sr_index_remove(sr_store *st, sr_index *ix, uint32_t slot);
/* New priority of a slot that is in the index (list and uniform: nothing to do). */
void sr_index_update(sr_store *st, sr_index *ix, uint32_t slot, double prio, uint64_t touch);
/* The same for n slots at once (sum tree: level by level with prefetching, duplicates allowed:
 * last wins). */
void sr_index_update_many(sr_store *st, sr_index *ix, uint32_t n, const uint32_t *slots,
                          const double *prios, const uint64_t *touches);
/* Forget everything. */
void sr_index_clear(sr_store *st, sr_index *ix);

/* Make the index anew, whatever state it is in: n slots, in the order of their insertion. SR_OK, or
 * SR_CORRUPT (nothing changed) where it says to have no memory for `slots_used` slots. */
int sr_index_rebuild(sr_store *st, sr_index *ix, uint64_t slots_used, uint64_t n,
                     const uint32_t *slots, const double *prios, const uint64_t *touches);

/* Draw n slots (count > 0) with replacement; epoch: without, which changes the index. `kind` says
 * how to read the structure: SR_SEL_FIFO head, SR_SEL_LIFO tail, ... (deterministic kinds give the
 * same slot n times). prob[i]: fifo, lifo, heaps 1; uniform 1/count; epoch 1/slots left in the
 * pass; prioritized weight/total, or 1/count when all weights are 0.
 * The sum-tree descent goes level by level over the whole batch, prefetching the next level's
 * nodes. A draw must never land on a slot of weight 0 while the total is positive, whatever the
 * rounding. The results keep the order of the random draws (no sorting visible). */
void sr_index_sample(sr_store *st, sr_index *ix, enum sr_selector kind, uint64_t *rng,
                     uint32_t n, uint32_t *slots, double *prob);

/* Sum of the weights (prioritized), else the number of entries. */
double sr_index_mass(const sr_store *st, const sr_index *ix);
/* 0 for priority 0 whatever the exponent, else pow(priority, exponent). */
double sr_index_weight(double prio, double exponent);

/* All invariants, against the slots: `live(ctx, slot, &prio, &touch)` tells whether a slot below
 * `slots_used` is live and its values. Every live slot is in the index exactly once and nothing
 * else is; list order is by `seq` via order(ctx, slot); heap order; positions; tree parents
 * bit-equal to the sum of their children; leaves bit-equal to sr_index_weight. Returns 0 or a
 * negative line number. */
typedef int (*sr_live_fn)(void *ctx, uint32_t slot, double *prio, uint64_t *touch, uint64_t *seq);
int sr_index_check(sr_store *st, const sr_index *ix, uint64_t slots_used, sr_live_fn live,
                   void *ctx);

#endif
