/* step_operations.h: what the actor is doing when it dies. `prepare` runs before, in the parent;
 * `run` is the operation, the same call that a user's process makes. */
#ifndef SR_STEP_OPERATIONS_H
#define SR_STEP_OPERATIONS_H

#include "bytes.h"
#include "checkpoint.h"
#include "hold.h"
#include "packed_fixture.h"
#include "step_world.h"

/* What the operation may leave behind in the table. */
enum effect { NOTHING, INSERTS, SAMPLES, UPDATES, REPLACES, DELETES, CLEARS };

typedef struct {
    const char *name;
    void (*prepare)(world *w);
    void (*run)(void *w);
    enum effect effect;
    uint32_t n;    /* items that it inserts, samples, updates or deletes */
    uint32_t fill; /* items in the table before */
    int every_kind;
    void (*first)(void *w); /* another dies in this before, so that `run` meets what that left */
} operation;

static inline void insert_n(world *w, uint32_t n) {
    w->status = sr_insert(&w->actor, 0, n, w->item, w->keys, &w->done, &w->seq);
}
static void run_insert(void *w) { insert_n(w, 1); }
static void run_insert_batch(void *w) { insert_n(w, 3); }

#define FIRST_NUMBER 10u
static inline void prepare_receipt(world *w) {
    const uint64_t name[2] = {1, 2};
    CHECK(sr_receipt_open(&w->st, name, 3, 4, &w->number) == SR_OK && w->number == 0);
    sr_session_receipt(&w->actor, 0, FIRST_NUMBER);
}
static void run_receipt(void *arg) {
    world *w = arg;
    const uint64_t name[2] = {5, 6};
    w->status = sr_receipt_open(&w->st, name, 7, 8, &w->number);
}

static inline void sample_n(world *w, uint32_t n) {
    w->status = sr_sample(&w->actor, 0, n, w->pins, &w->done, &w->seq);
}
static void run_sample(void *w) { sample_n(w, 1); }
static void run_sample_batch(void *w) { sample_n(w, 3); }

static inline void prepare_keys(world *w) {
    CHECK(w->before.n >= 4);
    w->keys[0] = w->before.item[2].key;
    w->keys[1] = w->before.item[0].key;
    w->priorities[0] = 9.5;
    w->priorities[1] = 0.25;
}
static void run_update(void *arg) {
    world *w = arg;
    w->status = sr_update(&w->actor, 0, 2, w->keys, w->priorities, &w->done);
}
static inline void prepare_replace(world *w) {
    prepare_keys(w);
    sr_run runs[N_COLS];
    uint32_t first[N_COLS + 1], flags[N_COLS];
    for (uint32_t c = 0; c <= N_COLS; c++) first[c] = c;
    for (uint32_t c = 0; c < N_COLS; c++) {
        runs[c] = (sr_run){.block = w->block.off, .col = c, .start = 1, .count = 1, .stride = 1};
        flags[c] = SR_COL_SQUEEZED;
    }
    CHECK(sr_traj_new(&w->actor, N_COLS, first, flags, runs, &w->traj.off, &w->traj.position) ==
          SR_OK);
}
/* The new data is larger than the old, and the table may not keep more than it does. */
static inline void prepare_bounded_replace(world *w) {
    prepare_replace(w);
    w->keys[0] = w->before.item[1].key;
    sr_table_change change = {.what = SR_SET_MAX_BYTES, .max_bytes = 1 << 20};
    CHECK(sr_table_configure(&w->other, 0, &change) == SR_OK);
    change.max_bytes = sr_bytes_of(&w->st, sr_table_at(&w->st, 0));
    CHECK(sr_table_configure(&w->other, 0, &change) == SR_OK);
}
static inline void prepare_bounded(world *w) {
    prepare_bounded_replace(w);
    CHECK(sr_release(&w->actor, 1, &w->traj.position) == SR_OK);
}
static void run_replace(void *arg) {
    world *w = arg;
    w->status = sr_replace(&w->actor, 0, w->keys[0], SR_REF(w->traj.off, SR_KIND_TRAJ), 0,
                           &w->done, &w->number);
}
static void run_pin(void *arg) {
    world *w = arg;
    w->status = sr_pin(&w->actor, 0, 2, w->keys, w->pins, &w->done);
}
static void run_delete(void *arg) {
    world *w = arg;
    w->status = sr_delete(&w->actor, 0, 2, w->keys, &w->done);
}
static void run_reset(void *arg) {
    world *w = arg;
    w->status = sr_reset(&w->actor, 0);
}

