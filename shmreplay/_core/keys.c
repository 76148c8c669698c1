/* Operations by key: update, delete, contains; and reset and info. */
#include "bytes.h"
#include "events.h"
#include "evict.h"
#include "index.h"
#include "limiter.h"
#include "lock.h"
#include "remote.h"
#include "shape.h"
#include "stripe.h"
#include "table.h"

#include <math.h>

#define BATCH_MAX 256u

/* Does the key say that it belongs to this stripe of this table? The rest of the check is the
 * compare with the slot. */
static int key_in_stripe(const sr_table *t, const sr_stripe *s, uint64_t key) {
    return sr_key_stripe(t, key) == s->number;
}

static void update_stripe(sr_store *st, sr_table *t, sr_stripe *s, uint32_t n, const uint64_t *keys,
                          const double *priorities, uint32_t *applied) {
    uint32_t slots[BATCH_MAX];
    double prios[BATCH_MAX];
    uint64_t touches[BATCH_MAX];
    uint32_t found = 0;
    double most = -INFINITY;
    for (uint32_t i = 0; i < n; i++) {
        uint32_t slot = sr_key_slot(t, keys[i]);
        if (slot < s->slots_used) __builtin_prefetch(sr_slot_at(st, s, slot), 1);
    }
    for (uint32_t i = 0; i < n; i++) {
        if (t->n_stripes > 1 && !key_in_stripe(t, s, keys[i])) continue;
        uint32_t slot = sr_stripe_find(st, t, s, keys[i]);
        if (slot == SR_NONE) continue;
        sr_slot *p = sr_slot_at(st, s, slot);
        if (sr_has_events(t)) sr_events_stage_update(st, t, p, priorities[i]);
        p->priority = priorities[i];
        p->touch = s->touch_next++;
        slots[found] = slot;
        prios[found] = p->priority;
        touches[found] = p->touch;
        found++;
        if (p->priority > most) most = p->priority;
    }
    if (found == 0) return;
    sr_see_priority(t, most);
    for (uint32_t k = 0; k < s->n_indexes; k++) {
        sr_index_update_many(st, &s->index[k], found, slots, prios, touches);
    }
    sr_stripe_hints(st, s);
    sr_events_commit(st, t);
    *applied += found;
}

int sr_update(sr_ses *ses, uint32_t table, uint32_t n, const uint64_t *keys,
              const double *priorities, uint32_t *applied) {
    SR_GUARDED_SES(ses)
    sr_store *st = ses->st;
    *applied = 0;
    int rc = sr_table_usable(st, table);
    if (rc != SR_OK) return rc;
    sr_table *t = sr_table_at(st, table);
    if (sr_has_events(t) && n > SR_EVENTS_BATCH) return SR_INVALID;
    for (uint32_t i = 0; i < n; i++) {
        if (!sr_priority_ok(st, table, priorities[i])) return SR_INVALID;
    }
    for (uint32_t at = 0; at < n; at += BATCH_MAX) {
        uint32_t count = n - at < BATCH_MAX ? n - at : BATCH_MAX;
        for (uint32_t k = 0; k < t->n_stripes; k++) {
            sr_stripe *s = sr_stripe_at(st, t, k);
            rc = sr_lock_stripe(st, t, s);
            if (rc != SR_OK) return rc;
            if (sr_has_events(t)) rc = sr_events_room(ses, t, count);
            if (rc == SR_OK) update_stripe(st, t, s, count, keys + at, priorities + at, applied);
            sr_unlock_stripe(st, t, s);
            if (rc != SR_OK) return rc;
        }
    }
    if (*applied < n) {
        atomic_fetch_add_explicit(&t->missed_updates, n - *applied, memory_order_relaxed);
    }
    atomic_fetch_add_explicit(&t->updates, *applied, memory_order_relaxed);
    sr_count(&ses->shared->updates, *applied);
    return SR_OK;
}

static int delete_in_stripe(sr_store *st, sr_table *t, sr_stripe *s, uint32_t n,
                            const uint64_t *keys, uint32_t *deleted) {
    int rc = SR_OK;
    for (uint32_t i = 0; i < n && rc == SR_OK; i++) {
        if (!key_in_stripe(t, s, keys[i])) continue;
        uint32_t slot = sr_stripe_find(st, t, s, keys[i]);
        if (slot == SR_NONE) continue;
        rc = sr_stripe_remove(st, t, s, slot);
        (*deleted)++;
    }
    if (*deleted > 0) sr_stripe_hints(st, s);
    return rc;
}

