/* test_table_threads.c: threads on one small table that insert, sample, update, delete and reset at
 * once, with eviction all the time. What is pinned stays whole; at the end every count is exact and
 * every reference given back. And a queue: each item is delivered once, nobody sleeps for ever. */
#include "table_fixture.h"

#include <pthread.h>

#define THREADS 4u
#define ROUNDS 1500u
#define PINS 12u

typedef struct {
    sr_store *st;
    uint32_t number;
    uint64_t rng, rows, inserted, sampled, updated;
    uint64_t own[8]; /* keys */
} worker;

static _Atomic int running;

/* Up to four rows: of one block, or the end of one block and the beginning of the next. */
static void insert_something(worker *w, sr_ses *ses) {
    uint64_t first = (uint64_t)w->number << 32 | w->rows, key;
    uint32_t done = 0, seq = 0;
    double priority = (double)sr_random_below(&w->rng, 4);
    held e = episode_make(ses, first), a = block_make(ses, first, 2, e), b = {0, 0}, t = {0, 0};
    sr_item item = {.ref = SR_REF(a.off, SR_KIND_BLOCK), .row_count = 2, .priority = priority};
    int two = sr_random_below(&w->rng, 2) == 0;
    if (two) {
        b = block_make(ses, first + 2, 2, e);
        sr_run runs[2 * N_COLS];
        uint32_t first_run[N_COLS + 1], flags[N_COLS] = {0};
        for (uint32_t c = 0; c < N_COLS; c++) {
            first_run[c] = 2 * c;
            runs[2 * c] = (sr_run){a.off, c, 1, 1, 1};
            runs[2 * c + 1] = (sr_run){b.off, c, 0, 2, 1};
        }
        first_run[N_COLS] = 2 * N_COLS;
        CHECK(sr_traj_new(ses, N_COLS, first_run, flags, runs, &t.off, &t.position) == SR_OK);
        item = (sr_item){.ref = SR_REF(t.off, SR_KIND_TRAJ), .priority = priority};
    }
    CHECK(sr_insert(ses, 0, 1, &item, &key, &done, &seq) == SR_OK && done == 1);
    if (two) {
        const uint32_t positions[] = {t.position, b.position};
        CHECK(sr_release(ses, 2, positions) == SR_OK);
    }
    let_go(ses, a);
    let_go(ses, e);
    w->rows += 4;
    w->own[w->inserted++ % 8] = key;
}

typedef struct {
    sr_sampled item[PINS];
    uint64_t row[PINS];
    uint32_t n;
} pins;

static void sample_something(worker *w, sr_ses *ses, pins *p) {
    uint32_t n = 1 + (uint32_t)sr_random_below(&w->rng, 4), done = 0, seq = 0;
    while (p->n + n > PINS) {
        uint32_t i = (uint32_t)sr_random_below(&w->rng, p->n);
        CHECK(item_check(w->st, &p->item[i]) == p->row[i]); /* as it was when it was drawn */
        CHECK(sr_release(ses, 1, &p->item[i].position) == SR_OK);
        p->n--;
        p->item[i] = p->item[p->n];
        p->row[i] = p->row[p->n];
    }
    int rc = sr_sample(ses, 0, n, &p->item[p->n], &done, &seq);
    CHECK(done == n ? rc == SR_OK : rc == SR_WOULD_BLOCK);
    for (uint32_t i = p->n; i < p->n + done; i++) {
        p->row[i] = item_check(w->st, &p->item[i]);
        CHECK(p->item[i].probability > 0 && p->item[i].table_size > 0);
    }
    p->n += done;
    w->sampled += done;
    if (rc == SR_WOULD_BLOCK) sr_wait_sample(w->st, 0, seq, 1);
}

static void change_something(worker *w, sr_ses *ses, const pins *p) {
    uint64_t keys[4];
    double priorities[4];
    uint32_t n = p->n < 4 ? p->n : 4, found = 0;
    for (uint32_t i = 0; i < n; i++) {
        keys[i] = p->item[i].key;
        priorities[i] = (double)sr_random_below(&w->rng, 4);
    }
    CHECK(sr_update(ses, 0, n, keys, priorities, &found) == SR_OK && found <= n);
    w->updated += found;
    if (sr_random_below(&w->rng, 3) == 0) {
        CHECK(sr_delete(ses, 0, 2, &w->own[sr_random_below(&w->rng, 7)], &found) == SR_OK);
    }
}

static void *work(void *arg) {
    worker *w = arg;
    sr_ses ses = session_make(w->st);
    static _Thread_local pins p;
    p.n = 0;
    for (uint32_t round = 0; round < ROUNDS; round++) {
        uint64_t what = sr_random_below(&w->rng, 10);
        if (what < 4) insert_something(w, &ses);
        else if (what < 8) sample_something(w, &ses, &p);
        else change_something(w, &ses, &p);
        if (w->number == 0 && round % 15 == 14) CHECK(sr_reset(&ses, 0) == SR_OK);
        if (w->number == 1 && round % 20 == 0) check_store(w->st);
    }
    for (; p.n > 0; p.n--) {
        CHECK(item_check(w->st, &p.item[p.n - 1]) == p.row[p.n - 1]);
        CHECK(sr_release(&ses, 1, &p.item[p.n - 1].position) == SR_OK);
    }
    CHECK(sr_session_close(&ses) == SR_OK);
    return NULL;
}

