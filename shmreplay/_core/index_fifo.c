#include "index_fifo.h"

uint64_t sr_list_array_bytes(uint32_t k, uint64_t slots) {
    return k < 2 ? slots * sizeof(uint32_t) : 0;
}

static uint32_t *next_of(const sr_store *st, const sr_index *ix) {
    return sr_known(st, ix->array_off[0]);
}
static uint32_t *prev_of(const sr_store *st, const sr_index *ix) {
    return sr_known(st, ix->array_off[1]);
}

void sr_list_insert(sr_store *st, sr_index *ix, uint32_t slot) {
    uint32_t *next = next_of(st, ix), *prev = prev_of(st, ix);
    next[slot] = SR_NONE;
    prev[slot] = ix->tail;
    if (ix->tail == SR_NONE) {
        ix->head = slot;
    } else {
        SR_ASSERT(ix->tail < ix->slots_cap);
        next[ix->tail] = slot;
    }
    ix->tail = slot;
    ix->count++;
}

void sr_list_remove(sr_store *st, sr_index *ix, uint32_t slot) {
    uint32_t *next = next_of(st, ix), *prev = prev_of(st, ix);
    uint32_t before = prev[slot], after = next[slot];
    /* Both neighbours must know this slot: catches a slot that is not in the list. */
    if (before == SR_NONE) {
        SR_ASSERT(ix->head == slot);
    } else {
        SR_ASSERT(before < ix->slots_cap && next[before] == slot);
    }
    if (after == SR_NONE) {
        SR_ASSERT(ix->tail == slot);
        ix->tail = before;
    } else {
        SR_ASSERT(after < ix->slots_cap && prev[after] == slot);
        prev[after] = before;
    }
    if (before == SR_NONE) {
        ix->head = after;
    } else {
        next[before] = after;
    }
    ix->count--;
}

void sr_list_clear(sr_index *ix) {
    ix->count = 0;
    ix->head = ix->tail = SR_NONE;
}

#define REQUIRE(cond)                 \
    do {                              \
        if (!(cond)) return -__LINE__; \
    } while (0)

int sr_list_check(sr_store *st, const sr_index *ix, uint64_t slots_used, sr_live_fn live,
                  void *ctx) {
    const uint32_t *next = next_of(st, ix), *prev = prev_of(st, ix);
    double prio;
    uint64_t touch, seq, last_seq = 0, n = 0;
    uint32_t before = SR_NONE, slot = ix->head;
    /* Rising insertion numbers mean that no slot is met twice, so the walk ends. */
    for (; slot != SR_NONE; before = slot, slot = next[slot], n++) {
        REQUIRE(slot < slots_used);
        REQUIRE(n < ix->count);
        REQUIRE(prev[slot] == before);
        REQUIRE(live(ctx, slot, &prio, &touch, &seq));
        REQUIRE(n == 0 || seq > last_seq);
        last_seq = seq;
    }
    REQUIRE(ix->tail == before);
    REQUIRE(n == ix->count);
    return 0;
}
