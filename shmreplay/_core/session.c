/* Participants and sessions: who is attached, and their places in the store. */
#include "arena.h"
#include "bytes.h"
#include "checkpoint.h"
#include "events.h"
#include "evict.h"
#include "hold.h"
#include "fault.h"
#include "ledger.h"
#include "limiter.h"
#include "lock.h"
#include "lock_all.h"
#include "table.h"

#include <time.h>

static sr_participant *participant_at(const sr_store *st, uint32_t number) {
    if (number >= st->shape.n_participants) return NULL;
    return (sr_participant *)sr_known(st, st->shape.participants_off) + number;
}

int sr_participant_set(sr_store *st, uint32_t number, uint32_t pid, uint64_t start_ticks,
                       uint64_t pid_namespace, const char *role) {
    sr_participant *p = participant_at(st, number);
    if (p == NULL) return SR_INVALID;
    /* The caller holds the record lock, so an entry in use is one whose owner died. */
    if (atomic_load_explicit(&p->state, memory_order_acquire) != 0) return SR_WOULD_BLOCK;
    struct timespec ts;
    clock_gettime(CLOCK_REALTIME, &ts);
    p->pid = pid;
    p->start_ticks = start_ticks;
    p->pid_namespace = pid_namespace;
    p->attached_ns = (uint64_t)ts.tv_sec * 1000000000ull + (uint64_t)ts.tv_nsec;
    memset(p->role, 0, sizeof p->role);
    memcpy(p->role, role, strnlen(role, sizeof p->role - 1));
    atomic_store_explicit(&p->state, 1, memory_order_release);
    return SR_OK;
}

void sr_participant_clear(sr_store *st, uint32_t number) {
    sr_participant *p = participant_at(st, number);
    /* A checkpoint that its process was writing as it ended. */
    if (p != NULL && sr_hold_holder(st) == number) sr_hold_release(st);
    if (p != NULL) atomic_store_explicit(&p->state, 0, memory_order_release);
}

int sr_participant_in_use(const sr_store *st, uint32_t number) {
    const sr_participant *p = participant_at(st, number);
    return p != NULL && atomic_load_explicit(&p->state, memory_order_acquire) != 0;
}

/* Free a place for the next. Nobody but its owner (or who reclaims it) comes here. */
static void vacate(sr_session *s) {
    atomic_store_explicit(&s->borrowed_ns, 0, memory_order_relaxed);
    /* As while it is claimed: whoever dies here can still be told as its owner. */
    uint32_t claim = SR_CLAIMED | s->participant << 2;
    atomic_store_explicit(&s->state, claim, memory_order_release);
    __atomic_store_n(&s->participant, SR_NONE, __ATOMIC_RELEASE);
    /* SYNC POINT: release: the next owner sees all that this one did. */
    atomic_store_explicit(&s->state, 0, memory_order_release);
}

int sr_session_open(sr_store *st, uint32_t participant, enum sr_session_kind kind, sr_ses *out) {
    SR_GUARDED(st, SR_CORRUPT)
    for (uint32_t i = 0; i < st->shape.n_sessions; i++) {
        sr_session *s = sr_session_at(st, i);
        uint32_t expected = 0, claim = SR_CLAIMED | participant << 2;
        if (!atomic_compare_exchange_strong_explicit(&s->state, &expected, claim,
                                                     memory_order_acquire, memory_order_relaxed)) {
            continue;
        }
        *out = (sr_ses){.st = st, .shared = s, .number = i};
        s->kind = kind;
        /* By turns within a kind: two writers never share a stripe or an arena while another is
         * free. */
        s->stripe_hint =
            atomic_fetch_add_explicit(&st->hdr->opened[kind & 3u], 1, memory_order_relaxed);
        s->arena = s->stripe_hint % st->shape.n_arenas;
        atomic_store_explicit(&s->table, SR_NONE, memory_order_relaxed);
        s->reserved_inserts = s->reserved_samples = 0;
        s->owed_inserts = s->owed_samples = s->owed_deletes = 0;
        s->promised = 0;
        s->participant = participant;
        int rc = sr_ledger_reserve(out, 1);
        if (rc != SR_OK) {
            free(out->free_stack);
            out->free_stack = NULL;
            vacate(s);
            return rc;
        }
        /* SYNC POINT: release: who sees the session in use sees whose it is. */
        atomic_store_explicit(&s->state, 1, memory_order_release);
        return SR_OK;
    }
    return SR_LIMIT;
}

/* Give every reference in the ledger back, the ledger itself, and the place. Also for a dead
 * owner's session whose operation is settled. */