/* What a server's thread does. */
static void *commit(void *arg) {
    while (atomic_load(&running) != 0) CHECK(sr_committer_step(arg) >= 0);
    return NULL;
}

static void test_table(sr_table_config cfg) {
    sr_store st = store_make(16u << 20, 2, 1, &cfg);
    static worker w[THREADS];
    pthread_t threads[THREADS], committer;
    atomic_store(&running, 1);
    CHECK(pthread_create(&committer, NULL, commit, &st) == 0);
    for (uint32_t i = 0; i < THREADS; i++) {
        w[i] = (worker){.st = &st, .number = i, .rng = i + 1};
        CHECK(pthread_create(&threads[i], NULL, work, &w[i]) == 0);
    }
    uint64_t sampled = 0, updated = 0;
    for (uint32_t i = 0; i < THREADS; i++) {
        CHECK(pthread_join(threads[i], NULL) == 0);
        sampled += w[i].sampled;
        updated += w[i].updated;
    }
    atomic_store(&running, 0);
    CHECK(pthread_join(committer, NULL) == 0);
    CHECK(sampled > ROUNDS / 4 && (updated > 0 || cfg.max_times_sampled > 0));
    check_store(&st);
    sr_ses ses = session_make(&st);
    sr_table_info info = info_of(&st, 0);
    CHECK(info.size <= cfg.max_size && info.size == info.inserts - info.deletes);
    CHECK(sr_reset(&ses, 0) == SR_OK && sr_session_close(&ses) == SR_OK);
    CHECK(n_objects(&st) == 0);
    check_store(&st);
    store_drop(&st);
}

/* ---------------------------------------------------------------- a queue */

#define DELIVERED 1000u /* a thread */
static _Atomic uint32_t deliveries[2][DELIVERED];

static void *produce(void *arg) {
    worker *w = arg;
    sr_ses ses = session_make(w->st);
    for (uint32_t i = 0; i < DELIVERED; i++) {
        held e = episode_make(&ses, i), b = block_make(&ses, (uint64_t)w->number << 32 | i, 1, e);
        sr_item item = row_item(b, 0, 1);
        uint64_t key;
        uint32_t done, seq;
        while (sr_insert(&ses, 0, 1, &item, &key, &done, &seq) != SR_OK) {
            sr_wait_insert(w->st, 0, seq, 100);
        }
        let_go(&ses, b);
        let_go(&ses, e);
    }
    CHECK(sr_session_close(&ses) == SR_OK);
    return NULL;
}

static void *consume(void *arg) {
    worker *w = arg;
    sr_ses ses = session_make(w->st);
    sr_sampled s[3];
    for (uint32_t left = DELIVERED; left > 0;) {
        uint32_t done, seq, n = left < 3 ? left : 3;
        int rc = sr_sample(&ses, 0, n, s, &done, &seq);
        for (uint32_t i = 0; i < done; i++) {
            uint64_t row = item_check(w->st, &s[i]);
            CHECK(atomic_fetch_add(&deliveries[row >> 32][row & 0xffffffffu], 1) == 0);
            CHECK(sr_release(&ses, 1, &s[i].position) == SR_OK);
        }
        left -= done;
        if (rc == SR_WOULD_BLOCK) sr_wait_sample(w->st, 0, seq, 100);
    }
    CHECK(sr_session_close(&ses) == SR_OK);
    return NULL;
}

static void test_queue(void) {
    sr_table_config cfg = table_config(SR_SEL_FIFO, SR_SEL_FIFO, 3, 1);
    cfg.min_diff = 0;
    cfg.max_diff = 3;
    cfg.max_times_sampled = 1;
    sr_store st = store_make(4u << 20, 2, 1, &cfg);
    worker w[4];
    pthread_t threads[4];
    for (uint32_t i = 0; i < 4; i++) {
        w[i] = (worker){.st = &st, .number = i % 2};
        CHECK(pthread_create(&threads[i], NULL, i < 2 ? produce : consume, &w[i]) == 0);
    }
    for (uint32_t i = 0; i < 4; i++) CHECK(pthread_join(threads[i], NULL) == 0);
    for (uint32_t i = 0; i < 2 * DELIVERED; i++) {
        CHECK(atomic_load(&deliveries[i / DELIVERED][i % DELIVERED]) == 1);
    }
    sr_table_info info = info_of(&st, 0);
    CHECK(info.size == 0 && info.inserts == 2 * DELIVERED && info.samples == 2 * DELIVERED);
    CHECK(info.sample_waiters == 0 && info.insert_waiters == 0);
    CHECK(n_objects(&st) == 0);
    check_store(&st);
    store_drop(&st);
}

int main(void) {
    test_table(table_config(SR_SEL_UNIFORM, SR_SEL_FIFO, 8, 1));
    test_table(table_config(SR_SEL_UNIFORM, SR_SEL_FIFO, 8, 2));
    test_table(table_config(SR_SEL_PRIORITIZED, SR_SEL_PRIORITIZED, 8, 2));
    test_table(table_config(SR_SEL_MIN_HEAP, SR_SEL_LIFO, 8, 1));
    sr_table_config consumed = table_config(SR_SEL_UNIFORM, SR_SEL_UNIFORM, 8, 2);
    consumed.max_times_sampled = 2;
    test_table(consumed);
    test_queue();
    printf("test_table_threads: ok\n");
    return 0;
}
