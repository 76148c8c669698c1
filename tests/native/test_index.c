/* test_index.c: each selector structure against a plain model, and the distribution of its draws.
 *
 * HAVE_ARENA: linked with arena.c. HAVE_STORE: linked with store.c. Otherwise stand-ins below. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <float.h>
#include <math.h>
#include <sys/mman.h>
#include <unistd.h>

#include "arena.h"
#include "check.h"
#include "huge.h"
#include "index.h"

#define SLOTS 70000u
#define SEGMENT (64u << 20)
#define REGION (2u * SR_PAGE)

#ifndef HAVE_STORE
sr_detail *sr_last_detail(void) {
    static _Thread_local sr_detail detail;
    return &detail;
}
#endif

#ifndef HAVE_ARENA
int sr_commit(sr_store *st, uint64_t off, uint64_t bytes, uint64_t charge) {
    uint64_t before = atomic_fetch_add(&st->hdr->committed_bytes, charge);
    int rc = SR_FULL;
    CHECK(off % SR_PAGE == 0 && bytes % SR_PAGE == 0);
    if (before + charge <= st->shape.capacity_bytes)
        rc = posix_fallocate(st->fd, (off_t)off, (off_t)bytes) == 0 ? SR_OK : SR_NOSPACE;
    if (rc != SR_OK) atomic_fetch_sub(&st->hdr->committed_bytes, charge);
    return rc;
}
void sr_huge_grown(sr_store *st, uint64_t start, uint64_t from, uint64_t end) {
    CHECK(start <= from && from <= end && end <= st->bytes);
}
#endif

/* ------------------------------------------------------------------ the model */

static struct {
    int live;
    double prio;
    uint64_t touch, seq;
} model[SLOTS];
static uint64_t n_live, n_touch, n_seq;

static int live(void *ctx, uint32_t slot, double *prio, uint64_t *touch, uint64_t *seq) {
    (void)ctx;
    *prio = model[slot].prio;
    *touch = model[slot].touch;
    *seq = model[slot].seq;
    return model[slot].live;
}

static sr_store segment(uint64_t capacity) {
    sr_store st = {.bytes = SEGMENT, .fd = memfd_create("test_index", MFD_CLOEXEC)};
    CHECK(st.fd >= 0 && ftruncate(st.fd, SEGMENT) == 0);
    st.base = mmap(NULL, SEGMENT, PROT_READ | PROT_WRITE, MAP_SHARED, st.fd, 0);
    CHECK(st.base != MAP_FAILED);
    st.hdr = (sr_header *)(void *)st.base;
    st.shape.file_bytes = SEGMENT;
    st.shape.capacity_bytes = capacity;
    st.shape.extent_bytes = 1u << 20;
    return st;
}

static void drop(sr_store *st) {
    CHECK(munmap(st->base, SEGMENT) == 0 && close(st->fd) == 0);
}

/* An empty structure and an empty model. */
static sr_store start(sr_index *ix, enum sr_selector kind, double exponent, uint64_t slots) {
    sr_store st = segment(SEGMENT);
    memset(model, 0, sizeof model);
    n_live = n_touch = n_seq = 0;
    CHECK(sr_index_region_bytes(kind, SLOTS) % SR_PAGE == 0);
    CHECK(REGION + sr_index_region_bytes(kind, SLOTS) <= SEGMENT);
    sr_index_init(ix, kind, exponent, REGION, SLOTS);
    CHECK(sr_index_mass(&st, ix) == 0.0);
    CHECK(sr_index_grow(&st, ix, slots) == SR_OK);
    return st;
}

static void insert(sr_store *st, sr_index *ix, uint32_t slot, double prio) {
    model[slot].live = 1;
    model[slot].prio = prio;
    model[slot].touch = ++n_touch;
    model[slot].seq = ++n_seq;
    n_live++;
    sr_index_insert(st, ix, slot, prio, n_touch);
}

static void take_out(sr_store *st, sr_index *ix, uint32_t slot) {
    model[slot].live = 0;
    n_live--;
    sr_index_remove(st, ix, slot);
}

