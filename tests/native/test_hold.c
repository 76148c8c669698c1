/* While a checkpoint is written, what its items refer to stays, whoever takes them out of their
 * tables, dies, or repairs; and goes when it ends, however that is. */
#include "table_fixture.h"

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
static void check_image(const sr_store *st, const image *im) {
    uint64_t off = SR_REF_OFF(im->slots[0].ref), got;
    sr_block_head head;
    char rows[ROWS * ROW_TOTAL + 1];
    sr_rows_cursor at = {0};
    CHECK(im->stripe.n_slots == ROWS && im->stripe.n_order[0] == ROWS);
    CHECK(sr_image_block_heads(st, 1, &off, &head) == SR_OK);
    CHECK(head.rows == ROWS && head.n_runs == 1 && head.bytes == ROWS * ROW_TOTAL);
    CHECK(sr_image_rows(st, 1, &off, &head, &at, rows, sizeof rows, &got) == SR_OK);
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
    check_image(&st, &im);
    atomic_store(&st.hdr->dirty, 1);
    CHECK(sr_repair(&st) == SR_OK);
    check_store(&st);
    check_image(&st, &im);
    CHECK(sr_hold_release(&st) == SR_OK && sr_hold_release(&st) == SR_OK);
    check_store(&st);
    CHECK(n_objects(&st) == 0 && sr_hold_memory(&st) == 0);
    CHECK(atomic_load(&st.hdr->committed_bytes) == committed);
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

int main(void) {
    test_items_go_and_what_they_refer_to_stays();
    test_no_room();
    test_deaths();
    return 0;
}
