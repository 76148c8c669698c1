/* test_table_limits.c: the limits of a table and of a store: rate limiters against their formulas,
 * memory that runs out, ledgers that grow, trajectories and what is refused of them. After an error
 * nothing is changed. */
#include "table_fixture.h"

#define CAPACITY (1u << 20)

/* Up to the last member: what comes after it is padding. */
#define INFO_BYTES (offsetof(sr_table_info, poisoned) + sizeof(uint32_t))

/* A snapshot of all that a refused call must leave as it was. */
typedef struct {
    sr_table_info info;
    uint64_t allocs, used;
    uint32_t ledger_used;
} snapshot;

static snapshot look(sr_store *st, const sr_ses *ses) {
    sr_store_stats s;
    CHECK(sr_store_get_stats(st, &s) == SR_OK);
    snapshot now = {info_of(st, 0), s.arena_allocs, s.arena_used, ses->shared->ledger_used};
    return now;
}

static void check_unchanged(sr_store *st, const sr_ses *ses, const snapshot *before) {
    snapshot now = look(st, ses);
    CHECK(memcmp(&now.info, &before->info, INFO_BYTES) == 0);
    CHECK(now.allocs == before->allocs && now.used == before->used);
    CHECK(now.ledger_used == before->ledger_used);
    check_store(st);
}

/* n items of one block, put in as far as the limiter lets them. */
static uint32_t insert_rows(sr_ses *ses, uint32_t n, int expected) {
    sr_item items[8];
    uint64_t keys[8];
    uint32_t done = 0, seq = 0;
    held episode = episode_make(ses, 1), block = block_make(ses, 100, n, episode);
    for (uint32_t i = 0; i < n; i++) items[i] = row_item(block, i, 1);
    int rc = sr_insert(ses, 0, n, items, keys, &done, &seq);
    CHECK(done == n ? rc == SR_OK : rc == expected);
    if (rc == SR_WOULD_BLOCK) sr_wait_insert(ses->st, 0, seq - 1, 100); /* changed: no wait */
    let_go(ses, block);
    let_go(ses, episode);
    return done;
}

static uint32_t sample_rows(sr_ses *ses, uint32_t n) {
    sr_sampled out[8];
    uint32_t done = 0, seq = 0;
    int rc = sr_sample(ses, 0, n, out, &done, &seq);
    CHECK(done == n ? rc == SR_OK : rc == SR_WOULD_BLOCK);
    if (rc == SR_WOULD_BLOCK) sr_wait_sample(ses->st, 0, seq - 1, 100);
    for (uint32_t i = 0; i < done; i++) CHECK(sr_release(ses, 1, &out[i].position) == SR_OK);
    return done;
}

/* ---------------------------------------------------------------- rate limiters */

typedef struct {
    sr_table_config cfg;
    int64_t inserts, samples, deletes;
} limiter;

static int may_insert(const limiter *l, int64_t n) {
    if (l->inserts - l->deletes + n <= l->cfg.min_size_to_sample) return 1;
    return (double)(l->inserts + n) * l->cfg.samples_per_insert - (double)l->samples <=
           l->cfg.max_diff;
}

static int may_sample(const limiter *l, int64_t n) {
    return l->inserts - l->deletes >= l->cfg.min_size_to_sample &&
           (double)l->inserts * l->cfg.samples_per_insert - (double)(l->samples + n) >=
               l->cfg.min_diff;
}

static void limiter_step(limiter *l, sr_ses *ses, uint64_t *rng) {
    uint32_t n = 1 + (uint32_t)sr_random_below(rng, 6), expected = 0;
    if (sr_random_below(rng, 2) == 0) {
        for (; expected < n && may_insert(l, 1); expected++) {
            l->inserts++;
            l->deletes += l->inserts - l->deletes > l->cfg.max_size;
        }
        CHECK(insert_rows(ses, n, SR_WOULD_BLOCK) == expected);
        return;
    }
    for (; expected < n && may_sample(l, 1); expected++) {
        l->samples++;
        l->deletes += l->cfg.max_times_sampled == 1;
    }
    CHECK(sample_rows(ses, n) == expected);
}

