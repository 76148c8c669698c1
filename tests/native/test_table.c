/* test_table.c: every pair of sampler and remover, on one stripe and on two, against a plain model:
 * what is there, who is drawn, who has to go, every counter, and what pinned items hold long after
 * they left. All invariants are walked after every operation. */
#include "table_fixture.h"

#include <math.h>

#define ITEMS_MAX 32u
#define STALE_MAX 64u
#define PINS_MAX 256u
#define BATCHES_MAX 4096u
#define STEPS 400u

typedef struct {
    uint64_t key, row, touch;
    double priority;
    uint32_t times, batch;
} entry;

/* The table as it should be; entries in the order of their insertion. */
typedef struct {
    sr_table_config cfg;
    entry e[ITEMS_MAX];
    uint32_t n, batch;
    uint32_t in_batch[BATCHES_MAX]; /* items of an insert that are still there: an episode each */
    uint64_t touch, rows, stale[STALE_MAX], n_stale;
    int64_t inserts, deletes, samples, unique, episodes, deleted_episodes;
    uint64_t missed;
} model;

typedef struct {
    uint32_t position, session;
    sr_sampled item;
    uint64_t row;
} pin;

typedef struct {
    sr_store st;
    sr_ses ses[2];
    model m;
    pin pins[PINS_MAX];
    uint32_t n_pins;
    uint64_t rng;
} world;

static uint32_t below(world *w, uint64_t n) { return (uint32_t)sr_random_below(&w->rng, n); }

static double weight(double priority, double exponent) {
    return priority > 0 ? pow(priority, exponent) : 0;
}

static int is_ordered(uint32_t kind) {
    return kind != SR_SEL_UNIFORM && kind != SR_SEL_PRIORITIZED;
}

/* The item that a selector which leaves no choice must choose. */
static uint32_t chosen(const model *m, uint32_t kind) {
    uint32_t best = 0;
    if (kind == SR_SEL_FIFO) return 0;
    if (kind == SR_SEL_LIFO) return m->n - 1;
    double sign = kind == SR_SEL_MIN_HEAP ? 1 : -1;
    for (uint32_t i = 1; i < m->n; i++) {
        double a = sign * m->e[i].priority, b = sign * m->e[best].priority;
        if (a < b || (a <= b && m->e[i].touch < m->e[best].touch)) best = i;
    }
    return best;
}

static uint32_t model_find(const model *m, uint64_t key) {
    for (uint32_t i = 0; i < m->n; i++) {
        if (m->e[i].key == key) return i;
    }
    return SR_NONE;
}

static void model_erase(model *m, uint32_t i) {
    m->stale[m->n_stale++ % STALE_MAX] = m->e[i].key;
    if (--m->in_batch[m->e[i].batch] == 0) {
        m->episodes--;
        m->deleted_episodes++;
    }
    memmove(&m->e[i], &m->e[i + 1], (m->n - i - 1) * sizeof *m->e);
    m->n--;
    m->deletes++;
}

static double random_priority(world *w) { return below(w, 5) == 0 ? 0 : below(w, 4) + 0.25; }

/* ---------------------------------------------------------------- operations */

/* Which of the model's items left is up to chance: find them. */
static void find_victims(world *w, uint32_t count, int single) {
    model *m = &w->m;
    double total = 0;
    for (uint32_t i = 0; i < m->n; i++) total += weight(m->e[i].priority, m->cfg.remover_exponent);
    for (uint32_t i = m->n; i-- > 0;) {
        if (sr_contains(&w->ses[0], 0, m->e[i].key) == 1) continue;
        CHECK(count-- > 0);
        if (single && m->cfg.remover_kind == SR_SEL_PRIORITIZED && total > 0) {
            CHECK(m->e[i].priority > 0); /* a weight of 0 is no victim while there are others */
        }
        model_erase(m, i);
    }
    CHECK(count == 0);
}

static void model_enter(model *m, uint64_t key, double priority) {
    CHECK(model_find(m, key) == SR_NONE);
    m->e[m->n++] = (entry){key, m->rows++, m->touch++, priority, 0, m->batch};
    m->episodes += m->in_batch[m->batch]++ == 0;
    m->inserts++;
}