static int close_session(sr_ses *ses) {
    sr_store *st = ses->st;
    sr_session *s = ses->shared;
    int result = SR_OK;
    for (uint32_t p = 0; p < ses->ledger_cap; p++) {
        const uint64_t *list = sr_ptr(st, ses->ledger_off);
        if (list[p] == 0) continue;
        int rc = sr_release(ses, 1, &p);
        if (rc != SR_OK) result = rc;
    }
    sr_begin(ses, SR_BUSY_LEDGER);
    int rc = sr_lock_session(ses);
    if (rc == SR_OK) {
        uint64_t spare = ses->ledger_off != sr_own_ledger(st, s) ? ses->ledger_off : 0;
        atomic_store_explicit(&s->inflight[1], spare, memory_order_release);
        s->ledger_used = 0;
        s->ledger_cap = 0;
        __atomic_store_n(&s->ledger_off, 0, __ATOMIC_RELEASE);
        sr_unlock_session(ses);
        rc = sr_free_outer(st, &s->inflight[1]);
    }
    if (rc != SR_OK) result = rc;
    sr_end(ses);
    free(ses->free_stack);
    ses->free_stack = NULL;
    ses->n_free = ses->ledger_cap = 0;
    vacate(s);
    return result;
}

int sr_session_close(sr_ses *ses) {
    SR_GUARDED_SES(ses)
    return close_session(ses);
}

void sr_session_abandon(sr_ses *ses) {
    free(ses->free_stack);
    memset(ses, 0, sizeof *ses);
}

/* What a dead session owed its table's limiter, and the evictions that it did not come to. */
static int settle(sr_store *st, sr_session *s) {
    sr_table *t = sr_table_at(st, atomic_load_explicit(&s->table, memory_order_relaxed));
    if (t == NULL) return SR_OK; /* it never began an operation on a table */
    int rc = sr_lock_table(st, t);
    if (rc != SR_OK) return rc;
    sr_events_forget(st, t, s);
    uint64_t over = sr_limiter_settle_dead(t, s);
    int poisoned = atomic_load_explicit(&t->poisoned, memory_order_relaxed) != SR_SOUND;
    if (over > 0 && !poisoned) rc = sr_evict_locked(st, t, over);
    if (rc == SR_OK && !poisoned && sr_counts_bytes(t)) rc = sr_evict_bytes_locked(st, t);
    sr_unlock_table(st, t);
    sr_limiter_wake_all(t);
    return rc;
}

/* Settle what an operation left that its owner's death cut short: what it owed a limiter, and
 * allocations that nothing refers to. */
static int finish_operation(sr_store *st, sr_session *s) {
    uint32_t busy = atomic_load_explicit(&s->busy, memory_order_acquire);
    int rc = SR_OK;
    if (busy == SR_BUSY_INSERT || busy == SR_BUSY_SAMPLE || busy == SR_BUSY_DELETE) {
        rc = settle(st, s);
    }
    for (uint32_t i = 0; i < 2 && rc == SR_OK; i++) rc = sr_free_outer(st, &s->inflight[i]);
    if (rc == SR_OK) atomic_store_explicit(&s->busy, SR_IDLE, memory_order_release);
    return rc;
}

int sr_session_finish(sr_ses *ses) { return finish_operation(ses->st, ses->shared); }

/* Is this a ledger that a session may have? */
static int ledger_ok(const sr_store *st, const sr_session *s) {
    if (s->ledger_off == 0) return s->ledger_cap == 0;
    if (s->ledger_off == sr_own_ledger(st, s)) return s->ledger_cap <= SR_OWN_LEDGER;
    return sr_alloc_kind(st, s->ledger_off) == SR_KIND_LEDGER &&
           sr_alloc_bytes(st, s->ledger_off) / sizeof(uint64_t) >= s->ledger_cap;
}

static int reclaim_session(sr_store *st, sr_session *s, uint32_t number) {
    int rc = finish_operation(st, s);
    if (rc != SR_OK) return rc;
    SR_ASSERT(ledger_ok(st, s));
    sr_ses dead = {.st = st, .shared = s, .number = number, .ledger_off = s->ledger_off,
                   .ledger_cap = s->ledger_cap};
    dead.free_stack = SR_FAULT_POINT("malloc")
                          ? NULL
                          : malloc((s->ledger_cap + 1ull) * sizeof *dead.free_stack);
    if (dead.free_stack == NULL) return SR_SYS;
    return close_session(&dead);
}

/* Is this session, in use or being claimed, the participant's? */
static int belongs(const sr_session *s, uint32_t participant) {
    uint32_t state = atomic_load_explicit(&s->state, memory_order_acquire);
    if ((state & SR_CLAIMED) != 0) return state >> 2 == participant;
    return state == 1 && s->participant == participant;
}

int sr_participant_reclaim(sr_store *st, uint32_t number) {
    SR_GUARDED(st, SR_CORRUPT)
    sr_participant *p = participant_at(st, number);
    if (p == NULL) return SR_INVALID;
    /* It may have died inside a lock that nobody has come to since, with its ledger and the counts
     * of what that names at odds: where one of all the locks has a dead owner, repair first. */
    int rc = sr_lock_all(st);
    if (rc != SR_OK) return rc;
    sr_unlock_all(st);
    int freed = 0;
    int broken = 0;
    for (uint32_t i = 0; i < st->shape.n_sessions; i++) {
        sr_session *s = sr_session_at(st, i);
        if (!belongs(s, number)) continue;
        rc = reclaim_session(st, s, i);
        if (rc == SR_OK) freed++;
        else broken = rc;
    }
    if (broken == 0 && sr_hold_holder(st) == number) broken = sr_hold_release(st);
    if (broken != 0) return broken; /* the next sweep tries again */
    sr_participant_clear(st, number);
    return freed;
}
