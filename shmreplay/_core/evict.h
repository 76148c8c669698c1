/* evict.h: make room by the remover, over all stripes. */
#ifndef SR_EVICT_H
#define SR_EVICT_H

#include "limiter.h"

/* Remove `want` items by the remover; they are counted as deleted already (g->epoch says under
 * which epoch, g->seed gives random numbers). Takes one stripe lock at a time. SR_OK or
 * SR_CORRUPT. */
int sr_evict(sr_ses *ses, uint32_t table, const sr_grant *g, uint64_t want);

/* Remove and count `want` items by the remover, or all there are. Under all locks of the table.
 * SR_OK or SR_CORRUPT. Crash: the repair counts what is gone. */
int sr_evict_locked(sr_store *st, sr_table *t, uint64_t want);

/* Of a table that counts bytes: remove by the remover, and count, until it is within max_size and
 * max_bytes. Under the limiter, so that several at once remove no more than one would. SR_OK,
 * SR_CORRUPT; SR_WOULD_BLOCK: no room to tell the table's extensions. Crash: inside the limiter. */
int sr_evict_bounded(sr_ses *ses, uint32_t table);
/* Down to max_bytes, as sr_evict_locked. */
int sr_evict_bytes_locked(sr_store *st, sr_table *t);

#endif