/* Up to three items in a call: rows of one block, or each of a block and an episode of its own. */
static void do_insert(world *w) {
    model *m = &w->m;
    uint32_t n = 1 + below(w, 3), done = 0, seq = 0, remover = m->cfg.remover_kind;
    int shared = is_ordered(remover);
    sr_ses *ses = &w->ses[below(w, 2)];
    sr_item items[3];
    uint64_t keys[3];
    held episodes[3], blocks[3];
    for (uint32_t i = 0; i < n; i++) {
        if (i == 0 || !shared) {
            episodes[i] = episode_make(ses, m->rows + i);
            blocks[i] = block_make(ses, m->rows + i, shared ? n : 1, episodes[i]);
        }
        items[i] = row_item(blocks[shared ? 0 : i], shared ? i : 0, random_priority(w));
    }
    CHECK(sr_insert(ses, 0, n, items, keys, &done, &seq) == SR_OK && done == n);
    for (uint32_t i = 0; i < (shared ? 1 : n); i++) {
        let_go(ses, blocks[i]);
        let_go(ses, episodes[i]);
    }
    for (uint32_t i = 0; i < n; i++) {
        if (i == 0 || !shared) CHECK(++m->batch < BATCHES_MAX);
        model_enter(m, keys[i], items[i].priority);
        if (shared && m->n > m->cfg.max_size) model_erase(m, chosen(m, remover));
    }
    uint32_t over = m->n > m->cfg.max_size ? m->n - (uint32_t)m->cfg.max_size : 0;
    if (!shared) find_victims(w, over, n == 1);
}

/* One draw: is it an item that may be drawn, with everything that is said of it? */
static void check_draw(world *w, const sr_sampled *s) {
    model *m = &w->m;
    uint32_t i = model_find(m, s->key);
    CHECK(i != SR_NONE);
    entry *e = &m->e[i];
    double total = 0, own = weight(e->priority, m->cfg.sampler_exponent), expected = 1;
    for (uint32_t k = 0; k < m->n; k++) total += weight(m->e[k].priority, m->cfg.sampler_exponent);
    if (m->cfg.sampler_kind == SR_SEL_UNIFORM) expected = 1.0 / m->n;
    if (m->cfg.sampler_kind == SR_SEL_PRIORITIZED) expected = total > 0 ? own / total : 1.0 / m->n;
    CHECK(expected > 0 && fabs(s->probability - expected) < 1e-12);
    if (is_ordered(m->cfg.sampler_kind)) CHECK(i == chosen(m, m->cfg.sampler_kind));
    CHECK(memcmp(&s->priority, &e->priority, 8) == 0 && s->table_size == m->n);
    m->unique += e->times++ == 0;
    m->samples++;
    CHECK(s->times_sampled == (int32_t)e->times);
    CHECK(item_check(&w->st, s) == e->row);
    w->pins[w->n_pins - 1].row = e->row;
    if (m->cfg.max_times_sampled > 0 && e->times == (uint32_t)m->cfg.max_times_sampled) {
        model_erase(m, i);
    }
}

static void do_sample(world *w) {
    uint32_t n = 1 + below(w, 6), session = below(w, 2), done = 0, seq = 0;
    sr_sampled out[6];
    if (w->n_pins + n > PINS_MAX) return;
    int rc = sr_sample(&w->ses[session], 0, n, out, &done, &seq);
    for (uint32_t i = 0; i < done; i++) {
        w->pins[w->n_pins++] = (pin){out[i].position, session, out[i], 0};
        check_draw(w, &out[i]);
    }
    CHECK(done == n ? rc == SR_OK : rc == SR_WOULD_BLOCK && w->m.n == 0);
}

/* Up to four keys: of items, of items that are gone, and of nothing. */
static uint32_t pick_keys(world *w, uint64_t keys[4]) {
    uint32_t n = 1 + below(w, 4);
    for (uint32_t i = 0; i < n; i++) {
        uint64_t old = w->m.stale[below(w, STALE_MAX)];
        uint32_t what = below(w, 5);
        if (what > 1 && w->m.n > 0) {
            keys[i] = w->m.e[below(w, w->m.n)].key;
        } else {
            keys[i] = what == 0 ? sr_splitmix64(&w->rng) : old;
        }
    }
    return n;
}

static void do_update(world *w) {
    uint64_t keys[4];
    double priorities[4];
    uint32_t n = pick_keys(w, keys), expected = 0, applied = 99;
    for (uint32_t i = 0; i < n; i++) {
        uint32_t k = model_find(&w->m, keys[i]);
        priorities[i] = random_priority(w);
        if (k == SR_NONE) continue;
        w->m.e[k].priority = priorities[i];
        w->m.e[k].touch = w->m.touch++;
        expected++;
    }
    CHECK(sr_update(&w->ses[0], 0, n, keys, priorities, &applied) == SR_OK);
    CHECK(applied == expected);
    w->m.missed += n - applied;
}

