#include "index_sumtree.h"

#include <float.h>
#include <math.h>

/* The same sums on every build: doubles are added as doubles. */
_Static_assert(FLT_EVAL_METHOD == 0, "arithmetic on doubles must not use more precision");
_Static_assert(SR_TREE_FAN == 8, "sum_of_line and pick are written for 8 children");

#define GROUP 64u   /* draws that descend together: their lines fit the first-level cache */
#define BATCH 512u  /* updates that climb together: their lines fit the second-level cache */
#define AHEAD 16u   /* updates between a prefetch and its use */
#define BLOCKS 1024u

double sr_index_weight(double prio, double exponent) {
    /* The one place where a weight is made: a leaf is compared with it bit by bit. */
    if (prio == 0.0) return 0.0;
    if (exponent == 1.0) return prio;
    if (exponent == 0.5) return sqrt(prio);
    return pow(prio, exponent);
}

static uint64_t nodes_at(uint32_t level, uint64_t slots) {
    for (uint32_t l = 0; l < level; l++) slots = (slots + SR_TREE_FAN - 1) / SR_TREE_FAN;
    return slots;
}

/* Levels of a tree over `slots` leaves: the highest has at most 8 nodes. */
static uint32_t levels_for(uint64_t slots) {
    uint32_t n = 1;
    if (slots == 0) return 0;
    while (nodes_at(n - 1, slots) > SR_TREE_FAN) n++;
    SR_ASSERT(n <= SR_TREE_LEVELS);
    return n;
}

uint64_t sr_tree_array_bytes(uint32_t k, uint64_t slots) {
    if (k >= levels_for(slots)) return 0;
    return sr_align(nodes_at(k, slots) * sizeof(double), SR_LINE);
}

static inline double *level_of(const sr_store *st, const sr_index *ix, uint32_t l) {
    return sr_known(st, ix->array_off[l]);
}

/* Part of the format: sums of children are formed in this order (two lanes of four, for SIMD). */
static inline double sum_of_line(const double *c) {
    double even = (c[0] + c[2]) + (c[4] + c[6]);
    double odd = (c[1] + c[3]) + (c[5] + c[7]);
    return even + odd;
}

static inline double leaf_of(double weight) { return weight == 0.0 ? -0.0 : weight; }

static inline int absent(const double *leaf) {
    uint64_t bits;
    memcpy(&bits, leaf, sizeof bits);
    return bits == 0;
}

double sr_tree_total(const sr_store *st, const sr_index *ix) {
    if (ix->n_levels == 0) return 0.0;
    SR_ASSERT(ix->n_levels <= SR_TREE_LEVELS);
    return sum_of_line(level_of(st, ix, ix->n_levels - 1)) + 0.0; /* -0.0 becomes 0 */
}

/* ------------------------------------------------------------------ changes */

void sr_tree_grown(sr_store *st, sr_index *ix, uint64_t slots) {
    uint32_t n_levels = levels_for(slots);
    /* The level that was highest is one line: a level above it has one node that is not empty. */
    for (uint32_t l = ix->n_levels == 0 ? 1 : ix->n_levels; l < n_levels; l++)
        level_of(st, ix, l)[0] = sum_of_line(level_of(st, ix, l - 1));
    ix->n_levels = n_levels;
}

/* Crash window, here and in update_many: a leaf may be set and its ancestors not. Only inside the
 * stripe's lock, whose next owner sees that and rebuilds. */
static void set_leaf(sr_store *st, sr_index *ix, uint32_t slot, double leaf) {
    uint64_t i = slot;
    double *below = level_of(st, ix, 0);
    below[i] = leaf;
    for (uint32_t l = 1; l < ix->n_levels; l++) {
        double *here = level_of(st, ix, l);
        i /= SR_TREE_FAN;
        here[i] = sum_of_line(below + i * SR_TREE_FAN);
        below = here;
    }
}

void sr_tree_insert(sr_store *st, sr_index *ix, uint32_t slot, double prio) {
    SR_ASSERT(absent(level_of(st, ix, 0) + slot));
    set_leaf(st, ix, slot, leaf_of(sr_index_weight(prio, ix->exponent)));
    ix->count++;
}

void sr_tree_remove(sr_store *st, sr_index *ix, uint32_t slot) {
    SR_ASSERT(!absent(level_of(st, ix, 0) + slot));
    set_leaf(st, ix, slot, 0.0);
    ix->count--;
}

static void prefetch_path(const sr_store *st, const sr_index *ix, uint32_t slot) {
    uint64_t i = slot;
    /* Higher levels are small and stay in the cache. */
    for (uint32_t l = 0; l < 3 && l < ix->n_levels; l++, i /= SR_TREE_FAN)
        __builtin_prefetch(level_of(st, ix, l) + i, 1);
}

