/* test_store.c: laying out and attaching, schemas, sessions and participants, and the calls that a
 * store refuses: out of range, closed, damaged, left locked by a process that died. */
#include "table_fixture.h"

#include <math.h>
#include <sys/wait.h>

#define CAPACITY (1u << 20)

static sr_store two_tables(void) {
    sr_table_config cfg[2] = {table_config(SR_SEL_UNIFORM, SR_SEL_FIFO, 10, 2),
                              table_config(SR_SEL_PRIORITIZED, SR_SEL_PRIORITIZED, 10, 1)};
    return store_make(CAPACITY, 2, 2, cfg);
}

static void insert_one(sr_ses *ses, uint32_t table, uint64_t *key) {
    held e = episode_make(ses, 1), b = block_make(ses, 0, 1, e);
    sr_item item = row_item(b, 0, 1);
    uint32_t done, seq;
    CHECK(sr_insert(ses, table, 1, &item, key, &done, &seq) == SR_OK);
    let_go(ses, b);
    let_go(ses, e);
}

/* ---------------------------------------------------------------- laying out, attaching */

static void test_format_refuses(void) {
    sr_table_config good = table_config(SR_SEL_FIFO, SR_SEL_FIFO, 10, 1);
    sr_store_config cfg = {.capacity_bytes = CAPACITY, .n_arenas = 1, .n_participants = 2,
                           .n_sessions = 1, .n_tables = 1, .generation = 1};
    for (int i = 0; i < 12; i++) {
        sr_table_config t = good;
        sr_store_config c = cfg;
        if (i == 0) c.n_tables = 0;
        if (i == 1) c.n_arenas = 0;
        if (i == 2) c.n_arenas = SR_ARENAS_MAX + 1;
        if (i == 3) c.n_participants = 1;
        if (i == 4) c.n_sessions = 0;
        if (i == 5) t.n_stripes = 0;
        if (i == 6) t.max_size = 0;
        if (i == 7) t.sampler_kind = SR_SEL_EPOCH + 1;
        if (i == 8) t.remover_kind = 0;
        if (i == 9) t.samples_per_insert = 0;
        if (i == 10) t.min_size_to_sample = 0;
        sr_store st = {.bytes = 1u << 30, .fd = -1};
        CHECK(sr_store_format(&st, &c, &t, "") == SR_INVALID); /* the last one: not its size */
    }
    cfg.capacity_bytes = SR_PAGE; /* less than the store's own pages */
    sr_store st = {.bytes = sr_store_bytes(&cfg, &good), .fd = -1};
    CHECK(sr_store_format(&st, &cfg, &good, "") == SR_FULL);
    CHECK(sr_last_detail()->asked > SR_PAGE && sr_last_detail()->available == SR_PAGE);
}