static void do_delete(world *w) {
    uint64_t keys[4];
    uint32_t n = pick_keys(w, keys), expected = 0, deleted = 99;
    for (uint32_t i = 0; i < n; i++) {
        uint32_t k = model_find(&w->m, keys[i]);
        if (k == SR_NONE) continue;
        model_erase(&w->m, k);
        expected++;
    }
    CHECK(sr_delete(&w->ses[1], 0, n, keys, &deleted) == SR_OK && deleted == expected);
}

static void do_release(world *w, uint32_t n) {
    for (; n > 0 && w->n_pins > 0; n--) {
        pin *p = &w->pins[below(w, w->n_pins)];
        CHECK(item_check(&w->st, &p->item) == p->row); /* whatever happened to it meanwhile */
        CHECK(sr_release(&w->ses[p->session], 1, &p->position) == SR_OK);
        *p = w->pins[--w->n_pins];
    }
}

static void do_reset(world *w) {
    model *m = &w->m;
    while (m->n > 0) model_erase(m, 0);
    m->inserts = m->deletes = m->samples = m->unique = m->episodes = m->deleted_episodes = 0;
    m->missed = 0;
    CHECK(sr_reset(&w->ses[0], 0) == SR_OK);
}

static void compare(world *w) {
    const model *m = &w->m;
    sr_table_info info = info_of(&w->st, 0);
    CHECK(info.size == m->n && info.inserts == m->inserts && info.deletes == m->deletes);
    CHECK(info.samples == m->samples && info.pending == 0);
    CHECK(info.num_episodes == m->episodes && info.num_deleted_episodes == m->deleted_episodes);
    CHECK(info.num_unique_samples == m->unique && info.missed_updates == m->missed);
    for (uint32_t i = 0; i < m->n; i++) CHECK(sr_contains(&w->ses[0], 0, m->e[i].key) == 1);
    for (uint32_t i = 0; i < STALE_MAX; i++) {
        CHECK(m->stale[i] == 0 || sr_contains(&w->ses[0], 0, m->stale[i]) == 0);
    }
    check_store(&w->st);
}

static void test_pair(sr_table_config cfg) {
    static world w;
    w = (world){.rng = cfg.sampler_kind * 100 + cfg.remover_kind * 10 + cfg.n_stripes};
    w.m.cfg = cfg;
    w.st = store_make(4u << 20, 2, 1, &cfg);
    w.ses[0] = session_make(&w.st);
    w.ses[1] = session_make(&w.st); /* inserts into the other stripe, if there are two */
    for (uint32_t step = 0; step < STEPS; step++) {
        uint32_t what = below(&w, 100);
        if (what < 40) do_insert(&w);
        else if (what < 65) do_sample(&w);
        else if (what < 78) do_update(&w);
        else if (what < 88) do_delete(&w);
        else if (what < 98) do_release(&w, 8);
        else do_reset(&w);
        compare(&w);
    }
    do_release(&w, PINS_MAX);
    do_reset(&w);
    compare(&w);
    CHECK(n_objects(&w.st) == 0);
    CHECK(sr_session_close(&w.ses[0]) == SR_OK && sr_session_close(&w.ses[1]) == SR_OK);
    CHECK(n_objects(&w.st) == 0);
    check_store(&w.st);
    store_drop(&w.st);
}

int main(void) {
    for (uint32_t s = SR_SEL_FIFO; s <= SR_SEL_MAX_HEAP; s++) {
        for (uint32_t r = SR_SEL_FIFO; r <= SR_SEL_MAX_HEAP; r++) {
            for (uint32_t stripes = 1; stripes <= 2; stripes++) {
                /* Total order needs one stripe, as the sampler; as the remover lifo and heaps. */
                int chance = !is_ordered(s) && (!is_ordered(r) || r == SR_SEL_FIFO);
                if (stripes == 2 && !chance) continue;
                sr_table_config cfg =
                    table_config((enum sr_selector)s, (enum sr_selector)r, 7, stripes);
                test_pair(cfg);
                cfg.max_times_sampled = 2;
                cfg.max_size = stripes; /* the least that there can be */
                test_pair(cfg);
            }
        }
    }
    printf("test_table: ok\n");
    return 0;
}
