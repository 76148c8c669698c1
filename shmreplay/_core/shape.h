/* shape.h: what never changes in a store, as this process found it when it came. It is read from
 * the process's own memory where that does, and compared with it where it is read from the store,
 * so that a changed byte is an error; a repair puts it back. */
#ifndef SR_SHAPE_H
#define SR_SHAPE_H

#include "internal.h"

/* Copy the shape of the store, whose header has been checked or written. SR_OK, SR_SYS: no memory;
 * SR_CORRUPT: tables and stripes do not fit the header. sr_shape_drop frees. */
int sr_shape_keep(sr_store *st);
void sr_shape_drop(sr_store *st);
/* A hash of the kept shape, of the arenas' ranges and of the config: of a store that was laid out
 * and not changed it is the header's `seal`. */
uint64_t sr_shape_seal(const sr_store *st);
/* Put back what somebody has changed. Under all locks. */
void sr_shape_restore(sr_store *st);

static inline uint32_t sr_shape_stripes(const sr_store *st, uint32_t table) {
    return st->tables[table].n_stripes;
}

/* The same bits? */
static inline int sr_same_double(double a, double b) {
    uint64_t x, y;
    memcpy(&x, &a, sizeof x);
    memcpy(&y, &b, sizeof y);
    return x == y;
}

/* Is the table what it was? Its number is one of a table. */
static inline int sr_shape_table_ok(const sr_store *st, const sr_table *t, uint32_t table) {
    const sr_table_shape *k = &st->tables[table];
    return ((t->n_stripes ^ k->n_stripes) | (t->first_stripe ^ k->first_stripe) |
            (t->slot_bits ^ k->slot_bits) | (t->stripe_bits ^ k->stripe_bits) |
            (t->sampler_kind ^ k->sampler_kind) | (t->remover_kind ^ k->remover_kind)) == 0 &&
           t->events_off == k->events_off &&
           sr_same_double(t->sampler_exponent, k->sampler_exponent) &&
           sr_same_double(t->remover_exponent, k->remover_exponent);
}

/* Are the arrays of a selector where they were? Those that it cannot have are not looked at. */
static inline int sr_shape_index_ok(const sr_index *ix, const sr_index_shape *k,
                                    uint64_t slots_max, uint64_t slots_used) {
    for (uint32_t i = 0; i < k->n_arrays; i++) {
        if (SR_UNLIKELY(ix->array_off[i] != k->array_off[i])) return 0;
    }
    return ix->kind == k->kind && ix->n_levels <= k->n_arrays &&
           sr_same_double(ix->exponent, k->exponent) && ix->slots_cap <= slots_max &&
           ix->slots_cap >= slots_used && ix->count <= ix->slots_cap;
}

/* Is the stripe where it was, and do its counts fit what it can have? Under its lock. */
static inline int sr_shape_stripe_ok(const sr_store *st, const sr_stripe *s) {
    uint64_t number = (uint64_t)(s - (const sr_stripe *)sr_known(st, st->shape.stripes_off));
    if (SR_UNLIKELY(number >= st->shape.n_stripes)) return 0;
    const sr_stripe_shape *k = &st->stripes[number];
    uint64_t moved = (s->slots_off ^ k->slots_off) | (s->slots_max ^ k->slots_max) |
                     (s->table ^ k->table) | (s->number ^ k->number) |
                     (s->sampler ^ k->sampler) | (s->remover ^ k->remover) |
                     (s->n_indexes ^ k->n_indexes);
    if (SR_UNLIKELY(moved != 0 || s->slots_used > k->slots_max ||
                    s->hold_slots > s->slots_used ||
                    s->slots_used * sizeof(sr_slot) > s->slots_committed ||
                    s->slots_committed > sr_align(k->slots_max * sizeof(sr_slot), SR_PAGE))) {
        return 0;
    }
    return sr_shape_index_ok(&s->index[0], &k->index[0], k->slots_max, s->slots_used) &&
           (k->n_indexes == 1 ||
            sr_shape_index_ok(&s->index[1], &k->index[1], k->slots_max, s->slots_used));
}

#endif