static void test_attach(void) {
    sr_store st = two_tables();
    sr_store other = {.bytes = st.bytes, .fd = st.fd};
    other.base = mmap(NULL, st.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, st.fd, 0);
    CHECK(other.base != MAP_FAILED && sr_store_attach(&other) == SR_OK);
    sr_ses mine = session_make(&st), theirs = session_make(&other);
    uint64_t key;
    insert_one(&mine, 0, &key);
    CHECK(sr_contains(&theirs, 0, key) == 1);
    sr_store_set_port(&other, 4321);
    CHECK(sr_store_port(&st) == 4321);
    CHECK(sr_session_close(&theirs) == SR_OK && sr_session_close(&mine) == SR_OK);

    sr_header *h = st.hdr;
    atomic_store(&h->magic, 0);
    CHECK(sr_store_attach(&other) == SR_WOULD_BLOCK);
    atomic_store(&h->magic, SR_MAGIC);
    h->layout_version++;
    CHECK(sr_store_attach(&other) == SR_VERSION);
    CHECK(sr_last_detail()->asked == SR_LAYOUT_VERSION + 1);
    CHECK(sr_last_detail()->available == SR_LAYOUT_VERSION);
    h->layout_version--;
    h->layout_signature ^= 1;
    CHECK(sr_store_attach(&other) == SR_VERSION);
    CHECK(sr_last_detail()->found_signature == h->layout_signature);
    CHECK(sr_last_detail()->expected_signature == sr_layout_signature());
    h->layout_signature ^= 1;
    uint64_t *offsets[] = {&h->participants_off, &h->sessions_off, &h->tables_off, &h->stripes_off,
                           &h->arenas_off, &h->schemas_off, &h->session_locks_off,
                           &h->config_off};
    const uint64_t bad[] = {0, st.bytes, UINT64_MAX - 7};
    for (size_t i = 0; i < sizeof offsets / sizeof *offsets; i++) {
        for (size_t k = 0; k < sizeof bad / sizeof *bad; k++) {
            uint64_t old = *offsets[i];
            *offsets[i] = bad[k];
            CHECK(sr_store_attach(&other) == SR_CORRUPT);
            *offsets[i] = old;
        }
    }
    uint32_t *counts[] = {&h->n_tables, &h->n_arenas, &h->n_stripes};
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
        uint32_t old = *counts[i];
        *counts[i] = 0xffffffffu;
        CHECK(sr_store_attach(&other) == SR_CORRUPT);
        *counts[i] = old;
    }
    CHECK(sr_store_attach(&other) == SR_OK);
    other.bytes = st.bytes - SR_PAGE;
    CHECK(sr_store_attach(&other) == SR_CORRUPT);
    other.bytes = 100;
    CHECK(sr_store_attach(&other) == SR_WOULD_BLOCK);
    sr_store_detach(&other);
    CHECK(munmap(other.base, st.bytes) == 0);
    store_drop(&st);
}

static void test_schemas(void) {
    sr_store st = two_tables();
    char text[32];
    uint32_t id;
    uint64_t bytes;
    for (uint32_t i = 0; i < SR_SCHEMAS_MAX; i++) {
        int n = snprintf(text, sizeof text, "{\"%u\":1}", i);
        CHECK(sr_schema_intern(&st, text, (uint64_t)n, &id) == SR_OK && id == i);
    }
    CHECK(sr_schema_intern(&st, "{}", 2, &id) == SR_LIMIT);
    CHECK(sr_schema_intern(&st, "{\"7\":1}", 7, &id) == SR_OK && id == 7);
    CHECK(memcmp(sr_schema_text(&st, 7, &bytes), "{\"7\":1}", 7) == 0 && bytes == 7);
    CHECK(sr_schema_text(&st, SR_SCHEMAS_MAX, &bytes) == NULL);
    CHECK(n_objects(&st) == SR_SCHEMAS_MAX);
    check_store(&st);
    store_drop(&st);
}

/* ---------------------------------------------------------------- who is there */

static void test_sessions(void) {
    sr_store st = two_tables();
    sr_ses ses[9];
    for (uint32_t i = 0; i < 8; i++) {
        ses[i] = session_make(&st);
        CHECK(ses[i].number == i);
    }
    CHECK(sr_session_open(&st, 1, SR_SESSION_CLIENT, &ses[8]) == SR_LIMIT);
    CHECK(sr_session_close(&ses[3]) == SR_OK);
    CHECK(sr_session_open(&st, 1, SR_SESSION_WRITER, &ses[8]) == SR_OK && ses[8].number == 3);
    ses[3] = ses[8];
    for (uint32_t i = 0; i < 8; i++) CHECK(sr_session_close(&ses[i]) == SR_OK);
    CHECK(n_objects(&st) == 0);
    store_drop(&st);
}

/* A process that is gone: what its sessions held is given back, of those too that were in the
 * middle of something, or of claiming a place. */
