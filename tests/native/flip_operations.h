/* flip_operations.h: a small store with tables of all kinds, and every operation on it, one after
 * the other, whatever they give. */
#ifndef SR_FLIP_OPERATIONS_H
#define SR_FLIP_OPERATIONS_H

#include "flip_checkpoint.h"
#include "packed_fixture.h"
#include "peek.h"
#include "step_world.h"

#define FLIP_TABLES 7u

typedef struct {
    sr_store st;
    sr_ses writer, reader;
    held episode, block, traj;
    held raw, packed; /* blocks whose rows lie apart */
    sr_sampled pin[2]; /* of table 0, taken before */
    uint64_t key[FLIP_TABLES];
    /* Of the same shape and empty: what is saved goes there. */
    sr_store target;
    image empty;
    flip_saved *good, *saved; /* of the whole store, and of the damaged one */
    /* The byte that is changed and how; and is a checkpoint being written all the while? */
    uint64_t offset;
    char pattern;
    int held;
} flip_store;

static inline void flip_make(flip_store *f) {
    static const uint32_t which[FLIP_TABLES] = {0, 1, 3, 4, 5, 6, 7}; /* of KINDS */
    sr_table_config cfg[FLIP_TABLES];
    for (uint32_t i = 0; i < FLIP_TABLES; i++) {
        const kind *k = &KINDS[which[i]];
        cfg[i] = table_config(k->sampler, k->remover, TABLE_MAX, k->stripes);
        cfg[i].max_times_sampled = k->max_times_sampled;
        if (k->queue) cfg[i].max_diff = TABLE_MAX;
    }
    cfg[0].n_events = SR_EVENTS_MIN;
    *f = (flip_store){.st = store_make(4u << 20, 2, FLIP_TABLES, cfg),
                      .target = store_make(4u << 20, 2, FLIP_TABLES, cfg),
                      .good = calloc(1, sizeof *f->good),
                      .saved = calloc(1, sizeof *f->saved)};
    CHECK(f->good != NULL && f->saved != NULL);
    image_take(&f->empty, &f->target);
    uint32_t id, done, seq;
    CHECK(sr_schema_intern(&f->st, "{\"a\": 1}", 8, &id) == SR_OK);
    CHECK(sr_participant_set(&f->st, SURVIVOR, 1, 1, 1, "writes") == SR_OK);
    CHECK(sr_participant_set(&f->st, ACTOR, 2, 2, 2, "was killed") == SR_OK);
    sr_ses dead;
    CHECK(sr_session_open(&f->st, SURVIVOR, SR_SESSION_WRITER, &f->writer) == SR_OK);
    CHECK(sr_session_open(&f->st, SURVIVOR, SR_SESSION_SAMPLER, &f->reader) == SR_OK);
    CHECK(sr_session_open(&f->st, ACTOR, SR_SESSION_CLIENT, &dead) == SR_OK);
    f->episode = episode_make(&f->writer, 1);
    f->block = block_make(&f->writer, 50, 4, f->episode);
    f->traj = traj_make(&f->writer, f->block, 1, f->block);
    f->raw = apart_make(&f->writer, 70, 2, f->episode);
    f->packed = apart_make(&f->writer, 80, 7, f->episode);
    CHECK(pack_try(&f->writer, f->packed, 7) == SR_OK);
    for (uint32_t t = 0; t < FLIP_TABLES; t++) {
        sr_item item[3] = {row_item(f->block, 0, 1.0), row_item(f->block, 2, 3.0),
                           {.ref = SR_REF(f->traj.off, SR_KIND_TRAJ), .priority = 2.0}};
        uint64_t keys[3];
        CHECK(sr_insert(&f->writer, t, 3, item, keys, &done, &seq) == SR_OK);
        f->key[t] = keys[1];
    }
    sr_item apart[2] = {row_item(f->raw, 1, 1.0), row_item(f->packed, 5, 1.0)};
    uint64_t keys[2];
    CHECK(sr_insert(&f->writer, 2, 2, apart, keys, &done, &seq) == SR_OK);
    CHECK(sr_sample(&f->reader, 0, 2, f->pin, &done, &seq) == SR_OK && done == 2);
    CHECK(sr_sample(&dead, 1, 1, &(sr_sampled){0}, &done, &seq) == SR_OK);
    CHECK(sr_ledger_reserve(&f->reader, 40) == SR_OK);
    block_make(&f->writer, 60, 1, f->episode); /* only begun, in the ledger alone */
    held open = {0};
    CHECK(sr_block_new(&f->writer, N_COLS, ROW_BYTES, 8, &open.off, &open.position) == SR_OK);
    f->block = open;
    sr_block_publish(&f->writer, open.off, 1, f->episode.off);
    sr_session_abandon(&dead);
    /* Without pages that nothing is in. */
    _Atomic uint64_t *touched = f->st.touched;
    f->st.touched = NULL;
    CHECK(flip_save(&f->st, f->good) && sr_hold_release(&f->st) == SR_OK);
    f->st.touched = touched;
}