static void check_all(sr_store *st, const sr_index *ix) {
    int rc = sr_index_check(st, ix, ix->slots_cap, live, NULL);
    if (rc != 0) fprintf(stderr, "sr_index_check: line %d, kind %u\n", -rc, ix->kind);
    CHECK(rc == 0);
    CHECK(ix->count == n_live);
}

/* Does slot a come before slot b for this selector? */
static int first(enum sr_selector kind, uint32_t a, uint32_t b) {
    double pa = model[a].prio, pb = model[b].prio;
    if (kind == SR_SEL_FIFO) return model[a].seq < model[b].seq;
    if (kind == SR_SEL_LIFO) return model[a].seq > model[b].seq;
    if (pa == pb) return model[a].touch < model[b].touch;
    return kind == SR_SEL_MIN_HEAP ? pa < pb : pa > pb;
}

static void check_head(sr_store *st, sr_index *ix, enum sr_selector kind, uint64_t *rng) {
    uint32_t best = SR_NONE, got[3];
    double prob[3];
    for (uint32_t s = 0; s < ix->slots_cap; s++)
        if (model[s].live && (best == SR_NONE || first(kind, s, best))) best = s;
    sr_index_sample(st, ix, kind, rng, 3, got, prob);
    for (int i = 0; i < 3; i++) CHECK(got[i] == best && prob[i] == 1.0);
}

static void check_draws(sr_store *st, sr_index *ix, enum sr_selector kind, uint64_t *rng) {
    enum { N = 100 };
    uint32_t got[N], one;
    double prob[N], p, total = sr_index_mass(st, ix);
    uint64_t again = *rng;
    sr_index_sample(st, ix, kind, rng, N, got, prob);
    for (int i = 0; i < N; i++) {
        CHECK(got[i] < ix->slots_cap && model[got[i]].live);
        double weight = sr_index_weight(model[got[i]].prio, ix->exponent);
        int by_weight = kind == SR_SEL_PRIORITIZED && total > 0.0;
        CHECK(prob[i] == (by_weight ? weight / total : 1.0 / (double)n_live));
        CHECK(prob[i] > 0.0);
        /* A batch is what single draws would have given, in their order. */
        sr_index_sample(st, ix, kind, &again, 1, &one, &p);
        CHECK(one == got[i] && p == prob[i]);
    }
}

/* Through this pass, each slot that is left in it once, and the next, each slot once; then back to
 * where it was, and some draws. */
static void check_pass(sr_store *st, sr_index *ix, uint64_t *rng) {
    static uint32_t got[2 * SLOTS], times[SLOTS], dense[SLOTS], pos[SLOTS];
    static double prob[2 * SLOTS];
    const uint32_t left = ix->head, count = (uint32_t)ix->count;
    sr_index before = *ix;
    uint64_t again = *rng;
    memcpy(dense, sr_ptr(st, ix->array_off[0]), count * sizeof *dense);
    memcpy(pos, sr_ptr(st, ix->array_off[1]), ix->slots_cap * sizeof *pos);
    sr_index_sample(st, ix, SR_SEL_EPOCH, &again, left + count, got, prob);
    memset(times, 0, sizeof times);
    for (uint32_t i = 0; i < left + count; i++) {
        uint32_t of = i < left ? left - i : count - (i - left);
        CHECK(model[got[i]].live && prob[i] == 1.0 / of);
        /* Not before its pass; the slots that were left are drawn a second time in the next. */
        CHECK(times[got[i]]++ < (i < left ? 1u : 2u));
    }
    for (uint32_t i = 0; i < count; i++) CHECK(times[dense[i]] == (i < left ? 2u : 1u));
    check_all(st, ix);
    *ix = before;
    memcpy(sr_ptr(st, ix->array_off[0]), dense, count * sizeof *dense);
    memcpy(sr_ptr(st, ix->array_off[1]), pos, ix->slots_cap * sizeof *pos);
    sr_index_sample(st, ix, SR_SEL_EPOCH, rng, 1 + count / 5, got, prob);
}

