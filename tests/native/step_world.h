/* step_world.h: a small store in which something dies: one table, an actor that is going to die,
 * another session that lives on, and what the table held before. */
#ifndef SR_STEP_WORLD_H
#define SR_STEP_WORLD_H

#include "events_fixture.h"
#include "remote.h"
#include "step_image.h"
#include "stripe.h"

#define SURVIVOR 1u
#define ACTOR 2u
#define THIRD 3u
#define ITEMS_MAX 16u

/* A kind of table. `queue`: a limiter that holds both sides. `events`: it has extensions. */
typedef struct {
    const char *name;
    enum sr_selector sampler, remover;
    uint32_t stripes;
    int32_t max_times_sampled;
    int queue, events;
} kind;

static const kind KINDS[] = {
    {"fifo", SR_SEL_FIFO, SR_SEL_FIFO, 1, 0, 0, 0},
    {"uniform-2", SR_SEL_UNIFORM, SR_SEL_FIFO, 2, 0, 0, 0},
    {"prioritized", SR_SEL_PRIORITIZED, SR_SEL_FIFO, 1, 0, 0, 0},
    {"prioritized-2", SR_SEL_PRIORITIZED, SR_SEL_PRIORITIZED, 2, 0, 0, 0},
    {"heaps", SR_SEL_MAX_HEAP, SR_SEL_MIN_HEAP, 1, 0, 0, 0},
    {"lifo-uniform", SR_SEL_LIFO, SR_SEL_UNIFORM, 1, 0, 0, 0},
    {"queue", SR_SEL_FIFO, SR_SEL_FIFO, 1, 1, 1, 0},
    {"epoch", SR_SEL_EPOCH, SR_SEL_FIFO, 1, 0, 0, 0},
    {"once-2", SR_SEL_UNIFORM, SR_SEL_UNIFORM, 2, 1, 0, 0},
    {"told", SR_SEL_PRIORITIZED, SR_SEL_FIFO, 1, 0, 0, 1},
    {"told-once", SR_SEL_FIFO, SR_SEL_UNIFORM, 1, 1, 0, 1},
};
#define N_KINDS (sizeof KINDS / sizeof *KINDS)
#define TABLE_MAX 8

typedef struct {
    uint64_t key, first_row;
    double priority;
    uint32_t times_sampled;
} content;

typedef struct {
    content item[ITEMS_MAX];
    uint32_t n;
    sr_table_info info;
} contents;

typedef struct {
    sr_store st;
    const kind *kind;
    sr_ses actor, other, third;
    contents before;
    held episode, block;  /* of the actor: four rows of room, three of them written */
    held traj;            /* row 7001 once more, where an operation needs it */
    sr_item item[4];      /* rows of it, not in the table yet */
    uint64_t keys[4];     /* what the operation gets or gives */
    double priorities[4];
    sr_sampled pins[4];
    uint32_t positions[4];
    uint32_t done, seq, number;
    int status;
    replica told; /* what the extensions were told of */
} world;

/* ---------------------------------------------------------------- what a table holds */

static inline sr_sampled slot_item(const sr_slot *p) {
    return (sr_sampled){.ref = p->ref, .row_start = p->row_start, .row_count = p->row_count};
}

/* Read by the one process that is there. Payloads are compared with what their rows' numbers
 * say. */
static inline void contents_read(sr_store *st, contents *c) {
    const sr_table *t = sr_table_at(st, 0);
    c->n = 0;
    for (uint32_t k = 0; k < t->n_stripes; k++) {
        const sr_stripe *s = sr_stripe_at(st, t, k);
        for (uint32_t i = 0; i < s->slots_used; i++) {
            const sr_slot *p = sr_slot_at(st, s, i);
            if (!sr_slot_live(p)) continue;
            CHECK(c->n < ITEMS_MAX);
            sr_sampled item = slot_item(p);
            c->item[c->n++] = (content){.key = p->key,
                                        .first_row = item_check(st, &item),
                                        .priority = p->priority,
                                        .times_sampled = p->times_sampled};
        }
    }
    c->info = info_of(st, 0);
}

static inline const content *contents_find(const contents *c, uint64_t key) {
    for (uint32_t i = 0; i < c->n; i++) {
        if (c->item[i].key == key) return &c->item[i];
    }
    return NULL;
}

/* ---------------------------------------------------------------- making one */

