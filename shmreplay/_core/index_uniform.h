/* index_uniform.h: a set of slots with constant-time insert, remove and draw. Only index.c calls
 * these.
 *
 * array 0: uint32 dense[count], array 1: uint32 pos[slot]. A slot is in the set if
 * dense[pos[slot]] is the slot and pos[slot] < count (Briggs, Torczon 1993), so neither array need
 * ever be cleared. */
#ifndef SR_INDEX_UNIFORM_H
#define SR_INDEX_UNIFORM_H

#include "index.h"

uint64_t sr_uniform_array_bytes(uint32_t k, uint64_t slots);
void sr_uniform_insert(sr_store *st, sr_index *ix, uint32_t slot);
void sr_uniform_remove(sr_store *st, sr_index *ix, uint32_t slot);
void sr_uniform_clear(sr_index *ix);
void sr_uniform_sample(const sr_store *st, const sr_index *ix, uint64_t *rng, uint32_t n,
                       uint32_t *slots, double *prob);
int sr_uniform_check(sr_store *st, const sr_index *ix, uint64_t slots_used, sr_live_fn live,
                     void *ctx);

#endif
