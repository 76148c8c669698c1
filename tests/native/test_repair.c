/* A process dies inside a lock, or at any instant: whoever comes next repairs the store and goes
 * on, with every item that was there, and nothing leaked. */
#include "table_fixture.h"

#include "steps.h"
#include "stripe.h"

#include <signal.h>
#include <sys/wait.h>
#include <time.h>

#define CAPACITY (64ull << 20)
#define DEAD 2u /* participant of the processes that die */

static void wait_for(pid_t pid) {
    int status;
    CHECK(waitpid(pid, &status, 0) == pid && WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
}

/* ---------------------------------------------------------------- one lock after the other */

typedef sr_mutex *(*pick)(sr_store *st);

static sr_mutex *limiter(sr_store *st) { return &sr_table_at(st, 0)->limiter_lock; }
static sr_mutex *stripe(sr_store *st) { return &sr_stripe_at(st, sr_table_at(st, 0), 0)->lock; }
static sr_mutex *session(sr_store *st) { return sr_session_lock(st, 0); }
static sr_mutex *schemas(sr_store *st) { return &st->hdr->schema_lock; }
static sr_mutex *arena(sr_store *st) { return &sr_arena_at(st, 0)->lock; }

/* What the dead one may leave behind under each lock: nonsense in everything that is derived. */
static void scribble(sr_store *st, sr_mutex *held) {
    sr_table *t = sr_table_at(st, 0);
    sr_stripe *s = sr_stripe_at(st, t, 0);
    sr_arena *a = sr_arena_at(st, 0);
    if (held == limiter(st)) t->pending = 77;
    if (held == stripe(st)) {
        s->free_head = 12345;
        s->index[0].count += 3;
        s->index[0].head = 9;
        t->num_episodes = 99;
        sr_store_double(&t->max_priority_bits, 0.5);
        sr_slot *slot = sr_slot_at(st, s, 0);
        sr_block *b = sr_ptr(st, SR_REF_OFF(slot->ref));
        b->refs += 5;
    }
    if (held == arena(st)) {
        memset(a->head, 0x5a, sizeof a->head);
        memset(a->sl_bitmap, 0xff, sizeof a->sl_bitmap);
        a->used_bytes = 1;
        st->hdr->committed_bytes += 1 << 20;
    }
}

static void test_each_lock(void) {
    const pick locks[] = {limiter, stripe, session, schemas, arena};
    for (size_t i = 0; i < sizeof locks / sizeof *locks; i++) {
        sr_table_config cfg = table_config(SR_SEL_PRIORITIZED, SR_SEL_FIFO, 100, 2);
        sr_store st = store_make(CAPACITY, 2, 1, &cfg);
        sr_ses ses = session_make(&st);
        held e = episode_make(&ses, 1), b = block_make(&ses, 0, 5, e);
        uint64_t keys[5];
        uint32_t done, seq, id;
        for (uint32_t r = 0; r < 5; r++) {
            sr_item item = row_item(b, r, 1.0 + r);
            CHECK(sr_insert(&ses, 0, 1, &item, &keys[r], &done, &seq) == SR_OK);
        }
        uint64_t committed = atomic_load(&st.hdr->committed_bytes);
        pid_t pid = fork();
        CHECK(pid >= 0);
        if (pid == 0) {
            sr_mutex *m = locks[i](&st);
            if (sr_lock(&st, m) == SR_OK) scribble(&st, m);
            kill(getpid(), SIGKILL);
        }
        wait_for(pid);
        check_store(&st);
        CHECK(atomic_load(&st.hdr->repairs) == 1 && atomic_load(&st.hdr->dirty) == 0);
        CHECK(atomic_load(&st.hdr->committed_bytes) == committed);
        sr_table_info info = info_of(&st, 0);
        CHECK(info.size == 5 && info.inserts == 5 && info.deletes == 0 && info.num_episodes == 1);
        CHECK(info.max_priority == 5.0);
        for (uint32_t r = 0; r < 5; r++) CHECK(sr_contains(&ses, 0, keys[r]) == 1);
        CHECK(sr_schema_intern(&st, "{}", 2, &id) == SR_OK);
        sr_sampled out;
        CHECK(sr_sample(&ses, 0, 1, &out, &done, &seq) == SR_OK && item_check(&st, &out) < 5);
        CHECK(sr_release(&ses, 1, &out.position) == SR_OK);
        CHECK(sr_delete(&ses, 0, 5, keys, &done) == SR_OK && done == 5);
        let_go(&ses, b);
        let_go(&ses, e);
        check_store(&st);
        CHECK(n_objects(&st) == 1); /* the schema */
        CHECK(sr_session_close(&ses) == SR_OK);
        store_drop(&st);
    }
}

/* An item that refers to nothing: its table is shut, the other one goes on. */
static void test_poison(void) {
    sr_table_config cfg[2] = {table_config(SR_SEL_UNIFORM, SR_SEL_FIFO, 100, 1),
                              table_config(SR_SEL_UNIFORM, SR_SEL_FIFO, 100, 1)};
    cfg[1].name[0] = 'o';
    sr_store st = store_make(CAPACITY, 1, 2, cfg);
    sr_ses ses = session_make(&st);
    held e = episode_make(&ses, 1), b = block_make(&ses, 0, 5, e);
    sr_item item = row_item(b, 0, 1);
    uint64_t key, other;
    uint32_t done, seq;
    CHECK(sr_insert(&ses, 0, 1, &item, &key, &done, &seq) == SR_OK);
    CHECK(sr_insert(&ses, 1, 1, &item, &other, &done, &seq) == SR_OK);
    pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        if (sr_lock(&st, stripe(&st)) == SR_OK) {
            sr_slot *slot = sr_slot_at(&st, sr_stripe_at(&st, sr_table_at(&st, 0), 0), 0);
            slot->ref += 4096;
        }
        kill(getpid(), SIGKILL);
    }
    wait_for(pid);
    CHECK(sr_insert(&ses, 0, 1, &item, &key, &done, &seq) == SR_CORRUPT);
    CHECK(info_of(&st, 0).poisoned == SR_POISON_ITEM && info_of(&st, 1).poisoned == SR_SOUND);
    CHECK(sr_insert(&ses, 0, 1, &item, &key, &done, &seq) == SR_CORRUPT && done == 0);
    CHECK(sr_can_sample(&st, 0, 1) == SR_CORRUPT);
    char why[128];
    CHECK(sr_check(&st, 0, why, sizeof why) == SR_CORRUPT && strstr(why, "poisoned") != NULL);
    CHECK(sr_check(&st, 1, why, sizeof why) == SR_OK && sr_contains(&ses, 1, other) == 1);
    CHECK(sr_insert(&ses, 1, 1, &item, &other, &done, &seq) == SR_OK);
    CHECK(sr_session_close(&ses) == SR_OK);
    store_drop(&st);
}