static double some_priority(enum sr_selector kind, uint64_t *rng) {
    /* Few values, so that there are many ties; heaps take negative ones too. */
    double low = kind == SR_SEL_PRIORITIZED ? 0.0 : -2.0;
    if (sr_random_below(rng, 50) == 0) return -0.0;
    if (kind == SR_SEL_PRIORITIZED && (sr_random_below(rng, 2))) return sr_random_double(rng);
    return low + 0.5 * (double)sr_random_below(rng, 9);
}

static uint32_t some_slot(const sr_index *ix, int is_live, uint64_t *rng) {
    uint32_t slot = (uint32_t)sr_random_below(rng, ix->slots_cap);
    while (model[slot].live != is_live) slot = (slot + 1) % (uint32_t)ix->slots_cap;
    return slot;
}

static void update_some(sr_store *st, sr_index *ix, enum sr_selector kind, uint64_t *rng) {
    uint32_t slots[40], n = 1 + (uint32_t)sr_random_below(rng, 40);
    double prios[40];
    uint64_t touches[40];
    for (uint32_t i = 0; i < n; i++) { /* with duplicates: the last one wins */
        slots[i] = i > 0 && sr_random_below(rng, 4) == 0 ? slots[i - 1] : some_slot(ix, 1, rng);
        prios[i] = model[slots[i]].prio = some_priority(kind, rng);
        touches[i] = model[slots[i]].touch = ++n_touch;
    }
    if (n == 1) sr_index_update(st, ix, slots[0], prios[0], touches[0]);
    else sr_index_update_many(st, ix, n, slots, prios, touches);
}

static void random_operations(enum sr_selector kind, double exponent) {
    enum { OPS = 40000 };
    sr_index ix;
    sr_store st = start(&ix, kind, exponent, 1024);
    uint64_t rng = 1000u + (uint64_t)kind;
    for (uint32_t op = 0; op < OPS; op++) {
        uint64_t r = sr_random_below(&rng, 100);
        /* The tide turns every 5,000 operations; clear once, in the middle of a full table. */
        uint64_t inserts = op / 5000 % 2 == 0 ? 60 : 20;
        if (op == 14000) {
            sr_index_clear(&st, &ix);
            memset(model, 0, sizeof model);
            n_live = 0;
            check_all(&st, &ix);
        }
        if (r < inserts || n_live == 0) {
            if (n_live == ix.slots_cap)
                CHECK(sr_index_grow(&st, &ix, ix.slots_cap + 1024) == SR_OK);
            insert(&st, &ix, some_slot(&ix, 0, &rng), some_priority(kind, &rng));
        } else if (r < 80) {
            take_out(&st, &ix, some_slot(&ix, 1, &rng));
        } else {
            update_some(&st, &ix, kind, &rng);
        }
        if (op % 512 == 0) check_all(&st, &ix);
        if (op % 16 != 0 || n_live == 0) continue;
        if (kind == SR_SEL_UNIFORM || kind == SR_SEL_PRIORITIZED)
            check_draws(&st, &ix, kind, &rng);
        else if (kind == SR_SEL_EPOCH) check_pass(&st, &ix, &rng);
        else check_head(&st, &ix, kind, &rng);
    }
    if (kind != SR_SEL_PRIORITIZED) CHECK(sr_index_mass(&st, &ix) == (double)n_live);
    check_all(&st, &ix);
    drop(&st);
}

/* ------------------------------------------------------------------ draws */

static void check_chi_square(double x, double df) {
    if (df < 1) return;
    /* Wilson, Hilferty 1931: the cube root is close to normal. */
    double z = (cbrt(x / df) - (1 - 2 / (9 * df))) / sqrt(2 / (9 * df));
    if (fabs(z) > 4) fprintf(stderr, "chi-square %g with %g degrees of freedom: z %g\n", x, df, z);
    CHECK(z < 4 && z > -5);
}

/* One slot in `stride` is in use, in runs of 20. */
static uint32_t spread(uint32_t i, uint32_t stride) { return i / 20 * 20 * stride + i % 20; }

