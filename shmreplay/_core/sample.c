/* Sampling: reserve at the limiter, split over the stripes by mass, draw and pin in each,
 * settle. */
#include "events.h"
#include "index.h"
#include "ledger.h"
#include "limiter.h"
#include "lock.h"
#include "stripe.h"
#include "table.h"

#define BATCH_MAX 256u /* draws under one hold of a stripe's lock */

typedef struct {
    sr_store *st;
    sr_ses *ses;
    sr_table *t;
    uint64_t rng;
    uint64_t removed; /* items that reached max_times_sampled */
    uint64_t removed_seen; /* of these, told to the limiter's books */
    uint64_t epoch;        /* of the last draw: a reset may come between two stripes */
    int32_t drawn, taken;  /* draws and removals under that epoch */
    int status;
} draw_ctx;

/* What is told of one draw, except where it is pinned. Gives its reference. */
static inline uint64_t describe(const sr_slot *slot, double probability, int64_t table_size,
                                sr_sampled *out) {
    uint64_t ref = atomic_load_explicit(&slot->ref, memory_order_relaxed);
    SR_ASSERT(ref != 0);
    out->key = slot->key;
    out->ref = ref;
    out->row_start = slot->row_start;
    out->row_count = slot->row_count;
    out->probability = probability;
    out->priority = slot->priority;
    out->table_size = table_size;
    out->times_sampled = (int32_t)slot->times_sampled;
    out->schema = slot->schema;
    out->inserted_ns = slot->inserted_ns;
    return ref;
}

/* Record one draw and pin what it refers to. Under the stripe's lock. */
static void take(draw_ctx *c, const sr_slot *slot, double probability, int64_t table_size,
                 sr_sampled *out) {
    out->position = sr_ledger_pin(c->ses, describe(slot, probability, table_size, out));
}

/* 1 if it is the first of this item. */
static inline uint32_t count_sample(sr_slot *slot) {
    uint32_t before = slot->times_sampled;
    slot->times_sampled = before + (before < 0x7fffffffu);
    return before == 0;
}
static void count_unique(draw_ctx *c, uint32_t n) {
    if (n > 0) atomic_fetch_add_explicit(&c->t->num_unique_samples, n, memory_order_relaxed);
}

/* Note what was drawn and removed so far, before the stripe's lock goes. */
static void owe(draw_ctx *c, uint32_t drawn) {
    uint64_t epoch = atomic_load_explicit(&c->t->epoch, memory_order_relaxed);
    if (epoch != c->epoch) c->drawn = c->taken = 0;
    c->epoch = epoch;
    c->drawn += (int32_t)drawn;
    c->taken += (int32_t)(c->removed - c->removed_seen);
    c->removed_seen = c->removed;
    sr_owe_samples(c->ses, c->drawn, c->taken, epoch);
}

/* n draws from a stripe that is locked and not empty, none of which removes anything. Each one's
 * probability is `exact` if that is not 0, else its share of the stripe times `scale`. */
static void draw_many(draw_ctx *c, sr_stripe *s, uint32_t n, double scale, double exact,
                      int64_t table_size, const uint32_t *where, sr_sampled *out) {
    uint32_t slots[BATCH_MAX];
    double prob[BATCH_MAX];
    sr_index_sample(c->st, &s->index[s->sampler], (enum sr_selector)c->t->sampler_kind, &c->rng, n,
                    slots, prob);
    sr_slot *const first = sr_slot_at(c->st, s, 0);
    const uint64_t used = s->slots_used;
    for (uint32_t i = 0; i < n; i++) {
        SR_ASSERT(slots[i] < used);
        __builtin_prefetch(first + slots[i], 1);
    }
    for (uint32_t i = 0; i < n; i++) {
        uint64_t ref = atomic_load_explicit(&first[slots[i]].ref, memory_order_relaxed);
        sr_prefetch(c->st, SR_REF_OFF(ref));
    }
    sr_events_spend(c->ses, c->t, n);
    const int told = sr_has_events(c->t);
    uint32_t unique = 0;
    sr_pinning pinning = sr_pinning_begin(c->ses, n);
    for (uint32_t i = 0; i < n; i++) {
        sr_slot *slot = first + slots[i];
        unique += count_sample(slot);
        if (told) sr_events_stage_item(c->st, c->t, SR_EVENT_SAMPLE, slot, slot->ref);
        double p = exact > 0 ? exact : prob[i] * scale;
        sr_sampled *to = &out[where == NULL ? i : where[i]];
        to->position = sr_pinning_next(&pinning, c->ses, describe(slot, p, table_size, to));
    }
    count_unique(c, unique);
    sr_events_commit(c->st, c->t);
}

