/* index_epoch.h: draws without replacement, in passes. Only index.c calls these.
 *
 * The arrays are those of the uniform selector. dense[0 .. head) are still to be drawn in this
 * pass, dense[head .. count) were drawn in it; a pass that has none left ends when the next draw
 * asks for one, so that what comes in before that is still part of it. */
#ifndef SR_INDEX_EPOCH_H
#define SR_INDEX_EPOCH_H

#include "index.h"

void sr_epoch_insert(sr_store *st, sr_index *ix, uint32_t slot);
void sr_epoch_remove(sr_store *st, sr_index *ix, uint32_t slot);
/* Forget everything: the next pass begins. */
void sr_epoch_clear(sr_index *ix);
/* Not const: each draw moves its slot among those that were drawn. */
void sr_epoch_sample(const sr_store *st, sr_index *ix, uint64_t *rng, uint32_t n, uint32_t *slots,
                     double *prob);
int sr_epoch_check(sr_store *st, const sr_index *ix, uint64_t slots_used, sr_live_fn live,
                   void *ctx);

#endif
