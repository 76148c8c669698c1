/* repair.c: after a death inside a lock. The truth: live slots, ledgers and inflight words of
 * sessions, what sessions owe, blocks and trajectories, schemas. All else follows from it and is
 * made anew, under all locks, so that it does not matter what was half done.
 *
 * Nothing here undoes what it did if it is cut short: the store stays dirty, and whoever comes next
 * does all of it again. */
#include "arena.h"
#include "bytes.h"
#include "events.h"
#include "hold.h"
#include "ledger.h"
#include "limiter.h"
#include "lock.h"
#include "lock_all.h"
#include "reach.h"
#include "receipt.h"
#include "shape.h"
#include "steps.h"
#include "stripe.h"
#include "table.h"

#include <math.h>

static void poison(sr_table *t, enum sr_poison reason) {
    uint32_t none = SR_SOUND;
    atomic_compare_exchange_strong(&t->poisoned, &none, (uint32_t)reason);
}

static void poison_all(sr_store *st, enum sr_poison reason) {
    for (uint32_t i = 0; i < st->shape.n_tables; i++) poison(sr_table_at(st, i), reason);
}

static int is_poisoned(const sr_table *t) {
    return atomic_load_explicit(&t->poisoned, memory_order_relaxed) != SR_SOUND;
}

/* A reset that was cut short is done to its end: items first, so that a second death finds either
 * the mark or a table that is reset. */
static void finish_reset(sr_store *st, sr_table *t, uint32_t table) {
    int reset = atomic_load_explicit(&t->resetting, memory_order_acquire) != 0;
    if (!sr_events_repair(st, t, table, reset)) poison(t, SR_POISON_CHECK);
    if (!reset) return;
    for (uint32_t k = 0; k < t->n_stripes; k++) {
        sr_stripe *s = sr_stripe_at(st, t, k);
        if (!sr_stripe_slots_ok(st, s)) continue; /* poisons the table below */
        for (uint32_t i = 0; i < s->slots_used; i++) {
            sr_hold_park(st, s, i);
            atomic_store_explicit(&sr_slot_at(st, s, i)->ref, 0, memory_order_relaxed);
        }
    }
    atomic_fetch_add_explicit(&t->epoch, 1, memory_order_relaxed);
    sr_reset_counters(t);
    atomic_store_explicit(&t->resetting, 0, memory_order_release);
}

/* ------------------------------------------------------------------ what refers to what */

static void reach_slots(sr_reach *r, sr_table *t) {
    sr_store *st = r->st;
    for (uint32_t k = 0; k < t->n_stripes; k++) {
        sr_stripe *s = sr_stripe_at(st, t, k);
        if (!sr_stripe_slots_ok(st, s)) {
            poison(t, SR_POISON_CHECK);
            continue;
        }
        for (uint32_t i = 0; i < s->slots_used; i++) {
            const sr_slot *p = sr_slot_at(st, s, i);
            uint64_t ref = atomic_load_explicit(&p->ref, memory_order_relaxed);
            if (ref == 0) continue;
            if (!sr_reach_ref(r, ref) || !sr_reach_item_ok(st, ref, p->row_start, p->row_count)) {
                poison(t, SR_POISON_ITEM);
            }
        }
    }
}

/* What a checkpoint that is being written holds. */
static void reach_parked(sr_reach *r, const sr_table *t) {
    for (uint32_t k = 0; k < t->n_stripes; k++) {
        const sr_stripe *s = sr_stripe_at(r->st, t, k);
        const uint64_t *parked = sr_hold_parked(r->st, s);
        for (uint64_t i = 0; i < sr_hold_slots(s); i++) {
            if (parked[i] != 0 && !sr_reach_ref(r, parked[i])) r->broken = 1;
        }
    }
}

/* Events that nobody was told of. */
static void reach_events(sr_reach *r, sr_table *t) {
    const sr_event *e;
    for (uint64_t i = 0; sr_has_events(t) && (e = sr_events_nth(r->st, t, i)) != NULL; i++) {
        if (e->ref == 0) continue;
        if (!sr_reach_ref(r, e->ref) ||
            !sr_reach_item_ok(r->st, e->ref, e->row_start, e->row_count)) {
            poison(t, SR_POISON_ITEM);
        }
    }
}

