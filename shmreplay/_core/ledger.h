/* ledger.h: a session's list of the references it holds. Only the session's owner writes it. */
#ifndef SR_LEDGER_H
#define SR_LEDGER_H

#include "internal.h"

/* Note one more reference and count it. Room must be reserved; the caller holds a lock that
 * keeps `ref` alive and that a repair would need (a stripe's or the session's arena's). */
uint32_t sr_ledger_pin(sr_ses *ses, uint64_t ref);
/* Note a reference that is counted already (a new allocation with one reference). Under the
 * session's arena lock. */
uint32_t sr_ledger_note(sr_ses *ses, uint64_t ref);

/* Offset of the ledger that lies in the session itself. */
static inline uint64_t sr_own_ledger(const sr_store *st, const sr_session *s) {
    return (uint64_t)((const char *)s->own_ledger - st->base);
}

static inline sr_arena *sr_arena_at(const sr_store *st, uint32_t arena) {
    return (sr_arena *)sr_ptr(st, st->hdr->arenas_off) + arena;
}

#endif
