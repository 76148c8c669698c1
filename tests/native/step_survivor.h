/* step_survivor.h: what somebody who lives on finds after a death, and can do. Each check that
 * fails ends the process with a message; so does a hang. */
#ifndef SR_STEP_SURVIVOR_H
#define SR_STEP_SURVIVOR_H

#include "step_operations.h"

#include <signal.h>

#define MUST(cond, ...)                                          \
    do {                                                         \
        if (!(cond)) {                                           \
            fprintf(stderr, "%s:%d: ", __FILE__, __LINE__);      \
            fprintf(stderr, __VA_ARGS__);                        \
            exit(1);                                             \
        }                                                        \
    } while (0)

static inline void survivor_hangs(int signal) {
    (void)signal;
    static const char text[] = "hangs";
    if (write(2, text, sizeof text - 1) < 0) _exit(3);
    _exit(2);
}

static inline void survivor_check(sr_store *st, const char *when) {
    char why[256];
    int rc = sr_check(st, SR_NONE, why, sizeof why);
    MUST(rc == SR_OK, "check %s: %d %s", when, rc, why);
}

/* ---------------------------------------------------------------- what the table holds */

/* Is the table bounded by bytes? Then what has to go is no matter of numbers. */
static inline int bounded(const world *w) { return sr_max_bytes(sr_table_at(&w->st, 0)) > 0; }

/* May an item that was there before be gone? */
static inline int may_be_gone(const operation *op, const world *w, const content *item) {
    if (bounded(w)) return 1;
    switch (op->effect) {
    case INSERTS: return 1; /* the numbers are compared below */
    case SAMPLES: return w->kind->max_times_sampled > 0;
    case CLEARS: return 1;
    case DELETES: return item->key == w->keys[0] || item->key == w->keys[1];
    default: return 0;
    }
}

static inline void same_item(const operation *op, const world *w, const content *old,
                             const content *now) {
    int other = op->effect == REPLACES && now->key == w->keys[0] && now->first_row == 7001;
    MUST(now->first_row == old->first_row || other, "an item has the rows of another");
    int changed = now->priority != old->priority;
    for (uint32_t i = 0; op->effect == UPDATES && i < op->n; i++) {
        if (now->key == w->keys[i] && now->priority == w->priorities[i]) changed = 0;
    }
    MUST(!changed, "priority %g became %g", old->priority, now->priority);
    uint32_t most = op->effect == SAMPLES ? op->n : 0;
    MUST(now->times_sampled - old->times_sampled <= most, "sampled %u times, before %u",
         now->times_sampled, old->times_sampled);
}

/* Items that came: rows of the actor's block, the first ones of the batch. */
static inline void new_items(const world *w, const contents *c, int64_t inserted) {
    for (uint32_t i = 0; i < c->n; i++) {
        if (contents_find(&w->before, c->item[i].key) != NULL) continue;
        uint64_t n = c->item[i].first_row - 7000;
        MUST(n < (uint64_t)inserted && c->item[i].priority == 2.5 + (double)n,
             "an item that nobody inserted: row %llu", (unsigned long long)c->item[i].first_row);
    }
}

/* What was numbered is written down if it is in the table, and only then. */
static inline void survivor_receipt(world *w, int64_t inserts) {
    sr_receipt_info r;
    uint32_t n;
    MUST(sr_receipts(&w->st, &n) == SR_OK, "receipts cannot be read");
    if (n == 0 || !sr_receipt_get(&w->st, 0, &r) || r.lane != 3) return;
    uint64_t last = inserts == 0 ? 0 : FIRST_NUMBER - 1 + (uint64_t)inserts;
    MUST(r.done == last, "%lld items are there, and the receipt says that the last is %llu",
         (long long)inserts, (unsigned long long)r.done);
    MUST((r.key == 0) == (inserts == 0), "a receipt with the wrong key");
    MUST(r.key == 0 || contents_find(&w->before, r.key) == NULL, "a receipt with an old key");
}