int sr_delete(sr_ses *ses, uint32_t table, uint32_t n, const uint64_t *keys, uint32_t *deleted) {
    SR_GUARDED_SES(ses)
    sr_store *st = ses->st;
    *deleted = 0;
    int rc = sr_table_usable(st, table);
    if (rc != SR_OK) return rc;
    sr_table *t = sr_table_at(st, table);
    if (sr_has_events(t) && n > SR_EVENTS_BATCH) return SR_INVALID;
    sr_begin_on(ses, SR_BUSY_DELETE, table);
    for (uint32_t k = 0; k < t->n_stripes && rc == SR_OK; k++) {
        sr_stripe *s = sr_stripe_at(st, t, k);
        rc = sr_lock_stripe(st, t, s);
        if (rc != SR_OK) break;
        uint64_t epoch = atomic_load_explicit(&t->epoch, memory_order_relaxed);
        uint32_t here = 0;
        if (sr_has_events(t)) rc = sr_events_room(ses, t, n);
        if (rc == SR_OK) rc = delete_in_stripe(st, t, s, n, keys, &here);
        sr_owe_deletes(ses, (int32_t)here, epoch);
        sr_unlock_stripe(st, t, s);
        *deleted += here;
        if (here > 0) {
            int settled = sr_limiter_settle_delete(ses, table, here, epoch);
            if (rc == SR_OK) rc = settled;
        }
    }
    sr_end(ses);
    return rc;
}

int sr_contains(sr_ses *ses, uint32_t table, uint64_t key) {
    SR_GUARDED_SES(ses)
    sr_store *st = ses->st;
    int rc = sr_table_usable(st, table);
    if (rc != SR_OK) return rc;
    sr_table *t = sr_table_at(st, table);
    uint32_t number = sr_key_stripe(t, key);
    if (number >= t->n_stripes) return 0;
    sr_stripe *s = sr_stripe_at(st, t, number);
    rc = sr_lock_stripe(st, t, s);
    if (rc != SR_OK) return rc;
    int found = sr_stripe_find(st, t, s, key) != SR_NONE;
    sr_unlock(&s->lock);
    return found;
}

/* In the item's stripe, whose lock is held. */
static int replace_in_stripe(sr_ses *ses, sr_table *t, sr_stripe *s, uint32_t slot, uint64_t ref,
                             uint32_t schema, uint32_t *item_schema) {
    *item_schema = sr_slot_at(ses->st, s, slot)->schema;
    if (*item_schema != schema) return SR_INVALID;
    int rc = sr_has_events(t) ? sr_events_room(ses, t, 1) : SR_OK;
    return rc == SR_OK ? sr_stripe_replace(ses->st, t, s, slot, ref) : rc;
}

int sr_replace(sr_ses *ses, uint32_t table, uint64_t key, uint64_t ref, uint32_t schema,
               uint32_t *found, uint32_t *item_schema) {
    *found = 0;
    SR_GUARDED_SES(ses)
    sr_store *st = ses->st;
    int rc = sr_table_usable(st, table);
    if (rc != SR_OK) return rc;
    sr_table *t = sr_table_at(st, table);
    uint32_t number = sr_key_stripe(t, key);
    if (number >= t->n_stripes) return SR_OK;
    sr_stripe *s = sr_stripe_at(st, t, number);
    /* Crash window: new data that is larger than the old, and a table above max_bytes: who reclaims
     * the dead one evicts, as it does after a delete. */
    sr_begin_on(ses, SR_BUSY_DELETE, table);
    rc = sr_lock_stripe(st, t, s);
    if (rc == SR_OK) {
        uint32_t slot = sr_stripe_find(st, t, s, key);
        *found = slot != SR_NONE;
        if (*found) rc = replace_in_stripe(ses, t, s, slot, ref, schema, item_schema);
        sr_unlock_stripe(st, t, s);
    }
    if (rc == SR_OK && sr_counts_bytes(t)) {
        rc = sr_evict_bounded(ses, table);
        if (rc == SR_WOULD_BLOCK) rc = SR_OK; /* the next insert does it */
    }
    sr_end(ses);
    return rc;
}

int sr_lock_table_inner(sr_store *st, sr_table *t) {
    uint32_t table = (uint32_t)(t - sr_table_at(st, 0));
    int rc = sr_lock_inner(st, &t->limiter_lock);
    if (rc != SR_OK) return rc;
    SR_ASSERT(sr_shape_table_ok(st, t, table));
    for (uint32_t k = 0; k < t->n_stripes; k++) {
        sr_stripe *s = sr_stripe_at(st, t, k);
        rc = sr_lock_inner(st, &s->lock);
        if (rc == SR_OK) SR_ASSERT(sr_shape_stripe_ok(st, s));
        if (rc == SR_OK) continue;
        while (k-- > 0) sr_unlock(&sr_stripe_at(st, t, k)->lock);
        sr_unlock(&t->limiter_lock);
        return rc;
    }
    return SR_OK;
}