static int reach_ledger(sr_reach *r, sr_session *s) {
    sr_store *st = r->st;
    if (s->ledger_off != sr_own_ledger(st, s)) {
        if (!sr_reach_ref(r, SR_REF(s->ledger_off, SR_KIND_LEDGER)) ||
            sr_alloc_bytes(st, s->ledger_off) / sizeof(uint64_t) < s->ledger_cap) {
            return 0;
        }
    } else if (s->ledger_cap > SR_OWN_LEDGER) {
        return 0;
    }
    const uint64_t *list = sr_ptr(st, s->ledger_off);
    uint32_t used = 0;
    for (uint32_t p = 0; p < s->ledger_cap; p++) {
        if (list[p] == 0) continue;
        if (!sr_reach_ref(r, list[p])) return 0;
        used++;
    }
    s->ledger_used = used;
    return 1;
}

/* After all references: what is in flight and referred to as well was on its way out of there. */
static int reach_inflight(sr_reach *r, sr_session *s) {
    for (uint32_t i = 0; i < 2; i++) {
        uint64_t off = atomic_load_explicit(&s->inflight[i], memory_order_acquire);
        if (off == 0) continue;
        int fresh = sr_reach_inflight(r, off);
        if (fresh < 0) return 0;
        if (!fresh) atomic_store_explicit(&s->inflight[i], 0, memory_order_relaxed);
    }
    return 1;
}

static int reach_all(sr_reach *r) {
    sr_store *st = r->st;
    int sound = 1;
    for (uint32_t i = 0; i < st->shape.n_tables; i++) {
        reach_slots(r, sr_table_at(st, i));
        reach_events(r, sr_table_at(st, i));
        reach_parked(r, sr_table_at(st, i));
    }
    for (uint32_t i = 0; i < st->shape.n_sessions; i++) {
        sr_session *s = sr_session_at(st, i);
        if (s->ledger_off != 0 && !reach_ledger(r, s)) sound = 0;
    }
    const sr_schema *schemas = sr_known(st, st->shape.schemas_off);
    uint32_t n = atomic_load_explicit(&st->hdr->n_schemas, memory_order_relaxed);
    if (n > SR_SCHEMAS_MAX) n = SR_SCHEMAS_MAX;
    for (uint32_t i = 0; i < n; i++) {
        if (schemas[i].off == 0) { /* none was ever written there: the count is wrong */
            atomic_store_explicit(&st->hdr->n_schemas, i, memory_order_relaxed);
            break;
        }
        if (!sr_reach_ref(r, SR_REF(schemas[i].off, SR_KIND_SCHEMA))) sound = 0;
    }
    for (uint32_t i = 0; i < st->shape.n_sessions; i++) {
        if (!reach_inflight(r, sr_session_at(st, i))) sound = 0;
    }
    if (r->broken) sound = 0;
    for (uint32_t i = 0; i < st->shape.n_arenas && sound; i++) {
        sound = sr_arena_rebuild(st, sr_arena_at(st, i), sr_reach_next, r) == SR_OK;
    }
    return sound;
}

/* Charges that were never recorded are forgotten, and the memory is used by the next who commits
 * there. */
static void recount_memory(sr_store *st) {
    uint64_t bytes = sr_align(st->shape.config_off + st->shape.config_bytes, SR_PAGE);
    for (uint32_t i = 0; i < st->shape.n_arenas; i++) {
        const sr_arena *a = sr_arena_at(st, i);
        bytes += a->committed_end - a->start;
    }
    for (uint32_t i = 0; i < st->shape.n_tables; i++) {
        const sr_table *t = sr_table_at(st, i);
        const sr_ring *ring = sr_has_events(t) ? sr_events_ring(st, t) : NULL;
        if (ring != NULL) bytes += sr_events_bytes(ring->capacity);
    }
    for (uint32_t i = 0; i < st->shape.n_stripes; i++) {
        const sr_stripe *s = (const sr_stripe *)sr_known(st, st->shape.stripes_off) + i;
        bytes += s->slots_committed;
        for (uint32_t k = 0; k < s->n_indexes && k < 2; k++) {
            for (uint32_t l = 0; l < SR_TREE_LEVELS; l++) bytes += s->index[k].array_committed[l];
        }
    }
    atomic_store_explicit(&st->hdr->committed_bytes, bytes, memory_order_relaxed);
}

/* ------------------------------------------------------------------ tables */

