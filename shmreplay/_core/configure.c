/* configure.c: bounds and limiter of a table that is in use.
 *
 * Crash: what has to go goes first, and each setting is one store, so that whatever a death leaves
 * is a table within its bounds, with each setting either old or new. Of a limiter's four numbers
 * some may be new and others old: that is a limiter too, if one that nobody asked for. */
#include "bytes.h"
#include "events.h"
#include "evict.h"
#include "limiter.h"
#include "lock.h"
#include "stripe.h"
#include "table.h"

static int change_ok(const sr_table *t, const sr_table_change *c) {
    if ((c->what & SR_SET_MAX_SIZE) && (c->max_size < 1 || c->max_size > t->max_size_limit)) {
        *sr_last_detail() = (sr_detail){.asked = (uint64_t)c->max_size,
                                        .available = (uint64_t)t->max_size_limit};
        return 0;
    }
    if ((c->what & SR_SET_MAX_BYTES) && c->max_bytes < 0) return 0;
    return !(c->what & SR_SET_LIMITER) ||
           (c->samples_per_insert > 0 && c->min_size_to_sample >= 1);
}

/* Is there room to tell that an item goes? */
static int room(sr_ses *ses, sr_table *t) {
    return sr_has_events(t) ? sr_events_room(ses, t, 1) : SR_OK;
}

/* Items that were sampled `most` times or more are through. */
static int expire(sr_ses *ses, sr_table *t, uint32_t most) {
    sr_store *st = ses->st;
    int rc = SR_OK;
    for (uint32_t k = 0; k < t->n_stripes && rc == SR_OK; k++) {
        sr_stripe *s = sr_stripe_at(st, t, k);
        for (uint32_t i = 0; i < s->slots_used && rc == SR_OK; i++) {
            const sr_slot *p = sr_slot_at(st, s, i);
            if (!sr_slot_live(p) || p->times_sampled < most) continue;
            rc = room(ses, t);
            if (rc != SR_OK) break;
            rc = sr_stripe_remove(st, t, s, i);
            t->deletes++;
        }
        sr_stripe_hints(st, s);
    }
    return rc;
}

static int64_t live(const sr_store *st, const sr_table *t) {
    int64_t n = 0;
    for (uint32_t k = 0; k < t->n_stripes; k++) {
        const sr_stripe *s = sr_stripe_at(st, t, k);
        n += (int64_t)s->index[s->remover].count;
    }
    return n;
}

/* The bytes are counted before the bound holds, and no longer once it does not. */
static int bound_bytes(sr_ses *ses, sr_table *t, int64_t max_bytes) {
    sr_store *st = ses->st;
    uint32_t table = (uint32_t)(t - sr_table_at(st, 0));
    int counted = sr_counts_bytes(t), rc = SR_OK;
    if (max_bytes > 0 && !counted) {
        atomic_store_explicit(&t->count_bytes, 1, memory_order_release);
        sr_bytes_recount(st, t, table);
    }
    while (max_bytes > 0 && live(st, t) > 0 && sr_bytes_of(st, t) > max_bytes && rc == SR_OK) {
        rc = room(ses, t);
        if (rc == SR_OK) rc = sr_evict_locked(st, t, 1);
    }
    if (rc == SR_OK) atomic_store_explicit(&t->max_bytes, max_bytes, memory_order_release);
    if (sr_max_bytes(t) == 0 && sr_counts_bytes(t)) {
        atomic_store_explicit(&t->count_bytes, 0, memory_order_release);
        sr_bytes_forget(st, t, table);
    }
    return rc;
}

/* Under all locks of the table. */
static int apply(sr_ses *ses, sr_table *t, const sr_table_change *c) {
    int rc = SR_OK;
    if (c->what & SR_SET_MAX_TIMES_SAMPLED) {
        if (c->max_times_sampled > 0) rc = expire(ses, t, (uint32_t)c->max_times_sampled);
        if (rc != SR_OK) return rc;
        atomic_store_explicit(&t->max_times_sampled, c->max_times_sampled, memory_order_relaxed);
    }
    if (c->what & SR_SET_MAX_SIZE) {
        /* Who has placed items and not counted them yet evicts them by the new size. */
        int64_t over = t->inserts - t->deletes - c->max_size, most = live(ses->st, t);
        if (over > most) over = most;
        for (; over > 0 && rc == SR_OK; over--) {
            rc = room(ses, t);
            if (rc == SR_OK) rc = sr_evict_locked(ses->st, t, 1);
        }
        if (rc != SR_OK) return rc;
        t->max_size = c->max_size;
    }
    if (c->what & SR_SET_MAX_BYTES) {
        rc = bound_bytes(ses, t, c->max_bytes);
        if (rc != SR_OK) return rc;
    }
    if (c->what & SR_SET_LIMITER) {
        t->samples_per_insert = c->samples_per_insert;
        t->min_size_to_sample = c->min_size_to_sample;
        t->min_diff = c->min_diff;
        t->max_diff = c->max_diff;
        sr_limiter_derive(t);
    }
    return SR_OK;
}

int sr_table_configure(sr_ses *ses, uint32_t table, const sr_table_change *change) {
    SR_GUARDED_SES(ses)
    sr_store *st = ses->st;
    int rc = sr_table_usable(st, table);
    if (rc != SR_OK) return rc;
    sr_table *t = sr_table_at(st, table);
    if (!change_ok(t, change)) return SR_INVALID;
    sr_begin_on(ses, SR_BUSY_DELETE, table);
    rc = sr_lock_table(st, t);
    if (rc == SR_OK) {
        int sound = atomic_load_explicit(&t->poisoned, memory_order_relaxed) == SR_SOUND;
        rc = sound ? apply(ses, t, change) : SR_CORRUPT;
        sr_unlock_table(st, t);
        sr_limiter_wake_all(t);
        if (sr_has_events(t)) sr_events_notify(st);
    }
    sr_end(ses);
    return rc;
}
