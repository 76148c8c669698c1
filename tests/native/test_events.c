/* What a table tells its extensions: every change, in order, with its data; room for it is there
 * before anything changes; and after any death the events and the table say the same. */
#include "events_fixture.h"

#include <signal.h>
#include <sys/wait.h>
#include <time.h>

#define CAPACITY (64ull << 20)
#define DEAD 2u /* participant of the processes that die */
#define MAX_SIZE 20u

static sr_table_config with_events(enum sr_selector sampler, enum sr_selector remover) {
    sr_table_config cfg = table_config(sampler, remover, MAX_SIZE, 1);
    cfg.n_events = RING;
    return cfg;
}

/* ---------------------------------------------------------------- one process */

static void test_order(void) {
    sr_table_config cfg = with_events(SR_SEL_FIFO, SR_SEL_FIFO);
    cfg.max_times_sampled = 2;
    sr_store st = store_make(CAPACITY, 1, 1, &cfg);
    sr_ses ses = session_make(&st);
    held e = episode_make(&ses, 1), b = block_make(&ses, 0, MAX_SIZE + 2, e);
    uint64_t keys[MAX_SIZE + 2];
    uint32_t done, seq;
    for (uint32_t r = 0; r < MAX_SIZE + 2; r++) {
        sr_item item = row_item(b, r, r);
        CHECK(sr_insert(&ses, 0, 1, &item, &keys[r], &done, &seq) == SR_OK);
    }
    double priority = 7.5;
    CHECK(sr_update(&ses, 0, 1, &keys[5], &priority, &done) == SR_OK && done == 1);
    CHECK(sr_update(&ses, 0, 1, &keys[0], &priority, &done) == SR_OK && done == 0);
    CHECK(sr_delete(&ses, 0, 2, keys + 3, &done) == SR_OK && done == 2);
    sr_sampled out[3];
    CHECK(sr_sample(&ses, 0, 3, out, &done, &seq) == SR_OK);
    for (uint32_t i = 0; i < 3; i++) CHECK(sr_release(&ses, 1, &out[i].position) == SR_OK);
    CHECK(sr_reset(&ses, 0) == SR_OK);
    check_store(&st);
    const uint32_t n_events = MAX_SIZE + 2 + 2 + 1 + 2 + 4 + 1;
    CHECK(info_of(&st, 0).events == n_events);
    sr_sampled items[64];
    uint32_t kinds[64], n_items, n;
    CHECK(sr_events_take(&ses, 0, 64, items, kinds, &n_items, &n) == SR_OK);
    CHECK(n == n_events && n_items == n - 1 && kinds[n - 1] == SR_EVENT_RESET);
    check_store(&st);
    for (uint32_t i = 0; i < MAX_SIZE; i++) CHECK(kinds[i] == SR_EVENT_INSERT);
    const uint32_t rest[] = {SR_EVENT_INSERT, SR_EVENT_DELETE, SR_EVENT_INSERT, SR_EVENT_DELETE,
                             SR_EVENT_UPDATE, SR_EVENT_DELETE, SR_EVENT_DELETE, SR_EVENT_SAMPLE,
                             SR_EVENT_SAMPLE, SR_EVENT_DELETE, SR_EVENT_SAMPLE};
    const uint32_t rows[] = {MAX_SIZE, 0, MAX_SIZE + 1, 1, 5, 3, 4, 2, 2, 2, 5};
    for (uint32_t i = 0; i < sizeof rest / sizeof *rest; i++) {
        const sr_sampled *item = &items[MAX_SIZE + i];
        CHECK(kinds[MAX_SIZE + i] == rest[i] && item->key == keys[rows[i]]);
        CHECK(item_check(&st, item) == rows[i]); /* though the table has let go of it */
    }
    CHECK(items[MAX_SIZE + 4].priority == 7.5 && items[MAX_SIZE + 10].priority == 7.5);
    CHECK(items[MAX_SIZE + 7].times_sampled == 1 && items[MAX_SIZE + 8].times_sampled == 2);
    for (uint32_t i = 0; i < n_items; i++) CHECK(sr_release(&ses, 1, &items[i].position) == SR_OK);
    let_go(&ses, b);
    let_go(&ses, e);
    check_store(&st);
    CHECK(n_objects(&st) == 0);
    CHECK(sr_session_close(&ses) == SR_OK);
    store_drop(&st);
}

