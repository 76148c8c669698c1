/* limiter.h: the rate limiter: arithmetic on three counters, and the budgets that are on their way.
 *
 * Every operation on a table is reserve -> act on the stripes -> settle. A reservation counts
 * against later reservations of the same kind at once, and becomes visible to the other kind
 * only when it settles, in one step with the deletions it caused. So an inserter never gets room
 * from a sample whose item has not left yet, and a sampler never counts on an item that is not
 * there yet. Reset changes the epoch; what was reserved under an older epoch is not settled into
 * the new counters.
 *
 * Crash: a critical section begins by writing what it found to the session (sr_undo) and ends by
 * calling that void, so that a death inside it is a death before it. Budget and debts stand in the
 * session, which whoever reclaims it settles. */
#ifndef SR_LIMITER_H
#define SR_LIMITER_H

#include "internal.h"

typedef struct {
    uint64_t granted;
    uint64_t epoch;
    uint64_t seed; /* a number of the table's random stream that nobody else gets */
    int64_t size;  /* inserts - deletes */
    uint32_t seq;  /* futex word to wait on when nothing was granted */
    int reserved;  /* counted as pending */
} sr_grant;

/* How many single inserts (samples) in a row are allowed now, at most `want`. Under the limiter. */
uint64_t sr_limiter_insert_budget(const sr_table *t, uint64_t want);
uint64_t sr_limiter_sample_budget(const sr_table *t, uint64_t want);

/* All of these take and release the limiter. SR_OK (granted may be 0) or SR_CORRUPT. */
int sr_limiter_reserve_insert(sr_ses *ses, uint32_t table, uint64_t want, sr_grant *g);
/* `placed` items are in, under `place_epoch`; *evict says how many must go (already counted as
 * deleted), with a fresh seed in g. */
int sr_limiter_settle_insert(sr_ses *ses, uint32_t table, sr_grant *g, uint64_t placed,
                             uint64_t place_epoch, uint64_t *evict);
int sr_limiter_reserve_sample(sr_ses *ses, uint32_t table, uint64_t want, sr_grant *g);
int sr_limiter_settle_sample(sr_ses *ses, uint32_t table, const sr_grant *g, uint64_t drawn,
                             uint64_t removed);
/* delta > 0: items were deleted; delta < 0: an eviction that was counted found nothing to evict. */
int sr_limiter_settle_delete(sr_ses *ses, uint32_t table, int64_t delta, uint64_t epoch);

/* Note, under a stripe's lock, what was done there and is not counted yet. */
void sr_owe_inserts(sr_ses *ses, int32_t placed, uint64_t epoch);
void sr_owe_samples(sr_ses *ses, int32_t drawn, int32_t removed, uint64_t epoch);
void sr_owe_deletes(sr_ses *ses, int32_t removed, uint64_t epoch);
/* Settle what a session whose owner is dead owed: it is counted, and its budget is nobody's. Gives
 * how many items the table has above max_size. Under all locks of the table, for sr_repair's and
 * sr_participant_reclaim's callers to evict and to wake. */
uint64_t sr_limiter_settle_dead(sr_table *t, sr_session *dead);
/* What follows from the limiter's settings. Under all locks of the table. */
void sr_limiter_derive(sr_table *t);
/* Whoever waits for the table looks again. No lock. */
void sr_limiter_wake_all(sr_table *t);
/* Take back the critical section that a dead owner of this limiter was in. Under all locks. */
void sr_limiter_undo(sr_store *st);

/* What the sessions have on their way in one table: budget taken, and what the stripes hold and the
 * counters do not. Under all locks of the table. */
typedef struct {
    int64_t inserts, samples; /* budget */
    int64_t owed; /* live items beyond inserts - deletes */
} sr_books;
sr_books sr_limiter_books(const sr_store *st, uint32_t table);

#endif