/* One stripe: everything under one hold of its lock. */
static uint32_t draw_single(draw_ctx *c, uint32_t n, sr_sampled *out) {
    sr_stripe *s = sr_stripe_at(c->st, c->t, 0);
    if ((c->status = sr_lock_stripe(c->st, c->t, s)) != SR_OK) return 0;
    sr_index *ix = &s->index[s->sampler];
    uint32_t done = 0;
    const int32_t most = sr_max_times_sampled(c->t);
    if (most <= 0 && ix->count > 0) {
        draw_many(c, s, n, 1.0, 0.0, (int64_t)ix->count, NULL, out);
        done = n;
    }
    while (done < n && ix->count > 0) {
        uint32_t number;
        double prob;
        sr_index_sample(c->st, ix, (enum sr_selector)c->t->sampler_kind, &c->rng, 1, &number,
                        &prob);
        SR_ASSERT(number < s->slots_used);
        sr_slot *slot = sr_slot_at(c->st, s, number);
        count_unique(c, count_sample(slot));
        take(c, slot, prob, (int64_t)ix->count, &out[done++]);
        sr_events_spend(c->ses, c->t, 2);
        sr_events_stage(c->st, c->t, SR_EVENT_SAMPLE, slot, slot->ref);
        if (slot->times_sampled >= (uint32_t)most) {
            c->removed++;
            /* Commits what is staged: the draw that took the item out, and that it went. */
            if ((c->status = sr_stripe_remove(c->st, c->t, s, number)) != SR_OK) break;
        }
        sr_events_commit(c->st, c->t);
    }
    if (c->removed > 0) sr_stripe_hints(c->st, s);
    owe(c, done);
    sr_unlock_stripe(c->st, c->t, s);
    return done;
}

typedef struct {
    double mass[SR_STRIPES_MAX];
    double upto[SR_STRIPES_MAX]; /* sum of the masses of it and those before it */
    double total;
    uint32_t last; /* the last that has any */
    uint64_t size[SR_STRIPES_MAX];
    uint64_t size_total;
    int even; /* every item is as likely as every other */
} masses;

/* 1/size exactly, not a product of two roundings, where every item was and is as likely as every
 * other; 0 where that is not so, or the stripe has changed since it was chosen. Under its lock. */
static double even_probability(const draw_ctx *c, const masses *m, uint32_t k, const sr_index *ix) {
    if (!m->even || ix->count != m->size[k]) return 0.0;
    if (ix->kind == SR_SEL_PRIORITIZED && sr_index_mass(c->st, ix) > 0) return 0.0;
    return 1.0 / (double)m->size_total;
}

/* What the stripes published: the weights by which a batch is split. */
static void read_masses(const draw_ctx *c, masses *m) {
    double mass_total = 0;
    m->size_total = 0;
    for (uint32_t i = 0; i < c->t->n_stripes; i++) {
        const sr_stripe *s = sr_stripe_at(c->st, c->t, i);
        m->size[i] = atomic_load_explicit(&s->size, memory_order_relaxed);
        m->size_total += m->size[i];
        m->mass[i] = c->t->sampler_kind == SR_SEL_PRIORITIZED ? sr_load_double(&s->mass_bits)
                                                              : (double)m->size[i];
        mass_total += m->mass[i];
    }
    m->even = c->t->sampler_kind != SR_SEL_PRIORITIZED || !(mass_total > 0);
    m->total = 0;
    m->last = 0;
    for (uint32_t i = 0; i < c->t->n_stripes; i++) {
        /* All weights are zero: every item is as likely as every other. */
        if (!(mass_total > 0)) m->mass[i] = (double)m->size[i];
        if (m->mass[i] > 0) {
            m->total += m->mass[i];
            m->last = i;
        }
        m->upto[i] = m->total;
    }
}

/* Without a branch on what was drawn, which nobody can predict. A stripe without mass ends where
 * the one before it does, and so is passed over with it. */
static inline uint32_t pick_stripe(draw_ctx *c, const masses *m, uint32_t n_stripes) {
    double u = sr_random_double(&c->rng) * m->total;
    uint32_t k = 0;
    for (uint32_t i = 0; i < n_stripes; i++) k += u >= m->upto[i];
    return k < m->last ? k : m->last; /* the product may have been rounded up to the total */
}

/* Choose a stripe for each of where[]; those of stripe k are then by_stripe[end[k - 1]] and on, up
 * to end[k], in their order. */
