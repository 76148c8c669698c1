/* Inserting: reserve at the limiter, place in a stripe, settle, evict. */
#include "bytes.h"
#include "events.h"
#include "evict.h"
#include "index.h"
#include "limiter.h"
#include "lock.h"
#include "receipt.h"
#include "shape.h"
#include "stripe.h"
#include "table.h"

#include <math.h>
#include <time.h>

#define BATCH_MAX 256u /* items placed under one hold of a stripe's lock */

int sr_table_usable(const sr_store *st, uint32_t table) {
    const sr_table *t = sr_table_at(st, table);
    if (t == NULL) return SR_INVALID;
    if (SR_UNLIKELY(sr_store_is_closed(st))) return SR_CLOSED;
    if (SR_CRASH_SAFE) SR_ASSERT(sr_shape_table_ok(st, t, table));
    if (SR_UNLIKELY(atomic_load_explicit(&t->poisoned, memory_order_relaxed))) return SR_CORRUPT;
    return SR_OK;
}

int sr_priority_ok(const sr_store *st, uint32_t table, double priority) {
    if (table >= st->shape.n_tables || isnan(priority)) return 0;
    const sr_table_shape *t = &st->tables[table];
    /* Weights are summed: the bound keeps the sum of 2^31 of them finite. */
    const double weight_max = 1e290;
    if (t->sampler_kind == SR_SEL_PRIORITIZED) {
        if (priority < 0 || isinf(priority)) return 0;
        if (!(sr_index_weight(priority, t->sampler_exponent) <= weight_max)) return 0;
    }
    if (t->remover_kind == SR_SEL_PRIORITIZED) {
        if (priority < 0 || isinf(priority)) return 0;
        if (!(sr_index_weight(priority, t->remover_exponent) <= weight_max)) return 0;
    }
    return 1;
}

static uint64_t clock_ns(clockid_t clock) {
    struct timespec ts;
    clock_gettime(clock, &ts);
    return (uint64_t)ts.tv_sec * 1000000000ull + (uint64_t)ts.tv_nsec;
}
static uint64_t now_ns(void) { return clock_ns(CLOCK_REALTIME_COARSE); }
static uint64_t monotonic_ns(void) { return clock_ns(CLOCK_MONOTONIC); }

/* Put n items into the stripe. *placed of them are in, in order, whatever the return. SR_DIRTY: the
 * rest may go in after a repair. */
static int place(sr_ses *ses, sr_table *t, sr_stripe *s, uint64_t n, const sr_item *items,
                 uint64_t *keys, uint64_t *placed, uint64_t *epoch) {
    sr_receipt *receipt = ses->receipt;
    sr_store *st = ses->st;
    *placed = 0;
    sr_stripe_touch(st, s);
    int rc = sr_lock_stripe(st, t, s);
    if (rc != SR_OK) return rc;
    *epoch = atomic_load_explicit(&t->epoch, memory_order_relaxed);
    uint64_t now = now_ns();
    for (uint64_t i = 0; i < n; i++) {
        uint32_t slot;
        rc = sr_stripe_take_slot(st, s, &slot);
        if (rc != SR_OK) break;
        sr_events_spend(ses, t, 1);
        uint64_t *key = receipt == NULL ? &keys[i] : sr_receipt_announce(ses, s->table);
        sr_stripe_publish(st, t, s, slot, &items[i], now, key);
        if (SR_UNLIKELY(receipt != NULL)) {
            keys[i] = *key;
            sr_receipt_confirm(receipt);
            ses->receipt_next++;
        }
        (*placed)++;
    }
    sr_stripe_hints(st, s);
    sr_owe_inserts(ses, (int32_t)*placed, *epoch);
    sr_unlock_stripe(st, t, s);
    return rc;
}

/* Of a table with events: room to tell of what is about to happen, and of what was to be evicted
 * before and could not be told. */
static int make_room(sr_ses *ses, sr_table *t, uint32_t table, uint64_t *want) {
    int rc = sr_counts_bytes(t) ? sr_evict_bounded(ses, table) : SR_OK;
    return rc == SR_OK ? sr_events_promise(ses, t, want) : rc;
}