static void test_reclaim(void) {
    sr_store st = two_tables();
    CHECK(sr_participant_set(&st, 2, 1234, 5, 6, "an actor whose name is longer than that") == 0);
    CHECK(sr_participant_set(&st, 2, 1, 1, 1, "another") == SR_WOULD_BLOCK);
    CHECK(sr_participant_set(&st, 4, 1, 1, 1, "beyond") == SR_INVALID);
    CHECK(sr_participant_in_use(&st, 2) && !sr_participant_in_use(&st, 3));
    const sr_participant *p = (sr_participant *)sr_ptr(&st, st.shape.participants_off) + 2;
    CHECK(p->pid == 1234 && strlen(p->role) == sizeof p->role - 1);
    sr_ses dead[2], alive = session_make(&st);
    uint64_t key;
    for (uint32_t i = 0; i < 2; i++) {
        CHECK(sr_session_open(&st, 2, SR_SESSION_WRITER, &dead[i]) == SR_OK);
        held e = episode_make(&dead[i], i);
        block_make(&dead[i], 0, 5, e);
    }
    insert_one(&alive, 0, &key);
    sr_begin_on(&dead[1], SR_BUSY_INSERT, 0);
    sr_session *claimed = sr_session_at(&st, 7);
    atomic_store(&claimed->state, SR_CLAIMED | 2u << 2);
    CHECK(sr_participant_reclaim(&st, 2) == 3 && !sr_participant_in_use(&st, 2));
    for (uint32_t i = 0; i < 2; i++) CHECK(atomic_load(&dead[i].shared->state) == 0);
    CHECK(atomic_load(&claimed->state) == 0 && atomic_load(&st.hdr->repairs) == 0);
    CHECK(sr_participant_reclaim(&st, 4) == SR_INVALID);
    CHECK(n_objects(&st) == 2); /* the living one's item: block and episode */
    check_store(&st);
    for (uint32_t i = 0; i < 2; i++) sr_session_abandon(&dead[i]);
    CHECK(sr_contains(&alive, 0, key) == 1 && sr_session_close(&alive) == SR_OK);
    store_drop(&st);
}

/* ---------------------------------------------------------------- refusals */

/* Every operation of a session gives `status`, and does nothing. */
static void all_refused(sr_ses *ses, uint32_t table, int status) {
    sr_item item = {.priority = 1};
    sr_sampled out;
    uint64_t key = 1;
    double priority = 1;
    uint32_t done = 9, seq = 0;
    CHECK(sr_insert(ses, table, 1, &item, &key, &done, &seq) == status && done == 0);
    done = 9;
    CHECK(sr_sample(ses, table, 1, &out, &done, &seq) == status && done == 0);
    done = 9;
    CHECK(sr_update(ses, table, 1, &key, &priority, &done) == status && done == 0);
    done = 9;
    CHECK(sr_delete(ses, table, 1, &key, &done) == status && done == 0);
    CHECK(sr_reset(ses, table) == status);
    CHECK(sr_contains(ses, table, key) == status);
    CHECK(atomic_load(&ses->shared->busy) == SR_IDLE);
}

static void test_refused(void) {
    sr_store st = two_tables();
    sr_ses ses = session_make(&st);
    uint64_t keys[2];
    char why[64];
    sr_table_info info;
    uint32_t applied;
    insert_one(&ses, 0, &keys[0]);
    insert_one(&ses, 1, &keys[1]);
    all_refused(&ses, 2, SR_INVALID);
    CHECK(sr_table_get_info(&st, 2, &info) == SR_INVALID);
    CHECK(sr_can_sample(&st, 2, 1) == SR_INVALID && sr_can_insert(&st, 0, 0) == SR_INVALID);
    CHECK(sr_check(&st, 2, why, sizeof why) == SR_INVALID);
    CHECK(sr_contains(&ses, 0, keys[1]) == 0 && sr_contains(&ses, 1, keys[0]) == 0);
    const double bad[] = {-1, -DBL_MIN, (double)INFINITY, (double)-INFINITY, (double)NAN, DBL_MAX};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        const double priorities[] = {2, bad[i]};
        const uint64_t twice[] = {keys[1], keys[1]};
        CHECK(!sr_priority_ok(&st, 1, bad[i]) || bad[i] >= DBL_MAX);
        CHECK(sr_priority_ok(&st, 0, bad[i]) == (bad[i] <= DBL_MAX || bad[i] > 0));
        if (bad[i] >= DBL_MAX && bad[i] < (double)INFINITY) continue; /* its 0.7th power is fine */
        CHECK(sr_update(&ses, 1, 2, twice, priorities, &applied) == SR_INVALID && applied == 0);
    }
    uint32_t done, seq;
    sr_sampled s;
    CHECK(sr_sample(&ses, 1, 1, &s, &done, &seq) == SR_OK && s.priority == 1);
    uint32_t twice[2] = {s.position, 77};
    CHECK(sr_release(&ses, 2, twice) == SR_INVALID);
    CHECK(sr_release(&ses, 1, twice) == SR_OK && sr_release(&ses, 1, twice) == SR_INVALID);
    check_store(&st);
    sr_store_close(&st);
    sr_store_close(&st);
    CHECK(sr_store_is_closed(&st));
    all_refused(&ses, 0, SR_CLOSED);
    sr_wait_sample(&st, 0, 0, 100); /* does not wait */
    CHECK(sr_session_close(&ses) == SR_OK);
    store_drop(&st);
}

