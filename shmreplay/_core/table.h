/* table.h: a table as the layers inside the core see it. */
#ifndef SR_TABLE_H
#define SR_TABLE_H

#include "internal.h"

static inline sr_table *sr_table_at(const sr_store *st, uint32_t table) {
    if (SR_UNLIKELY(table >= st->hdr->n_tables)) return NULL;
    return (sr_table *)sr_ptr(st, st->hdr->tables_off) + table;
}
static inline sr_stripe *sr_stripe_at(const sr_store *st, const sr_table *t, uint32_t stripe) {
    return (sr_stripe *)sr_ptr(st, st->hdr->stripes_off) + t->first_stripe + stripe;
}
/* Does the set of victims not depend on what else came in between? */
static inline int sr_remover_keeps_order(const sr_table *t) {
    return t->remover_kind == SR_SEL_FIFO;
}
/* Does the remover need random numbers? */
static inline int sr_remover_draws(const sr_table *t) {
    return t->remover_kind == SR_SEL_UNIFORM || t->remover_kind == SR_SEL_PRIORITIZED;
}
/* SR_OK, or why no operation may start: SR_CLOSED, SR_CORRUPT (poisoned), SR_INVALID (no such
 * table). */
int sr_table_usable(const sr_store *st, uint32_t table);

/* All locks of a table, in order. SR_OK, or SR_CORRUPT holding none. */
int sr_lock_table(sr_store *st, sr_table *t);
void sr_unlock_table(sr_store *st, sr_table *t);

/* An operation in progress: a participant that dies with this word set marks the store dirty. */
static inline void sr_begin(sr_ses *ses, enum sr_busy what) {
    atomic_store_explicit(&ses->shared->busy, what, memory_order_relaxed);
}
static inline void sr_begin_on(sr_ses *ses, enum sr_busy what, uint32_t table) {
    ses->shared->table = table;
    sr_begin(ses, what);
}
static inline void sr_end(sr_ses *ses) {
    /* SYNC POINT: release, so that whoever sees the word idle sees the operation's effects
     * whole. */
    atomic_store_explicit(&ses->shared->busy, SR_IDLE, memory_order_release);
}

#endif