static int insert_some(sr_ses *ses, uint32_t table, uint32_t n, const sr_item *items,
                       uint64_t *keys, uint32_t *done, uint32_t *seq) {
    sr_store *st = ses->st;
    sr_table *t = sr_table_at(st, table);
    sr_stripe *s = sr_stripe_at(st, t, ses->shared->stripe_hint % t->n_stripes);
    while (*done < n) {
        uint64_t want = n - *done < BATCH_MAX ? n - *done : BATCH_MAX;
        sr_grant g;
        int rc = sr_has_events(t) ? make_room(ses, t, table, &want) : SR_OK;
        *seq = ses->room_seq;
        if (rc == SR_OK) rc = sr_limiter_reserve_insert(ses, table, want, &g);
        if (rc != SR_OK) return rc;
        if (g.granted == 0) {
            *seq = g.seq;
            return SR_WOULD_BLOCK;
        }
        uint64_t placed, place_epoch = g.epoch, evict;
        int placing =
            place(ses, t, s, g.granted, items + *done, keys + *done, &placed, &place_epoch);
        *done += (uint32_t)placed;
        rc = sr_limiter_settle_insert(ses, table, &g, placed, place_epoch, &evict);
        if (rc == SR_OK && evict > 0) rc = sr_evict(ses, table, &g, evict);
        if (rc == SR_OK && SR_UNLIKELY(sr_counts_bytes(t))) {
            rc = sr_evict_bounded(ses, table);
            if (rc == SR_WOULD_BLOCK) rc = SR_OK; /* the next insert does it, before its item */
        }
        if (rc != SR_OK) return rc;
        if (placing == SR_DIRTY) placing = sr_repair(st);
        if (placing != SR_OK) return placing;
    }
    return SR_OK;
}

int sr_insert(sr_ses *ses, uint32_t table, uint32_t n, const sr_item *items, uint64_t *keys,
              uint32_t *done, uint32_t *seq) {
    *done = 0;
    SR_GUARDED_SES(ses)
    int rc = sr_table_usable(ses->st, table);
    if (rc != SR_OK) return rc;
    sr_begin_on(ses, SR_BUSY_INSERT, table);
    ses->behind = 0;
    rc = insert_some(ses, table, n, items, keys, done, seq);
    if (SR_UNLIKELY(ses->shared->promised != 0)) {
        sr_events_unpromise(ses, sr_table_at(ses->st, table));
    }
    sr_count(&ses->shared->inserts, *done);
    sr_end(ses);
    return rc;
}

/* What it looks at is this process's own, or a word that may change at any time. What it does not
 * look at is an arena's lock, which the eviction of a block's last item takes. */
int sr_insert_is_brief(const sr_ses *ses, uint32_t table) {
    const sr_store *st = ses->st;
    const sr_table *t = sr_table_at(st, table);
    if (t == NULL) return 0;
    const sr_table_shape *k = &st->tables[table];
    uint32_t number = k->first_stripe + ses->shared->stripe_hint % k->n_stripes;
    const sr_stripe *s = (const sr_stripe *)sr_known(st, st->shape.stripes_off) + number;
    return atomic_load_explicit(&t->insert_free, memory_order_relaxed) != 0 &&
           __atomic_load_n(&s->free_head, __ATOMIC_RELAXED) != SR_NONE &&
           !sr_seems_held(&s->lock) && !sr_seems_held(&t->limiter_lock) &&
           atomic_load_explicit(&t->sample_waiters, memory_order_relaxed) == 0 &&
           atomic_load_explicit(&t->insert_waiters, memory_order_relaxed) == 0 &&
           !sr_has_events(t) && !sr_counts_bytes(t) &&
           atomic_load_explicit(&st->hdr->dirty, memory_order_relaxed) == 0;
}

void sr_wait_insert(sr_store *st, uint32_t table, uint32_t seq, uint32_t timeout_ms) {
    sr_table *t = sr_table_at(st, table);
    if (t != NULL && !sr_store_is_closed(st)) {
        uint64_t since = monotonic_ns();
        sr_futex_wait(&t->insert_seq, seq, &t->insert_waiters, timeout_ms);
        atomic_fetch_add_explicit(&t->insert_wait_ns, monotonic_ns() - since, memory_order_relaxed);
    }
}

void sr_wait_sample(sr_store *st, uint32_t table, uint32_t seq, uint32_t timeout_ms) {
    sr_table *t = sr_table_at(st, table);
    if (t != NULL && !sr_store_is_closed(st)) {
        uint64_t since = monotonic_ns();
        sr_futex_wait(&t->sample_seq, seq, &t->sample_waiters, timeout_ms);
        atomic_fetch_add_explicit(&t->sample_wait_ns, monotonic_ns() - since, memory_order_relaxed);
    }
}