/* What there is no room to tell of is refused, and changes nothing. */
static void test_full(void) {
    sr_table_config cfg = with_events(SR_SEL_UNIFORM, SR_SEL_FIFO);
    sr_store st = store_make(CAPACITY, 1, 1, &cfg);
    sr_ses ses = session_make(&st), reader = session_make(&st);
    held e = episode_make(&ses, 1), b = block_make(&ses, 0, 2 * RING, e);
    static sr_item items[2 * RING];
    static uint64_t keys[2 * RING];
    uint32_t done, seq, sampled;
    for (uint32_t r = 0; r < 2 * RING; r++) items[r] = row_item(b, r, 1);
    CHECK(sr_insert(&ses, 0, 2 * RING, items, keys, &done, &seq) == SR_WOULD_BLOCK);
    CHECK(ses.behind && done > RING / 4 && done < RING);
    sr_table_info full = info_of(&st, 0);
    CHECK(full.size == MAX_SIZE && full.events >= RING - 1 && full.events_capacity == RING);
    CHECK(full.events_dropped == 0 && sr_events_behind(&st, 0) == 1);
    check_store(&st);
    uint64_t here = keys[done - 1];
    sr_sampled out;
    double priority = 2;
    uint32_t some;
    const double many[2] = {2, 2};
    CHECK(sr_sample(&ses, 0, 1, &out, &sampled, &seq) == SR_WOULD_BLOCK && ses.behind);
    CHECK(sr_update(&ses, 0, 2, keys + done - 2, many, &some) == SR_WOULD_BLOCK && some == 0);
    CHECK(sr_delete(&ses, 0, 2, keys + done - 2, &some) == SR_WOULD_BLOCK && some == 0);
    while (info_of(&st, 0).events < RING) {
        CHECK(sr_update(&ses, 0, 1, &here, &priority, &some) == SR_OK && some == 1);
    }
    CHECK(sr_reset(&ses, 0) == SR_WOULD_BLOCK && ses.behind);
    CHECK(sr_contains(&ses, 0, here) == 1 && info_of(&st, 0).size == MAX_SIZE);
    CHECK(info_of(&st, 0).inserts == full.inserts && info_of(&st, 0).samples == 0);
    check_store(&st);
    /* Whoever waits is woken when there is room. */
    uint32_t before = atomic_load(&sr_table_at(&st, 0)->insert_seq);
    replica r = {0};
    CHECK(drain(&reader, 0, &r) == RING);
    CHECK(atomic_load(&sr_table_at(&st, 0)->insert_seq) != before && ses.room_seq == before);
    compare(&st, 0, &r);
    uint32_t more;
    CHECK(sr_insert(&ses, 0, 10, items + done, keys, &more, &seq) == SR_OK && !ses.behind);
    CHECK(sr_update(&ses, 0, SR_EVENTS_BATCH + 1, keys, NULL, &some) == SR_INVALID);
    CHECK(sr_delete(&ses, 0, SR_EVENTS_BATCH + 1, keys, &some) == SR_INVALID);
    CHECK(drain(&reader, 0, &r) == 20);
    compare(&st, 0, &r);
    CHECK(sr_reset(&ses, 0) == SR_OK && drain(&reader, 0, &r) == 1);
    let_go(&ses, b);
    let_go(&ses, e);
    check_store(&st);
    CHECK(n_objects(&st) == 0);
    CHECK(sr_session_close(&ses) == SR_OK && sr_session_close(&reader) == SR_OK);
    store_drop(&st);
}

/* Where nobody takes events they are dropped and counted; who comes to take them gets the rest. */
static void test_unserved(void) {
    sr_table_config cfg = with_events(SR_SEL_UNIFORM, SR_SEL_FIFO);
    sr_store st = store_make(CAPACITY, 1, 1, &cfg);
    sr_ses ses = session_make(&st);
    held e = episode_make(&ses, 1), b = block_make(&ses, 0, RING, e);
    static sr_item items[RING];
    static uint64_t keys[RING];
    uint32_t done, more, seq;
    for (uint32_t r = 0; r < RING; r++) items[r] = row_item(b, r, 1);
    CHECK(sr_insert(&ses, 0, RING, items, keys, &done, &seq) == SR_WOULD_BLOCK);
    /* Of a server that has a successor already: nothing. */
    CHECK(sr_events_unserve(&st, 0, st.hdr->creator_pid + 1) == SR_OK);
    CHECK(sr_events_behind(&st, 0) == 1);
    CHECK(sr_events_unserve(&st, 0, st.hdr->creator_pid) == SR_OK);
    CHECK(sr_events_behind(&st, 0) == 0);
    CHECK(sr_insert(&ses, 0, RING - done, items + done, keys + done, &more, &seq) == SR_OK);
    CHECK(sr_reset(&ses, 0) == SR_OK);
    sr_table_info info = info_of(&st, 0);
    CHECK(info.events_dropped == 2 * (RING - done) + 1);
    check_store(&st);
    replica r = {0};
    CHECK(drain(&ses, 0, &r) == info.events && r.inserts == done);
    CHECK(sr_insert(&ses, 0, 1, items, keys, &more, &seq) == SR_OK);
    r = (replica){0};
    CHECK(drain(&ses, 0, &r) == 1);
    compare(&st, 0, &r);
    CHECK(info_of(&st, 0).events_dropped == info.events_dropped);
    CHECK(sr_reset(&ses, 0) == SR_OK && drain(&ses, 0, &r) == 1);
    let_go(&ses, b);
    let_go(&ses, e);
    CHECK(n_objects(&st) == 0);
    CHECK(sr_session_close(&ses) == SR_OK);
    store_drop(&st);
}

