#include "index_uniform.h"

uint64_t sr_uniform_array_bytes(uint32_t k, uint64_t slots) {
    return k < 2 ? slots * sizeof(uint32_t) : 0;
}

static uint32_t *dense_of(const sr_store *st, const sr_index *ix) {
    return sr_known(st, ix->array_off[0]);
}
static uint32_t *pos_of(const sr_store *st, const sr_index *ix) {
    return sr_known(st, ix->array_off[1]);
}

void sr_uniform_insert(sr_store *st, sr_index *ix, uint32_t slot) {
    uint32_t *dense = dense_of(st, ix), *pos = pos_of(st, ix);
    SR_ASSERT(ix->count < ix->slots_cap);
    SR_ASSERT(pos[slot] >= ix->count || dense[pos[slot]] != slot);
    dense[ix->count] = slot;
    pos[slot] = (uint32_t)ix->count;
    ix->count++;
}

void sr_uniform_remove(sr_store *st, sr_index *ix, uint32_t slot) {
    uint32_t *dense = dense_of(st, ix), *pos = pos_of(st, ix);
    uint32_t hole = pos[slot];
    SR_ASSERT(hole < ix->count && dense[hole] == slot);
    uint32_t last = dense[ix->count - 1];
    SR_ASSERT(last < ix->slots_cap);
    dense[hole] = last;
    pos[last] = hole;
    ix->count--;
}

void sr_uniform_clear(sr_index *ix) { ix->count = 0; }

void sr_uniform_sample(const sr_store *st, const sr_index *ix, uint64_t *rng, uint32_t n,
                       uint32_t *slots, double *prob) {
    const uint32_t *dense = dense_of(st, ix);
    const double p = 1.0 / (double)ix->count;
    SR_ASSERT(ix->count <= ix->slots_cap);
    for (uint32_t i = 0; i < n; i++) {
        slots[i] = dense[sr_random_below(rng, ix->count)];
        SR_ASSERT(slots[i] < ix->slots_cap);
        prob[i] = p;
    }
}

#define REQUIRE(cond)                 \
    do {                              \
        if (!(cond)) return -__LINE__; \
    } while (0)

int sr_uniform_check(sr_store *st, const sr_index *ix, uint64_t slots_used, sr_live_fn live,
                     void *ctx) {
    const uint32_t *dense = dense_of(st, ix), *pos = pos_of(st, ix);
    double prio;
    uint64_t touch, seq;
    for (uint64_t i = 0; i < ix->count; i++) {
        REQUIRE(dense[i] < slots_used);
        REQUIRE(pos[dense[i]] == i);
        REQUIRE(live(ctx, dense[i], &prio, &touch, &seq));
    }
    return 0;
}
