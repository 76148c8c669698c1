/* Rows that lie apart from their block: raw, packed, and whoever packs them killed. */
#include "packed_fixture.h"

#include <signal.h>
#include <sys/wait.h>
#include <time.h>

#define CAPACITY (8u << 20)
#define DEAD 2u
#define ROWS 10u

static sr_store make(void) {
    sr_table_config cfg = table_config(SR_SEL_FIFO, SR_SEL_FIFO, 40, 2);
    return store_make(CAPACITY, 2, 1, &cfg);
}

static uint64_t sums(sr_store *st, uint64_t *raw) {
    sr_store_stats s;
    CHECK(sr_store_get_stats(st, &s) == SR_OK);
    *raw = s.packed_raw;
    return s.packed_stored;
}

static void insert(sr_ses *ses, held b, uint32_t row, uint64_t *key) {
    sr_item item = row_item(b, row, 1.0);
    uint32_t done, seq;
    CHECK(sr_insert(ses, 0, 1, &item, key, &done, &seq) == SR_OK);
}

static void test_life(void) {
    sr_store st = make();
    sr_ses w = session_make(&st), r = session_make(&st);
    held e = episode_make(&w, 1), b;
    uint64_t key, raw, rows, bytes;
    uint32_t pin, done, position, again;
    CHECK(apart_try(&w, 50, ROWS - 1, ROWS, e, &b) == SR_OK);
    CHECK(n_objects(&st) == 3); /* episode, block, its rows */
    insert(&w, b, 4, &key);
    sr_sampled item;
    CHECK(sr_pin(&r, 0, 1, &key, &item, &done) == SR_OK && done == 1);
    pin = item.position;
    /* Copies only: the rows may move. */
    char cells[N_COLS][32];
    char *dst[N_COLS] = {cells[0], cells[1], cells[2]};
    CHECK(sr_item_view(&st, &item, 1) == NULL);
    CHECK(sr_gather(&st, 1, &item, N_COLS, dst, ROW_BYTES, &done) == SR_ELSEWHERE);
    uint32_t flags;
    sr_run run;
    CHECK(sr_item_column(&st, &item, 1, &flags, &raw) == SR_OK && raw == ROW_BYTES[1]);
    CHECK(sr_item_run(&st, &item, 1, 0, &run) == 1 && run.block == b.off && run.start == 4);
    CHECK(sr_item_run(&st, &item, 1, 1, &run) == 0);
    CHECK(sr_rows_hold(&r, b.off, &rows, &position) == SR_OK && position != SR_NONE);
    apart_check(&st, b.off, rows, 50, ROWS - 1);
    check_store(&st);
    CHECK(pack_try(&w, b, ROWS - 1) == SR_OK);
    check_store(&st);
    CHECK(n_objects(&st) == 4); /* whoever reads the raw rows keeps them */
    apart_check(&st, b.off, rows, 50, ROWS - 1);
    CHECK(sr_release(&r, 1, &position) == SR_OK && n_objects(&st) == 3);
    CHECK(sr_rows_hold(&r, b.off, &rows, &again) == SR_OK && again == SR_NONE);
    apart_check(&st, b.off, rows, 50, ROWS - 1);
    /* No more rows, and no second time. */
    const void *src[N_COLS] = {cells[0], cells[1], cells[2]};
    CHECK(sr_block_append(&w, b.off, N_COLS, ROW_TOTAL, src, e.off) == SR_CORRUPT);
    CHECK(sr_block_cell(&st, b.off, 0, 0, 1, ROW_BYTES[0]) == NULL);
    CHECK(pack_try(&w, b, ROWS - 1) == SR_CORRUPT);
    uint64_t stored = sums(&st, &raw);
    CHECK(raw == ROW_TOTAL * (ROWS - 1) && sr_block_stored(&st, b.off, &bytes) != NULL);
    CHECK(bytes == stored);
    let_go(&w, b);
    let_go(&w, e);
    CHECK(sr_delete(&w, 0, 1, &key, &done) == SR_OK && n_objects(&st) == 3);
    CHECK(sr_release(&r, 1, &pin) == SR_OK && n_objects(&st) == 0);
    CHECK(sums(&st, &raw) == 0 && raw == 0);
    CHECK(sr_session_close(&r) == SR_OK && sr_session_close(&w) == SR_OK);
    check_store(&st);
    store_drop(&st);
}

