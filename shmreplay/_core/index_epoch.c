#include "index_epoch.h"

#include "index_uniform.h"

static void swap(const sr_store *st, const sr_index *ix, uint32_t a, uint32_t b) {
    uint32_t *dense = sr_known(st, ix->array_off[0]), *pos = sr_known(st, ix->array_off[1]);
    uint32_t x = dense[a], y = dense[b];
    SR_ASSERT(x < ix->slots_cap && y < ix->slots_cap);
    dense[a] = y;
    dense[b] = x;
    pos[y] = a;
    pos[x] = b;
}

void sr_epoch_insert(sr_store *st, sr_index *ix, uint32_t slot) {
    SR_ASSERT(ix->head <= ix->count);
    sr_uniform_insert(st, ix, slot);
    swap(st, ix, (uint32_t)ix->count - 1, ix->head);
    ix->head++;
}

void sr_epoch_remove(sr_store *st, sr_index *ix, uint32_t slot) {
    const uint32_t *pos = sr_known(st, ix->array_off[1]);
    SR_ASSERT(ix->head <= ix->count && pos[slot] < ix->count);
    if (pos[slot] < ix->head) {
        ix->head--;
        swap(st, ix, pos[slot], ix->head);
    }
    /* It is among those that were drawn, or is the last of all: what fills its place was drawn. */
    sr_uniform_remove(st, ix, slot);
}

void sr_epoch_clear(sr_index *ix) {
    sr_uniform_clear(ix);
    ix->head = 0;
}

void sr_epoch_sample(const sr_store *st, sr_index *ix, uint64_t *rng, uint32_t n, uint32_t *slots,
                     double *prob) {
    const uint32_t *dense = sr_known(st, ix->array_off[0]);
    SR_ASSERT(ix->head <= ix->count && ix->count <= ix->slots_cap);
    for (uint32_t i = 0; i < n; i++) {
        if (ix->head == 0) ix->head = (uint32_t)ix->count;
        uint32_t at = (uint32_t)sr_random_below(rng, ix->head);
        slots[i] = dense[at];
        prob[i] = 1.0 / (double)ix->head;
        ix->head--;
        swap(st, ix, at, ix->head);
    }
}

int sr_epoch_check(sr_store *st, const sr_index *ix, uint64_t slots_used, sr_live_fn live,
                   void *ctx) {
    if (ix->head > ix->count) return -__LINE__;
    return sr_uniform_check(st, ix, slots_used, live, ctx);
}