static void set_leaves(sr_store *st, sr_index *ix, uint32_t n, const uint32_t *slots,
                       const double *prios) {
    double *leaves = level_of(st, ix, 0);
    for (uint32_t i = 0; i < n && i < AHEAD; i++) prefetch_path(st, ix, slots[i]);
    for (uint32_t i = 0; i < n; i++) {
        if (i + AHEAD < n) prefetch_path(st, ix, slots[i + AHEAD]);
        SR_ASSERT(slots[i] < ix->slots_cap && !absent(leaves + slots[i]));
        leaves[slots[i]] = leaf_of(sr_index_weight(prios[i], ix->exponent));
    }
}

static void climb(sr_store *st, sr_index *ix, uint32_t n, const uint32_t *slots) {
    uint64_t nodes = ix->slots_cap;
    for (uint32_t l = 1; l < ix->n_levels; l++) {
        const double *below = level_of(st, ix, l - 1);
        double *here = level_of(st, ix, l);
        nodes = (nodes + SR_TREE_FAN - 1) / SR_TREE_FAN;
        if (nodes <= n) { /* fewer nodes than changes: all of them, each once */
            for (uint64_t i = 0; i < nodes; i++) here[i] = sum_of_line(below + i * SR_TREE_FAN);
            continue;
        }
        uint64_t last = UINT64_MAX;
        for (uint32_t i = 0; i < n; i++) {
            uint64_t node = slots[i] >> (3 * l);
            if (node == last) continue;
            here[node] = sum_of_line(below + node * SR_TREE_FAN);
            last = node;
        }
    }
}

void sr_tree_update_many(sr_store *st, sr_index *ix, uint32_t n, const uint32_t *slots,
                         const double *prios) {
    while (n > 0) {
        uint32_t m = n < BATCH ? n : BATCH;
        set_leaves(st, ix, m, slots, prios);
        climb(st, ix, m, slots);
        n -= m;
        slots += m;
        prios += m;
    }
}

void sr_tree_clear(sr_store *st, sr_index *ix) {
    for (uint32_t l = 0; l < ix->n_levels; l++)
        memset(level_of(st, ix, l), 0, sr_tree_array_bytes(l, ix->slots_cap));
    ix->count = 0;
}

void sr_tree_rebuild(sr_store *st, sr_index *ix, uint64_t n, const uint32_t *slots,
                     const double *prios) {
    ix->n_levels = levels_for(ix->slots_cap);
    ix->count = 0;
    /* All that has memory: a growth that was cut short may have left sums beyond slots_cap. */
    for (uint32_t l = 0; l < SR_TREE_LEVELS; l++) {
        if (ix->array_committed[l] > 0) memset(level_of(st, ix, l), 0, ix->array_committed[l]);
    }
    if (ix->n_levels == 0) return;
    double *leaves = level_of(st, ix, 0);
    for (uint64_t i = 0; i < n; i++) {
        SR_ASSERT(slots[i] < ix->slots_cap);
        leaves[slots[i]] = leaf_of(sr_index_weight(prios[i], ix->exponent));
    }
    for (uint32_t l = 1; l < ix->n_levels; l++) {
        const double *below = level_of(st, ix, l - 1);
        double *here = level_of(st, ix, l);
        uint64_t nodes = nodes_at(l, ix->slots_cap);
        for (uint64_t i = 0; i < nodes; i++) here[i] = sum_of_line(below + i * SR_TREE_FAN);
    }
    ix->count = n;
}

/* ------------------------------------------------------------------ draws */

static uint32_t last_positive(const double *c) {
    for (uint32_t k = SR_TREE_FAN; k > 0; k--)
        if (c[k - 1] > 0.0) return k - 1;
    SR_ASSERT(!"a node of the sum tree is positive and none of its children is");
    return 0;
}

/* The child of this line in which `*u` falls; `*u` becomes what is left of it there. Which child it
 * is is random, so a branch on it would be mispredicted each time: there is none. */
static inline uint32_t pick(const double *c, double *u) {
    double p[8];
    p[0] = 0.0;
    for (uint32_t k = 1; k < 8; k++) p[k] = p[k - 1] + c[k - 1];
    uint32_t child = 0;
    for (uint32_t k = 1; k < 8; k++) child += *u >= p[k];
    /* Only the last child can be picked with weight 0: rounding left u >= the sum of the line. */
    if (SR_UNLIKELY(!(c[child] > 0.0))) child = last_positive(c);
    *u -= p[child];
    return child;
}

/* One group: slots[] holds the nodes reached, prob[] what is left of u, in the draws' order. */
static void descend(const sr_store *st, const sr_index *ix, double total, uint32_t n,
                    uint32_t *slots, double *prob) {
    for (uint32_t l = ix->n_levels; l > 0; l--) {
        const double *here = level_of(st, ix, l - 1);
        const double *below = l > 1 ? level_of(st, ix, l - 2) : here;
        const uint64_t bound = nodes_at(l - 1, ix->slots_cap);
        for (uint32_t i = 0; i < n; i++) {
            uint64_t line = (uint64_t)slots[i] * SR_TREE_FAN;
            SR_ASSERT(line < bound);
            slots[i] = (uint32_t)line + pick(here + line, &prob[i]);
            if (l > 1) __builtin_prefetch(below + (uint64_t)slots[i] * SR_TREE_FAN);
        }
    }
    const double *leaves = level_of(st, ix, 0);
    for (uint32_t i = 0; i < n; i++) {
        SR_ASSERT(slots[i] < ix->slots_cap);
        prob[i] = leaves[slots[i]] / total;
    }
}