static inline void flip_drop(flip_store *f) {
    sr_session_abandon(&f->writer);
    sr_session_abandon(&f->reader);
    store_drop(&f->st);
    store_drop(&f->target);
    image_drop(&f->empty);
    saved_drop(f->good);
    free(f->good);
    free(f->saved);
}

/* A session's own memory, which every case begins with anew. */
static inline void flip_own(sr_ses *ses) {
    uint32_t *stack = malloc(256 * sizeof *stack);
    CHECK(stack != NULL && ses->n_free <= 256);
    memcpy(stack, ses->free_stack, ses->n_free * sizeof *stack);
    ses->free_stack = stack;
}

/* ---------------------------------------------------------------- trying everything */

/* Read a column wherever its rows are, as who holds nothing. */
static inline void flip_run(const sr_store *st, const sr_sampled *item, uint32_t c) {
    sr_run run;
    sr_rows_at at;
    char cell[64];
    if (sr_peek_run(st, item, c, 0, &run) != 1) return;
    uint64_t rows = sr_block_rows_ref(st, run.block);
    if (sr_peek_rows(st, run.block, rows, run.col, &at) == SR_OK) {
        (void)apart_cell(&at, run.start, cell, sizeof cell);
    }
    if (sr_rows_find(st, run.block, rows, run.col, &at) == SR_OK) {
        (void)apart_cell(&at, run.start, cell, sizeof cell);
    }
}

/* Read a pinned item in each way there is. */
static inline void flip_read(const sr_store *st, const sr_sampled *item) {
    static char copy[N_COLS][4096];
    char *dst[SR_COLUMNS_MAX];
    uint64_t bytes[SR_COLUMNS_MAX];
    uint32_t n = sr_item_columns(st, item), bad;
    int fits = n <= N_COLS;
    for (uint32_t c = 0; c < n && c < SR_COLUMNS_MAX; c++) {
        uint32_t flags;
        uint64_t row = 0;
        if (sr_item_column(st, item, c, &flags, &row) != SR_OK) return;
        bytes[c] = row * SR_COL_LENGTH(flags);
        if (c < N_COLS) dst[c] = copy[c];
        if (row > sizeof copy[0] || SR_COL_LENGTH(flags) > 1024 || bytes[c] > sizeof copy[0]) {
            fits = 0;
            continue;
        }
        const char *view = sr_item_view(st, item, c);
        volatile char sum = 0;
        for (uint64_t i = 0; view != NULL && i < bytes[c]; i++) sum = (char)(sum + view[i]);
    }
    if (fits && n > 0) (void)sr_gather(st, 1, item, n, dst, bytes, &bad);
    for (uint32_t c = 0; c < n && c < N_COLS; c++) flip_run(st, item, c);
}

