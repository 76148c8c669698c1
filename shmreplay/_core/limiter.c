#include "limiter.h"

#include <math.h>

#include "lock.h"
#include "table.h"

/* CanInsert(n) and CanSample(n) as Reverb defines them (Cassirer et al. 2021, section 3.4;
 * boundaries inclusive). */
static int can_insert(const sr_table *t, int64_t n) {
    int64_t inserts = t->inserts + t->pending;
    if (inserts - t->deletes + n <= t->min_size_to_sample) return 1;
    return (double)(inserts + n) * t->samples_per_insert - (double)t->samples <= t->max_diff;
}

static int can_sample(const sr_table *t, int64_t n) {
    if (t->inserts - t->deletes < t->min_size_to_sample) return 0;
    double samples = (double)(t->samples + t->pending_samples + n);
    return (double)t->inserts * t->samples_per_insert - samples >= t->min_diff;
}

/* The greatest n in [0, want] for which allowed(t, n) holds, given that it holds for all smaller
 * ones: guess by division, then correct by the exact test, since the guess may be off by a
 * rounding. */
static uint64_t largest(const sr_table *t, int (*allowed)(const sr_table *, int64_t), double guess,
                        uint64_t want) {
    if (allowed(t, (int64_t)want)) return want;
    double bounded = guess < 0 ? 0 : guess > (double)want ? (double)want : guess;
    uint64_t n = (uint64_t)bounded;
    while (n > 0 && !allowed(t, (int64_t)n)) n--;
    while (n < want && allowed(t, (int64_t)n + 1)) n++;
    return n;
}

uint64_t sr_limiter_insert_budget(const sr_table *t, uint64_t want) {
    int64_t inserts = t->inserts + t->pending;
    double by_size = (double)(t->min_size_to_sample - (inserts - t->deletes));
    double by_diff =
        floor((t->max_diff + (double)t->samples) / t->samples_per_insert - (double)inserts);
    return largest(t, can_insert, by_size > by_diff ? by_size : by_diff, want);
}

uint64_t sr_limiter_sample_budget(const sr_table *t, uint64_t want) {
    /* Of itself, since no guess below is near 0 where min_diff is the lowest number there is. */
    if (t->inserts - t->deletes < t->min_size_to_sample) return 0;
    if (t->max_times_sampled > 0) {
        /* Each sample may remove its item: the size must still reach the minimum before the last
         * one. */
        int64_t spare = t->inserts - t->deletes - t->pending_samples - t->min_size_to_sample + 1;
        if (spare <= 0) return 0;
        if ((uint64_t)spare < want) want = (uint64_t)spare;
    }
    double guess = floor((double)t->inserts * t->samples_per_insert -
                         (double)(t->samples + t->pending_samples) - t->min_diff);
    return largest(t, can_sample, guess, want);
}

/* Wake as many waiters as may go now. Called after the limiter was released, with budgets taken
 * under it: the word is changed whenever the answer may have become yes, so that nobody sleeps
 * on an old one. */
static void notify(sr_table *t, uint64_t insert_budget, uint64_t sample_budget) {
    if (insert_budget > 0) {
        sr_futex_wake(&t->insert_seq, &t->insert_waiters, (uint32_t)insert_budget);
    }
    if (sample_budget > 0) {
        sr_futex_wake(&t->sample_seq, &t->sample_waiters, (uint32_t)sample_budget);
    }
}

#define WAKE_MAX 0x7fffffffull

int sr_limiter_reserve_insert(sr_ses *ses, uint32_t table, uint64_t want, sr_grant *g) {
    sr_table *t = sr_table_at(ses->st, table);
    int rc = sr_lock(ses->st, &t->limiter_lock);
    if (rc != SR_OK) return rc;
    g->size = t->inserts + t->pending - t->deletes;
    if (want > 1 && !sr_remover_keeps_order(t) && g->size + (int64_t)want > t->max_size) {
        /* The victim depends on what was there: where the table overflows, one by one. */
        want = g->size < t->max_size ? (uint64_t)(t->max_size - g->size) : 1;
    }
    g->granted = sr_limiter_insert_budget(t, want);
    g->epoch = atomic_load_explicit(&t->epoch, memory_order_relaxed);
    g->seq = atomic_load_explicit(&t->insert_seq, memory_order_relaxed);
    t->pending += (int64_t)g->granted;
    ses->shared->reserved_table = table;
    ses->shared->reserved_inserts = (uint32_t)g->granted;
    sr_unlock(&t->limiter_lock);
    return SR_OK;
}