/* Is the table as it was before the operation, after it, or after a first part of it? */
static inline void survivor_contents(const operation *op, world *w) {
    contents now;
    contents_read(&w->st, &now);
    const sr_table_info *a = &w->before.info, *b = &now.info;
    int64_t gone = 0, fresh = (int64_t)now.n;
    for (uint32_t i = 0; i < w->before.n; i++) {
        const content *old = &w->before.item[i], *found = contents_find(&now, old->key);
        if (found != NULL) same_item(op, w, old, found);
        MUST(found != NULL || may_be_gone(op, w, old), "an item is gone: row %llu",
             (unsigned long long)old->first_row);
        gone += found == NULL;
        fresh -= found != NULL;
    }
    if (op->effect == CLEARS && b->inserts == 0) {
        MUST(now.n == 0 && b->deletes == 0 && b->samples == 0, "reset by half");
        return;
    }
    int64_t inserts = b->inserts - a->inserts, deletes = b->deletes - a->deletes;
    int64_t samples = b->samples - a->samples, over = (int64_t)w->before.n + inserts - TABLE_MAX;
    MUST(inserts >= 0 && inserts <= (op->effect == INSERTS ? op->n : 0), "%lld inserts counted",
         (long long)inserts);
    MUST(samples >= 0 && samples <= (op->effect == SAMPLES ? op->n : 0), "%lld samples counted",
         (long long)samples);
    MUST(deletes == gone + inserts - fresh, "%lld deletes counted, %lld items gone of %lld new",
         (long long)deletes, (long long)gone, (long long)inserts);
    MUST(op->effect != INSERTS || bounded(w) || deletes == (over > 0 ? over : 0),
         "%lld items evicted of %lld", (long long)deletes, (long long)over);
    new_items(w, &now, inserts);
    survivor_receipt(w, inserts);
    MUST(b->size == now.n && b->pending == 0, "sizes differ: %lld", (long long)b->size);
}

/* The operation had ended: all of its effect must be there. */
static inline void survivor_effect(const operation *op, world *w, uint32_t done) {
    contents now;
    contents_read(&w->st, &now);
    const sr_table_info *a = &w->before.info, *b = &now.info;
    uint32_t is = 0;
    if (op->effect == INSERTS) is = (uint32_t)(b->inserts - a->inserts);
    if (op->effect == SAMPLES) is = (uint32_t)(b->samples - a->samples);
    if (op->effect == DELETES) is = (uint32_t)(b->deletes - a->deletes);
    for (uint32_t i = 0; op->effect == UPDATES && i < op->n; i++) {
        const content *c = contents_find(&now, w->keys[i]);
        is += c != NULL && c->priority == w->priorities[i];
    }
    if (op->effect == REPLACES) {
        const content *c = contents_find(&now, w->keys[0]);
        is = c == NULL ? (uint32_t)bounded(w) : c->first_row == 7001;
    }
    MUST(is == done || op->effect == NOTHING || op->effect == CLEARS,
         "%u of %u are there although the call had returned", is, done);
    if (op->effect == CLEARS) MUST(now.n == 0 && b->inserts == 0, "reset had returned");
}

/* ---------------------------------------------------------------- going on */

/* An insert, a sample, an update and a delete, by one session. `held_back`: the dead may still
 * stand in the limiter's way. */
static inline void survivor_uses(sr_ses *ses, int held_back) {
    held e = episode_make(ses, 3), b = block_make(ses, 8000, 2, e);
    sr_item item = row_item(b, 1, 3.0);
    uint64_t key = 0;
    uint32_t done = 0, seq, found;
    double priority = 1.5;
    int rc = sr_insert(ses, 0, 1, &item, &key, &done, &seq);
    if (rc == SR_WOULD_BLOCK && info_of(ses->st, 0).size == TABLE_MAX) {
        sr_sampled first; /* a queue that is full */
        MUST(sr_sample(ses, 0, 1, &first, &done, &seq) == SR_OK || held_back, "sample: full");
        MUST(done == 0 || sr_release(ses, 1, &first.position) == SR_OK, "release: full");
        rc = sr_insert(ses, 0, 1, &item, &key, &done, &seq);
    }
    MUST(rc == SR_OK || (held_back && rc == SR_WOULD_BLOCK), "insert: %d", rc);
    rc = sr_update(ses, 0, 1, &key, &priority, &found);
    MUST(rc == SR_OK, "update: %d", rc);
    sr_sampled s;
    rc = sr_sample(ses, 0, 1, &s, &done, &seq);
    MUST((rc == SR_OK && done == 1) || (held_back && rc == SR_WOULD_BLOCK), "sample: %d", rc);
    if (rc == SR_OK) {
        item_check(ses->st, &s);
        rc = sr_release(ses, 1, &s.position);
        MUST(rc == SR_OK, "release: %d", rc);
    }
    rc = sr_delete(ses, 0, 1, &key, &found);
    MUST(rc == SR_OK, "delete: %d", rc);
    let_go(ses, b);
    let_go(ses, e);
}

