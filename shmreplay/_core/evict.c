#include "evict.h"

#include "bytes.h"
#include "events.h"
#include "index.h"
#include "limiter.h"
#include "lock.h"
#include "shape.h"
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

static int over(const sr_store *st, const sr_table *t) {
    return t->inserts - t->deletes > t->max_size || sr_bytes_over(st, t);
}

/* May one more event be put: room that was promised, or that there is? */
static int room(sr_ses *ses, sr_table *t) {
    if (!sr_has_events(t)) return SR_OK;
    if (ses->shared->promised == 0) return sr_events_room(ses, t, 1);
    sr_events_spend(ses, t, 1);
    return SR_OK;
}

/* Evict from one stripe, whose lock is held, while the table is over a bound and the stripe holds
 * the next victim. Under the limiter. */
static int evict_while_over(sr_ses *ses, sr_table *t, sr_stripe *s, uint64_t others,
                            uint64_t *rng, uint64_t *removed) {
    sr_store *st = ses->st;
    sr_index *remover = &s->index[s->remover];
    const int ordered = t->remover_kind == SR_SEL_FIFO;
    int rc = SR_OK;
    while (rc == SR_OK && remover->count > 0 && over(st, t)) {
        uint32_t slot;
        double prob;
        sr_index_sample(st, remover, (enum sr_selector)t->remover_kind, rng, 1, &slot, &prob);
        SR_ASSERT(slot < s->slots_used);
        if (ordered && sr_slot_at(st, s, slot)->seq >= others) break;
        rc = room(ses, t);
        if (rc != SR_OK) break;
        rc = sr_stripe_remove(st, t, s, slot);
        /* Crash between the two: the repair counts what is gone. */
        t->deletes++;
        (*removed)++;
        if (t->n_stripes > 1 && !ordered) break;
    }
    sr_stripe_hints(st, s);
    return rc;
}

static int evict_bounded(sr_ses *ses, sr_table *t, uint64_t *removed) {
    sr_store *st = ses->st;
    uint64_t rng = sr_remover_draws(t) ? sr_splitmix64(&t->rng) : 0;
    uint32_t fruitless = 0;
    while (over(st, t) && fruitless < 64) {
        uint64_t others, before = *removed;
        uint32_t number = choose(st, t, &rng, &others);
        if (number == SR_NONE) return SR_OK;
        sr_stripe *s = sr_stripe_at(st, t, number);
        int rc = sr_lock_inner(st, &s->lock);
        if (rc != SR_OK) return rc;
        SR_ASSERT(sr_shape_stripe_ok(st, s));
        rc = evict_while_over(ses, t, s, others, &rng, removed);
        sr_unlock_stripe(st, t, s);
        if (rc != SR_OK) return rc;
        fruitless = *removed > before ? 0 : fruitless + 1;
    }
    return SR_OK;
}

int sr_evict_bounded(sr_ses *ses, uint32_t table) {
    sr_store *st = ses->st;
    sr_table *t = sr_table_at(st, table);
    uint64_t removed = 0;
    int rc;
    do {
        rc = sr_lock(st, &t->limiter_lock);
        if (rc != SR_OK) return rc;
        int sound = atomic_load_explicit(&t->poisoned, memory_order_relaxed) == SR_SOUND;
        rc = sound ? evict_bounded(ses, t, &removed) : SR_CORRUPT;
        sr_unlock(&t->limiter_lock);
        if (rc == SR_DIRTY) {
            rc = sr_repair(st);
            if (rc == SR_OK) rc = SR_DIRTY;
        }
    } while (rc == SR_DIRTY);
    if (removed > 0) sr_limiter_wake_all(t);
    return rc;
}

int sr_evict_bytes_locked(sr_store *st, sr_table *t) {
    int rc = SR_OK;
    int64_t before;
    while (rc == SR_OK && sr_bytes_over(st, t)) {
        before = t->deletes;
        rc = sr_evict_locked(st, t, 1);
        if (t->deletes == before) break; /* it is empty */
    }
    return rc;
}