static inline void flip_sample(flip_store *f, sr_ses *ses, uint32_t t) {
    sr_sampled s[3];
    uint32_t done = 0, seq;
    (void)sr_sample(ses, t, 3, s, &done, &seq);
    for (uint32_t i = 0; i < done; i++) {
        flip_read(&f->st, &s[i]);
        (void)sr_release(ses, 1, &s[i].position);
    }
}

/* By keys, and without locks. */
static inline void flip_list(flip_store *f, uint32_t t) {
    const sr_store *st = &f->st;
    sr_listed listed[8];
    sr_sampled item;
    sr_table_info info;
    uint64_t cursor = 0, seq, bytes;
    uint32_t got, flags;
    for (uint32_t i = 0; i < 8 && cursor != SR_LIST_END; i++) {
        if (sr_list(&f->st, t, &cursor, 8, listed, &got) != SR_OK) break;
    }
    (void)sr_peek_table(st, t, &info);
    for (uint32_t k = 0; k < sr_peek_stripes(st, t); k++) {
        for (uint32_t i = 0; i < sr_peek_slots(st, t, k) && i < 64; i++) {
            if (!sr_peek_slot(st, t, k, i, &item, &seq)) continue;
            int n = sr_peek_columns(st, &item);
            for (int c = 0; c < n; c++) {
                static char copy[4096];
                if (sr_peek_column(st, &item, (uint32_t)c, &flags, &bytes) != SR_OK) continue;
                if (bytes <= sizeof copy) (void)sr_peek_copy(st, &item, (uint32_t)c, copy, bytes);
            }
            (void)sr_peek_same(st, t, k, i, &item);
        }
    }
}

static inline void flip_table(flip_store *f, uint32_t t, const char **operation) {
    sr_store *st = &f->st;
    uint32_t done, seq;
    uint64_t key;
    double priority = 4.0;
    sr_table_info info;
    char why[128];
    sr_item item = row_item(f->block, 0, 2.5);
    *operation = "insert";
    (void)sr_insert(&f->writer, t, 1, &item, &key, &done, &seq);
    *operation = "sample";
    flip_sample(f, &f->reader, t);
    *operation = "update";
    (void)sr_update(&f->writer, t, 1, &f->key[t], &priority, &done);
    *operation = "contains";
    (void)sr_contains(&f->writer, t, f->key[t]);
    *operation = "delete";
    (void)sr_delete(&f->writer, t, 1, &f->key[t], &done);
    *operation = "list";
    flip_list(f, t);
    *operation = "pin";
    sr_sampled pinned;
    if (sr_pin(&f->reader, t, 1, &f->key[t], &pinned, &done) == SR_OK && done == 1) {
        flip_read(st, &pinned);
        (void)sr_release(&f->reader, 1, &pinned.position);
    }
    *operation = "replace";
    uint32_t schema;
    (void)sr_replace(&f->writer, t, f->key[t], SR_REF(f->traj.off, SR_KIND_TRAJ), 0, &done,
                     &schema);
    *operation = "events";
    if (sr_table_has_events(st, t)) {
        sr_sampled told[8];
        uint32_t kinds[8], items = 0, n = 0;
        (void)sr_events_take(&f->reader, t, 8, told, kinds, &items, &n);
        for (uint32_t i = 0; i < items; i++) {
            flip_read(st, &told[i]);
            (void)sr_release(&f->reader, 1, &told[i].position);
        }
        (void)sr_events_behind(st, t);
        (void)sr_events_unserve(st, t, st->hdr->creator_pid);
    }
    *operation = "info";
    (void)sr_table_get_info(st, t, &info);
    (void)sr_can_insert(st, t, 1);
    (void)sr_can_sample(st, t, 1);
    *operation = "check one";
    (void)sr_check(st, t, why, sizeof why);
    *operation = "evict";
    for (uint32_t i = 0; i < TABLE_MAX; i++) {
        (void)sr_insert(&f->writer, t, 1, &item, &key, &done, &seq);
    }
}

