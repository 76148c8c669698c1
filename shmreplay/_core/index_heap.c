#include "index_heap.h"

uint64_t sr_heap_array_bytes(uint32_t k, uint64_t slots) {
    if (k == 0) return slots * sizeof(sr_heap_entry);
    return k == 1 ? slots * sizeof(uint32_t) : 0;
}

static sr_heap_entry *heap_of(const sr_store *st, const sr_index *ix) {
    return sr_known(st, ix->array_off[0]);
}
static uint32_t *pos_of(const sr_store *st, const sr_index *ix) {
    return sr_known(st, ix->array_off[1]);
}

static int before(const sr_heap_entry *a, const sr_heap_entry *b) {
    return a->key < b->key || (a->key == b->key && a->touch < b->touch);
}

static sr_heap_entry entry_of(const sr_index *ix, uint32_t slot, double prio, uint64_t touch) {
    double key = ix->kind == SR_SEL_MAX_HEAP ? -prio : prio;
    return (sr_heap_entry){.key = key, .touch = touch, .slot = slot};
}

static void place(const sr_index *ix, sr_heap_entry *heap, uint32_t *pos, uint64_t i,
                  const sr_heap_entry *e) {
    SR_ASSERT(e->slot < ix->slots_cap);
    heap[i] = *e;
    pos[e->slot] = (uint32_t)i;
}

/* Put `e` where it belongs, beginning at the hole `i`, which is one of `count` places. */
static void settle(sr_store *st, sr_index *ix, uint64_t i, sr_heap_entry e) {
    sr_heap_entry *heap = heap_of(st, ix);
    uint32_t *pos = pos_of(st, ix);
    const uint64_t count = ix->count;
    while (i > 0 && before(&e, &heap[(i - 1) / 2])) {
        place(ix, heap, pos, i, &heap[(i - 1) / 2]);
        i = (i - 1) / 2;
    }
    for (uint64_t child = 2 * i + 1; child < count; child = 2 * i + 1) {
        if (child + 1 < count && before(&heap[child + 1], &heap[child])) child++;
        if (!before(&heap[child], &e)) break;
        place(ix, heap, pos, i, &heap[child]);
        i = child;
    }
    place(ix, heap, pos, i, &e);
}

static uint32_t find(const sr_store *st, const sr_index *ix, uint32_t slot) {
    uint32_t i = pos_of(st, ix)[slot];
    SR_ASSERT(i < ix->count && heap_of(st, ix)[i].slot == slot);
    return i;
}

void sr_heap_insert(sr_store *st, sr_index *ix, uint32_t slot, double prio, uint64_t touch) {
    uint32_t i = pos_of(st, ix)[slot];
    SR_ASSERT(ix->count < ix->slots_cap);
    SR_ASSERT(i >= ix->count || heap_of(st, ix)[i].slot != slot);
    ix->count++;
    settle(st, ix, ix->count - 1, entry_of(ix, slot, prio, touch));
}

void sr_heap_remove(sr_store *st, sr_index *ix, uint32_t slot) {
    uint32_t hole = find(st, ix, slot);
    ix->count--;
    if (hole == ix->count) return;
    sr_heap_entry last = heap_of(st, ix)[ix->count];
    SR_ASSERT(last.slot < ix->slots_cap);
    settle(st, ix, hole, last);
}

void sr_heap_update(sr_store *st, sr_index *ix, uint32_t slot, double prio, uint64_t touch) {
    settle(st, ix, find(st, ix, slot), entry_of(ix, slot, prio, touch));
}

void sr_heap_clear(sr_index *ix) { ix->count = 0; }

uint32_t sr_heap_top(const sr_store *st, const sr_index *ix) { return heap_of(st, ix)[0].slot; }

#define REQUIRE(cond)                 \
    do {                              \
        if (!(cond)) return -__LINE__; \
    } while (0)

int sr_heap_check(sr_store *st, const sr_index *ix, uint64_t slots_used, sr_live_fn live,
                  void *ctx) {
    const sr_heap_entry *heap = heap_of(st, ix);
    const uint32_t *pos = pos_of(st, ix);
    double prio;
    uint64_t touch, seq;
    for (uint64_t i = 0; i < ix->count; i++) {
        REQUIRE(heap[i].slot < slots_used);
        REQUIRE(pos[heap[i].slot] == i);
        REQUIRE(live(ctx, heap[i].slot, &prio, &touch, &seq));
        sr_heap_entry want = entry_of(ix, heap[i].slot, prio, touch);
        REQUIRE(heap[i].key == want.key);
        REQUIRE(heap[i].touch == want.touch);
        REQUIRE(i == 0 || before(&heap[(i - 1) / 2], &heap[i]));
    }
    return 0;
}
