/* While a checkpoint is written, what its items refer to stays, whoever takes them out of their
 * tables, dies, or repairs; and goes when it ends, however that is. */
#include "packed_fixture.h"

#include "checkpoint.h"
#include "hold.h"

#include <signal.h>
#include <sys/wait.h>

#define CAPACITY (64ull << 20)
#define DEAD 2u
#define ROWS 40u

typedef struct {
    sr_slot slots[256];
    uint32_t order[2][256];
    sr_stripe_image stripe;
    sr_table_image table;
} image;

static sr_table_config config(void) { return table_config(SR_SEL_UNIFORM, SR_SEL_FIFO, 200, 1); }

static void fill(sr_ses *ses, uint64_t first, uint64_t *keys) {
    held e = episode_make(ses, first), b = block_make(ses, first, ROWS, e);
    uint32_t done, seq;
    for (uint32_t r = 0; r < ROWS; r++) {
        sr_item item = row_item(b, r, 1.0);
        CHECK(sr_insert(ses, 0, 1, &item, &keys[r], &done, &seq) == SR_OK);
    }
    let_go(ses, b);
    let_go(ses, e);
}

static void take(sr_store *st, uint32_t participant, image *out) {
    uint64_t ns;
    CHECK(sr_hold_claim(st, participant) == SR_OK);
    CHECK(sr_hold_claim(st, participant) == SR_WOULD_BLOCK);
    out->stripe = (sr_stripe_image){
        .slots = out->slots, .order = {out->order[0], out->order[1]}, .room = 256};
    CHECK(sr_hold_prepare(st, 0, 256) == SR_OK);
    CHECK(sr_snapshot(st, &out->stripe, &out->table, &ns) == SR_OK);
}

/* The rows of the image's items are what they were. */
static void check_image(sr_ses *ses, const image *im) {
    const sr_store *st = ses->st;
    uint64_t off = SR_REF_OFF(im->slots[0].ref), got, where;
    sr_block_head head;
    char rows[ROWS * ROW_TOTAL + 1];
    sr_rows_cursor at = {0};
    CHECK(im->stripe.n_slots == ROWS && im->stripe.n_order[0] == ROWS);
    CHECK(sr_image_block_heads(ses, 1, &off, &head, &where) == SR_OK);
    CHECK(head.rows == ROWS && head.n_runs == 1 && head.bytes == ROWS * ROW_TOTAL);
    CHECK(sr_image_rows(st, 1, &off, &where, &head, &at, rows, sizeof rows, &got) == SR_OK);
    CHECK(got == head.bytes && at.block == 1);
    const char *cell = rows;
    for (uint32_t c = 0; c < N_COLS; c++) {
        for (uint32_t r = 0; r < ROWS; r++, cell += ROW_BYTES[c]) cell_check(cell, r, c);
    }
}