static void test_limiter(sr_table_config cfg, double spi, int64_t min_size, double min_diff,
                         double max_diff) {
    cfg.samples_per_insert = spi;
    cfg.min_size_to_sample = min_size;
    cfg.min_diff = min_diff;
    cfg.max_diff = max_diff;
    limiter l = {.cfg = cfg};
    sr_store st = store_make(CAPACITY, 1, 1, &cfg);
    sr_ses ses = session_make(&st);
    uint64_t rng = 3;
    int64_t refused = 0;
    for (uint32_t step = 0; step < 600; step++) {
        limiter_step(&l, &ses, &rng);
        for (int64_t n = 1; n < 6; n++) {
            CHECK(sr_can_insert(&st, 0, n) == may_insert(&l, n));
            CHECK(sr_can_sample(&st, 0, n) == may_sample(&l, n));
            refused += !may_insert(&l, n) + !may_sample(&l, n);
        }
        sr_table_info info = info_of(&st, 0);
        CHECK(info.inserts == l.inserts && info.samples == l.samples);
        CHECK(info.deletes == l.deletes && info.size == l.inserts - l.deletes);
        if (step % 50 == 0) check_store(&st);
        if (step % 200 != 199) continue;
        CHECK(sr_reset(&ses, 0) == SR_OK);
        l.inserts = l.samples = l.deletes = 0;
    }
    CHECK(refused > 0);
    CHECK(sr_session_close(&ses) == SR_OK);
    store_drop(&st);
}

static void test_limiters(void) {
    sr_table_config plain = table_config(SR_SEL_UNIFORM, SR_SEL_FIFO, 9, 1);
    sr_table_config striped = table_config(SR_SEL_UNIFORM, SR_SEL_FIFO, 9, 2);
    sr_table_config queue = table_config(SR_SEL_FIFO, SR_SEL_FIFO, 4, 1);
    sr_table_config stack = table_config(SR_SEL_LIFO, SR_SEL_LIFO, 4, 1);
    queue.max_times_sampled = stack.max_times_sampled = 1;
    test_limiter(plain, 1, 3, -DBL_MAX, DBL_MAX);
    test_limiter(striped, 2.5, 4, 7, 13);
    test_limiter(plain, 0.25, 2, 0.5 - 0.75, 0.5 + 0.75);
    test_limiter(plain, 0.1, 5, 0.5 - 1.1, 0.5 + 1.1); /* 0.1 is not exact */
    test_limiter(plain, 2, 6, 0, 5); /* the first six come in whatever the difference */
    test_limiter(queue, 1, 1, 0, 4);
    test_limiter(stack, 1, 1, 0, 4);
}

/* ---------------------------------------------------------------- memory runs out */

/* Blocks until the store is full, then some room, then on. */
static void test_full_blocks(void) {
    sr_table_config cfg = table_config(SR_SEL_UNIFORM, SR_SEL_FIFO, 1000000, 1);
    static held blocks[CAPACITY / 1024];
    sr_store st = store_make(CAPACITY, 2, 1, &cfg);
    sr_ses ses = session_make(&st);
    held episode = episode_make(&ses, 1), refused;
    uint32_t n = 0, room;
    int rc;
    CHECK(insert_rows(&ses, 4, SR_OK) == 4);
    /* The ledger is a part of it: its growth may be what is refused. */
    while ((rc = block_try(&ses, n, 60, episode, &blocks[n])) == SR_OK) n++;
    CHECK(rc == SR_FULL && n > 100);
    CHECK(sr_last_detail()->asked > 0 && sr_last_detail()->available < CAPACITY);
    snapshot full = look(&st, &ses);
    CHECK(block_try(&ses, n, 60, episode, &refused) == SR_FULL);
    check_unchanged(&st, &ses, &full);
    CHECK(sample_rows(&ses, 8) == 8); /* what is there stays usable */
    for (room = 0; room < 10; room++) let_go(&ses, blocks[--n]);
    for (; room > 0; room--, n++) blocks[n] = block_make(&ses, n, 60, episode);
    while (n > 0) let_go(&ses, blocks[--n]);
    let_go(&ses, episode);
    CHECK(sr_reset(&ses, 0) == SR_OK && n_objects(&st) == 0);
    CHECK(sr_session_close(&ses) == SR_OK && n_objects(&st) == 0);
    check_store(&st);
    store_drop(&st);
}