/* ---------------------------------------------------------------- references */

static inline void prepare_pins(world *w) {
    sample_n(w, 3);
    CHECK(w->status == SR_OK && w->done == 3);
    for (uint32_t i = 0; i < 3; i++) w->positions[i] = w->pins[i].position;
}
/* The pins are the last references to all that they hold. */
static inline void prepare_last_pins(world *w) {
    prepare_pins(w);
    CHECK(sr_reset(&w->other, 0) == SR_OK);
}
static void run_release(void *arg) {
    world *w = arg;
    w->status = sr_release(&w->actor, 3, w->positions);
}
static void run_hold(void *arg) {
    world *w = arg;
    w->status = sr_hold(&w->actor, SR_REF(w->block.off, SR_KIND_BLOCK), w->positions);
}
static void run_ledger(void *arg) {
    world *w = arg;
    w->status = sr_ledger_reserve(&w->actor, 100);
}
/* From a ledger in an arena to a longer one. */
static inline void prepare_ledger(world *w) {
    CHECK(sr_ledger_reserve(&w->actor, 40) == SR_OK);
    prepare_pins(w);
}

/* ---------------------------------------------------------------- writing */

static void run_episode(void *arg) {
    world *w = arg;
    w->status = sr_episode_new(&w->actor, 8, &w->episode.off, &w->episode.position);
}
static void run_block(void *arg) {
    world *w = arg;
    w->status = sr_block_new(&w->actor, N_COLS, ROW_BYTES, 8, &w->block.off, &w->block.position);
}
/* More than the arena has: it commits. */
static void run_large_block(void *arg) {
    world *w = arg;
    w->status = sr_block_new(&w->actor, N_COLS, ROW_BYTES, 20000, &w->block.off,
                             &w->block.position);
}
static inline void prepare_episode(world *w) { w->episode = episode_make(&w->actor, 8); }
static void run_publish(void *arg) {
    world *w = arg;
    sr_block_publish(&w->actor, w->block.off, 1, w->episode.off);
}
static void run_append(void *arg) {
    world *w = arg;
    char cells[N_COLS][32];
    const void *src[N_COLS];
    for (uint32_t c = 0; c < N_COLS; c++) {
        cell_fill(cells[c], 7003, c);
        src[c] = cells[c];
    }
    sr_block_append(&w->actor, w->block.off, N_COLS, ROW_TOTAL, src, w->episode.off);
}
static void run_apart(void *arg) {
    world *w = arg;
    w->status = sr_block_new_apart(&w->actor, N_COLS, ROW_BYTES, 8, &w->block.off,
                                   &w->block.position);
}
static inline void prepare_apart(world *w) {
    w->block = apart_make(&w->actor, 7000, 4, w->episode);
}
static inline void prepare_apart_room(world *w) {
    CHECK(apart_try(&w->actor, 7000, 3, 4, w->episode, &w->block) == SR_OK);
}
static void run_pack(void *arg) {
    world *w = arg;
    w->status = pack_try(&w->actor, w->block, 4);
}
/* Somebody reads the rows meanwhile. */
static inline void prepare_apart_held(world *w) {
    uint64_t rows;
    prepare_apart(w);
    CHECK(sr_rows_hold(&w->other, w->block.off, &rows, &w->positions[0]) == SR_OK);
    CHECK(sr_release(&w->other, 1, &w->positions[0]) == SR_OK);
    CHECK(sr_rows_hold(&w->actor, w->block.off, &rows, &w->positions[0]) == SR_OK);
}
static void run_rows_hold(void *arg) {
    world *w = arg;
    uint64_t rows;
    w->status = sr_rows_hold(&w->actor, w->block.off, &rows, &w->positions[0]);
}
static inline void prepare_packed(world *w) {
    prepare_apart(w);
    CHECK(pack_try(&w->actor, w->block, 4) == SR_OK);
    w->positions[0] = w->positions[1] = w->positions[2] = w->block.position;
}
static void run_release_one(void *arg) {
    world *w = arg;
    w->status = sr_release(&w->actor, 1, w->positions);
}
static void run_traj(void *arg) {
    world *w = arg;
    held t;
    w->status = traj_try(&w->actor, w->block, 1, w->block, &t);
}