int sr_lock_table(sr_store *st, sr_table *t) {
    int rc = sr_lock_table_inner(st, t);
    while (rc == SR_DIRTY) {
        rc = sr_repair(st);
        if (rc == SR_OK) rc = sr_lock_table_inner(st, t);
    }
    return rc;
}

void sr_unlock_table(sr_store *st, sr_table *t) {
    for (uint32_t k = t->n_stripes; k-- > 0;) sr_unlock(&sr_stripe_at(st, t, k)->lock);
    sr_unlock(&t->limiter_lock);
}

/* Everything out and all counters zero, under all locks of the table. Also what sr_repair does
 * where a reset was cut short: a reset that has begun has happened. */
void sr_reset_counters(sr_table *t) {
    sr_store_double(&t->max_priority_bits, NAN);
    t->inserts = t->samples = t->deletes = t->pending = t->pending_samples = 0;
    t->inserts_refused = t->samples_refused = t->consumed = t->deleted = 0;
    atomic_store_explicit(&t->updates, 0, memory_order_relaxed);
    atomic_store_explicit(&t->missed_updates, 0, memory_order_relaxed);
    atomic_store_explicit(&t->insert_wait_ns, 0, memory_order_relaxed);
    atomic_store_explicit(&t->sample_wait_ns, 0, memory_order_relaxed);
    atomic_store_explicit(&t->num_episodes, 0, memory_order_relaxed);
    atomic_store_explicit(&t->num_deleted_episodes, 0, memory_order_relaxed);
    atomic_store_explicit(&t->num_unique_samples, 0, memory_order_relaxed);
}

int sr_reset(sr_ses *ses, uint32_t table) {
    SR_GUARDED_SES(ses)
    sr_store *st = ses->st;
    int rc = sr_table_usable(st, table);
    if (rc != SR_OK) return rc;
    sr_table *t = sr_table_at(st, table);
    sr_begin_on(ses, SR_BUSY_DELETE, table);
    rc = sr_lock_table(st, t);
    if (rc == SR_OK && atomic_load_explicit(&t->poisoned, memory_order_relaxed) != SR_SOUND) {
        sr_unlock_table(st, t);
        rc = SR_CORRUPT;
    }
    if (rc == SR_OK && sr_has_events(t) && (rc = sr_events_room(ses, t, 1)) != SR_OK) {
        sr_unlock_table(st, t);
    }
    if (rc == SR_OK) {
        /* Staged before the mark: a repair that finds both puts it where it was missing. */
        if (sr_has_events(t)) sr_events_stage_reset(st, t);
        atomic_store_explicit(&t->resetting, 1, memory_order_release);
        atomic_fetch_add_explicit(&t->epoch, 1, memory_order_relaxed);
        for (uint32_t k = 0; k < t->n_stripes; k++) {
            int cleared = sr_stripe_clear(st, t, sr_stripe_at(st, t, k));
            if (cleared != SR_OK) rc = cleared;
        }
        sr_reset_counters(t);
        sr_events_commit(st, t);
        atomic_store_explicit(&t->resetting, 0, memory_order_release);
        sr_unlock_table(st, t);
        if (sr_has_events(t)) sr_events_notify(st);
        sr_limiter_wake_all(t);
    }
    sr_end(ses);
    return rc;
}

const char *sr_table_name(const sr_store *st, uint32_t table) {
    return table < st->shape.n_tables ? st->tables[table].name : NULL;
}

uint64_t sr_table_epoch(const sr_store *st, uint32_t table) {
    const sr_table *t = sr_table_at(st, table);
    return t == NULL ? 0 : atomic_load_explicit(&t->epoch, memory_order_acquire);
}

int sr_table_consumes(const sr_store *st, uint32_t table) {
    const sr_table *t = sr_table_at(st, table);
    return t != NULL && (sr_max_times_sampled(t) > 0 || t->sampler_kind == SR_SEL_EPOCH);
}

int sr_table_get_info(sr_store *st, uint32_t table, sr_table_info *out) {
    SR_GUARDED(st, SR_CORRUPT)
    sr_table *t = sr_table_at(st, table);
    if (t == NULL) return SR_INVALID;
    memset(out, 0, sizeof *out);
    int rc = sr_lock(st, &t->limiter_lock);
    if (rc != SR_OK) return rc;
    sr_copy_info(st, t, out);
    sr_unlock(&t->limiter_lock);
    sr_events_count(st, t, out);
    SR_ASSERT(sr_shape_table_ok(st, t, table));
    for (uint32_t k = 0; k < sr_shape_stripes(st, table); k++) {
        sr_add_hints(sr_stripe_at(st, t, k), out);
    }
    return SR_OK;
}
