/* ledger.h: a session's list of the references it holds. Only the session's owner writes it,
 * under a lock that keeps out who counts references (a repair, sr_check): the session's, or a
 * stripe's. */
#ifndef SR_LEDGER_H
#define SR_LEDGER_H

#include "lock.h"
#include "steps.h"

/* Nobody but the owner changes where it lies: the owner knows without looking. */
static inline uint64_t *sr_ledger_entries(const sr_ses *ses) {
    return sr_ptr(ses->st, ses->ledger_off);
}
/* Note a reference that is counted already (a new allocation with one reference). Under the
 * session's lock. */
static inline uint32_t sr_ledger_note(sr_ses *ses, uint64_t ref) {
    SR_ASSERT(ses->n_free > 0);
    uint32_t position = ses->free_stack[--ses->n_free];
    sr_ledger_entries(ses)[position] = ref;
    ses->shared->ledger_used++;
    return position;
}
/* The same for many in a row, with at hand what would be read anew each time. Room for all of them
 * must be reserved. */
typedef struct {
    uint64_t *list;
    const uint32_t *stack;
    uint32_t n_free, used;
} sr_pinning;
static inline sr_pinning sr_pinning_begin(const sr_ses *ses, uint32_t n) {
    SR_ASSERT(ses->n_free >= n);
    return (sr_pinning){.list = sr_ledger_entries(ses),
                        .stack = ses->free_stack,
                        .n_free = ses->n_free,
                        .used = ses->shared->ledger_used};
}
/* As sr_ledger_pin. */
static inline uint32_t sr_pinning_next(sr_pinning *p, sr_ses *ses, uint64_t ref) {
    uint32_t position = p->stack[--p->n_free];
    p->list[position] = ref;
    ses->n_free = p->n_free;
    ses->shared->ledger_used = ++p->used;
    sr_ref_retain(ses->st, ref);
    return position;
}
/* Note one more reference and count it. Room must be reserved; the caller holds a lock that
 * keeps `ref` alive and that a repair would need (a stripe's or the session's). */
static inline uint32_t sr_ledger_pin(sr_ses *ses, uint64_t ref) {
    uint32_t position = sr_ledger_note(ses, ref);
    sr_ref_retain(ses->st, ref);
    return position;
}

/* Offset of the ledger that lies in the session itself. */
static inline uint64_t sr_own_ledger(const sr_store *st, const sr_session *s) {
    return (uint64_t)((const char *)s->own_ledger - st->base);
}

/* The lock of session `number`; a few sessions share one. Protects, against those who count
 * references, what the session's owner changes outside of stripes: its ledger, its inflight words
 * and the counts of what these name. */
static inline sr_mutex *sr_session_lock(const sr_store *st, uint32_t number) {
    return (sr_mutex *)sr_known(st, st->shape.session_locks_off) + number % SR_SESSION_LOCKS;
}
static inline int sr_lock_session(const sr_ses *ses) {
    return SR_CRASH_SAFE ? sr_lock(ses->st, sr_session_lock(ses->st, ses->number)) : SR_OK;
}
static inline void sr_unlock_session(const sr_ses *ses) {
    if (SR_CRASH_SAFE) sr_unlock(sr_session_lock(ses->st, ses->number));
}
static inline sr_session *sr_session_at(const sr_store *st, uint32_t number) {
    return (sr_session *)sr_known(st, st->shape.sessions_off) + number;
}

static inline sr_arena *sr_arena_at(const sr_store *st, uint32_t arena) {
    return (sr_arena *)sr_known(st, st->shape.arenas_off) + arena;
}

#endif