/* Slots until the store is full: what was let in before is there, the rest not at all. */
static void test_full_slots(void) {
    sr_table_config cfg = table_config(SR_SEL_PRIORITIZED, SR_SEL_UNIFORM, 1000000, 1);
    sr_store st = store_make(CAPACITY, 1, 1, &cfg);
    sr_ses ses = session_make(&st);
    held episode = episode_make(&ses, 1), block = block_make(&ses, 0, 64, episode);
    int64_t before = 0;
    for (int round = 0; round < 2; round++) {
        sr_item items[64];
        uint64_t keys[64];
        uint32_t done = 64, seq = 0;
        int64_t total = 0;
        int rc = SR_OK;
        for (uint32_t i = 0; i < 64; i++) items[i] = row_item(block, i, i);
        while (rc == SR_OK) {
            rc = sr_insert(&ses, 0, 64, items, keys, &done, &seq);
            total += done;
        }
        CHECK(rc == SR_FULL && total > 4096 && done < 64);
        for (uint32_t i = 0; i < done; i++) CHECK(sr_contains(&ses, 0, keys[i]) == 1);
        snapshot full = look(&st, &ses);
        CHECK(full.info.inserts == total && full.info.size == total && full.info.pending == 0);
        CHECK(sr_insert(&ses, 0, 64, items, keys, &done, &seq) == SR_FULL && done == 0);
        check_unchanged(&st, &ses, &full);
        CHECK(round == 0 || total == before); /* the same room again */
        before = total;
        CHECK(sr_reset(&ses, 0) == SR_OK);
    }
    let_go(&ses, block);
    let_go(&ses, episode);
    CHECK(sr_session_close(&ses) == SR_OK && n_objects(&st) == 0);
    store_drop(&st);
}

/* A ledger that cannot grow: nothing is drawn, nothing reserved. One that can keeps its entries. */
static void test_ledger(void) {
    sr_table_config cfg = table_config(SR_SEL_UNIFORM, SR_SEL_FIFO, 100, 2);
    static sr_sampled out[20000];
    static uint32_t positions[20000];
    sr_store st = store_make(CAPACITY, 1, 1, &cfg);
    sr_ses ses = session_make(&st);
    uint32_t done = 0, seq = 0, cap = ses.shared->ledger_cap;
    CHECK(insert_rows(&ses, 8, SR_OK) == 8);
    snapshot before = look(&st, &ses);
    CHECK(sr_sample(&ses, 0, 2000000, out, &done, &seq) == SR_FULL && done == 0);
    check_unchanged(&st, &ses, &before);
    CHECK(ses.shared->ledger_cap == cap);
    for (uint32_t n = 1; n < 20000; n *= 3) {
        CHECK(sr_sample(&ses, 0, n, out, &done, &seq) == SR_OK && done == n);
        CHECK(ses.shared->ledger_used == n);
        check_store(&st); /* counts each pin */
        for (uint32_t i = 0; i < n; i++) positions[i] = out[n - 1 - i].position;
        CHECK(sr_release(&ses, n, positions) == SR_OK && ses.shared->ledger_used == 0);
        CHECK(sr_release(&ses, n, positions) == SR_INVALID); /* given back already */
    }
    CHECK(ses.shared->ledger_cap > cap);
    CHECK(sr_session_close(&ses) == SR_OK && sr_session_open(&st, 1, SR_SESSION_CLIENT, &ses) == 0);
    CHECK(ses.shared->ledger_cap == cap);
    CHECK(sr_session_close(&ses) == SR_OK);
    store_drop(&st);
}

/* ---------------------------------------------------------------- trajectories */

/* The columns of a trajectory over two blocks: forwards over the seam, every third row backwards,
 * and one row alone. */
