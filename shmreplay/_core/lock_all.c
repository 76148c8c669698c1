/* lock_all.c: every lock of a store, in the order of layout.h. */
#include "lock_all.h"
#include "ledger.h"
#include "lock.h"
#include "table.h"

/* Lock number i in that order, NULL after the last. */
static sr_mutex *nth(const sr_store *st, uint32_t i) {
    sr_stripe *stripes = sr_known(st, st->shape.stripes_off);
    for (uint32_t k = 0; k < st->shape.n_tables; k++) {
        const sr_table_shape *t = &st->tables[k];
        if (i == 0) return &sr_table_at(st, k)->limiter_lock;
        if (i <= t->n_stripes) return &stripes[t->first_stripe + i - 1].lock;
        i -= 1 + t->n_stripes;
    }
    if (i < SR_SESSION_LOCKS) return sr_session_lock(st, i);
    i -= SR_SESSION_LOCKS;
    if (i == 0) return &st->hdr->schema_lock;
    return i - 1 < st->shape.n_arenas ? &sr_arena_at(st, i - 1)->lock : NULL;
}

static void unlock_first(sr_store *st, uint32_t n) {
    while (n-- > 0) sr_unlock(nth(st, n));
}

/* `anyway`: whatever happened to the owners. */
static int lock_each(sr_store *st, int anyway) {
    sr_mutex *m;
    for (uint32_t i = 0; (m = nth(st, i)) != NULL; i++) {
        int rc = anyway ? sr_lock_anyway(m) : sr_lock_inner(st, m);
        if (rc == SR_OK) continue;
        unlock_first(st, i);
        return rc;
    }
    return SR_OK;
}

int sr_lock_all(sr_store *st) {
    int rc = lock_each(st, 0);
    while (rc == SR_DIRTY) {
        rc = sr_repair(st);
        if (rc == SR_OK) rc = lock_each(st, 0);
    }
    if (rc == SR_OK && sr_inside != NULL) sr_inside->leave = sr_unlock_all;
    return rc;
}

int sr_lock_all_anyway(sr_store *st) { return lock_each(st, 1); }

void sr_unlock_all(sr_store *st) {
    if (sr_inside != NULL) sr_inside->leave = NULL;
    uint32_t n = 0;
    while (nth(st, n) != NULL) n++;
    unlock_first(st, n);
}