/* ---------------------------------------------------------------- sessions, the store */

static void run_open(void *arg) {
    world *w = arg;
    w->status = sr_session_open(&w->st, ACTOR, SR_SESSION_SAMPLER, &w->third);
}
static void run_close(void *arg) {
    world *w = arg;
    w->status = sr_session_close(&w->actor);
}
static void run_join(void *arg) {
    world *w = arg;
    w->status = sr_participant_set(&w->st, THIRD, 9, 9, 9, "joins");
}
static void run_leave(void *arg) {
    world *w = arg;
    w->status = sr_session_close(&w->actor);
    sr_participant_clear(&w->st, ACTOR);
}
static void run_schema(void *arg) {
    world *w = arg;
    w->status = sr_schema_intern(&w->st, "{\"a\": 1}", 8, &w->number);
}
static void run_commit_ahead(void *arg) {
    world *w = arg;
    int added = sr_commit_ahead(&w->st);
    w->status = added < 0 ? added : SR_OK;
}
/* So little is left free that the committer has work. */
static inline void prepare_commit_ahead(world *w) {
    held b;
    CHECK(sr_block_new(&w->actor, N_COLS, ROW_BYTES, 5000, &b.off, &b.position) == SR_OK);
}
static void run_give_back(void *arg) {
    world *w = arg;
    w->status = sr_give_back(&w->st, 2 * SR_PAGE) > 0 ? SR_OK : SR_FULL;
}
static void run_check(void *arg) {
    world *w = arg;
    char why[128];
    w->status = sr_check(&w->st, SR_NONE, why, sizeof why);
}
static void run_info(void *arg) {
    world *w = arg;
    sr_table_info info;
    sr_store_stats stats;
    w->status = sr_table_get_info(&w->st, 0, &info) | sr_store_get_stats(&w->st, &stats);
    if (sr_contains(&w->actor, 0, w->keys[0]) != 1) w->status = SR_INVALID;
}
/* The janitor dies while it clears up after somebody else. */
static inline void prepare_dead(world *w) {
    sr_ses dead;
    uint32_t done, seq;
    sr_sampled pins[2];
    CHECK(sr_participant_set(&w->st, THIRD, 3, 3, 3, "dead before") == SR_OK);
    CHECK(sr_session_open(&w->st, THIRD, SR_SESSION_SAMPLER, &dead) == SR_OK);
    CHECK(sr_sample(&dead, 0, 2, pins, &done, &seq) == SR_OK);
    block_make(&dead, 9000, 2, episode_make(&dead, 9));
    sr_session_abandon(&dead);
}
static void run_reclaim(void *arg) {
    world *w = arg;
    w->status = sr_participant_reclaim(&w->st, THIRD) == 1 ? SR_OK : SR_CORRUPT;
}

/* ---------------------------------------------------------------- checkpoints */

/* The actor begins to hold all that the table's items refer to. */
static void run_hold_begin(void *arg) {
    world *w = arg;
    static sr_slot slots[4][64];
    static uint32_t order[4][2][64];
    sr_stripe_image stripes[4];
    sr_table_image table;
    uint64_t ns;
    w->status = sr_hold_claim(&w->st, ACTOR);
    for (uint32_t i = 0; i < w->kind->stripes && w->status == SR_OK; i++) {
        stripes[i] = (sr_stripe_image){
            .slots = slots[i], .order = {order[i][0], order[i][1]}, .room = 64};
        w->status = sr_hold_prepare(&w->st, i, 64);
    }
    if (w->status == SR_OK) w->status = sr_snapshot(&w->st, stripes, &table, &ns);
}
static void run_hold_end(void *arg) {
    world *w = arg;
    w->status = sr_hold_release(&w->st);
}
static inline void prepare_held(world *w) {
    run_hold_begin(w);
    CHECK(w->status == SR_OK);
    if (w->before.n >= 4) prepare_keys(w);
}
/* Some of what is held has left the table. */
static inline void prepare_left(world *w) {
    prepare_held(w);
    CHECK(sr_delete(&w->other, 0, 2, w->keys, &w->done) == SR_OK && w->done == 2);
}
static inline void prepare_held_replace(world *w) {
    prepare_held(w);
    prepare_replace(w);
}
/* What the pins let go of is held. */
static inline void prepare_held_pins(world *w) {
    prepare_held(w);
    prepare_last_pins(w);
}
/* Of a block whose rows lie apart a checkpoint notes where they are. */
static void run_heads(void *arg) {
    world *w = arg;
    sr_block_head head;
    uint64_t rows;
    w->status = sr_image_block_heads(&w->actor, 1, &w->block.off, &head, &rows);
}