static inline void survivor_works(world *w, int held_back) {
    sr_ses fresh;
    survivor_uses(&w->other, held_back);
    int rc = sr_session_open(&w->st, SURVIVOR, SR_SESSION_CLIENT, &fresh);
    MUST(rc == SR_OK, "session_open: %d", rc);
    survivor_uses(&fresh, held_back);
    rc = sr_session_close(&fresh);
    MUST(rc == SR_OK, "session_close: %d", rc);
}

/* ---------------------------------------------------------------- what is left */

/* What the extensions are told, from the beginning, makes the same table. */
static inline void survivor_is_told(world *w) {
    if (!w->kind->events) return;
    drain(&w->other, 0, &w->told);
    compare(&w->st, 0, &w->told);
}

/* Bytes of memory that tables and arenas say they have. */
static inline uint64_t recorded_bytes(const sr_store *st) {
    const sr_header *h = st->hdr;
    uint64_t bytes = sr_align(h->config_off + h->config_bytes, SR_PAGE);
    for (uint32_t i = 0; i < h->n_arenas; i++) {
        bytes += sr_arena_at(st, i)->committed_end - sr_arena_at(st, i)->start;
    }
    for (uint32_t i = 0; i < h->n_tables; i++) {
        const sr_ring *ring = sr_events_ring(st, sr_table_at(st, i));
        if (ring != NULL) bytes += sr_events_bytes(ring->capacity);
    }
    for (uint32_t k = 0; k < h->n_stripes; k++) {
        const sr_stripe *s = (sr_stripe *)sr_ptr(st, h->stripes_off) + k;
        bytes += s->slots_committed;
        for (uint32_t i = 0; i < s->n_indexes; i++) {
            for (uint32_t l = 0; l < SR_TREE_LEVELS; l++) bytes += s->index[i].array_committed[l];
        }
    }
    return bytes;
}

/* With everything deleted and everybody gone nothing is in use but schemas. */
static inline void survivor_leaves_nothing(world *w) {
    contents now;
    uint32_t found;
    sr_store_stats s;
    contents_read(&w->st, &now);
    for (uint32_t i = 0; i < now.n; i++) {
        int rc = sr_delete(&w->other, 0, 1, &now.item[i].key, &found);
        MUST(rc == SR_OK && found == 1, "the last delete: %d", rc);
    }
    survivor_is_told(w);
    int rc = sr_session_close(&w->other);
    MUST(rc == SR_OK, "the last session_close: %d", rc);
    survivor_check(&w->st, "at the end");
    MUST(sr_store_get_stats(&w->st, &s) == SR_OK, "stats");
    MUST(s.arena_allocs == atomic_load(&w->st.hdr->n_schemas), "%llu allocations are left",
         (unsigned long long)s.arena_allocs);
    MUST(s.committed == recorded_bytes(&w->st), "%llu bytes are charged, %llu are recorded",
         (unsigned long long)s.committed, (unsigned long long)recorded_bytes(&w->st));
    MUST(s.sessions == 0, "%u sessions are left", s.sessions);
    MUST(sr_hold_holder(&w->st) == SR_NONE && sr_hold_memory(&w->st) == 0,
         "a checkpoint is still held");
    sr_table_info info = info_of(&w->st, 0);
    MUST(info.size == 0 && info.num_episodes == 0, "%lld items, %lld episodes are left",
         (long long)info.size, (long long)info.num_episodes);
}

/* As the janitor does with who is dead; another who joined just now goes away as well. */
static inline void survivor_reclaims(world *w) {
    for (uint32_t i = ACTOR; i <= THIRD; i++) {
        int rc = sr_participant_reclaim(&w->st, i);
        MUST(rc >= 0 && !sr_participant_in_use(&w->st, i), "reclaim: %d", rc);
    }
    MUST(!sr_bytes_over(&w->st, sr_table_at(&w->st, 0)), "the table keeps more than it may");
}

/* The whole life after. `ended`: the operation had returned, with `done`. */
static inline void survivor_live(const operation *op, world *w, int janitor_first, int ended,
                                 uint32_t done) {
    if (janitor_first) {
        survivor_reclaims(w);
        survivor_check(&w->st, "after the death");
        survivor_contents(op, w);
        if (ended) survivor_effect(op, w, done);
        survivor_is_told(w);
        survivor_works(w, 0);
    } else {
        survivor_works(w, w->kind->queue || w->kind->max_times_sampled > 0);
        survivor_reclaims(w);
        survivor_works(w, 0);
    }
    survivor_check(&w->st, "after more work");
    survivor_leaves_nothing(w);
}

#endif