/* Where there is no room the rows stay raw, and nothing is lost. */
static void test_full(void) {
    sr_store st = make();
    sr_ses w = session_make(&st);
    held e = episode_make(&w, 1), b = apart_make(&w, 5, ROWS, e), rest;
    for (uint32_t rows = 200000; rows > 0; rows = rows * 3 / 4) {
        while (sr_block_new(&w, N_COLS, ROW_BYTES, rows, &rest.off, &rest.position) == SR_OK) {}
    }
    uint64_t n = n_objects(&st);
    CHECK(pack_try(&w, b, ROWS) == SR_FULL && n_objects(&st) == n);
    CHECK(apart_try(&w, 5, ROWS, ROWS, e, &rest) == SR_FULL && n_objects(&st) == n);
    apart_check(&st, b.off, sr_block_rows_ref(&st, b.off), 5, ROWS);
    check_store(&st);
    CHECK(sr_session_close(&w) == SR_OK && n_objects(&st) == 0);
    store_drop(&st);
}

static void test_differences(void) {
    unsigned char rows[5 * 7], other[5 * 7];
    for (uint32_t i = 0; i < sizeof rows; i++) rows[i] = (unsigned char)(i * i);
    sr_xor_rows(other, rows, 7, 5);
    CHECK(memcmp(other, rows, 7) == 0 && other[7] == (rows[7] ^ rows[0]));
    sr_unxor_rows(other, 7, 5);
    CHECK(memcmp(other, rows, sizeof rows) == 0);
}

/* ---------------------------------------------------------------- killed at random */

static void act(sr_store *st) {
    sr_ses w, r;
    if (sr_session_open(st, DEAD, SR_SESSION_WRITER, &w) != SR_OK) _exit(3);
    if (sr_session_open(st, DEAD, SR_SESSION_SAMPLER, &r) != SR_OK) _exit(3);
    for (uint64_t row = 0;; row += 1000) {
        held e = episode_make(&w, row), b = apart_make(&w, row, ROWS, e);
        uint64_t key, rows;
        uint32_t position;
        insert(&w, b, 3, &key);
        CHECK(sr_rows_hold(&r, b.off, &rows, &position) == SR_OK);
        CHECK(pack_try(&w, b, ROWS) == SR_OK);
        apart_check(st, b.off, rows, row, ROWS);
        if (row % 2000 == 0) CHECK(sr_release(&r, 1, &position) == SR_OK);
        let_go(&w, b);
        let_go(&w, e);
    }
}

/* Each item that is there has whole rows. */
static void read_items(sr_store *st, sr_ses *ses) {
    sr_sampled out[40];
    uint32_t done, seq, position;
    if (info_of(st, 0).size == 0) return;
    CHECK(sr_sample(ses, 0, 40, out, &done, &seq) == SR_OK);
    for (uint32_t i = 0; i < done; i++) {
        uint64_t rows, first;
        char cell[32];
        sr_rows_at at;
        uint64_t block = SR_REF_OFF(out[i].ref);
        CHECK(sr_rows_hold(ses, block, &rows, &position) == SR_OK);
        CHECK(sr_rows_find(st, block, rows, 0, &at) == SR_OK);
        CHECK(apart_cell(&at, 0, cell, sizeof cell));
        memcpy(&first, cell, sizeof first);
        apart_check(st, block, rows, first, ROWS);
        if (position != SR_NONE) CHECK(sr_release(ses, 1, &position) == SR_OK);
        CHECK(sr_release(ses, 1, &out[i].position) == SR_OK);
    }
}

static void test_kills(void) {
    sr_store st = make();
    sr_ses ses = session_make(&st);
    uint64_t seed = 3, raw;
    for (int kills = 0; kills < 150; kills++) {
        CHECK(sr_participant_set(&st, DEAD, 1, 1, 1, "dies") == SR_OK);
        long nanoseconds = (long)(200000 + sr_splitmix64(&seed) % 1000000);
        pid_t pid = fork();
        CHECK(pid >= 0);
        if (pid == 0) act(&st);
        struct timespec pause = {.tv_nsec = nanoseconds};
        nanosleep(&pause, NULL); /* the instant of its death is to be any */
        CHECK(kill(pid, SIGKILL) == 0 && waitpid(pid, NULL, 0) == pid);
        CHECK(sr_participant_reclaim(&st, DEAD) >= 0);
        check_store(&st);
        read_items(&st, &ses);
    }
    fprintf(stderr, "%llu repairs\n", (unsigned long long)atomic_load(&st.hdr->repairs));
    CHECK(sr_reset(&ses, 0) == SR_OK);
    check_store(&st);
    CHECK(n_objects(&st) == 0 && sums(&st, &raw) == 0 && raw == 0);
    CHECK(sr_session_close(&ses) == SR_OK);
    store_drop(&st);
}

int main(void) {
    test_life();
    test_full();
    test_differences();
    test_kills();
    printf("test_packed: ok\n");
    return 0;
}