static inline void insert_ok(sr_ses *ses, const sr_item *item) {
    uint64_t key;
    uint32_t done, seq;
    CHECK(sr_insert(ses, 0, 1, item, &key, &done, &seq) == SR_OK && done == 1);
}

/* An item with a block and an episode of its own, so that its end frees them. */
static inline void fill_row(sr_ses *ses, uint64_t row, double priority) {
    held e = episode_make(ses, row), b = block_make(ses, row, 1, e);
    sr_item item = row_item(b, 0, priority);
    insert_ok(ses, &item);
    let_go(ses, b);
    let_go(ses, e);
}

/* An item of two rows, the last of one block and the first of the next, of two episodes. */
static inline int traj_try(sr_ses *ses, held a, uint32_t row, held b, held *out) {
    sr_run runs[2 * N_COLS];
    uint32_t first[N_COLS + 1], flags[N_COLS] = {0};
    for (uint32_t c = 0; c < N_COLS; c++) {
        runs[2 * c] = (sr_run){.block = a.off, .col = c, .start = row, .count = 1, .stride = 1};
        runs[2 * c + 1] = (sr_run){.block = b.off, .col = c, .start = 0, .count = 1, .stride = 1};
        first[c] = 2 * c;
    }
    first[N_COLS] = 2 * N_COLS;
    return sr_traj_new(ses, N_COLS, first, flags, runs, &out->off, &out->position);
}

static inline held traj_make(sr_ses *ses, held a, uint32_t row, held b) {
    held t;
    CHECK(traj_try(ses, a, row, b, &t) == SR_OK);
    return t;
}

static inline void fill_traj_item(sr_ses *ses, uint64_t row, double priority) {
    held e = episode_make(ses, row), f = episode_make(ses, row + 1);
    held a = block_make(ses, row, 1, e), b = block_make(ses, row + 1, 1, f);
    held t = traj_make(ses, a, 0, b);
    sr_item item = {.ref = SR_REF(t.off, SR_KIND_TRAJ), .priority = priority};
    insert_ok(ses, &item);
    const held all[] = {t, b, a, f, e};
    for (uint32_t i = 0; i < 5; i++) let_go(ses, all[i]);
}

static inline sr_store world_store(const kind *k) {
    sr_table_config cfg = table_config(k->sampler, k->remover, TABLE_MAX, k->stripes);
    cfg.max_times_sampled = k->max_times_sampled;
    cfg.n_events = k->events ? SR_EVENTS_MIN : 0;
    if (k->queue) {
        cfg.min_diff = 0;
        cfg.max_diff = TABLE_MAX;
    }
    return store_make(4u << 20, 2, 1, &cfg);
}

/* `fill` items in the table, and an actor that is ready to write more. */
static inline void world_make(world *w, const kind *k, uint32_t fill) {
    *w = (world){.st = world_store(k), .kind = k};
    for (uint32_t i = SURVIVOR; i <= ACTOR; i++) {
        CHECK(sr_participant_set(&w->st, i, i, i, i, "one of two") == SR_OK);
    }
    CHECK(sr_session_open(&w->st, SURVIVOR, SR_SESSION_CLIENT, &w->other) == SR_OK);
    for (uint32_t i = 0; i < fill; i++) {
        double priority = 1 + (double)((i * 5) % 8);
        if (i == 2) fill_traj_item(&w->other, 100 * (i + 1), priority);
        else fill_row(&w->other, 100 * (i + 1), priority);
    }
    CHECK(sr_session_open(&w->st, ACTOR, SR_SESSION_WRITER, &w->actor) == SR_OK);
    w->episode = episode_make(&w->actor, 7);
    CHECK(sr_block_new(&w->actor, N_COLS, ROW_BYTES, 4, &w->block.off, &w->block.position) ==
          SR_OK);
    for (uint32_t r = 0; r < 4; r++) {
        for (uint32_t c = 0; c < N_COLS; c++) {
            cell_fill(sr_block_cell(&w->st, w->block.off, c, r, 1, ROW_BYTES[c]), 7000 + r, c);
        }
        w->item[r] = row_item(w->block, r, 2.5 + r);
    }
    sr_block_publish(&w->actor, w->block.off, 3, w->episode.off);
}

static inline void world_drop(world *w) {
    sr_session_abandon(&w->actor);
    sr_session_abandon(&w->other);
    store_drop(&w->st);
}

#endif