/* Weights are 0 throughout if `weightless`. */
static void distribution(enum sr_selector kind, uint32_t count, uint32_t stride, int weightless) {
    static uint32_t seen[SLOTS], got[1000];
    static double prob[1000];
    sr_index ix;
    sr_store st = start(&ix, kind, 0.7, (uint64_t)count * stride);
    uint64_t rng = 77, rounds = count > 1000 ? 1000 : 200;
    double draws = (double)rounds * 1000, x = 0, sum = 0;
    for (uint32_t i = 0; i < count; i++)
        insert(&st, &ix, spread(i, stride), weightless ? 0 : 1 + i % 5);
    memset(seen, 0, sizeof seen);
    for (uint64_t r = 0; r < rounds; r++) {
        sr_index_sample(&st, &ix, kind, &rng, 1000, got, prob);
        for (uint32_t i = 0; i < 1000; i++) seen[got[i]]++;
    }
    for (uint32_t i = 0; i < count; i++) {
        uint32_t slot = spread(i, stride);
        int flat = kind == SR_SEL_UNIFORM || weightless;
        double weight = flat ? 1.0 : sr_index_weight(model[slot].prio, 0.7);
        double want = draws * weight / (flat ? (double)count : sr_index_mass(&st, &ix));
        double off = (double)seen[slot] - want;
        x += off * off / want;
        sum += want;
        seen[slot] = 0;
    }
    for (uint32_t i = 0; i < SLOTS; i++) CHECK(seen[i] == 0);
    CHECK(fabs(sum - draws) < 1e-9 * draws);
    check_chi_square(x, (double)count - 1);
    drop(&st);
}

static void weight_zero_is_never_drawn(void) {
    sr_index ix;
    sr_store st = start(&ix, SR_SEL_PRIORITIZED, 1.0, 5000);
    uint64_t rng = 5;
    uint32_t got[1000];
    double prob[1000];
    for (uint32_t i = 0; i < 5000; i++) {
        double weight = pow(10.0, (double)sr_random_below(&rng, 31) - 15.0);
        insert(&st, &ix, i, sr_random_below(&rng, 4) == 0 ? weight : 0.0);
    }
    for (int r = 0; r < 200; r++) {
        sr_index_sample(&st, &ix, SR_SEL_PRIORITIZED, &rng, 1000, got, prob);
        for (int i = 0; i < 1000; i++) CHECK(model[got[i]].prio > 0.0 && prob[i] > 0.0);
        if (r % 10 != 0) continue;
        /* Drawn, so heavy: with those gone the next lighter ones have their turn. */
        for (int i = 0; i < 1000; i++) {
            model[got[i]].prio = 0.0;
            sr_index_update(&st, &ix, got[i], 0.0, 0);
        }
        for (uint32_t s = 0; sr_index_mass(&st, &ix) == 0.0; s++) {
            model[s].prio = 1e-15;
            sr_index_update(&st, &ix, s, 1e-15, 0);
        }
    }
    drop(&st);
}

/* Totals at the ends of the range: r * total is rounded up to the total, or the sums overflow. */
static void extreme_totals(void) {
    const double extreme[] = {4.9406564584124654e-324, DBL_MIN, DBL_MAX};
    for (uint32_t e = 0; e < 3; e++) {
        sr_index ix;
        sr_store st = start(&ix, SR_SEL_PRIORITIZED, 1.0, 1000);
        uint64_t rng = 9;
        uint32_t got[500];
        double prob[500];
        for (uint32_t i = 0; i < 1000; i++) insert(&st, &ix, i, i % 300 == 3 ? extreme[e] : 0.0);
        check_all(&st, &ix);
        sr_index_sample(&st, &ix, SR_SEL_PRIORITIZED, &rng, 500, got, prob);
        for (int i = 0; i < 500; i++) CHECK(got[i] % 300 == 3 && prob[i] > 0.0);
        drop(&st);
    }
}

/* ------------------------------------------------------------------ the tree's bits */