/* ---------------------------------------------------------------- other data for an item */

/* Rows r and after of a block as a trajectory, held. */
static held traj_make(sr_ses *ses, held block, uint32_t r, uint32_t count) {
    sr_run runs[N_COLS];
    uint32_t first[N_COLS + 1], flags[N_COLS] = {0};
    for (uint32_t c = 0; c <= N_COLS; c++) first[c] = c;
    for (uint32_t c = 0; c < N_COLS; c++) {
        runs[c] = (sr_run){.block = block.off, .col = c, .start = r, .count = count, .stride = 1};
        if (count == 1) flags[c] = SR_COL_SQUEEZED;
    }
    held t;
    CHECK(sr_traj_new(ses, N_COLS, first, flags, runs, &t.off, &t.position) == SR_OK);
    return t;
}

/* The steps of sr_stripe_replace up to the place of death: 0 the new data are counted, 1 and
 * published, 2 and the old ones are out of the episodes, 3 and dropped. */
static void die_replacing(sr_store *st, sr_ses *ses, held b, int place) {
    held t = traj_make(ses, b, 0, 1);
    sr_table *table = sr_table_at(st, 0);
    sr_stripe *s = sr_stripe_at(st, table, 0);
    if (sr_lock(st, &s->lock) != SR_OK) _exit(3);
    sr_slot *p = sr_slot_at(st, s, 0);
    uint64_t ref = SR_REF(t.off, SR_KIND_TRAJ), old = p->ref;
    sr_ref_retain(st, ref);
    if (place >= 0) sr_episodes_enter(st, table, 0, ref, 0, 0);
    if (place >= 1) atomic_store(&p->ref, ref);
    if (place >= 2) sr_episodes_leave(st, table, 0, old, p->row_start, p->row_count, 1);
    if (place >= 3 && sr_ref_drop(st, old) != SR_OK) _exit(3);
    kill(getpid(), SIGKILL);
}