static void test_trajectory(void) {
    sr_table_config cfg = table_config(SR_SEL_FIFO, SR_SEL_FIFO, 10, 1);
    sr_store st = store_make(CAPACITY, 2, 1, &cfg);
    sr_ses ses = session_make(&st), reader = session_make(&st);
    held e1 = episode_make(&ses, 1), e2 = episode_make(&ses, 2), t;
    held a = block_make(&ses, 0, 10, e1), b = block_make(&ses, 10, 10, e2);
    sr_run runs[] = {{a.off, 0, 8, 2, 1}, {b.off, 0, 0, 2, 1}, {b.off, 1, 9, 4, -3},
                     {a.off, 2, 5, 1, 1}};
    const uint32_t first_run[] = {0, 2, 3, 4}, flags[] = {0, 0, SR_COL_SQUEEZED};
    const uint64_t rows[3][4] = {{8, 9, 10, 11}, {19, 16, 13, 10}, {5}};
    CHECK(sr_traj_new(&ses, 3, first_run, flags, runs, &t.off, &t.position) == SR_OK);
    sr_item item = {.ref = SR_REF(t.off, SR_KIND_TRAJ), .priority = 1};
    uint64_t key;
    uint32_t done, seq, bad = 7;
    CHECK(sr_insert(&ses, 0, 1, &item, &key, &done, &seq) == SR_OK);
    CHECK(info_of(&st, 0).num_episodes == 2);
    let_go(&ses, t);
    let_go(&ses, a); /* the item keeps them */
    let_go(&ses, b);
    let_go(&ses, e1);
    let_go(&ses, e2);
    check_store(&st);
    sr_sampled s;
    char c0[4 * 8], c1[4 * 20], c2[3];
    char *dst[] = {c0, c1, c2};
    uint64_t bytes[] = {sizeof c0, sizeof c1, sizeof c2};
    CHECK(sr_sample(&reader, 0, 1, &s, &done, &seq) == SR_OK);
    CHECK(sr_reset(&ses, 0) == SR_OK); /* now the pin alone keeps them */
    CHECK(sr_gather(&st, 1, &s, 3, dst, bytes, &bad) == SR_OK && bad == 7);
    for (uint32_t i = 0; i < 4; i++) cell_check(c0 + 8 * i, rows[0][i], 0);
    for (uint32_t i = 0; i < 4; i++) cell_check(c1 + 20 * i, rows[1][i], 1);
    cell_check(c2, rows[2][0], 2);
    CHECK(sr_item_view(&st, &s, 0) == NULL && sr_item_view(&st, &s, 1) == NULL);
    CHECK(memcmp(sr_item_view(&st, &s, 2), c2, 3) == 0 && sr_item_view(&st, &s, 3) == NULL);
    bytes[1]--;
    CHECK(sr_gather(&st, 1, &s, 3, dst, bytes, &bad) == SR_INVALID && bad == 0);
    CHECK(sr_gather(&st, 1, &s, 2, dst, bytes, &bad) == SR_INVALID);
    CHECK(sr_release(&reader, 1, &s.position) == SR_OK);
    CHECK(n_objects(&st) == 0);
    check_store(&st);
    store_drop(&st);
    free(ses.free_stack);
    free(reader.free_stack);
}