static void recount_episodes(sr_store *st, sr_table *t, uint32_t table) {
    atomic_store_explicit(&t->num_episodes, 0, memory_order_relaxed);
    for (uint32_t k = 0; k < t->n_stripes; k++) {
        const sr_stripe *s = sr_stripe_at(st, t, k);
        for (uint32_t i = 0; i < s->slots_used; i++) {
            const sr_slot *p = sr_slot_at(st, s, i);
            uint64_t ref = atomic_load_explicit(&p->ref, memory_order_relaxed);
            if (ref != 0) sr_episodes_enter(st, t, table, ref, p->row_start, p->row_count);
        }
    }
}

/* Items that a dead owner placed or took out and had not noted yet count all the same. */
static void settle_counters(const sr_store *st, sr_table *t, uint32_t table, int64_t live) {
    sr_books b = sr_limiter_books(st, table);
    t->pending = b.inserts;
    t->pending_samples = b.samples;
    int64_t surplus = live - (t->inserts - t->deletes + b.owed);
    if (surplus > 0) t->inserts += surplus;
    if (surplus < 0) t->deletes -= surplus;
    t->insert_wanted = t->sample_wanted = 1;
    sr_limiter_derive(t);
}

/* SR_OK, table poisoned or not; SR_SYS. */
static int rebuild_table(sr_store *st, uint32_t table) {
    sr_table *t = sr_table_at(st, table);
    int64_t live = 0;
    double most = sr_max_priority(t);
    if (!sr_priority_ok(st, table, most)) sr_store_double(&t->max_priority_bits, NAN);
    for (uint32_t k = 0; k < t->n_stripes; k++) {
        uint64_t n_live;
        int rc = sr_stripe_rebuild(st, t, sr_stripe_at(st, t, k), &n_live);
        if (rc == SR_SYS) return rc;
        if (rc != SR_OK) {
            poison(t, SR_POISON_CHECK);
            return SR_OK;
        }
        live += (int64_t)n_live;
    }
    recount_episodes(st, t, table);
    if (sr_counts_bytes(t)) sr_bytes_recount_locked(st, t, table);
    settle_counters(st, t, table, live);
    char why[160];
    if (sr_check_table_locked(st, table, why, sizeof why) != SR_OK) poison(t, SR_POISON_CHECK);
    return SR_OK;
}

static int repair_locked(sr_store *st) {
    sr_shape_restore(st);
    sr_limiter_undo(st);
    sr_receipts_repair(st);
    for (uint32_t i = 0; i < st->shape.n_tables; i++) finish_reset(st, sr_table_at(st, i), i);
    sr_reach r;
    int rc = sr_reach_begin(st, &r);
    if (rc == SR_SYS) return rc;
    int sound = rc == SR_OK && reach_all(&r);
    if (rc == SR_OK) sr_reach_end(&r);
    if (!sound) {
        poison_all(st, SR_POISON_MEMORY);
        return SR_OK;
    }
    recount_memory(st);
    rc = SR_OK;
    for (uint32_t i = 0; i < st->shape.n_tables && rc == SR_OK; i++) {
        if (!is_poisoned(sr_table_at(st, i))) rc = rebuild_table(st, i);
    }
    return rc;
}

/* What a repair read contradicts itself: no table is to be used again, and nobody repairs in vain.
 * Under all locks. */
static void give_up(sr_store *st) {
    poison_all(st, SR_POISON_MEMORY);
    atomic_store(&st->hdr->dirty, 0);
    sr_unlock_all(st);
    sr_unlock(&st->hdr->repair_lock);
    for (uint32_t i = 0; i < st->shape.n_tables; i++) sr_limiter_wake_all(sr_table_at(st, i));
}

int sr_repair(sr_store *st) {
    SR_GUARDED(st, SR_CORRUPT)
    sr_header *h = st->hdr;
    int rc = sr_lock_anyway(&h->repair_lock);
    if (rc != SR_OK) return rc;
    int repaired = 0;
    if (atomic_load(&h->dirty) != 0) {
        rc = sr_lock_all_anyway(st);
        if (rc == SR_OK) {
            if (sr_inside != NULL) sr_inside->leave = give_up;
            rc = repair_locked(st);
            if (rc == SR_OK) {
                atomic_fetch_add_explicit(&h->repairs, 1, memory_order_relaxed);
                /* SYNC POINT: under all locks: whoever takes one from now on sees it. */
                atomic_store(&h->dirty, 0);
                repaired = 1;
            }
            sr_unlock_all(st);
        }
    }
    sr_unlock(&h->repair_lock);
    for (uint32_t i = 0; i < st->shape.n_tables && repaired; i++) {
        sr_limiter_wake_all(sr_table_at(st, i));
    }
    return rc;
}
