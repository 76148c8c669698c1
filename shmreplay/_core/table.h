/* table.h: a table as the layers inside the core see it. */
#ifndef SR_TABLE_H
#define SR_TABLE_H

#include "internal.h"

static inline sr_table *sr_table_at(const sr_store *st, uint32_t table) {
    if (SR_UNLIKELY(table >= st->shape.n_tables)) return NULL;
    return (sr_table *)sr_known(st, st->shape.tables_off) + table;
}
static inline sr_stripe *sr_stripe_at(const sr_store *st, const sr_table *t, uint32_t stripe) {
    uint32_t number = t->first_stripe + stripe;
    SR_ASSERT(number < st->shape.n_stripes);
    return (sr_stripe *)sr_known(st, st->shape.stripes_off) + number;
}
/* Does the set of victims not depend on what else came in between? */
static inline int sr_remover_keeps_order(const sr_table *t) {
    return t->remover_kind == SR_SEL_FIFO;
}
/* Does the remover need random numbers? */
static inline int sr_remover_draws(const sr_table *t) {
    return t->remover_kind == SR_SEL_UNIFORM || t->remover_kind == SR_SEL_PRIORITIZED;
}
/* The largest priority since the last reset; 1 where there was none. */
static inline double sr_max_priority(const sr_table *t) {
    double seen = sr_load_double(&t->max_priority_bits);
    return seen == seen ? seen : 1.0;
}
/* This priority is in the table, or was. Under a stripe's lock. */
void sr_raise_max_priority(sr_table *t, double priority);
static inline void sr_see_priority(sr_table *t, double priority) {
    if (SR_UNLIKELY(!(priority <= sr_load_double(&t->max_priority_bits)))) {
        sr_raise_max_priority(t, priority);
    }
}
/* May change while no lock of the table is held. */
static inline int32_t sr_max_times_sampled(const sr_table *t) {
    return atomic_load_explicit(&t->max_times_sampled, memory_order_relaxed);
}
/* Adds to a session's statistics. Only its owner does: no need to lock the bus. */
static inline void sr_count(_Atomic uint64_t *statistic, uint64_t n) {
    uint64_t before = atomic_load_explicit(statistic, memory_order_relaxed);
    atomic_store_explicit(statistic, before + n, memory_order_relaxed);
}
/* Counters and settings of a table, but for those of its stripes and its events. They are of one
 * moment for who holds the limiter's lock. */
void sr_copy_info(const sr_store *st, const sr_table *t, sr_table_info *out);

/* Adds what a stripe published of its size and mass. No lock. */
void sr_add_hints(const sr_stripe *s, sr_table_info *out);
/* What all sessions did so far. */
void sr_sum_sessions(const sr_store *st, sr_store_stats *out);

/* What an operation of this session that a failed check cut short left to be done: as for a dead
 * owner. SR_OK at once where there was none. */
int sr_session_finish(sr_ses *ses);
/* SR_GUARDED for functions of a session that give a status. */
#ifdef SR_FRAGILE
#define SR_GUARDED_SES(ses) (void)(ses);
#else
#define SR_GUARDED_SES(ses)                                                              \
    SR_GUARDED((ses)->st, SR_CORRUPT)                                                    \
    if (SR_UNLIKELY(sr_inside == &guard_ &&                                              \
                    atomic_load_explicit(&(ses)->shared->busy, memory_order_relaxed))) { \
        int finished_ = sr_session_finish(ses);                                          \
        if (finished_ != SR_OK) return finished_;                                        \
    }
#endif

/* SR_OK, or why no operation may start: SR_CLOSED, SR_CORRUPT (poisoned), SR_INVALID (no such
 * table). */
int sr_table_usable(const sr_store *st, uint32_t table);

/* A stripe's lock, as sr_lock. SR_CORRUPT where the table is poisoned: perhaps by the repair that
 * this call made. */
int sr_lock_stripe(sr_store *st, const sr_table *t, sr_stripe *s);

/* All locks of a table, in order: for who holds none (as sr_lock), and for who holds another
 * table's (as sr_lock_inner). SR_OK, or an error holding none. */
int sr_lock_table(sr_store *st, sr_table *t);
int sr_lock_table_inner(sr_store *st, sr_table *t);
void sr_unlock_table(sr_store *st, sr_table *t);

/* Walk one table, under all its locks: as sr_check. */
int sr_check_table_locked(sr_store *st, uint32_t table, char *text, uint64_t text_bytes);

/* Zero what a reset zeroes. Under all locks of the table. */
void sr_reset_counters(sr_table *t);

/* An operation in progress: of a participant that died with this word set, whoever reclaims its
 * session settles the operation. */
static inline void sr_begin(sr_ses *ses, enum sr_busy what) {
    if (SR_CRASH_SAFE) {
        atomic_store_explicit(&ses->shared->busy, what, memory_order_relaxed);
    }
}
static inline void sr_begin_on(sr_ses *ses, enum sr_busy what, uint32_t table) {
    atomic_store_explicit(&ses->shared->table, table, memory_order_relaxed);
    sr_begin(ses, what);
}
static inline void sr_end(sr_ses *ses) {
    /* SYNC POINT: release, so that whoever sees the word idle sees the operation's effects
     * whole. */
    if (SR_CRASH_SAFE) {
        atomic_store_explicit(&ses->shared->busy, SR_IDLE, memory_order_release);
    }
}

#endif