static void test_bad_trajectories(void) {
    sr_table_config cfg = table_config(SR_SEL_FIFO, SR_SEL_FIFO, 10, 1);
    sr_store st = store_make(CAPACITY, 1, 1, &cfg);
    sr_ses ses = session_make(&st);
    held e = episode_make(&ses, 1), t, part;
    held a = block_make(&ses, 0, 10, e);
    CHECK(sr_block_new(&ses, N_COLS, ROW_BYTES, 10, &part.off, &part.position) == SR_OK);
    sr_block_publish(&ses, part.off, 3, e.off);
    const sr_run bad[] = {{a.off, 3, 0, 1, 1},     {a.off, 0, 10, 1, 1},   {a.off, 0, 0, 11, 1},
                          {a.off, 0, 0, 0, 1},     {a.off, 0, 5, 7, -1},   {a.off, 0, 5, 3, 3},
                          {part.off, 0, 3, 1, 1},  {e.off, 0, 0, 1, 1},    {0, 0, 0, 1, 1},
                          {st.bytes, 0, 0, 1, 1},  {UINT64_MAX, 0, 0, 1, 1}};
    const uint32_t first_run[] = {0, 1, 2}, none[] = {0, 0}, flags[] = {0, 0};
    snapshot before = look(&st, &ses);
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        sr_run runs[] = {{part.off, 0, 0, 3, 1}, bad[i]}; /* the first one is good */
        CHECK(sr_traj_new(&ses, 2, first_run, flags, runs, &t.off, &t.position) == SR_INVALID);
        check_unchanged(&st, &ses, &before);
    }
    CHECK(sr_traj_new(&ses, 1, none, flags, bad, &t.off, &t.position) == SR_INVALID);
    CHECK(sr_traj_new(&ses, 0, none, flags, bad, &t.off, &t.position) == SR_INVALID);
    const uint64_t huge[] = {1ull << 45, 8};
    CHECK(sr_block_new(&ses, 2, huge, 1000, &t.off, &t.position) == SR_INVALID);
    CHECK(sr_block_new(&ses, 2, huge, 1, &t.off, &t.position) == SR_FULL);
    CHECK(sr_block_new(&ses, 0, huge, 1, &t.off, &t.position) == SR_INVALID);
    CHECK(sr_block_new(&ses, SR_COLUMNS_MAX + 1, huge, 1, &t.off, &t.position) == SR_INVALID);
    check_unchanged(&st, &ses, &before);
    CHECK(sr_session_close(&ses) == SR_OK && n_objects(&st) == 0); /* all that it held */
    store_drop(&st);
}

/* ---------------------------------------------------------------- what an insert may wait for */

static void test_brief(void) {
    sr_table_config cfg = table_config(SR_SEL_UNIFORM, SR_SEL_FIFO, 2, 1);
    sr_store st = store_make(CAPACITY, 1, 1, &cfg);
    sr_ses ses = session_make(&st);
    sr_table *t = sr_table_at(&st, 0);
    sr_stripe *s = sr_stripe_at(&st, t, 0);
    CHECK(!sr_insert_is_brief(&ses, 0) && !sr_insert_is_brief(&ses, 1)); /* slots to be made */
    CHECK(insert_rows(&ses, 3, SR_OK) == 3);
    CHECK(sr_insert_is_brief(&ses, 0));
    CHECK(sr_lock_stripe(&st, t, s) == SR_OK && !sr_insert_is_brief(&ses, 0));
    sr_unlock(&s->lock);
    CHECK(sr_lock(&st, &t->limiter_lock) == SR_OK && !sr_insert_is_brief(&ses, 0));
    sr_unlock(&t->limiter_lock);
    CHECK(sr_insert_is_brief(&ses, 0));
    _Atomic uint32_t *words[] = {&t->sample_waiters, &t->insert_waiters, &t->count_bytes,
                                 &st.hdr->dirty};
    for (uint32_t i = 0; i < sizeof words / sizeof *words; i++) {
        uint32_t before = atomic_exchange(words[i], 1);
        CHECK(!sr_insert_is_brief(&ses, 0));
        atomic_store(words[i], before);
    }
    CHECK(insert_rows(&ses, 1, SR_OK) == 1 && sr_insert_is_brief(&ses, 0));
    check_store(&st);
    CHECK(sr_session_close(&ses) == SR_OK && n_objects(&st) == 4); /* blocks and episodes */
    store_drop(&st);

    cfg.max_diff = 4; /* its limiter may refuse */
    st = store_make(CAPACITY, 1, 1, &cfg);
    ses = session_make(&st);
    CHECK(insert_rows(&ses, 3, SR_WOULD_BLOCK) == 3 && !sr_insert_is_brief(&ses, 0));
    CHECK(sr_session_close(&ses) == SR_OK);
    store_drop(&st);
}

int main(void) {
    test_brief();
    test_limiters();
    test_full_blocks();
    test_full_slots();
    test_ledger();
    test_trajectory();
    test_bad_trajectories();
    printf("test_table_limits: ok\n");
    return 0;
}
