#include "limiter.h"

#include <float.h>
#include <math.h>

#include "bytes.h"
#include "ledger.h"
#include "lock.h"
#include "table.h"

#define WAKE_MAX 0x7fffffffull
#define ROUNDINGS 4u

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
    double bounded = !(guess > 0) ? 0 : guess > (double)want ? (double)want : guess;
    uint64_t n = (uint64_t)bounded;
    for (uint32_t i = 0; i < ROUNDINGS && n > 0 && !allowed(t, (int64_t)n); i++) n--;
    for (uint32_t i = 0; i < ROUNDINGS && n < want && allowed(t, (int64_t)n + 1); i++) n++;
    int here = n == 0 || allowed(t, (int64_t)n), next = n < want && allowed(t, (int64_t)n + 1);
    if (here && !next) return n;
    uint64_t low = 0, high = want; /* numbers that large, or damaged: by halves */
    while (high - low > 1) {
        uint64_t mid = low + (high - low) / 2;
        if (allowed(t, (int64_t)mid)) low = mid;
        else high = mid;
    }
    return low;
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
    if (sr_max_times_sampled(t) > 0) {
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

/* Who is to be woken: as many as may go now. Taken under the limiter, acted upon after it.
 * SYNC POINT: whoever is refused sets `*_wanted` and reads the word under the limiter, before it
 * sleeps on that word; so a change of the counters that comes after sees either the mark or the
 * sleeper's count, and changes the word. With neither, nobody needs to know. */
typedef struct {
    uint64_t inserts, samples;
} wake;

static wake whom_to_wake(sr_table *t, int maybe_inserts, int maybe_samples) {
    wake w = {0, 0};
    if (maybe_inserts && (t->insert_wanted || atomic_load(&t->insert_waiters) > 0)) {
        w.inserts = sr_limiter_insert_budget(t, WAKE_MAX);
        if (w.inserts > 0) t->insert_wanted = 0;
    }
    if (maybe_samples && (t->sample_wanted || atomic_load(&t->sample_waiters) > 0)) {
        w.samples = sr_limiter_sample_budget(t, WAKE_MAX);
        if (w.samples > 0) t->sample_wanted = 0;
    }
    return w;
}

static void notify(sr_table *t, wake w) {
    if (w.inserts > 0) sr_futex_wake(&t->insert_seq, &t->insert_waiters, (uint32_t)w.inserts);
    if (w.samples > 0) sr_futex_wake(&t->sample_seq, &t->sample_waiters, (uint32_t)w.samples);
}

/* From here to commit(), all or nothing; under the limiter. pending and pending_samples are sums
 * over the sessions, and so not noted. */
static void begin(sr_session *s, uint32_t table, const sr_table *t) {
    if (!SR_CRASH_SAFE) return;
    sr_undo *u = &s->undo;
    u->reserved_inserts = s->reserved_inserts;
    u->reserved_samples = s->reserved_samples;
    u->owed_inserts = s->owed_inserts;
    u->owed_samples = s->owed_samples;
    u->owed_deletes = s->owed_deletes;
    u->owed_epoch = s->owed_epoch;
    u->inserts = t->inserts;
    u->samples = t->samples;
    u->deletes = t->deletes;
    /* SYNC POINT: a process dies between two instructions, so that it is their order that counts:
     * the record before its mark, the mark before the first change. */
    atomic_signal_fence(memory_order_seq_cst);
    atomic_store_explicit(&u->valid, table + 1, memory_order_release);
    atomic_signal_fence(memory_order_seq_cst);
}

static void commit(sr_session *s) {
    if (!SR_CRASH_SAFE) return;
    atomic_signal_fence(memory_order_seq_cst);
    atomic_store_explicit(&s->undo.valid, 0, memory_order_release);
    atomic_signal_fence(memory_order_seq_cst);
}

void sr_limiter_undo(sr_store *st) {
    for (uint32_t i = 0; i < st->shape.n_sessions; i++) {
        sr_session *s = sr_session_at(st, i);
        sr_undo *u = &s->undo;
        uint32_t valid = atomic_load_explicit(&u->valid, memory_order_acquire);
        if (valid == 0) continue;
        sr_table *t = sr_table_at(st, valid - 1);
        if (t != NULL) {
            s->reserved_inserts = u->reserved_inserts;
            s->reserved_samples = u->reserved_samples;
            s->owed_inserts = u->owed_inserts;
            s->owed_samples = u->owed_samples;
            s->owed_deletes = u->owed_deletes;
            s->owed_epoch = u->owed_epoch;
            t->inserts = u->inserts;
            t->samples = u->samples;
            t->deletes = u->deletes;
        }
        commit(s);
    }
}

sr_books sr_limiter_books(const sr_store *st, uint32_t table) {
    sr_books b = {0, 0, 0};
    const sr_table *t = sr_table_at(st, table);
    uint64_t epoch = atomic_load_explicit(&t->epoch, memory_order_relaxed);
    for (uint32_t i = 0; i < st->shape.n_sessions; i++) {
        const sr_session *s = sr_session_at(st, i);
        if (atomic_load_explicit(&s->state, memory_order_acquire) != 1) continue;
        if (s->table != table || s->owed_epoch != epoch) continue;
        b.inserts += s->reserved_inserts;
        b.samples += s->reserved_samples;
        b.owed += (int64_t)s->owed_inserts - s->owed_deletes;
    }
    return b;
}

int sr_limiter_reserve_insert(sr_ses *ses, uint32_t table, uint64_t want, sr_grant *g) {
    sr_table *t = sr_table_at(ses->st, table);
    g->reserved = !atomic_load_explicit(&t->insert_free, memory_order_relaxed) ||
                  (want > 1 && !sr_remover_keeps_order(t));
    if (!g->reserved) {
        g->granted = want;
        g->epoch = atomic_load_explicit(&t->epoch, memory_order_relaxed);
        return SR_OK;
    }
    int rc = sr_lock(ses->st, &t->limiter_lock);
    if (rc != SR_OK) return rc;
    g->size = t->inserts + t->pending - t->deletes;
    if (want > 1 && !sr_remover_keeps_order(t) &&
        (sr_counts_bytes(t) || g->size + (int64_t)want > t->max_size)) {
        /* The victim depends on what was there: where the table overflows, one by one. */
        int known = g->size < t->max_size && !sr_counts_bytes(t);
        want = known ? (uint64_t)(t->max_size - g->size) : 1;
    }
    g->granted = sr_limiter_insert_budget(t, want);
    if (g->granted == 0) {
        t->insert_wanted = 1;
        t->inserts_refused++;
    }
    g->epoch = atomic_load_explicit(&t->epoch, memory_order_relaxed);
    g->seq = atomic_load_explicit(&t->insert_seq, memory_order_relaxed);
    begin(ses->shared, table, t);
    t->pending += (int64_t)g->granted;
    ses->shared->reserved_inserts = (uint32_t)g->granted;
    ses->shared->owed_epoch = g->epoch;
    commit(ses->shared);
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
    begin(ses->shared, table, t);
    if (g->reserved) {
        if (g->epoch == epoch) t->pending -= (int64_t)g->granted;
        ses->shared->reserved_inserts = 0;
    }
    if (place_epoch == epoch) {
        t->inserts += (int64_t)placed;
        int64_t over = t->inserts - t->deletes - t->max_size;
        if (over > 0 && !sr_counts_bytes(t)) { /* else sr_evict_bounded sees to it */
            *evict = (uint64_t)over;
            t->deletes += over;
        }
    }
    g->epoch = epoch;
    ses->shared->owed_inserts = 0;
    sr_owe_deletes(ses, -(int32_t)*evict, epoch);
    commit(ses->shared);
    if (*evict > 0 && sr_remover_draws(t)) g->seed = sr_splitmix64(&t->rng);
    wake w = whom_to_wake(t, *evict > 0 || placed < g->granted, 1);
    sr_unlock(&t->limiter_lock);
    notify(t, w);
    return SR_OK;
}

int sr_limiter_reserve_sample(sr_ses *ses, uint32_t table, uint64_t want, sr_grant *g) {
    sr_table *t = sr_table_at(ses->st, table);
    int rc = sr_lock(ses->st, &t->limiter_lock);
    if (rc != SR_OK) return rc;
    g->size = t->inserts - t->deletes;
    g->granted = sr_limiter_sample_budget(t, want);
    if (g->granted == 0) {
        t->sample_wanted = 1;
        t->samples_refused++;
    }
    g->epoch = atomic_load_explicit(&t->epoch, memory_order_relaxed);
    g->seq = atomic_load_explicit(&t->sample_seq, memory_order_relaxed);
    begin(ses->shared, table, t);
    t->pending_samples += (int64_t)g->granted;
    ses->shared->reserved_samples = (uint32_t)g->granted;
    ses->shared->owed_epoch = g->epoch;
    commit(ses->shared);
    if (g->granted > 0) g->seed = sr_splitmix64(&t->rng);
    sr_unlock(&t->limiter_lock);
    return SR_OK;
}

int sr_limiter_settle_sample(sr_ses *ses, uint32_t table, const sr_grant *g, uint64_t drawn,
                             uint64_t removed) {
    sr_table *t = sr_table_at(ses->st, table);
    int rc = sr_lock(ses->st, &t->limiter_lock);
    if (rc != SR_OK) return rc;
    /* Budget was taken and draws were made under epochs of their own: a reset may lie between. */
    uint64_t epoch = atomic_load_explicit(&t->epoch, memory_order_relaxed);
    begin(ses->shared, table, t);
    if (g->epoch == epoch) t->pending_samples -= (int64_t)g->granted;
    if (ses->shared->owed_epoch == epoch) {
        t->samples += ses->shared->owed_samples;
        t->deletes += ses->shared->owed_deletes;
        t->consumed += (uint64_t)ses->shared->owed_deletes;
    }
    ses->shared->reserved_samples = 0;
    ses->shared->owed_samples = ses->shared->owed_deletes = 0;
    commit(ses->shared);
    /* With nothing drawn there is nothing there for others either; and waking would wake
     * ourselves, for ever. The caller then sleeps on the word that it got with the grant. */
    if (drawn == 0) t->sample_wanted = 1;
    wake w = whom_to_wake(t, 1, drawn > 0 && (drawn < g->granted || removed < drawn));
    sr_unlock(&t->limiter_lock);
    notify(t, w);
    return SR_OK;
}

int sr_limiter_settle_delete(sr_ses *ses, uint32_t table, int64_t delta, uint64_t epoch) {
    sr_table *t = sr_table_at(ses->st, table);
    int rc = sr_lock(ses->st, &t->limiter_lock);
    if (rc != SR_OK) return rc;
    int current = epoch == atomic_load_explicit(&t->epoch, memory_order_relaxed);
    begin(ses->shared, table, t);
    ses->shared->owed_deletes = 0;
    if (current) t->deletes += delta;
    commit(ses->shared);
    if (current && delta > 0) t->deleted += (uint64_t)delta;
    wake w = {0, 0};
    if (current) {
        w = whom_to_wake(t, 1, delta < 0);
    }
    sr_unlock(&t->limiter_lock);
    notify(t, w);
    return SR_OK;
}

void sr_owe_inserts(sr_ses *ses, int32_t placed, uint64_t epoch) {
    sr_session *s = ses->shared;
    if (s->owed_epoch != epoch) s->reserved_inserts = 0; /* a reset has settled the budget */
    s->owed_inserts = placed;
    s->owed_epoch = epoch;
}

void sr_owe_samples(sr_ses *ses, int32_t drawn, int32_t removed, uint64_t epoch) {
    sr_session *s = ses->shared;
    if (s->owed_epoch != epoch) s->reserved_samples = 0;
    s->owed_samples = drawn;
    s->owed_deletes = removed;
    s->owed_epoch = epoch;
}

void sr_owe_deletes(sr_ses *ses, int32_t removed, uint64_t epoch) {
    ses->shared->owed_deletes = removed;
    ses->shared->owed_epoch = epoch;
}

uint64_t sr_limiter_settle_dead(sr_table *t, sr_session *dead) {
    int current = dead->owed_epoch == atomic_load_explicit(&t->epoch, memory_order_relaxed);
    begin(dead, dead->table, t);
    if (current) {
        t->pending -= dead->reserved_inserts;
        t->pending_samples -= dead->reserved_samples;
        t->inserts += dead->owed_inserts;
        t->samples += dead->owed_samples;
        t->deletes += dead->owed_deletes;
    }
    dead->reserved_inserts = dead->reserved_samples = 0;
    dead->owed_inserts = dead->owed_samples = dead->owed_deletes = 0;
    commit(dead);
    int64_t over = t->inserts - t->deletes - t->max_size;
    return over > 0 ? (uint64_t)over : 0;
}

void sr_limiter_derive(sr_table *t) {
    atomic_store_explicit(&t->insert_free, t->max_diff >= DBL_MAX, memory_order_relaxed);
}

void sr_limiter_wake_all(sr_table *t) {
    sr_futex_wake(&t->insert_seq, &t->insert_waiters, UINT32_MAX);
    sr_futex_wake(&t->sample_seq, &t->sample_waiters, UINT32_MAX);
}

static int query(sr_store *st, uint32_t table, int64_t n,
                 int (*allowed)(const sr_table *, int64_t)) {
    SR_GUARDED(st, SR_CORRUPT)
    sr_table *t = sr_table_at(st, table);
    if (t == NULL || n < 1) return SR_INVALID;
    if (atomic_load_explicit(&t->poisoned, memory_order_relaxed)) return SR_CORRUPT;
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