/* Dies holding a lock of table 0: the limiter's, or a stripe's. */
static void die_inside(sr_store *st, int of_stripe) {
    sr_table *t = sr_table_at(st, 0);
    pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        sr_mutex *m = of_stripe ? &sr_stripe_at(st, t, 1)->lock : &t->limiter_lock;
        _exit(sr_lock(st, m) == SR_OK ? 0 : 1);
    }
    int status;
    CHECK(waitpid(pid, &status, 0) == pid && status == 0);
}

static void test_dead_owner(void) {
    for (int of_stripe = 0; of_stripe < 2; of_stripe++) {
        sr_store st = two_tables();
        sr_ses ses = session_make(&st), second = session_make(&st);
        uint64_t key;
        insert_one(&ses, 0, &key);
        insert_one(&ses, 1, &key);
        die_inside(&st, of_stripe);
        held e = episode_make(&second, 1), b = block_make(&second, 0, 1, e);
        sr_item item = row_item(b, 0, 1);
        uint32_t done, seq;
        CHECK(sr_insert(&second, 1, 1, &item, &key, &done, &seq) == SR_OK); /* the other table */
        CHECK(sr_insert(&second, 0, 1, &item, &key, &done, &seq) == SR_OK && done == 1);
        check_store(&st); /* takes all locks */
        CHECK(atomic_load(&st.hdr->dirty) == 0 && atomic_load(&st.hdr->repairs) == 1);
        CHECK(sr_contains(&second, 0, key) == 1);
        CHECK(sr_session_close(&ses) == SR_OK && sr_session_close(&second) == SR_OK);
        check_store(&st);
        store_drop(&st);
    }
}

/* Damage of each kind that the walk is there to find. */
static void test_check_finds(void) {
    sr_store st = two_tables();
    sr_ses ses = session_make(&st);
    uint64_t key;
    char why[256];
    insert_one(&ses, 0, &key);
    insert_one(&ses, 1, &key);
    sr_table *t = sr_table_at(&st, 1);
    sr_stripe *s = sr_stripe_at(&st, t, 0);
    sr_slot *slot = sr_ptr(&st, s->slots_off);
    sr_block *b = sr_ptr(&st, SR_REF_OFF(slot->ref));
    uint64_t *words[] = {(uint64_t *)&slot->key,        (uint64_t *)&slot->ref,
                         (uint64_t *)&slot->priority,   (uint64_t *)&t->inserts,
                         (uint64_t *)&t->deletes,       (uint64_t *)&t->pending,
                         (uint64_t *)&t->max_size,      (uint64_t *)&s->size,
                         (uint64_t *)&s->mass_bits,     (uint64_t *)&s->slots_used,
                         (uint64_t *)&s->index[0].count, (uint64_t *)&b->refs};
    const uint64_t change[] = {1, 64, 1ull << 50, 1, 1, 1, 10, 1, 1, 1, 1, 1};
    for (size_t i = 0; i < sizeof words / sizeof *words; i++) {
        check_store(&st);
        *words[i] ^= change[i];
        if (sr_check(&st, SR_NONE, why, sizeof why) != SR_CORRUPT || why[0] == 0) {
            fprintf(stderr, "damage %zu was not found\n", i);
            exit(1);
        }
        *words[i] ^= change[i];
    }
    check_store(&st);
    CHECK(sr_session_close(&ses) == SR_OK);
    store_drop(&st);
}

int main(void) {
    test_format_refuses();
    test_attach();
    test_schemas();
    test_sessions();
    test_reclaim();
    test_refused();
    test_dead_owner();
    test_check_finds();
    printf("test_store: ok\n");
    return 0;
}
