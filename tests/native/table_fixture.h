/* table_fixture.h: stores, sessions and rows for the tests of tables. A row's bytes follow from its
 * number, so that whoever reads a row can tell whether it is whole. */
#ifndef SR_TABLE_FIXTURE_H
#define SR_TABLE_FIXTURE_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <float.h>
#include <sys/mman.h>
#include <unistd.h>

#include "arena.h"
#include "check.h"
#include "ledger.h"
#include "lock.h"
#include "table.h"

#define N_COLS 3u
static const uint64_t ROW_BYTES[N_COLS] = {8, 20, 3};
#define ROW_TOTAL 31u

/* A table that lets everything in and out: a limiter that only asks for one item. */
static inline sr_table_config table_config(enum sr_selector sampler, enum sr_selector remover,
                                           int64_t max_size, uint32_t stripes) {
    return (sr_table_config){.name = "t",
                             .sampler_kind = sampler,
                             .remover_kind = remover,
                             .sampler_exponent = 0.7,
                             .remover_exponent = 0.7,
                             .max_size = max_size,
                             .n_stripes = stripes,
                             .samples_per_insert = 1,
                             .min_diff = -DBL_MAX,
                             .max_diff = DBL_MAX,
                             .min_size_to_sample = 1,
                             .seed = 11};
}

static inline sr_store store_make(uint64_t capacity, uint32_t n_arenas, uint32_t n_tables,
                                  const sr_table_config *tables) {
    sr_store_config cfg = {.capacity_bytes = capacity,
                           .generation = 7,
                           .config_bytes = 2,
                           .n_arenas = n_arenas,
                           .n_participants = 4,
                           .n_sessions = 8,
                           .n_tables = n_tables};
    sr_store st = {.bytes = sr_store_bytes(&cfg, tables), .fd = memfd_create("table", MFD_CLOEXEC)};
    CHECK(st.fd >= 0 && ftruncate(st.fd, (off_t)st.bytes) == 0);
    st.base = mmap(NULL, st.bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, st.fd, 0);
    CHECK(st.base != MAP_FAILED);
    CHECK(sr_store_format(&st, &cfg, tables, "{}") == SR_OK);
    return st;
}

static inline void store_drop(sr_store *st) {
    sr_store_detach(st);
    CHECK(munmap(st->base, st->bytes) == 0);
    CHECK(close(st->fd) == 0);
}

static inline void check_store(sr_store *st) {
    char why[256];
    if (sr_check(st, SR_NONE, why, sizeof why) != SR_OK) {
        fprintf(stderr, "sr_check: %s\n", why);
        exit(1);
    }
}

/* Allocations: blocks, trajectories, episodes, schemas; not the ledgers of open sessions. */
static inline uint64_t n_objects(sr_store *st) {
    sr_store_stats s;
    CHECK(sr_store_get_stats(st, &s) == SR_OK);
    const sr_session *ses = sr_ptr(st, st->shape.sessions_off);
    for (uint32_t i = 0; i < st->shape.n_sessions; i++) {
        uint64_t ledger = ses[i].ledger_off;
        if (ledger != 0 && ledger != sr_own_ledger(st, &ses[i])) s.arena_allocs--;
    }
    return s.arena_allocs;
}

static inline sr_table_info info_of(sr_store *st, uint32_t table) {
    sr_table_info info;
    CHECK(sr_table_get_info(st, table, &info) == SR_OK);
    return info;
}

static inline sr_ses session_make(sr_store *st) {
    sr_ses ses;
    CHECK(sr_session_open(st, 1, SR_SESSION_CLIENT, &ses) == SR_OK);
    return ses;
}

/* ---------------------------------------------------------------- rows */

static inline void cell_fill(char *cell, uint64_t row, uint32_t col) {
    uint64_t state = row * 1000003 + col;
    if (col == 0) {
        memcpy(cell, &row, 8);
        return;
    }
    for (uint64_t i = 0; i < ROW_BYTES[col]; i++) cell[i] = (char)sr_splitmix64(&state);
}

static inline void cell_check(const char *cell, uint64_t row, uint32_t col) {
    char expected[32];
    cell_fill(expected, row, col);
    CHECK(memcmp(cell, expected, ROW_BYTES[col]) == 0);
}

typedef struct {
    uint64_t off;
    uint32_t position;
} held;

/* A block of rows first, first + 1, ..., published as rows of the episode. The status, or SR_OK. */
static inline int block_try(sr_ses *ses, uint64_t first, uint32_t rows, held episode, held *out) {
    int rc = sr_block_new(ses, N_COLS, ROW_BYTES, rows, &out->off, &out->position);
    if (rc != SR_OK) return rc;
    for (uint32_t r = 0; r < rows; r++) {
        for (uint32_t c = 0; c < N_COLS; c++) {
            cell_fill(sr_block_cell(ses->st, out->off, c, r, 1, ROW_BYTES[c]), first + r, c);
        }
    }
    sr_block_publish(ses, out->off, rows, episode.off);
    return SR_OK;
}

static inline held block_make(sr_ses *ses, uint64_t first, uint32_t rows, held episode) {
    held b;
    CHECK(block_try(ses, first, rows, episode, &b) == SR_OK);
    return b;
}

static inline held episode_make(sr_ses *ses, uint64_t id) {
    held e;
    CHECK(sr_episode_new(ses, id, &e.off, &e.position) == SR_OK);
    return e;
}

static inline void let_go(sr_ses *ses, held h) { CHECK(sr_release(ses, 1, &h.position) == SR_OK); }

/* Row r of the block as an item without a time dimension. */
static inline sr_item row_item(held block, uint32_t r, double priority) {
    return (sr_item){.ref = SR_REF(block.off, SR_KIND_BLOCK),
                     .row_start = r,
                     .row_count = 1 | SR_COL_SQUEEZED,
                     .priority = priority};
}

/* A pinned item of N_COLS columns of consecutive rows: copied out, whole, and as it was written.
 * Gives its first row's number. */
static inline uint64_t item_check(const sr_store *st, const sr_sampled *item) {
    char copy[N_COLS][32 * 8];
    char *dst[N_COLS];
    uint64_t bytes[N_COLS], first;
    uint32_t bad = 0, length = 0;
    CHECK(sr_item_columns(st, item) == N_COLS);
    for (uint32_t c = 0; c < N_COLS; c++) {
        uint32_t flags;
        uint64_t row;
        CHECK(sr_item_column(st, item, c, &flags, &row) == SR_OK);
        CHECK(row == ROW_BYTES[c] && (c == 0 || SR_COL_LENGTH(flags) == length));
        length = SR_COL_LENGTH(flags);
        bytes[c] = row * length;
        dst[c] = copy[c];
        CHECK(bytes[c] <= sizeof copy[c]);
    }
    CHECK(sr_gather(st, 1, item, N_COLS, dst, bytes, &bad) == SR_OK);
    memcpy(&first, copy[0], 8);
    for (uint32_t c = 0; c < N_COLS; c++) {
        for (uint32_t r = 0; r < length; r++) cell_check(copy[c] + r * ROW_BYTES[c], first + r, c);
        const char *view = sr_item_view(st, item, c);
        CHECK(view == NULL || memcmp(view, copy[c], bytes[c]) == 0);
    }
    return first;
}

#endif