int sr_limiter_settle_insert(sr_ses *ses, uint32_t table, sr_grant *g, uint64_t placed,
                             uint64_t place_epoch, uint64_t *evict) {
    sr_table *t = sr_table_at(ses->st, table);
    *evict = 0;
    int rc = sr_lock(ses->st, &t->limiter_lock);
    if (rc != SR_OK) return rc;
    uint64_t epoch = atomic_load_explicit(&t->epoch, memory_order_relaxed);
    if (g->epoch == epoch) t->pending -= (int64_t)g->granted;
    ses->shared->reserved_inserts = 0;
    if (place_epoch == epoch) {
        t->inserts += (int64_t)placed;
        int64_t over = t->inserts - t->deletes - t->max_size;
        if (over > 0) {
            *evict = (uint64_t)over;
            t->deletes += over;
        }
    }
    g->epoch = epoch;
    if (*evict > 0 && sr_remover_draws(t)) g->seed = sr_splitmix64(&t->rng);
    uint64_t samples = sr_limiter_sample_budget(t, WAKE_MAX);
    uint64_t inserts =
        *evict > 0 || placed < g->granted ? sr_limiter_insert_budget(t, WAKE_MAX) : 0;
    sr_unlock(&t->limiter_lock);
    notify(t, inserts, samples);
    return SR_OK;
}

int sr_limiter_reserve_sample(sr_ses *ses, uint32_t table, uint64_t want, sr_grant *g) {
    sr_table *t = sr_table_at(ses->st, table);
    int rc = sr_lock(ses->st, &t->limiter_lock);
    if (rc != SR_OK) return rc;
    g->size = t->inserts - t->deletes;
    g->granted = sr_limiter_sample_budget(t, want);
    g->epoch = atomic_load_explicit(&t->epoch, memory_order_relaxed);
    g->seq = atomic_load_explicit(&t->sample_seq, memory_order_relaxed);
    t->pending_samples += (int64_t)g->granted;
    ses->shared->reserved_table = table;
    ses->shared->reserved_samples = (uint32_t)g->granted;
    if (g->granted > 0) g->seed = sr_splitmix64(&t->rng);
    sr_unlock(&t->limiter_lock);
    return SR_OK;
}

int sr_limiter_settle_sample(sr_ses *ses, uint32_t table, const sr_grant *g, uint64_t drawn,
                             uint64_t removed) {
    sr_table *t = sr_table_at(ses->st, table);
    int rc = sr_lock(ses->st, &t->limiter_lock);
    if (rc != SR_OK) return rc;
    if (g->epoch == atomic_load_explicit(&t->epoch, memory_order_relaxed)) {
        t->pending_samples -= (int64_t)g->granted;
        t->samples += (int64_t)drawn;
        t->deletes += (int64_t)removed;
    }
    ses->shared->reserved_samples = 0;
    uint64_t inserts = sr_limiter_insert_budget(t, WAKE_MAX);
    /* With nothing drawn there is nothing there for others either; and waking would wake
     * ourselves, for ever. */
    uint64_t samples = drawn > 0 && drawn < g->granted ? sr_limiter_sample_budget(t, WAKE_MAX) : 0;
    sr_unlock(&t->limiter_lock);
    notify(t, inserts, samples);
    return SR_OK;
}

int sr_limiter_settle_delete(sr_store *st, uint32_t table, int64_t delta, uint64_t epoch) {
    sr_table *t = sr_table_at(st, table);
    int rc = sr_lock(st, &t->limiter_lock);
    if (rc != SR_OK) return rc;
    uint64_t inserts = 0;
    uint64_t samples = 0;
    if (epoch == atomic_load_explicit(&t->epoch, memory_order_relaxed)) {
        t->deletes += delta;
        inserts = sr_limiter_insert_budget(t, WAKE_MAX);
        samples = delta < 0 ? sr_limiter_sample_budget(t, WAKE_MAX) : 0;
    }
    sr_unlock(&t->limiter_lock);
    notify(t, inserts, samples);
    return SR_OK;
}

static int query(sr_store *st, uint32_t table, int64_t n,
                 int (*allowed)(const sr_table *, int64_t)) {
    sr_table *t = sr_table_at(st, table);
    if (t == NULL || n < 1) return SR_INVALID;
    int rc = sr_lock(st, &t->limiter_lock);
    if (rc != SR_OK) return rc;
    int yes = allowed(t, n);
    sr_unlock(&t->limiter_lock);
    return yes;
}

int sr_can_sample(sr_store *st, uint32_t table, int64_t n) {
    return query(st, table, n, can_sample);
}
int sr_can_insert(sr_store *st, uint32_t table, int64_t n) {
    return query(st, table, n, can_insert);
}
