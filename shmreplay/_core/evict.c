#include "evict.h"

#include "events.h"
#include "index.h"
#include "limiter.h"
#include "lock.h"
#include "stripe.h"
#include "table.h"

/* The stripe whose item must go next, by what the stripes published: oldest item for fifo, by
 * size or mass for the random ones. SR_NONE: nothing there. */
static uint32_t choose(const sr_store *st, const sr_table *t, uint64_t *rng, uint64_t *others) {
    uint64_t oldest = UINT64_MAX;
    *others = UINT64_MAX;
    if (t->n_stripes == 1) return 0;
    double mass[SR_STRIPES_MAX];
    double size[SR_STRIPES_MAX];
    double mass_total = 0, size_total = 0;
    uint32_t first = SR_NONE;
    for (uint32_t i = 0; i < t->n_stripes; i++) {
        const sr_stripe *s = sr_stripe_at(st, t, i);
        size[i] = (double)atomic_load_explicit(&s->size, memory_order_relaxed);
        mass[i] =
            t->remover_kind == SR_SEL_PRIORITIZED ? sr_load_double(&s->remover_mass_bits) : size[i];
        size_total += size[i];
        mass_total += mass[i];
        uint64_t seq = atomic_load_explicit(&s->oldest_seq, memory_order_relaxed);
        if (size[i] <= 0) continue;
        if (seq < oldest) {
            *others = oldest;
            oldest = seq;
            first = i;
        } else if (seq < *others) {
            *others = seq;
        }
    }
    if (t->remover_kind == SR_SEL_FIFO) return first;
    if (size_total <= 0) return SR_NONE;
    const double *by = mass_total > 0 ? mass : size;
    double u = sr_random_double(rng) * (mass_total > 0 ? mass_total : size_total);
    uint32_t last = SR_NONE;
    for (uint32_t i = 0; i < t->n_stripes; i++) {
        if (by[i] <= 0) continue;
        last = i;
        if (u < by[i]) break;
        u -= by[i];
    }
    return last;
}

/* Evict from one stripe while it holds the next victim. Gives the number removed. */
static int evict_from(sr_ses *ses, sr_table *t, uint32_t number, uint64_t others,
                      const sr_grant *g, uint64_t *rng, uint64_t want, uint64_t *removed,
                      int *stale) {
    sr_store *st = ses->st;
    sr_stripe *s = sr_stripe_at(st, t, number);
    sr_stripe_touch(st, s);
    int rc = sr_lock_stripe(st, t, s);
    if (rc != SR_OK) return rc;
    *stale = atomic_load_explicit(&t->epoch, memory_order_relaxed) != g->epoch;
    sr_index *remover = &s->index[s->remover];
    while (!*stale && *removed < want && remover->count > 0) {
        uint32_t slot;
        double prob;
        sr_index_sample(st, remover, (enum sr_selector)t->remover_kind, rng, 1, &slot, &prob);
        SR_ASSERT(slot < s->slots_used);
        /* Older than all in the other stripes? Else look at all of them again. */
        if (t->remover_kind == SR_SEL_FIFO && sr_slot_at(st, s, slot)->seq >= others) break;
        sr_events_spend(ses, t, 1);
        rc = sr_stripe_remove(st, t, s, slot);
        (*removed)++;
        if (rc != SR_OK || (t->n_stripes > 1 && t->remover_kind != SR_SEL_FIFO)) break;
    }
    sr_stripe_hints(st, s);
    sr_owe_deletes(ses, *stale ? 0 : -(int32_t)(want - *removed), g->epoch);
    sr_unlock_stripe(st, t, s);
    return rc;
}

int sr_evict(sr_ses *ses, uint32_t table, const sr_grant *g, uint64_t want) {
    sr_store *st = ses->st;
    sr_table *t = sr_table_at(st, table);
    uint64_t rng = g->seed;
    uint64_t removed = 0;
    uint32_t fruitless = 0;
    while (removed < want) {
        uint64_t before = removed;
        uint64_t others;
        uint32_t number = choose(st, t, &rng, &others);
        int stale = 0;
        if (number != SR_NONE) {
            int rc = evict_from(ses, t, number, others, g, &rng, want, &removed, &stale);
            if (rc != SR_OK) return rc;
        }
        if (stale) return SR_OK; /* a reset emptied the table and zeroed the counters */
        if (removed > before) {
            fruitless = 0;
        } else if (number == SR_NONE || ++fruitless > 64) {
            /* Deleters were faster: what we counted as deleted, they counted too. */
            return sr_limiter_settle_delete(ses, table, -(int64_t)(want - removed), g->epoch);
        }
    }
    return SR_OK;
}

int sr_evict_locked(sr_store *st, sr_table *t, uint64_t want) {
    uint64_t rng = sr_splitmix64(&t->rng);
    for (uint64_t i = 0; i < want; i++) {
        uint64_t others;
        uint32_t number = choose(st, t, &rng, &others);
        if (number == SR_NONE) break;
        sr_stripe *s = sr_stripe_at(st, t, number);
        sr_index *remover = &s->index[s->remover];
        if (remover->count == 0) break;
        uint32_t slot;
        double prob;
        sr_index_sample(st, remover, (enum sr_selector)t->remover_kind, &rng, 1, &slot, &prob);
        int rc = sr_stripe_remove(st, t, s, slot);
        t->deletes++;
        sr_stripe_hints(st, s);
        if (rc != SR_OK) return rc;
    }
    return SR_OK;
}
