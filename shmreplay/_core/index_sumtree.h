/* index_sumtree.h: weights in an 8-ary tree of sums. Only index.c calls these.
 *
 * array l: level l, doubles; leaves are level 0, indexed by slot. Node i of level l + 1 is the sum
 * of nodes 8 i .. 8 i + 7 of level l, which are one cache line. The highest level in use is a
 * single line; the sum of that is the total.
 *
 * A leaf of bits 0 (fresh memory) is a slot that is not in the tree; a slot of weight 0 that is in
 * it is kept as -0.0, which adds up like 0 and can be told from it. */
#ifndef SR_INDEX_SUMTREE_H
#define SR_INDEX_SUMTREE_H

#include "index.h"

uint64_t sr_tree_array_bytes(uint32_t k, uint64_t slots);
/* The arrays have memory for `slots`: give the new upper levels their sums. Leaves slots_cap. */
void sr_tree_grown(sr_store *st, sr_index *ix, uint64_t slots);
void sr_tree_insert(sr_store *st, sr_index *ix, uint32_t slot, double prio);
void sr_tree_remove(sr_store *st, sr_index *ix, uint32_t slot);
void sr_tree_update_many(sr_store *st, sr_index *ix, uint32_t n, const uint32_t *slots,
                         const double *prios);
void sr_tree_clear(sr_store *st, sr_index *ix);
/* Leaves slots_cap; all else anew. */
void sr_tree_rebuild(sr_store *st, sr_index *ix, uint64_t n, const uint32_t *slots,
                     const double *prios);
double sr_tree_total(const sr_store *st, const sr_index *ix);
void sr_tree_sample(const sr_store *st, const sr_index *ix, uint64_t *rng, uint32_t n,
                    uint32_t *slots, double *prob);
int sr_tree_check(sr_store *st, const sr_index *ix, uint64_t slots_used, sr_live_fn live,
                  void *ctx);

#endif
