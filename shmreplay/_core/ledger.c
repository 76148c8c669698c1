#include "ledger.h"

#include <time.h>

#include "arena.h"
#include "fault.h"
#include "steps.h"
#include "table.h"

#define LEDGER_MIN 64u

static void push_free(sr_ses *ses, uint32_t position) {
    SR_ASSERT(ses->n_free < ses->ledger_cap);
    ses->free_stack[ses->n_free++] = position;
}

/* A longer ledger: allocate, copy, switch, free the old one. Crash: either ledger is complete, and
 * the other one stands in the inflight word. */
static int grow(sr_ses *ses, uint32_t cap) {
    sr_store *st = ses->st;
    sr_session *shared = ses->shared;
    uint32_t *stack =
        SR_FAULT_POINT("realloc") ? NULL : realloc(ses->free_stack, cap * sizeof *stack);
    if (stack == NULL) return SR_SYS;
    ses->free_stack = stack;
    uint64_t off;
    int rc = sr_alloc_outer(st, shared->arena, SR_KIND_LEDGER, cap * sizeof(uint64_t),
                            &shared->inflight[1], &off);
    if (rc != SR_OK) return rc;
    uint64_t *fresh = sr_ptr(st, off);
    memset(fresh, 0, cap * sizeof *fresh);
    rc = sr_lock_session(ses);
    if (rc != SR_OK) return rc;
    uint32_t old_cap = ses->ledger_cap;
    uint64_t old_off = ses->ledger_off;
    memcpy(fresh, sr_ledger_entries(ses), old_cap * sizeof *fresh);
    shared->ledger_off = off;
    /* Crash: never a length beyond what the ledger named before it has. Here, below and where it is
     * given back, the release keeps the compiler from changing the order. */
    __atomic_store_n(&shared->ledger_cap, cap, __ATOMIC_RELEASE);
    uint64_t spare = old_off != sr_own_ledger(st, shared) ? old_off : 0;
    atomic_store_explicit(&shared->inflight[1], spare, memory_order_release);
    sr_unlock_session(ses);
    ses->ledger_off = off;
    ses->ledger_cap = cap;
    for (uint32_t p = cap; p > old_cap; p--) push_free(ses, p - 1);
    return sr_free_outer(st, &shared->inflight[1]);
}

/* The first ledger, which needs no memory of the store. */
static int start(sr_ses *ses) {
    sr_session *shared = ses->shared;
    ses->free_stack =
        SR_FAULT_POINT("malloc") ? NULL : malloc(SR_OWN_LEDGER * sizeof *ses->free_stack);
    if (ses->free_stack == NULL) return SR_SYS;
    int rc = sr_lock_session(ses);
    if (rc != SR_OK) return rc;
    memset(shared->own_ledger, 0, sizeof shared->own_ledger);
    shared->ledger_off = sr_own_ledger(ses->st, shared);
    __atomic_store_n(&shared->ledger_cap, SR_OWN_LEDGER, __ATOMIC_RELEASE);
    sr_unlock_session(ses);
    ses->ledger_off = shared->ledger_off;
    ses->ledger_cap = SR_OWN_LEDGER;
    for (uint32_t p = SR_OWN_LEDGER; p > 0; p--) push_free(ses, p - 1);
    return SR_OK;
}

int sr_ledger_reserve(sr_ses *ses, uint32_t n) {
    if (SR_LIKELY(ses->n_free >= n)) return SR_OK;
    SR_GUARDED_SES(ses)
    sr_begin(ses, SR_BUSY_LEDGER);
    int rc = ses->ledger_cap == 0 ? start(ses) : SR_OK;
    if (rc == SR_OK && ses->n_free < n) {
        uint64_t want = (uint64_t)ses->ledger_cap + (n - ses->n_free);
        uint64_t cap = LEDGER_MIN;
        while (cap < want) cap *= 2;
        rc = cap > 0x7fffffffu ? SR_INVALID : grow(ses, (uint32_t)cap);
    }
    sr_end(ses);
    return rc;
}

int sr_hold(sr_ses *ses, uint64_t ref, uint32_t *position) {
    SR_GUARDED_SES(ses)
    if (ses->n_free == 0) return SR_INVALID;
    int rc = sr_lock_session(ses);
    if (rc != SR_OK) return rc;
    *position = sr_ledger_pin(ses, ref);
    sr_unlock_session(ses);
    return SR_OK;
}

int sr_release(sr_ses *ses, uint32_t n, const uint32_t *positions) {
    SR_GUARDED_SES(ses)
    sr_store *st = ses->st;
    uint64_t *list = sr_ledger_entries(ses);
    for (uint32_t i = 0; i < n; i++) {
        if (positions[i] >= ses->ledger_cap || list[positions[i]] == 0) return SR_INVALID;
        sr_prefetch(st, SR_REF_OFF(list[positions[i]]));
    }
    sr_begin(ses, SR_BUSY_RELEASE);
    /* One lock for the whole batch. What drops to nothing is freed under it (arena locks). */
    int rc = sr_lock_session(ses);
    if (rc == SR_OK) {
        uint32_t *const stack = ses->free_stack;
        uint32_t n_free = ses->n_free, used = ses->shared->ledger_used;
        SR_ASSERT(n <= ses->ledger_cap - n_free);
        for (uint32_t i = 0; i < n; i++) {
            const uint32_t position = positions[i];
            const uint64_t ref = list[position];
            SR_ASSERT(ref != 0);
            list[position] = 0;
            stack[n_free++] = position;
            ses->n_free = n_free;
            ses->shared->ledger_used = --used;
            int dropped = sr_ref_drop(st, ref);
            /* SR_DIRTY: nothing refers to it any more, and the repair that comes frees it. */
            if (dropped != SR_OK && dropped != SR_DIRTY) rc = dropped;
        }
        sr_unlock_session(ses);
    }
    sr_end(ses);
    return rc;
}