static void test_replacing(void) {
    for (int place = -1; place <= 3; place++) {
        sr_table_config cfg = table_config(SR_SEL_FIFO, SR_SEL_FIFO, 100, 1);
        sr_store st = store_make(CAPACITY, 2, 1, &cfg);
        sr_ses ses = session_make(&st);
        held e = episode_make(&ses, 1), b = block_make(&ses, 0, 2, e);
        sr_item item = row_item(b, 1, 4.0);
        uint64_t key;
        uint32_t done, seq, found, schema = 0;
        CHECK(sr_insert(&ses, 0, 1, &item, &key, &done, &seq) == SR_OK);
        let_go(&ses, b);
        let_go(&ses, e);
        CHECK(sr_participant_set(&st, DEAD, 1, 1, 1, "dies") == SR_OK);
        pid_t pid = fork();
        CHECK(pid >= 0);
        if (pid == 0) {
            sr_ses mine;
            if (sr_session_open(&st, DEAD, SR_SESSION_WRITER, &mine) != SR_OK) _exit(3);
            held other = episode_make(&mine, 2);
            die_replacing(&st, &mine, block_make(&mine, 70, 1, other), place);
        }
        wait_for(pid);
        CHECK(sr_participant_reclaim(&st, DEAD) == 1);
        check_store(&st);
        CHECK(atomic_load(&st.hdr->repairs) == 1 && info_of(&st, 0).num_episodes == 1);
        sr_sampled out;
        CHECK(sr_sample(&ses, 0, 1, &out, &done, &seq) == SR_OK && out.key == key);
        CHECK(item_check(&st, &out) == (place >= 1 ? 70 : 1) && out.priority == 4.0);
        CHECK(sr_release(&ses, 1, &out.position) == SR_OK);
        /* And once more, to the end; then not with another structure. */
        e = episode_make(&ses, 3);
        b = block_make(&ses, 30, 3, e);
        held t = traj_make(&ses, b, 1, 2);
        uint64_t ref = SR_REF(t.off, SR_KIND_TRAJ);
        CHECK(sr_replace(&ses, 0, key, ref, 0, &found, &schema) == SR_OK && found == 1);
        CHECK(sr_replace(&ses, 0, key, ref, 9, &found, &schema) == SR_INVALID && schema == 0);
        CHECK(sr_replace(&ses, 0, key + 1, ref, 0, &found, &schema) == SR_OK && found == 0);
        let_go(&ses, t);
        let_go(&ses, b);
        let_go(&ses, e);
        check_store(&st);
        CHECK(n_objects(&st) == 3); /* trajectory, block, episode */
        CHECK(sr_sample(&ses, 0, 1, &out, &done, &seq) == SR_OK && item_check(&st, &out) == 31);
        CHECK(sr_release(&ses, 1, &out.position) == SR_OK);
        CHECK(sr_delete(&ses, 0, 1, &key, &done) == SR_OK && n_objects(&st) == 0);
        CHECK(sr_session_close(&ses) == SR_OK);
        store_drop(&st);
    }
}

/* A sampler dies within a draw of a pass: a new pass begins. */
static void test_pass(void) {
    sr_table_config cfg = table_config(SR_SEL_EPOCH, SR_SEL_FIFO, 100, 1);
    sr_store st = store_make(CAPACITY, 1, 1, &cfg);
    sr_ses ses = session_make(&st);
    held e = episode_make(&ses, 1), b = block_make(&ses, 0, 9, e);
    uint64_t key;
    uint32_t done, seq, times[9] = {0};
    for (uint32_t r = 0; r < 9; r++) {
        sr_item item = row_item(b, r, 1.0);
        CHECK(sr_insert(&ses, 0, 1, &item, &key, &done, &seq) == SR_OK);
    }
    sr_sampled out[18];
    CHECK(sr_sample(&ses, 0, 5, out, &done, &seq) == SR_OK && out[4].probability == 1.0 / 5);
    pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        sr_stripe *s = sr_stripe_at(&st, sr_table_at(&st, 0), 0);
        if (sr_lock(&st, &s->lock) == SR_OK) s->index[0].head--;
        kill(getpid(), SIGKILL);
    }
    wait_for(pid);
    CHECK(sr_sample(&ses, 0, 18, out, &done, &seq) == SR_OK && done == 18);
    for (uint32_t i = 0; i < 18; i++) {
        CHECK(times[item_check(&st, &out[i])]++ == i / 9);
        CHECK(out[i].probability == 1.0 / (9 - i % 9));
    }
    check_store(&st);
    CHECK(atomic_load(&st.hdr->repairs) == 1 && sr_session_close(&ses) == SR_OK);
    store_drop(&st);
}

/* ---------------------------------------------------------------- killed at random */