static inline void flip_writer(flip_store *f, const char **operation) {
    char cells[N_COLS][32] = {{0}};
    const void *src[N_COLS] = {cells[0], cells[1], cells[2]};
    held e, b, t = {0};
    uint32_t first[N_COLS + 1] = {0, 1, 2, 3}, flags[N_COLS] = {0};
    sr_run runs[N_COLS];
    *operation = "append";
    sr_block_append(&f->writer, f->block.off, N_COLS, ROW_TOTAL, src, f->episode.off);
    *operation = "episode";
    if (sr_episode_new(&f->writer, 5, &e.off, &e.position) != SR_OK) return;
    *operation = "append of another episode";
    sr_block_append(&f->writer, f->block.off, N_COLS, ROW_TOTAL, src, e.off);
    *operation = "block";
    if (sr_block_new(&f->writer, N_COLS, ROW_BYTES, 100, &b.off, &b.position) != SR_OK) return;
    sr_block_append(&f->writer, b.off, N_COLS, ROW_TOTAL, src, e.off);
    *operation = "trajectory";
    for (uint32_t c = 0; c < N_COLS; c++) {
        runs[c] = (sr_run){.block = c == 0 ? f->block.off : b.off, .col = c, .count = 1,
                           .stride = 1};
    }
    (void)sr_traj_new(&f->writer, N_COLS, first, flags, runs, &t.off, &t.position);
    *operation = "hold";
    (void)sr_hold(&f->writer, SR_REF(b.off, SR_KIND_BLOCK), &t.position);
    *operation = "release";
    const uint32_t positions[] = {f->pin[0].position, f->pin[1].position};
    (void)sr_release(&f->reader, 2, positions);
    *operation = "ledger";
    (void)sr_ledger_reserve(&f->writer, 60);
}

/* Rows that lie apart: held, packed, and made from what is stored. */
static inline void flip_apart(flip_store *f, const char **operation) {
    sr_store *st = &f->st;
    const held blocks[2] = {f->raw, f->packed};
    held b;
    uint64_t rows, bytes;
    uint32_t position;
    *operation = "rows held";
    for (uint32_t i = 0; i < 2; i++) {
        if (sr_rows_hold(&f->reader, blocks[i].off, &rows, &position) != SR_OK) continue;
        sr_rows_at at;
        char cell[64];
        for (uint32_t c = 0; c < N_COLS; c++) {
            if (sr_rows_find(st, blocks[i].off, rows, c, &at) != SR_OK) continue;
            (void)apart_cell(&at, 1, cell, sizeof cell);
        }
        if (position != SR_NONE) (void)sr_release(&f->reader, 1, &position);
    }
    *operation = "copy what is stored";
    const void *stored = sr_block_stored(st, f->packed.off, &bytes);
    void *copy = stored == NULL ? NULL : malloc(bytes);
    if (copy != NULL) memcpy(copy, stored, bytes);
    free(copy);
    *operation = "pack";
    (void)pack_try(&f->writer, f->raw, 2);
    *operation = "new apart";
    (void)apart_try(&f->writer, 5, 2, 4, f->episode, &b);
    *operation = "release packed";
    (void)sr_release(&f->writer, 1, &f->packed.position);
}

static inline void flip_sessions(flip_store *f, const char **operation) {
    sr_store *st = &f->st;
    sr_ses fresh;
    uint32_t id;
    uint64_t bytes;
    *operation = "session open";
    if (sr_session_open(st, SURVIVOR, SR_SESSION_CLIENT, &fresh) == SR_OK) {
        flip_sample(f, &fresh, 1);
        *operation = "session close";
        (void)sr_session_close(&fresh);
    }
    *operation = "participant set";
    (void)sr_participant_set(st, THIRD, 1, 1, 1, "more");
    *operation = "reclaim";
    (void)sr_participant_reclaim(st, ACTOR);
    *operation = "schema";
    (void)sr_schema_intern(st, "{\"a\": 1}", 8, &id);
    (void)sr_schema_intern(st, "{\"b\": 1}", 8, &id);
    const char *text = sr_schema_text(st, 0, &bytes);
    volatile char sum = 0;
    for (uint64_t i = 0; text != NULL && i < bytes; i++) sum = (char)(sum + text[i]);
}