static uint64_t present_in(const double *leaves, uint64_t from, uint64_t to) {
    uint64_t n = 0;
    for (uint64_t i = from; i < to; i++) n += !absent(leaves + i);
    return n;
}

/* Uniform over the slots in the tree, few of those there could be: by rank. One walk over the
 * leaves counts them block by block, each draw then looks into one block. */
static void draw_sparse(const double *leaves, const sr_index *ix, uint64_t *rng, uint32_t n,
                        uint32_t *slots) {
    uint64_t first[BLOCKS + 1]; /* rank of the first entry of each block */
    const uint64_t cap = ix->slots_cap, width = (cap + BLOCKS - 1) / BLOCKS;
    first[0] = 0;
    for (uint64_t b = 0; b < BLOCKS; b++) {
        uint64_t from = b * width < cap ? b * width : cap;
        uint64_t to = from + width < cap ? from + width : cap;
        first[b + 1] = first[b] + present_in(leaves, from, to);
    }
    SR_ASSERT(first[BLOCKS] == ix->count);
    for (uint32_t i = 0; i < n; i++) {
        uint64_t rank = sr_random_below(rng, ix->count), lo = 0, hi = BLOCKS;
        while (hi - lo > 1) { /* first[lo] <= rank < first[hi] */
            uint64_t mid = (lo + hi) / 2;
            if (first[mid] <= rank) lo = mid;
            else hi = mid;
        }
        uint64_t slot = lo * width;
        for (uint64_t left = rank - first[lo]; absent(leaves + slot) || left-- > 0; slot++)
            SR_ASSERT(slot + 1 < cap);
        slots[i] = (uint32_t)slot;
    }
}

/* All weights are 0: every slot in the tree is as likely as any other. */
static void draw_weightless(const sr_store *st, const sr_index *ix, uint64_t *rng, uint32_t n,
                            uint32_t *slots, double *prob) {
    const double *leaves = level_of(st, ix, 0);
    const double p = 1.0 / (double)ix->count;
    for (uint32_t i = 0; i < n; i++) prob[i] = p;
    if (ix->count < ix->slots_cap / 8) {
        draw_sparse(leaves, ix, rng, n, slots);
        return;
    }
    for (uint32_t i = 0; i < n; i++) {
        /* At least one in eight is there: a million misses in a row do not happen. */
        uint32_t tries = 0;
        do {
            SR_ASSERT(tries++ < 1000000);
            slots[i] = (uint32_t)sr_random_below(rng, ix->slots_cap);
        } while (absent(leaves + slots[i]));
    }
}

void sr_tree_sample(const sr_store *st, const sr_index *ix, uint64_t *rng, uint32_t n,
                    uint32_t *slots, double *prob) {
    double total = sr_tree_total(st, ix);
    if (!(total > 0.0)) {
        draw_weightless(st, ix, rng, n, slots, prob);
        return;
    }
    if (total > DBL_MAX) total = DBL_MAX; /* finite weights, infinite sum: keep u a number */
    while (n > 0) {
        uint32_t m = n < GROUP ? n : GROUP;
        for (uint32_t i = 0; i < m; i++) {
            slots[i] = 0;
            prob[i] = sr_random_double(rng) * total;
        }
        descend(st, ix, total, m, slots, prob);
        n -= m;
        slots += m;
        prob += m;
    }
}

/* ------------------------------------------------------------------ check */

#define REQUIRE(cond)                 \
    do {                              \
        if (!(cond)) return -__LINE__; \
    } while (0)

static int same_bits(double a, double b) { return memcmp(&a, &b, sizeof a) == 0; }

int sr_tree_check(sr_store *st, const sr_index *ix, uint64_t slots_used, sr_live_fn live,
                  void *ctx) {
    double prio;
    uint64_t touch, seq;
    REQUIRE(ix->n_levels == levels_for(ix->slots_cap));
    if (ix->n_levels == 0) return 0;
    const double *leaves = level_of(st, ix, 0);
    for (uint64_t slot = 0; slot < sr_align(ix->slots_cap, SR_TREE_FAN); slot++) {
        double want = 0.0;
        if (slot < slots_used && live(ctx, (uint32_t)slot, &prio, &touch, &seq))
            want = leaf_of(sr_index_weight(prio, ix->exponent));
        REQUIRE(same_bits(leaves[slot], want));
    }
    for (uint32_t l = 1; l < ix->n_levels; l++) {
        const double *here = level_of(st, ix, l), *below = level_of(st, ix, l - 1);
        uint64_t nodes = nodes_at(l, ix->slots_cap);
        for (uint64_t i = 0; i < sr_align(nodes, SR_TREE_FAN); i++)
            REQUIRE(same_bits(here[i], i < nodes ? sum_of_line(below + i * SR_TREE_FAN) : 0.0));
    }
    return 0;
}