/* Everything an actor does, until it is killed. */
static void act(sr_store *st, uint64_t seed) {
    sr_ses ses;
    if (sr_session_open(st, DEAD, SR_SESSION_WRITER, &ses) != SR_OK) _exit(3);
    for (uint64_t row = 0;; row++) {
        held e = episode_make(&ses, row), b = block_make(&ses, row, 3, e);
        uint64_t keys[3];
        uint32_t done, seq, applied;
        sr_item items[3];
        for (uint32_t r = 0; r < 3; r++) items[r] = row_item(b, r, (double)(r + row % 5));
        uint32_t table = (uint32_t)(row % st->shape.n_tables);
        CHECK(sr_insert(&ses, table, 3, items, keys, &done, &seq) == SR_OK);
        sr_sampled out[4];
        (void)sr_sample(&ses, table, 4, out, &done, &seq);
        uint32_t positions[4];
        for (uint32_t i = 0; i < done; i++) {
            item_check(st, &out[i]);
            positions[i] = out[i].position;
        }
        double priority = (double)(sr_splitmix64(&seed) % 9);
        CHECK(sr_update(&ses, table, 1, &keys[1], &priority, &applied) == SR_OK);
        CHECK(sr_release(&ses, done, positions) == SR_OK);
        if (row % 3 == 0) CHECK(sr_delete(&ses, table, 2, keys, &applied) == SR_OK);
        if (row % 2 == 0) {
            held t = traj_make(&ses, b, 2, 1);
            uint32_t found, schema;
            CHECK(sr_replace(&ses, table, keys[0], SR_REF(t.off, SR_KIND_TRAJ), 0, &found,
                             &schema) == SR_OK);
            let_go(&ses, t);
        }
        if (row % 11 == 0) {
            sr_table_change change = {.what = SR_SET_MAX_BYTES,
                                      .max_bytes = (int64_t)(row % 3) * 3000};
            CHECK(sr_table_configure(&ses, table, &change) == SR_OK);
        }
        if (row % 7 == 0) {
            sr_table_change change = {.what = SR_SET_MAX_SIZE | SR_SET_MAX_TIMES_SAMPLED,
                                      .max_times_sampled = (int32_t)(row % 4),
                                      .max_size = 5 + (int64_t)(row % 30)};
            CHECK(sr_table_configure(&ses, table, &change) == SR_OK);
        }
        if (row % 50 == 49) CHECK(sr_reset(&ses, table) == SR_OK);
        let_go(&ses, b);
        let_go(&ses, e);
    }
}

/* The others go on: one round of everything, and nothing contradicts itself. */
static void survive(sr_store *st, sr_ses *ses) {
    CHECK(sr_participant_reclaim(st, DEAD) >= 0);
    check_store(st);
    for (uint32_t i = 0; i < st->shape.n_tables; i++) {
        held e = episode_make(ses, 1), b = block_make(ses, 7, 2, e);
        sr_item item = row_item(b, 1, 3);
        uint64_t key;
        uint32_t done, seq;
        CHECK(sr_insert(ses, i, 1, &item, &key, &done, &seq) == SR_OK);
        sr_sampled out;
        CHECK(sr_sample(ses, i, 1, &out, &done, &seq) == SR_OK);
        item_check(st, &out);
        CHECK(sr_release(ses, 1, &out.position) == SR_OK);
        let_go(ses, b);
        let_go(ses, e);
    }
    check_store(st);
}

static void test_random_kills(void) {
    sr_table_config cfg[5] = {table_config(SR_SEL_PRIORITIZED, SR_SEL_FIFO, 20, 2),
                              table_config(SR_SEL_UNIFORM, SR_SEL_UNIFORM, 20, 2),
                              table_config(SR_SEL_MAX_HEAP, SR_SEL_MIN_HEAP, 20, 1),
                              table_config(SR_SEL_FIFO, SR_SEL_FIFO, 20, 1),
                              table_config(SR_SEL_EPOCH, SR_SEL_FIFO, 20, 1)};
    for (uint32_t i = 0; i < 5; i++) cfg[i].name[0] = (char)('a' + i);
    cfg[0].max_bytes = cfg[1].max_bytes = 2000;
    cfg[3].max_times_sampled = 1;
    cfg[2].max_times_sampled = 2;
    sr_store st = store_make(CAPACITY, 2, 5, cfg);
    sr_ses ses = session_make(&st);
    uint64_t seed = 5;
    for (int kills = 0; kills < 300; kills++) {
        CHECK(sr_participant_set(&st, DEAD, 1, 1, 1, "dies") == SR_OK);
        uint64_t child_seed = sr_splitmix64(&seed);
        long nanoseconds = (long)(200000 + sr_splitmix64(&seed) % 1000000);
        pid_t pid = fork();
        CHECK(pid >= 0);
        if (pid == 0) act(&st, child_seed);
        struct timespec pause = {.tv_nsec = nanoseconds};
        nanosleep(&pause, NULL); /* the instant of its death is to be any */
        CHECK(kill(pid, SIGKILL) == 0);
        wait_for(pid);
        survive(&st, &ses);
    }
    for (uint32_t i = 0; i < 5; i++) CHECK(sr_reset(&ses, i) == SR_OK);
    check_store(&st);
    CHECK(n_objects(&st) == 0);
    fprintf(stderr, "%llu repairs\n", (unsigned long long)atomic_load(&st.hdr->repairs));
    CHECK(sr_session_close(&ses) == SR_OK);
    store_drop(&st);
}

int main(void) {
    test_each_lock();
    test_poison();
    test_replacing();
    test_pass();
    test_random_kills();
    printf("test_repair: ok\n");
    return 0;
}
