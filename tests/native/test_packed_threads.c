/* Rows that lie apart from their block are read while their writer packs them. */
#include "packed_fixture.h"

#include <pthread.h>

#define BLOCKS 400u
#define ROWS 10u

typedef struct {
    sr_store *st;
    _Atomic uint32_t done;
} shared;

static void *read_all(void *arg) {
    shared *s = arg;
    sr_ses ses = session_make(s->st);
    uint32_t last = 0;
    while (!last) {
        last = atomic_load(&s->done);
        sr_sampled item;
        uint32_t done, seq, position;
        uint64_t rows, first;
        if (sr_sample(&ses, 0, 1, &item, &done, &seq) != SR_OK) continue;
        uint64_t block = SR_REF_OFF(item.ref);
        CHECK(sr_rows_hold(&ses, block, &rows, &position) == SR_OK);
        sr_rows_at at;
        char cell[32];
        CHECK(sr_rows_find(s->st, block, rows, 0, &at) == SR_OK);
        CHECK(apart_cell(&at, 0, cell, sizeof cell));
        memcpy(&first, cell, sizeof first);
        apart_check(s->st, block, rows, first, item.row_start + 1);
        if (position != SR_NONE) CHECK(sr_release(&ses, 1, &position) == SR_OK);
        CHECK(sr_release(&ses, 1, &item.position) == SR_OK);
    }
    CHECK(sr_session_close(&ses) == SR_OK);
    return NULL;
}

static void test_readers(void) {
    sr_table_config cfg = table_config(SR_SEL_FIFO, SR_SEL_FIFO, 40, 2);
    sr_store st = store_make(8u << 20, 2, 1, &cfg);
    shared s = {.st = &st};
    sr_ses w = session_make(&st);
    pthread_t threads[2];
    for (uint32_t i = 0; i < 2; i++) CHECK(pthread_create(&threads[i], NULL, read_all, &s) == 0);
    for (uint32_t k = 0; k < BLOCKS; k++) {
        held e = episode_make(&w, k), b = apart_make(&w, 1000 * k, ROWS, e);
        uint64_t key;
        uint32_t done, seq;
        for (uint32_t r = 0; r < ROWS; r++) {
            sr_item item = row_item(b, r, 1.0);
            CHECK(sr_insert(&w, 0, 1, &item, &key, &done, &seq) == SR_OK);
        }
        CHECK(pack_try(&w, b, ROWS) == SR_OK);
        let_go(&w, b);
        let_go(&w, e);
    }
    atomic_store(&s.done, 1);
    for (uint32_t i = 0; i < 2; i++) CHECK(pthread_join(threads[i], NULL) == 0);
    check_store(&st);
    CHECK(sr_reset(&w, 0) == SR_OK && n_objects(&st) == 0);
    CHECK(sr_session_close(&w) == SR_OK);
    store_drop(&st);
}

int main(void) {
    test_readers();
    printf("test_packed_threads: ok\n");
    return 0;
}