/* A ring that is damaged is an error once; the repair puts it back. */
static void test_damage(void) {
    sr_table_config cfg[2] = {with_events(SR_SEL_UNIFORM, SR_SEL_FIFO),
                              with_events(SR_SEL_UNIFORM, SR_SEL_FIFO)};
    cfg[1].name[0] = 'o';
    sr_store st = store_make(CAPACITY, 1, 2, cfg);
    sr_ses ses = session_make(&st);
    held e = episode_make(&ses, 1), b = block_make(&ses, 0, 1, e);
    sr_item item = row_item(b, 0, 1);
    uint64_t key;
    uint32_t done, seq, kind, n, n_items;
    CHECK(sr_insert(&ses, 0, 1, &item, &key, &done, &seq) == SR_OK);
    sr_ring *ring = sr_ptr(&st, sr_table_at(&st, 0)->events_off);
    sr_event *event = (sr_event *)(ring + 1);
    sr_sampled taken;
    char why[160];
    event->ref += 4096;
    CHECK(sr_events_take(&ses, 0, 1, &taken, &kind, &n_items, &n) == SR_CORRUPT && n == 0);
    CHECK(sr_check(&st, SR_NONE, why, sizeof why) == SR_CORRUPT && strstr(why, "event") != NULL);
    event->ref -= 4096;
    event->number++;
    CHECK(sr_check(&st, 0, why, sizeof why) == SR_CORRUPT && strstr(why, "missing") != NULL);
    event->number--;
    check_store(&st);
    ring->capacity = 1;
    CHECK(sr_insert(&ses, 0, 1, &item, &key, &done, &seq) == SR_CORRUPT && done == 0);
    CHECK(sr_insert(&ses, 1, 1, &item, &key, &done, &seq) == SR_OK); /* repairs */
    CHECK(ring->capacity == RING);
    check_store(&st);
    ring->promised = RING + 1;
    CHECK(sr_sample(&ses, 0, 1, &taken, &done, &seq) == SR_CORRUPT && done == 0);
    CHECK(sr_sample(&ses, 0, 1, &taken, &done, &seq) == SR_OK && ring->promised == 0);
    check_store(&st);
    CHECK(sr_session_close(&ses) == SR_OK);
    store_drop(&st);
}

/* ---------------------------------------------------------------- processes that die */