static void sums_do_not_drift(void) {
    sr_index ix;
    sr_store st = start(&ix, SR_SEL_PRIORITIZED, 1.0, 1024);
    insert(&st, &ix, 17, 1e-15);
    for (uint32_t i = 0; i < 10000; i++) {
        uint32_t slot = 18 + i % 1000;
        insert(&st, &ix, slot, 0.3);
        take_out(&st, &ix, slot);
        CHECK(sr_index_mass(&st, &ix) == 1e-15);
    }
    check_all(&st, &ix);
    drop(&st);
}

/* One by one, many at once, and a rebuild from the slots in another order: the same bytes. */
static void same_bits_by_every_way(void) {
    enum { N = 20000, M = 1500 };
    static uint32_t slots[M];
    static double prios[M];
    static uint64_t touches[M];
    const uint64_t bytes = sr_index_region_bytes(SR_SEL_PRIORITIZED, SLOTS);
    sr_index a, b, c;
    sr_store sa = start(&a, SR_SEL_PRIORITIZED, 0.6, N), sb = start(&b, SR_SEL_PRIORITIZED, 0.6, N);
    sr_store sc = segment(SEGMENT);
    uint64_t rng = 3;
    for (uint32_t i = 0; i < N; i++) {
        insert(&sa, &a, i, sr_random_double(&rng));
        sr_index_insert(&sb, &b, i, model[i].prio, 0);
    }
    for (uint32_t i = 0; i < M; i++) {
        slots[i] = (uint32_t)sr_random_below(&rng, N);
        prios[i] = model[slots[i]].prio = sr_random_double(&rng) * 1e6;
        sr_index_update(&sa, &a, slots[i], prios[i], 0);
    }
    sr_index_update_many(&sb, &b, M, slots, prios, touches);
    check_all(&sa, &a);
    CHECK(memcmp(sa.base + REGION, sb.base + REGION, bytes) == 0);
    sr_index_init(&c, SR_SEL_PRIORITIZED, 0.6, REGION, SLOTS);
    for (uint32_t i = 0; i < N; i += 1000) CHECK(sr_index_grow(&sc, &c, i + 1000) == SR_OK);
    for (uint32_t i = N; i > 0; i--) sr_index_insert(&sc, &c, i - 1, model[i - 1].prio, 0);
    CHECK(memcmp(sa.base + REGION, sc.base + REGION, bytes) == 0);
    sr_index_clear(&sb, &b);
    for (uint32_t i = N; i > 0; i--) sr_index_insert(&sb, &b, i - 1, model[i - 1].prio, 0);
    CHECK(memcmp(sa.base + REGION, sb.base + REGION, bytes) == 0);
    drop(&sa);
    drop(&sb);
    drop(&sc);
}

static void weights(void) {
    uint64_t rng = 11;
    for (int i = 0; i < 10000; i++) {
        double p = ldexp(sr_random_double(&rng), (int)sr_random_below(&rng, 200) - 100);
        CHECK(sr_index_weight(p, 1.0) == p);
        CHECK(sr_index_weight(p, 0.7) == pow(p, 0.7));
        CHECK(fabs(sr_index_weight(p, 0.5) - pow(p, 0.5)) <= DBL_EPSILON * sqrt(p));
    }
    CHECK(sr_index_weight(3.0, 0.0) == 1.0);
    CHECK(sr_index_weight(0.0, 0.0) == 0.0 && sr_index_weight(-0.0, 0.0) == 0.0);
    CHECK(sr_index_weight(0.0, 0.5) == 0.0 && sr_index_weight(0.0, 2.0) == 0.0);
}

/* ------------------------------------------------------------------ growth, damage */

static void growth(enum sr_selector kind) {
    const uint32_t steps[] = {1, 7, 8, 9, 64, 65, 512, 513, 1024, 4096, 4097, 32768, 32769, SLOTS};
    sr_index ix;
    sr_store st = start(&ix, kind, 0.5, 0);
    uint32_t used = 0;
    check_all(&st, &ix);
    for (uint32_t i = 0; i < sizeof steps / sizeof *steps; i++) {
        CHECK(sr_index_grow(&st, &ix, steps[i]) == SR_OK);
        check_all(&st, &ix);
        for (; used < steps[i]; used++) insert(&st, &ix, used, 1 + used % 3);
        check_all(&st, &ix);
    }
    uint64_t charged = 0;
    for (uint32_t k = 0; k < SR_TREE_LEVELS; k++) charged += ix.array_committed[k];
    CHECK(charged == atomic_load(&st.hdr->committed_bytes));
    CHECK(charged == sr_index_region_bytes(kind, SLOTS));
    drop(&st);
}

