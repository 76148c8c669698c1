/* ledger.h: a session's list of the references it holds. Only the session's owner writes it,
 * under a lock that keeps out who counts references (a repair, sr_check): the session's, or a
 * stripe's. */
#ifndef SR_LEDGER_H
#define SR_LEDGER_H

#include "lock.h"

/* Note one more reference and count it. Room must be reserved; the caller holds a lock that
 * keeps `ref` alive and that a repair would need (a stripe's or the session's). */
uint32_t sr_ledger_pin(sr_ses *ses, uint64_t ref);
/* Note a reference that is counted already (a new allocation with one reference). Under the
 * session's lock. */
uint32_t sr_ledger_note(sr_ses *ses, uint64_t ref);

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