static void part_by_stripe(draw_ctx *c, const masses *m, uint32_t n_stripes, uint32_t n,
                           const uint32_t *where, uint32_t *by_stripe, uint32_t *end) {
    uint8_t stripe[BATCH_MAX];
    uint32_t counts[SR_STRIPES_MAX];
    memset(counts, 0, n_stripes * sizeof *counts);
    for (uint32_t i = 0; i < n; i++) {
        uint32_t k = pick_stripe(c, m, n_stripes);
        stripe[i] = (uint8_t)k;
        counts[k]++;
    }
    uint32_t sum = 0;
    for (uint32_t k = 0; k < n_stripes; k++) {
        end[k] = sum;
        sum += counts[k];
    }
    for (uint32_t i = 0; i < n; i++) by_stripe[end[stripe[i]]++] = where[i];
}

/* Several stripes, nothing removed by sampling: choose each draw's stripe by mass, then visit
 * each stripe once. A draw's probability is mass(stripe) / total at the choice, times its share
 * of the stripe at the draw. Draws whose stripe was empty by then are chosen anew by the caller.
 * Gives how many entries of where[] are left over. */
static uint32_t draw_round(draw_ctx *c, uint32_t n, uint32_t *where, sr_sampled *out) {
    masses m;
    read_masses(c, &m);
    if (m.size_total == 0 || !(m.total > 0)) return n;
    const uint32_t n_stripes = c->t->n_stripes;
    SR_ASSERT(n_stripes <= SR_STRIPES_MAX);
    uint32_t by_stripe[BATCH_MAX], end[SR_STRIPES_MAX];
    uint32_t left = 0, first = 0;
    part_by_stripe(c, &m, n_stripes, n, where, by_stripe, end);
    for (uint32_t k = 0; k < n_stripes && c->status == SR_OK; first = end[k++]) {
        const uint32_t *mine = by_stripe + first;
        const uint32_t count = end[k] - first;
        if (count == 0) continue;
        sr_stripe *s = sr_stripe_at(c->st, c->t, k);
        if ((c->status = sr_lock_stripe(c->st, c->t, s)) != SR_OK) break;
        const sr_index *ix = &s->index[s->sampler];
        /* Left over as well: since the path was chosen, draws may have come to take items out. */
        if (ix->count == 0 || sr_max_times_sampled(c->t) > 0) {
            memcpy(where + left, mine, count * sizeof *mine);
            left += count;
        } else {
            double exact = even_probability(c, &m, k, ix);
            draw_many(c, s, count, m.mass[k] / m.total, exact, (int64_t)m.size_total, mine, out);
            owe(c, count);
        }
        sr_unlock(&s->lock);
    }
    return left;
}

static uint32_t draw_striped(draw_ctx *c, uint32_t n, sr_sampled *out) {
    uint32_t where[BATCH_MAX];
    for (uint32_t i = 0; i < n; i++) {
        where[i] = i;
        out[i].ref = 0;
    }
    uint32_t left = n;
    for (uint32_t round = 0; left > 0 && round < 8 && c->status == SR_OK; round++) {
        left = draw_round(c, left, where, out);
    }
    if (left == 0 && c->status == SR_OK) return n;
    uint32_t done = 0;
    for (uint32_t i = 0; i < n; i++) {
        if (out[i].ref != 0) {
            if (done != i) out[done] = out[i];
            done++;
        }
    }
    return done;
}

/* Several stripes and items that leave when sampled: one draw at a time, by the masses of that
 * moment. */
static uint32_t draw_consuming(draw_ctx *c, uint32_t n, sr_sampled *out) {
    uint32_t done = 0;
    for (uint32_t tries = 0; done < n && tries < n + 64 && c->status == SR_OK; tries++) {
        masses m;
        read_masses(c, &m);
        if (m.size_total == 0 || !(m.total > 0)) break;
        SR_ASSERT(c->t->n_stripes <= SR_STRIPES_MAX);
        uint32_t k = pick_stripe(c, &m, c->t->n_stripes);
        sr_stripe *s = sr_stripe_at(c->st, c->t, k);
        if ((c->status = sr_lock_stripe(c->st, c->t, s)) != SR_OK) break;
        sr_index *ix = &s->index[s->sampler];
        if (ix->count > 0) {
            uint32_t number;
            double prob;
            sr_index_sample(c->st, ix, (enum sr_selector)c->t->sampler_kind, &c->rng, 1, &number,
                            &prob);
            SR_ASSERT(number < s->slots_used);
            sr_slot *slot = sr_slot_at(c->st, s, number);
            count_unique(c, count_sample(slot));
            double exact = even_probability(c, &m, k, ix);
            double p = exact > 0 ? exact : prob * m.mass[k] / m.total;
            take(c, slot, p, (int64_t)m.size_total, &out[done++]);
            if (slot->times_sampled >= (uint32_t)sr_max_times_sampled(c->t)) {
                c->removed++;
                c->status = sr_stripe_remove(c->st, c->t, s, number);
            }
            sr_stripe_hints(c->st, s);
            owe(c, 1);
        }
        sr_unlock(&s->lock);
    }
    return done;
}