static void wait_for(pid_t pid) {
    int status;
    CHECK(waitpid(pid, &status, 0) == pid && WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
}

/* Everything an actor does, until it is killed. */
static void act(sr_store *st, uint64_t seed) {
    sr_ses ses;
    if (sr_session_open(st, DEAD, SR_SESSION_WRITER, &ses) != SR_OK) _exit(3);
    for (uint64_t row = 0;; row++) {
        held e = episode_make(&ses, row), b = block_make(&ses, row, 3, e);
        uint64_t keys[3];
        uint32_t done, at = 0, seq, some;
        sr_item items[3];
        for (uint32_t r = 0; r < 3; r++) items[r] = row_item(b, r, (double)(r + row % 5));
        uint32_t table = (uint32_t)(row % st->shape.n_tables);
        while (sr_insert(&ses, table, 3 - at, items + at, keys + at, &done, &seq) != SR_OK) {
            at += done;
            sr_wait_insert(st, table, seq, 100);
        }
        sr_sampled out[4];
        (void)sr_sample(&ses, table, 4, out, &done, &seq);
        uint32_t positions[4];
        for (uint32_t i = 0; i < done; i++) positions[i] = out[i].position;
        CHECK(sr_release(&ses, done, positions) == SR_OK);
        double priority = (double)(sr_splitmix64(&seed) % 9);
        (void)sr_update(&ses, table, 1, &keys[1], &priority, &some);
        if (row % 3 == 0) (void)sr_delete(&ses, table, 2, keys, &some);
        if (row % 50 == 49) (void)sr_reset(&ses, table);
        let_go(&ses, b);
        let_go(&ses, e);
    }
}

static int64_t now_ns(void) {
    struct timespec ts;
    CHECK(clock_gettime(CLOCK_MONOTONIC, &ts) == 0);
    return (int64_t)ts.tv_sec * 1000000000 + ts.tv_nsec;
}

static void test_dead_producers(void) {
    sr_table_config cfg[3] = {with_events(SR_SEL_PRIORITIZED, SR_SEL_FIFO),
                              with_events(SR_SEL_MAX_HEAP, SR_SEL_MIN_HEAP),
                              with_events(SR_SEL_FIFO, SR_SEL_FIFO)};
    for (uint32_t i = 0; i < 3; i++) cfg[i].name[0] = (char)('a' + i);
    cfg[1].max_times_sampled = 2;
    cfg[2].max_times_sampled = 1;
    sr_store st = store_make(CAPACITY, 2, 3, cfg);
    sr_ses ses = session_make(&st);
    static replica r[3];
    uint64_t seed = 5;
    for (int kills = 0; kills < 300; kills++) {
        CHECK(sr_participant_set(&st, DEAD, 1, 1, 1, "dies") == SR_OK);
        uint64_t child_seed = sr_splitmix64(&seed);
        int64_t end = now_ns() + 200000 + (int64_t)(sr_splitmix64(&seed) % 1000000);
        pid_t pid = fork();
        CHECK(pid >= 0);
        if (pid == 0) act(&st, child_seed);
        /* The instant of its death is to be any; odd ones have nobody to take their events. */
        while (now_ns() < end) {
            for (uint32_t i = 0; i < 3 && kills % 2 == 0; i++) drain(&ses, i, &r[i]);
        }
        CHECK(kill(pid, SIGKILL) == 0);
        wait_for(pid);
        CHECK(sr_participant_reclaim(&st, DEAD) >= 0);
        check_store(&st);
        for (uint32_t i = 0; i < 3; i++) {
            drain(&ses, i, &r[i]);
            compare(&st, i, &r[i]);
            CHECK(info_of(&st, i).size <= MAX_SIZE && info_of(&st, i).events_dropped == 0);
        }
        check_store(&st);
    }
    for (uint32_t i = 0; i < 3; i++) {
        CHECK(sr_reset(&ses, i) == SR_OK && drain(&ses, i, &r[i]) == 1);
    }
    check_store(&st);
    CHECK(n_objects(&st) == 0);
    fprintf(stderr, "%llu repairs\n", (unsigned long long)atomic_load(&st.hdr->repairs));
    CHECK(sr_session_close(&ses) == SR_OK);
    store_drop(&st);
}

/* Whoever takes events dies: those that it had taken are lost, and nothing else. */
static void test_dead_consumer(void) {
    sr_table_config cfg = with_events(SR_SEL_UNIFORM, SR_SEL_FIFO);
    sr_store st = store_make(CAPACITY, 1, 1, &cfg);
    sr_ses ses = session_make(&st);
    held e = episode_make(&ses, 1), b = block_make(&ses, 0, 10, e);
    sr_item items[10];
    uint64_t keys[10];
    uint32_t done, seq;
    for (uint32_t r = 0; r < 10; r++) items[r] = row_item(b, r, 1);
    CHECK(sr_insert(&ses, 0, 10, items, keys, &done, &seq) == SR_OK);
    CHECK(sr_participant_set(&st, DEAD, 1, 1, 1, "dies") == SR_OK);
    pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        sr_ses taker;
        sr_sampled taken[4];
        uint32_t kinds[4], n_items, n;
        if (sr_session_open(&st, DEAD, SR_SESSION_CLIENT, &taker) != SR_OK) _exit(3);
        if (sr_events_take(&taker, 0, 4, taken, kinds, &n_items, &n) != SR_OK) _exit(4);
        kill(getpid(), SIGKILL);
    }
    wait_for(pid);
    check_store(&st);
    CHECK(sr_participant_reclaim(&st, DEAD) == 1);
    check_store(&st);
    sr_sampled item;
    uint32_t kind, n_items, n;
    for (uint32_t row = 4; row < 10; row++) {
        CHECK(sr_events_take(&ses, 0, 1, &item, &kind, &n_items, &n) == SR_OK && n == 1);
        CHECK(kind == SR_EVENT_INSERT && item.key == keys[row] && item_check(&st, &item) == row);
        CHECK(sr_release(&ses, 1, &item.position) == SR_OK);
    }
    CHECK(sr_events_take(&ses, 0, 1, &item, &kind, &n_items, &n) == SR_OK && n == 0);
    CHECK(sr_session_close(&ses) == SR_OK);
    store_drop(&st);
}