static void no_memory_changes_nothing(enum sr_selector kind) {
    sr_index ix;
    sr_store st = start(&ix, kind, 0.5, 1024);
    uint64_t rng = 4;
    for (uint32_t i = 0; i < 1000; i++) insert(&st, &ix, i, 1 + i % 3);
    st.shape.capacity_bytes = atomic_load(&st.hdr->committed_bytes) + 300000;
    CHECK(sr_index_grow(&st, &ix, SLOTS) == SR_FULL);
    CHECK(ix.slots_cap == 1024);
    CHECK(atomic_load(&st.hdr->committed_bytes) <= st.shape.capacity_bytes);
    check_all(&st, &ix);
    for (uint32_t i = 1000; i < 1024; i++) insert(&st, &ix, i, 2);
    take_out(&st, &ix, 500);
    update_some(&st, &ix, kind, &rng);
    check_all(&st, &ix);
    st.shape.capacity_bytes = SEGMENT;
    CHECK(sr_index_grow(&st, &ix, SLOTS) == SR_OK);
    insert(&st, &ix, SLOTS - 1, 2);
    check_all(&st, &ix);
    drop(&st);
}

/* Any changed word of any array is found. */
static void damage_is_found(enum sr_selector kind) {
    sr_index ix;
    sr_store st = start(&ix, kind, 0.5, 1024);
    for (uint32_t i = 0; i < 1000; i++) insert(&st, &ix, i, i % 5);
    for (uint32_t k = 0; k < SR_TREE_LEVELS && ix.array_committed[k] > 0; k++) {
        uint32_t *word = sr_ptr(&st, ix.array_off[k]);
        for (uint32_t bit = 0; bit < 32; bit += 5) {
            word[1] ^= 1u << bit;
            CHECK(sr_index_check(&st, &ix, 1024, live, NULL) < 0);
            word[1] ^= 1u << bit;
        }
    }
    check_all(&st, &ix);
    model[3].live = 0; /* an entry that is no live slot, and a live slot that is no entry */
    CHECK(sr_index_check(&st, &ix, 1024, live, NULL) < 0);
    model[1001] = model[3];
    model[1001].live = 1;
    CHECK(sr_index_check(&st, &ix, 1024, live, NULL) < 0);
    drop(&st);
}

int main(void) {
    const uint32_t counts[] = {1, 2, 3, 7, 1000, 65537};
    weights();
    for (int kind = SR_SEL_FIFO; kind <= SR_SEL_EPOCH; kind++) {
        random_operations((enum sr_selector)kind, 0.6);
        growth((enum sr_selector)kind);
        no_memory_changes_nothing((enum sr_selector)kind);
        damage_is_found((enum sr_selector)kind);
    }
    random_operations(SR_SEL_PRIORITIZED, 0.0);
    random_operations(SR_SEL_PRIORITIZED, 0.5);
    random_operations(SR_SEL_PRIORITIZED, 1.0);
    for (uint32_t i = 0; i < sizeof counts / sizeof *counts; i++) {
        distribution(SR_SEL_UNIFORM, counts[i], 1, 0);
        distribution(SR_SEL_PRIORITIZED, counts[i], 1, 0);
        distribution(SR_SEL_PRIORITIZED, counts[i], 1, 1);
    }
    distribution(SR_SEL_PRIORITIZED, 1000, 5, 1);
    distribution(SR_SEL_PRIORITIZED, 1000, 61, 1); /* few among many: drawn by rank */
    weight_zero_is_never_drawn();
    extreme_totals();
    sums_do_not_drift();
    same_bits_by_every_way();
    puts("test_index: ok");
    return 0;
}
