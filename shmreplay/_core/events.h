/* events.h: a table's ring of events, for its extensions. All calls under the stripe's lock, except
 * where said; putting into a table without one is a branch and nothing else.
 *
 * An operation makes sure of room before it changes anything: with sr_events_room, for what it does
 * under the same hold of the lock, or with sr_events_promise, for what it does under later ones. A
 * change is told of in three steps: its event is staged, the change made, the event committed. */
#ifndef SR_EVENTS_H
#define SR_EVENTS_H

#include "internal.h"
#include "lock.h"
#include "table.h"

static inline int sr_has_events(const sr_table *t) {
    return __builtin_expect(t->events_off != 0, 0) != 0;
}

/* Bytes of the region of a ring; 0 for none. */
uint64_t sr_events_bytes(uint32_t n_events);
/* Lay it out in a region that has memory. */
void sr_events_init(sr_store *st, sr_table *t, uint32_t table, uint64_t region, uint32_t n_events);
/* Make what never changes in it what it was. Under all locks. */
void sr_events_place(sr_store *st, sr_table *t, uint32_t table);
/* The table's ring, NULL if it has none or it is damaged. */
sr_ring *sr_events_ring(const sr_store *st, const sr_table *t);

/* Is there room for n events, of a table with a ring? SR_OK; SR_WOULD_BLOCK: no, and who waits on
 * ses->room_seq is woken when there is more; SR_CORRUPT. */
int sr_events_room(sr_ses *ses, sr_table *t, uint64_t n);
/* Of `want` changes, each of which may make two events: how many may be made? SR_OK, with room for
 * them; SR_WOULD_BLOCK: none; SR_CORRUPT. For who holds no lock, before the limiter is asked. */
int sr_events_promise(sr_ses *ses, sr_table *t, uint64_t *want);
/* Give back what is left of it, for who holds no lock. */
void sr_events_unpromise(sr_ses *ses, sr_table *t);
/* Use up some of it: the caller stages so many events at once. */
void sr_events_spend_promise(sr_ses *ses, sr_table *t, uint64_t n);
static inline void sr_events_spend(sr_ses *ses, sr_table *t, uint64_t n) {
    if (sr_has_events(t)) sr_events_spend_promise(ses, t, n);
}

/* The slot is as the event is to say it; `ref` is its data. Without room it is dropped. */
void sr_events_stage_item(sr_store *st, sr_table *t, enum sr_event_kind kind, const sr_slot *slot,
                          uint64_t ref);
/* A slot's priority is about to become this. */
void sr_events_stage_update(sr_store *st, sr_table *t, const sr_slot *slot, double priority);
void sr_events_stage_reset(sr_store *st, sr_table *t);
void sr_events_commit_staged(sr_store *st, sr_table *t);
/* After the lock was let go of: tell who takes events. */
void sr_events_notify(sr_store *st);

static inline void sr_events_stage(sr_store *st, sr_table *t, enum sr_event_kind kind,
                                   const sr_slot *slot, uint64_t ref) {
    if (sr_has_events(t)) sr_events_stage_item(st, t, kind, slot, ref);
}
static inline void sr_events_commit(sr_store *st, sr_table *t) {
    if (sr_has_events(t)) sr_events_commit_staged(st, t);
}

/* What waits, for people: no lock. */
void sr_events_count(const sr_store *st, const sr_table *t, sr_table_info *out);
static inline void sr_unlock_stripe(sr_store *st, const sr_table *t, sr_stripe *s) {
    sr_unlock(&s->lock);
    if (sr_has_events(t)) sr_events_notify(st);
}

/* For sr_participant_reclaim, under all locks of the table: what a dead session was promised is
 * free. */
void sr_events_forget(sr_store *st, sr_table *t, sr_session *dead);
/* For sr_repair, before references are followed: staged events whose change has happened are
 * committed, the others are forgotten, and updates are made to have happened. `reset`: a reset was
 * cut short, which the caller does to its end. 1, or 0: the ring is damaged. */
int sr_events_repair(sr_store *st, sr_table *t, uint32_t table, int reset);
/* NULL if all is well, else what is not. Under all locks of the table. */
const char *sr_events_check(const sr_store *st, const sr_table *t, uint32_t table);
/* Event number i from the oldest on; NULL after the last. */
const sr_event *sr_events_nth(const sr_store *st, const sr_table *t, uint64_t i);

#endif