/* Dies under the stripe's lock with one event staged, before what it tells of or after it. */
static void die_between(sr_store *st, enum sr_event_kind kind, int after, held other) {
    sr_table *t = sr_table_at(st, 0);
    sr_stripe *s = sr_stripe_at(st, t, 0);
    sr_slot *p = sr_slot_at(st, s, 0);
    if (kind == SR_EVENT_RESET ? sr_lock_table(st, t) : sr_lock(st, &s->lock)) _exit(3);
    uint64_t ref = p->ref;
    if (kind == SR_EVENT_INSERT) {
        p = sr_slot_at(st, s, (uint32_t)s->slots_used++);
        *p = (sr_slot){.key = sr_slot_at(st, s, 0)->key + 1, /* the slot after it */
                       .row_count = 1 | SR_COL_SQUEEZED,
                       .priority = 5,
                       .seq = 1,
                       .touch = 1};
        ref = SR_REF(other.off, SR_KIND_BLOCK);
        sr_events_stage_item(st, t, kind, p, ref);
        if (after) p->ref = ref;
    }
    if (kind == SR_EVENT_DELETE || kind == SR_EVENT_SAMPLE) {
        p->times_sampled += kind == SR_EVENT_SAMPLE;
        if (kind == SR_EVENT_SAMPLE) sr_events_stage_item(st, t, kind, p, ref);
        sr_events_stage_item(st, t, SR_EVENT_DELETE, p, ref);
        if (after) p->ref = 0;
    }
    if (kind == SR_EVENT_UPDATE) {
        sr_events_stage_update(st, t, p, 6);
        if (after) p->priority = 6;
    }
    if (kind == SR_EVENT_RESET) {
        sr_events_stage_reset(st, t);
        if (after) t->resetting = 1;
    }
    kill(getpid(), SIGKILL);
}

/* The change is there with its event, or neither is. */
static void test_dead_between(void) {
    for (uint32_t kind = SR_EVENT_INSERT; kind <= SR_EVENT_RESET; kind++) {
        for (int after = 0; after <= 1; after++) {
            sr_table_config cfg = with_events(SR_SEL_FIFO, SR_SEL_FIFO);
            cfg.max_times_sampled = 2;
            sr_store st = store_make(CAPACITY, 1, 1, &cfg);
            sr_ses ses = session_make(&st);
            held e = episode_make(&ses, 1), b = block_make(&ses, 0, 1, e);
            sr_item item = row_item(b, 0, 1);
            uint64_t key;
            uint32_t done, seq;
            CHECK(sr_insert(&ses, 0, 1, &item, &key, &done, &seq) == SR_OK);
            pid_t pid = fork();
            CHECK(pid >= 0);
            if (pid == 0) die_between(&st, kind, after, b);
            wait_for(pid);
            check_store(&st);
            static replica r;
            r = (replica){0};
            uint32_t n = drain(&ses, 0, &r);
            compare(&st, 0, &r);
            /* An update that had begun is done; a draw is reported with its item's end. */
            uint32_t whole = kind == SR_EVENT_SAMPLE ? 2 : 1;
            CHECK(n == 1 + (after || kind == SR_EVENT_UPDATE ? whole : 0));
            CHECK(kind != SR_EVENT_UPDATE || r.list[0].priority == 6);
            /* Nothing of it is taken for another one's. */
            CHECK(sr_insert(&ses, 0, 1, &item, &key, &done, &seq) == SR_OK);
            CHECK(sr_delete(&ses, 0, 1, &key, &done) == SR_OK && done == 1);
            CHECK(drain(&ses, 0, &r) == 2);
            compare(&st, 0, &r);
            CHECK(sr_reset(&ses, 0) == SR_OK && drain(&ses, 0, &r) == 1);
            let_go(&ses, b);
            let_go(&ses, e);
            check_store(&st);
            CHECK(n_objects(&st) == 0);
            CHECK(sr_session_close(&ses) == SR_OK);
            store_drop(&st);
        }
    }
}

int main(void) {
    test_order();
    test_full();
    test_unserved();
    test_damage();
    test_dead_between();
    test_dead_producers();
    test_dead_consumer();
    printf("test_events: ok\n");
    return 0;
}