/* Somebody comes upon a death inside a lock, repairs, and dies of it as well. */
static inline void prepare_third(world *w) {
    CHECK(sr_participant_set(&w->st, THIRD, 3, 3, 3, "comes next") == SR_OK);
    CHECK(sr_session_open(&w->st, THIRD, SR_SESSION_CLIENT, &w->third) == SR_OK);
    if (w->before.n >= 4) prepare_keys(w);
}
static inline void prepare_held_third(world *w) {
    prepare_held(w);
    prepare_third(w);
}
static inline void prepare_apart_third(world *w) {
    prepare_third(w);
    prepare_apart(w);
}
static inline void prepare_third_and_receipt(world *w) {
    prepare_third(w);
    prepare_receipt(w);
}
static void run_touch(void *arg) {
    world *w = arg;
    uint32_t found;
    const uint64_t key = 1;
    w->status = sr_delete(&w->third, 0, 1, &key, &found);
    held e = {0};
    if (sr_episode_new(&w->third, 9, &e.off, &e.position) != SR_OK) w->status = SR_CORRUPT;
    sr_session_close(&w->third);
}

static const operation OPERATIONS[] = {
    {"insert", NULL, run_insert, INSERTS, 1, 4, 1, NULL},
    {"insert_batch", NULL, run_insert_batch, INSERTS, 3, 4, 1, NULL},
    {"first_insert", NULL, run_insert, INSERTS, 1, 0, 1, NULL},
    {"evicting_insert", NULL, run_insert, INSERTS, 1, 8, 1, NULL},
    {"evicting_batch", NULL, run_insert_batch, INSERTS, 3, 7, 1, NULL},
    {"numbered_insert", prepare_receipt, run_insert, INSERTS, 1, 4, 1, NULL},
    {"numbered_batch", prepare_receipt, run_insert_batch, INSERTS, 3, 7, 1, NULL},
    {"receipt_open", NULL, run_receipt, NOTHING, 0, 1, 0, NULL},
    {"sample", NULL, run_sample, SAMPLES, 1, 4, 1, NULL},
    {"sample_batch", NULL, run_sample_batch, SAMPLES, 3, 4, 1, NULL},
    {"update", prepare_keys, run_update, UPDATES, 2, 5, 1, NULL},
    {"replace", prepare_replace, run_replace, REPLACES, 1, 5, 1, NULL},
    {"bounded_replace", prepare_bounded_replace, run_replace, REPLACES, 1, 5, 1, NULL},
    {"bounded_insert", prepare_bounded, run_insert, INSERTS, 1, 5, 1, NULL},
    {"delete", prepare_keys, run_delete, DELETES, 2, 5, 1, NULL},
    {"reset", NULL, run_reset, CLEARS, 0, 5, 1, NULL},
    {"pin", prepare_keys, run_pin, NOTHING, 0, 5, 0, NULL},
    {"release", prepare_pins, run_release, NOTHING, 0, 4, 0, NULL},
    {"release_last", prepare_last_pins, run_release, NOTHING, 0, 4, 0, NULL},
    {"hold", NULL, run_hold, NOTHING, 0, 1, 0, NULL},
    {"ledger_growth", prepare_pins, run_ledger, NOTHING, 0, 4, 0, NULL},
    {"ledger_growth_again", prepare_ledger, run_ledger, NOTHING, 0, 4, 0, NULL},
    {"episode_new", NULL, run_episode, NOTHING, 0, 1, 0, NULL},
    {"block_new", NULL, run_block, NOTHING, 0, 1, 0, NULL},
    {"block_new_large", NULL, run_large_block, NOTHING, 0, 1, 0, NULL},
    {"publish", NULL, run_publish, NOTHING, 0, 1, 0, NULL},
    {"publish_episode", prepare_episode, run_publish, NOTHING, 0, 1, 0, NULL},
    {"append", NULL, run_append, NOTHING, 0, 1, 0, NULL},
    {"append_episode", prepare_episode, run_append, NOTHING, 0, 1, 0, NULL},
    {"block_new_apart", NULL, run_apart, NOTHING, 0, 1, 0, NULL},
    {"append_apart", prepare_apart_room, run_append, NOTHING, 0, 1, 0, NULL},
    {"block_pack", prepare_apart, run_pack, NOTHING, 0, 1, 0, NULL},
    {"block_pack_held", prepare_apart_held, run_pack, NOTHING, 0, 1, 0, NULL},
    {"rows_hold", prepare_apart, run_rows_hold, NOTHING, 0, 1, 0, NULL},
    {"packed_release", prepare_packed, run_release_one, NOTHING, 0, 1, 0, NULL},
    {"trajectory_new", NULL, run_traj, NOTHING, 0, 1, 0, NULL},
    {"session_open", NULL, run_open, NOTHING, 0, 1, 0, NULL},
    {"session_close", prepare_pins, run_close, NOTHING, 0, 4, 0, NULL},
    {"session_close_last", prepare_last_pins, run_close, NOTHING, 0, 4, 0, NULL},
    {"session_close_long", prepare_ledger, run_close, NOTHING, 0, 4, 0, NULL},
    {"participant_set", NULL, run_join, NOTHING, 0, 1, 0, NULL},
    {"participant_leave", NULL, run_leave, NOTHING, 0, 1, 0, NULL},
    {"schema_intern", NULL, run_schema, NOTHING, 0, 1, 0, NULL},
    {"commit_ahead", prepare_commit_ahead, run_commit_ahead, NOTHING, 0, 1, 0, NULL},
    {"give_back", NULL, run_give_back, NOTHING, 0, 1, 0, NULL},
    {"check", NULL, run_check, NOTHING, 0, 4, 0, NULL},
    {"info", prepare_keys, run_info, NOTHING, 0, 4, 0, NULL},
    {"reclaim", prepare_dead, run_reclaim, NOTHING, 0, 4, 0, NULL},
    {"hold_begin", NULL, run_hold_begin, NOTHING, 0, 5, 0, NULL},
    {"hold_end", prepare_left, run_hold_end, NOTHING, 0, 5, 0, NULL},
    {"hold_heads", prepare_apart, run_heads, NOTHING, 0, 1, 0, NULL},
    {"held_insert", prepare_held, run_insert, INSERTS, 1, 8, 1, NULL},
    {"held_batch", prepare_held, run_insert_batch, INSERTS, 3, 7, 0, NULL},
    {"held_sample", prepare_held, run_sample_batch, SAMPLES, 3, 4, 0, NULL},
    {"held_update", prepare_held, run_update, UPDATES, 2, 5, 0, NULL},
    {"held_replace", prepare_held_replace, run_replace, REPLACES, 1, 5, 0, NULL},
    {"held_delete", prepare_held, run_delete, DELETES, 2, 5, 1, NULL},
    {"held_reset", prepare_held, run_reset, CLEARS, 0, 5, 0, NULL},
    {"held_release", prepare_held_pins, run_release, NOTHING, 0, 4, 0, NULL},
    {"repair_insert", prepare_third, run_touch, INSERTS, 1, 8, 1, run_insert},
    {"repair_numbered", prepare_third_and_receipt, run_touch, INSERTS, 1, 4, 1, run_insert},
    {"repair_sample", prepare_third, run_touch, SAMPLES, 1, 4, 1, run_sample},
    {"repair_delete", prepare_third, run_touch, DELETES, 2, 5, 1, run_delete},
    {"repair_held", prepare_held_third, run_touch, DELETES, 2, 5, 0, run_delete},
    {"repair_pack", prepare_apart_third, run_touch, NOTHING, 0, 1, 0, run_pack},
    {"repair_block", prepare_third, run_touch, NOTHING, 0, 1, 0, run_large_block},
};
#define N_OPERATIONS (sizeof OPERATIONS / sizeof *OPERATIONS)

#endif