static void wait_for(pid_t pid) {
    int status;
    CHECK(waitpid(pid, &status, 0) == pid && WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
}

static void test_items_go_and_what_they_refer_to_stays(void) {
    sr_table_config cfg = config();
    sr_store st = store_make(CAPACITY, 1, 1, &cfg);
    sr_ses ses = session_make(&st);
    uint64_t keys[ROWS], later[ROWS];
    uint32_t n;
    static image im;
    fill(&ses, 0, keys);
    uint64_t committed = atomic_load(&st.hdr->committed_bytes);
    take(&st, 1, &im);
    CHECK(sr_delete(&ses, 0, 10, keys, &n) == SR_OK && n == 10);
    fill(&ses, 1000, later); /* into the places that became free */
    CHECK(sr_delete(&ses, 0, ROWS, later, &n) == SR_OK && n == ROWS);
    CHECK(n_objects(&st) == 2); /* what came later is not held */
    check_store(&st);
    CHECK(sr_reset(&ses, 0) == SR_OK);
    check_store(&st);
    check_image(&ses, &im);
    atomic_store(&st.hdr->dirty, 1);
    CHECK(sr_repair(&st) == SR_OK);
    check_store(&st);
    check_image(&ses, &im);
    CHECK(sr_hold_release(&st) == SR_OK && sr_hold_release(&st) == SR_OK);
    check_store(&st);
    CHECK(n_objects(&st) == 0 && sr_hold_memory(&st) == 0);
    CHECK(atomic_load(&st.hdr->committed_bytes) == committed);
    CHECK(sr_session_close(&ses) == SR_OK);
    store_drop(&st);
}

/* A count beyond the slots, which nothing that is copied has room for. */
static void test_a_damaged_count_is_not_copied(void) {
    sr_table_config cfg = config();
    sr_store st = store_make(CAPACITY, 1, 1, &cfg);
    sr_ses ses = session_make(&st);
    uint64_t keys[ROWS], ns;
    static image im;
    fill(&ses, 0, keys);
    sr_stripe *s = sr_stripe_at(&st, sr_table_at(&st, 0), 0);
    CHECK(s->index[0].kind == SR_SEL_UNIFORM && s->index[0].slots_cap > s->slots_used);
    s->index[0].count = (uint32_t)s->slots_used + 1;
    im.stripe = (sr_stripe_image){
        .slots = im.slots, .order = {im.order[0], im.order[1]}, .room = s->slots_used};
    CHECK(sr_hold_claim(&st, 1) == SR_OK);
    CHECK(sr_snapshot(&st, &im.stripe, &im.table, &ns) == SR_CORRUPT);
    /* It is counted anew. */
    CHECK(sr_hold_prepare(&st, 0, ROWS) == SR_OK);
    CHECK(sr_snapshot(&st, &im.stripe, &im.table, &ns) == SR_OK);
    CHECK(im.stripe.n_order[0] == ROWS);
    CHECK(sr_hold_release(&st) == SR_OK);
    CHECK(sr_session_close(&ses) == SR_OK);
    store_drop(&st);
}

static void test_no_room(void) {
    sr_table_config cfg = config();
    sr_store st = store_make(CAPACITY, 1, 1, &cfg);
    sr_ses ses = session_make(&st);
    uint64_t keys[ROWS], ns;
    static image im;
    fill(&ses, 0, keys);
    CHECK(sr_hold_claim(&st, 1) == SR_OK);
    im.stripe = (sr_stripe_image){.slots = im.slots, .room = ROWS - 1};
    CHECK(sr_snapshot(&st, &im.stripe, &im.table, &ns) == SR_WOULD_BLOCK);
    CHECK(sr_hold_memory(&st) == 0);
    CHECK(sr_hold_unwanted(&st) == 0 && sr_hold_ask_back(&st) == 1 && sr_hold_unwanted(&st) == 1);
    CHECK(sr_hold_release(&st) == SR_OK && sr_hold_ask_back(&st) == 0);
    CHECK(sr_session_close(&ses) == SR_OK);
    store_drop(&st);
}

/* Where it dies: after the claim, with all held, in the middle of letting go, and inside the lock
 * with a reference left behind and its item still there. */
static void die(sr_store *st, int how, uint64_t *keys) {
    static image im;
    sr_ses ses;
    uint32_t n;
    if (how == 0) CHECK(sr_hold_claim(st, DEAD) == SR_OK);
    if (how > 0) take(st, DEAD, &im);
    if (how > 1) {
        CHECK(sr_session_open(st, DEAD, SR_SESSION_CLIENT, &ses) == SR_OK);
        CHECK(sr_delete(&ses, 0, 10, keys, &n) == SR_OK && n == 10);
    }
    sr_stripe *s = sr_stripe_at(st, sr_table_at(st, 0), 0);
    if (how > 2) CHECK(sr_lock(st, &s->lock) == SR_OK);
    if (how == 3) CHECK(sr_hold_park(st, s, 20) == 1 && sr_hold_park(st, s, 20) == 0);
    if (how == 4) {
        s->hold_seq = 0;
        sr_hold_parked(st, s)[0] = 0;
    }
    kill(getpid(), SIGKILL);
}

static void test_deaths(void) {
    for (int how = 0; how < 5; how++) {
        sr_table_config cfg = config();
        sr_store st = store_make(CAPACITY, 1, 1, &cfg);
        sr_ses ses = session_make(&st);
        uint64_t keys[ROWS];
        uint32_t n;
        fill(&ses, 0, keys);
        CHECK(sr_participant_set(&st, DEAD, 1, 1, 1, "dies") == SR_OK);
        pid_t pid = fork();
        CHECK(pid >= 0);
        if (pid == 0) die(&st, how, keys);
        wait_for(pid);
        check_store(&st);
        CHECK(sr_hold_holder(&st) == DEAD);
        CHECK(sr_participant_reclaim(&st, DEAD) >= 0);
        CHECK(sr_hold_holder(&st) == SR_NONE && sr_hold_memory(&st) == 0);
        check_store(&st);
        CHECK(info_of(&st, 0).size == (how > 1 ? ROWS - 10 : ROWS));
        CHECK(sr_delete(&ses, 0, ROWS, keys, &n) == SR_OK);
        CHECK(n_objects(&st) == 0);
        check_store(&st);
        CHECK(sr_session_close(&ses) == SR_OK);
        store_drop(&st);
    }
}

/* ---------------------------------------------------------------- rows that lie apart */

#define APART_ROWS 10u
#define APART_ROOM 2048u

/* A block of the image, with its rows as a file has them. */
typedef struct {
    uint64_t off, where, bytes, row_bytes[N_COLS];
    sr_block_head head;
    sr_run_of_rows run;
    char rows[APART_ROOM];
} saved_block;

static void save_head(sr_ses *ses, uint64_t off, saved_block *out) {
    out->off = off;
    CHECK(sr_image_block_heads(ses, 1, &off, &out->head, &out->where) == SR_OK);
    CHECK(sr_image_blocks(ses->st, 1, &off, &out->head, out->row_bytes, &out->run) == SR_OK);
    out->run.episode = 0;
}

/* In pieces, as they fall. */
static void save_rows(const sr_store *st, saved_block *b) {
    sr_rows_cursor at = {0};
    uint64_t got;
    for (b->bytes = 0; at.block == 0; b->bytes += got) {
        CHECK(b->bytes + 37 <= APART_ROOM);
        CHECK(sr_image_rows(st, 1, &b->off, &b->where, &b->head, &at, b->rows + b->bytes, 37,
                            &got) == SR_OK);
    }
    CHECK(b->bytes == b->head.bytes);
}

/* Into a store of its own. `flip`: a byte of the rows that is changed before, if there is one. */
static int load(const saved_block *b, uint64_t flip, uint64_t first_row) {
    sr_table_config cfg = config();
    sr_store st = store_make(CAPACITY, 1, 1, &cfg);
    const uint64_t id = 1, where = 0;
    uint64_t episode, off, next = 0;
    static char rows[APART_ROOM];
    memcpy(rows, b->rows, b->bytes);
    if (flip < b->bytes) rows[flip] = (char)(rows[flip] ^ 0x20);
    sr_restore_begin(&st);
    CHECK(sr_restore_episodes(&st, 1, &id, &episode) == SR_OK);
    CHECK(sr_restore_blocks(&st, 1, &b->head, b->row_bytes, &b->run, 1, &episode, &off) == SR_OK);
    int rc = SR_OK;
    for (uint64_t from = 0; from < b->bytes && rc == SR_OK; from += 41) {
        uint64_t n = b->bytes - from < 41 ? b->bytes - from : 41;
        rc = sr_restore_rows(&st, 1, &off, &b->head, &where, &next, rows + from, from, n);
    }
    if (rc == SR_OK && flip >= b->bytes) {
        CHECK(next == 1);
        apart_check(&st, off, sr_block_rows_ref(&st, off), first_row, b->head.rows);
    }
    store_drop(&st);
    return rc;
}

static void test_rows_apart(void) {
    sr_table_config cfg = config();
    sr_store st = store_make(CAPACITY, 1, 1, &cfg);
    sr_ses w = session_make(&st), saver;
    CHECK(sr_session_open(&st, 1, SR_SESSION_CLIENT, &saver) == SR_OK);
    held e = episode_make(&w, 1), b = apart_make(&w, 500, APART_ROWS, e);
    static saved_block raw, packed;
    save_head(&saver, b.off, &raw);
    CHECK(raw.head.encoding == SR_SAVED_RAW && raw.head.bytes == APART_ROWS * ROW_TOTAL);
    CHECK(pack_try(&w, b, APART_ROWS) == SR_OK && n_objects(&st) == 4);
    save_rows(&st, &raw);
    save_head(&saver, b.off, &packed);
    CHECK(packed.head.encoding == SR_SAVED_PACKED);
    save_rows(&st, &packed);
    check_store(&st);
    CHECK(load(&raw, SR_NONE, 500) == SR_OK && load(&packed, SR_NONE, 500) == SR_OK);
    for (uint64_t at = 0; at < sizeof(sr_packed) + N_COLS * sizeof(sr_packed_col); at++) {
        int rc = load(&packed, at, 500);
        CHECK(rc == SR_OK || rc == SR_INVALID);
        /* The kind, the columns, the rows, and both sizes. */
        if (at < 8 || (at >= 12 && at < 32)) CHECK(rc == SR_INVALID);
    }
    CHECK(sr_session_close(&saver) == SR_OK && n_objects(&st) == 3);
    let_go(&w, b);
    let_go(&w, e);
    CHECK(n_objects(&st) == 0);
    CHECK(sr_session_close(&w) == SR_OK);
    store_drop(&st);
}

int main(void) {
    test_items_go_and_what_they_refer_to_stays();
    test_no_room();
    test_a_damaged_count_is_not_copied();
    test_deaths();
    test_rows_apart();
    return 0;
}