static int sample_some(sr_ses *ses, uint32_t table, uint32_t n, sr_sampled *out, uint32_t *done,
                       uint32_t *seq) {
    draw_ctx c = {.st = ses->st, .ses = ses, .t = sr_table_at(ses->st, table), .status = SR_OK};
    while (*done < n) {
        uint64_t want = n - *done < BATCH_MAX ? n - *done : BATCH_MAX;
        sr_grant g;
        int rc = sr_has_events(c.t) ? sr_events_promise(ses, c.t, &want) : SR_OK;
        *seq = ses->sample_seq;
        if (rc == SR_OK) rc = sr_limiter_reserve_sample(ses, table, want, &g);
        if (rc != SR_OK) return rc;
        *seq = g.seq;
        if (g.granted == 0) return SR_WOULD_BLOCK;
        c.rng = g.seed;
        c.removed = c.removed_seen = 0;
        c.drawn = c.taken = 0;
        c.epoch = g.epoch;
        uint32_t granted = (uint32_t)g.granted;
        uint32_t drawn;
        if (c.t->n_stripes == 1) {
            drawn = draw_single(&c, granted, out + *done);
        } else if (sr_max_times_sampled(c.t) <= 0) {
            drawn = draw_striped(&c, granted, out + *done);
        } else {
            drawn = draw_consuming(&c, granted, out + *done);
        }
        *done += drawn;
        rc = sr_limiter_settle_sample(ses, table, &g, drawn, c.removed);
        if (c.status != SR_OK) return c.status;
        if (rc != SR_OK) return rc;
        /* What the limiter counted on is being deleted or is not placed yet: wait for that to
         * settle. */
        if (drawn == 0) return SR_WOULD_BLOCK;
    }
    return SR_OK;
}

int sr_sample(sr_ses *ses, uint32_t table, uint32_t n, sr_sampled *out, uint32_t *done,
              uint32_t *seq) {
    *done = 0;
    SR_GUARDED_SES(ses)
    int rc = sr_table_usable(ses->st, table);
    if (rc != SR_OK) return rc;
    rc = sr_ledger_reserve(ses, n);
    if (rc != SR_OK) return rc;
    sr_begin_on(ses, SR_BUSY_SAMPLE, table);
    ses->behind = 0;
    rc = sample_some(ses, table, n, out, done, seq);
    if (SR_UNLIKELY(ses->shared->promised != 0)) {
        sr_events_unpromise(ses, sr_table_at(ses->st, table));
    }
    sr_count(&ses->shared->samples, *done);
    sr_end(ses);
    return rc;
}

int sr_pin(sr_ses *ses, uint32_t table, uint32_t n, const uint64_t *keys, sr_sampled *out,
           uint32_t *found) {
    *found = 0;
    SR_GUARDED_SES(ses)
    int rc = sr_table_usable(ses->st, table);
    if (rc == SR_OK) rc = sr_ledger_reserve(ses, n);
    if (rc != SR_OK) return rc;
    draw_ctx c = {.st = ses->st, .ses = ses, .t = sr_table_at(ses->st, table)};
    masses m;
    read_masses(&c, &m);
    for (uint32_t i = 0; i < n; i++) out[i].ref = 0;
    for (uint32_t k = 0; k < c.t->n_stripes; k++) {
        sr_stripe *s = sr_stripe_at(c.st, c.t, k);
        rc = sr_lock_stripe(c.st, c.t, s);
        if (rc != SR_OK) break;
        for (uint32_t i = 0; i < n; i++) {
            if (sr_key_stripe(c.t, keys[i]) != k) continue;
            uint32_t slot = sr_stripe_find(c.st, c.t, s, keys[i]);
            if (slot == SR_NONE) continue;
            take(&c, sr_slot_at(c.st, s, slot), 0.0, (int64_t)m.size_total, &out[i]);
        }
        sr_unlock(&s->lock);
    }
    for (uint32_t i = 0; i < n; i++) {
        if (out[i].ref != 0) out[(*found)++] = out[i];
    }
    return rc;
}
