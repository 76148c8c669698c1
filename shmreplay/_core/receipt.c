#include "receipt.h"

#include "arena.h"
#include "lock.h"
#include "lock_all.h"
#include "shape.h"
#include "stripe.h"
#include "table.h"

#define AT_ONCE (SR_PAGE / (uint32_t)sizeof(sr_receipt)) /* receipts that get memory together */

static sr_receipt *receipt_at(const sr_store *st, uint32_t number) {
    return (sr_receipt *)sr_known(st, st->shape.receipts_off) + number;
}

static uint32_t used(const sr_store *st) {
    uint32_t n = atomic_load_explicit(&st->hdr->receipts_used, memory_order_acquire);
    SR_ASSERT(n <= SR_RECEIPTS_MAX);
    return n;
}

static int claim(sr_receipt *r) {
    uint32_t expected = 0;
    return atomic_load_explicit(&r->state, memory_order_relaxed) == 0 &&
           atomic_compare_exchange_strong_explicit(&r->state, &expected, 1, memory_order_acquire,
                                                   memory_order_relaxed);
}

/* One that was never used, claimed. */
static int grow(sr_store *st, uint32_t *number) {
    sr_header *h = st->hdr;
    int rc = sr_lock(st, &h->schema_lock);
    if (rc != SR_OK) return rc;
    uint32_t n = used(st);
    if (n == SR_RECEIPTS_MAX) rc = SR_LIMIT;
    if (rc == SR_OK && n >= h->receipts_committed) {
        uint64_t off = st->shape.receipts_off + n * sizeof(sr_receipt);
        rc = sr_commit(st, off, SR_PAGE, 0);
        /* Crash window: memory that nobody counts, and that the next to come here gives again. */
        if (rc == SR_OK) h->receipts_committed = n + AT_ONCE;
    }
    if (rc == SR_OK) {
        atomic_store_explicit(&receipt_at(st, n)->state, 1, memory_order_relaxed);
        *number = n;
        /* SYNC POINT: release: who sees the count sees memory. */
        atomic_store_explicit(&h->receipts_used, n + 1, memory_order_release);
    }
    sr_unlock(&h->schema_lock);
    return rc;
}

int sr_receipt_open(sr_store *st, const uint64_t name[2], uint64_t lane, uint32_t owner,
                    uint32_t *number) {
    SR_GUARDED(st, SR_CORRUPT)
    uint32_t n = used(st), i = 0;
    while (i < n && !claim(receipt_at(st, i))) i++;
    if (i == n) {
        int rc = grow(st, &i);
        if (rc != SR_OK) return rc;
    }
    sr_receipt *r = receipt_at(st, i);
    r->name[0] = name[0];
    r->name[1] = name[1];
    r->lane = lane;
    atomic_store_explicit(&r->done, 0, memory_order_relaxed);
    atomic_store_explicit(&r->key, 0, memory_order_relaxed);
    atomic_store_explicit(&r->next, 0, memory_order_relaxed);
    /* SYNC POINT: release: who sees the owner sees the rest. Crash window: a death before it leaves
     * a claimed receipt, which stays out of use. */
    atomic_store_explicit(&r->state, owner + SR_RECEIPT_OWNED, memory_order_release);
    *number = i;
    return SR_OK;
}

void sr_receipt_close(sr_store *st, uint32_t number) {
    SR_GUARDED(st, (void)0)
    if (number < used(st)) {
        atomic_store_explicit(&receipt_at(st, number)->state, 0, memory_order_release);
    }
}

void sr_receipt_take(sr_store *st, uint32_t number, uint32_t owner) {
    SR_GUARDED(st, (void)0)
    if (number >= used(st)) return;
    sr_receipt *r = receipt_at(st, number);
    if (atomic_load_explicit(&r->state, memory_order_relaxed) < SR_RECEIPT_OWNED) return;
    /* SYNC POINT: release, as where it is opened. Crash: it is the one's or the other's. */
    atomic_store_explicit(&r->state, owner + SR_RECEIPT_OWNED, memory_order_release);
}

void sr_receipt_note(sr_store *st, uint32_t number, uint64_t done, uint64_t key) {
    SR_GUARDED(st, (void)0)
    if (number >= used(st)) return;
    sr_receipt *r = receipt_at(st, number);
    atomic_store_explicit(&r->key, key, memory_order_relaxed);
    /* SYNC POINT: release: a number is never there before its key. */
    atomic_store_explicit(&r->done, done, memory_order_release);
}

int sr_receipt_get(sr_store *st, uint32_t number, sr_receipt_info *out) {
    SR_GUARDED(st, 0)
    if (number >= used(st)) return 0;
    const sr_receipt *r = receipt_at(st, number);
    uint32_t state = atomic_load_explicit(&r->state, memory_order_acquire);
    if (state < SR_RECEIPT_OWNED) return 0;
    *out = (sr_receipt_info){
        .name = {r->name[0], r->name[1]},
        .lane = r->lane,
        .done = atomic_load_explicit(&r->done, memory_order_acquire),
        .key = atomic_load_explicit(&r->key, memory_order_relaxed),
        .owner = state - SR_RECEIPT_OWNED,
    };
    return 1;
}

int sr_receipts(sr_store *st, uint32_t *n) {
    SR_GUARDED(st, SR_CORRUPT)
    int rc = sr_lock_all(st);
    if (rc != SR_OK) return rc;
    sr_unlock_all(st);
    *n = used(st);
    return SR_OK;
}

void sr_session_receipt(sr_ses *ses, uint32_t number, uint64_t next) {
    SR_GUARDED(ses->st, (void)0)
    ses->receipt = number < used(ses->st) ? receipt_at(ses->st, number) : NULL;
    ses->receipt_next = next;
}

/* ------------------------------------------------------------------ after a death */

static int is_there(const sr_store *st, uint32_t table, uint64_t key) {
    const sr_table *t = sr_table_at(st, table);
    if (t == NULL || key == 0) return 0;
    uint32_t k = sr_key_stripe(t, key);
    if (k >= sr_shape_stripes(st, table)) return 0;
    const sr_stripe *s = sr_stripe_at(st, t, k);
    return sr_stripe_slots_ok(st, s) && sr_stripe_find(st, t, s, key) != SR_NONE;
}

void sr_receipts_repair(sr_store *st) {
    uint32_t n = atomic_load_explicit(&st->hdr->receipts_used, memory_order_relaxed);
    if (n > SR_RECEIPTS_MAX) n = SR_RECEIPTS_MAX;
    if (n > st->hdr->receipts_committed) n = st->hdr->receipts_committed;
    atomic_store_explicit(&st->hdr->receipts_used, n, memory_order_relaxed);
    for (uint32_t i = 0; i < n; i++) {
        sr_receipt *r = receipt_at(st, i);
        if (atomic_load_explicit(&r->next, memory_order_relaxed) == 0) continue;
        /* Again if this repair is cut short: as long as the announcement stands it says the same,
         * since nobody takes the item out before the repair is done. */
        if (is_there(st, r->table, r->next_key)) sr_receipt_confirm(r);
        else atomic_store_explicit(&r->next, 0, memory_order_release);
    }
}