/* Is the byte among those that an empty store has? */
static inline int flip_is_early(const flip_store *f) {
    for (uint32_t i = 0; i < f->empty.n; i++) {
        if (f->empty.page[i] == f->offset / SR_PAGE) return 1;
    }
    return 0;
}

/* What is restored is used as well. */
static inline int flip_fill_target(flip_store *f, flip_saved *from) {
    sr_store *st = &f->target;
    sr_ses ses;
    if (flip_restore(st, from) != SR_OK) return 0;
    if (sr_session_open(st, SURVIVOR, SR_SESSION_CLIENT, &ses) != SR_OK) return 0;
    for (uint32_t t = 0; t < FLIP_TABLES; t++) {
        sr_sampled s;
        uint32_t done = 0, seq;
        (void)sr_sample(&ses, t, 1, &s, &done, &seq);
        if (done == 1) flip_read(st, &s);
    }
    (void)sr_session_close(&ses);
    return 1;
}

static inline void flip_checkpoint(flip_store *f, const char **operation) {
    *operation = "save";
    int saved = flip_save(&f->st, f->saved);
    if (!f->held) (void)sr_hold_release(&f->st);
    *operation = "restore";
    if (saved && !saved_same(f->saved, f->good, f->st.shape.n_stripes)) {
        image_restore(&f->empty, &f->target);
        (void)flip_fill_target(f, f->saved);
    }
    saved_drop(f->saved);
    if (!flip_is_early(f)) return;
    *operation = "restore into a damaged store";
    image_restore(&f->empty, &f->target);
    f->target.base[f->offset] ^= f->pattern;
    (void)flip_fill_target(f, f->good);
}

/* `operation` follows what is being tried. */
static inline void flip_all(flip_store *f, const char **operation) {
    flip_own(&f->writer);
    flip_own(&f->reader);
    sr_store *st = &f->st, other = {.base = f->st.base, .bytes = f->st.bytes, .fd = f->st.fd};
    char why[128];
    sr_store_stats stats;
    *operation = "attach";
    if (sr_store_attach(&other) == SR_OK) {
        *operation = "stats";
        (void)sr_store_get_stats(&other, &stats);
    }
    sr_store_detach(&other);
    *operation = "read";
    flip_read(st, &f->pin[0]);
    flip_read(st, &f->pin[1]);
    flip_checkpoint(f, operation);
    for (uint32_t t = 0; t < FLIP_TABLES; t++) flip_table(f, t, operation);
    flip_writer(f, operation);
    flip_apart(f, operation);
    flip_sessions(f, operation);
    *operation = "check";
    (void)sr_check(st, SR_NONE, why, sizeof why);
    *operation = "committer";
    (void)sr_commit_ahead(st);
    *operation = "give back";
    (void)sr_give_back(st, SR_PAGE);
    *operation = "configure";
    const sr_table_change change = {.what = SR_SET_MAX_SIZE | SR_SET_MAX_TIMES_SAMPLED |
                                            SR_SET_LIMITER,
                                    .max_times_sampled = 5,
                                    .max_size = 2,
                                    .samples_per_insert = 2,
                                    .min_diff = -DBL_MAX,
                                    .max_diff = DBL_MAX,
                                    .min_size_to_sample = 1};
    for (uint32_t t = 0; t < FLIP_TABLES; t++) (void)sr_table_configure(&f->writer, t, &change);
    *operation = "reset";
    for (uint32_t t = 0; t < FLIP_TABLES; t++) (void)sr_reset(&f->reader, t);
    *operation = "end of a checkpoint";
    (void)sr_hold_ask_back(st);
    (void)sr_hold_release(st);
    *operation = "close";
    (void)sr_session_close(&f->writer);
    (void)sr_session_close(&f->reader);
    *operation = "participant clear";
    sr_participant_clear(st, SURVIVOR);
    *operation = "store close";
    sr_store_close(st);
}

#endif
