#include "index.h"

#include "index_epoch.h"
#include "index_fifo.h"
#include "index_heap.h"
#include "index_sumtree.h"
#include "index_uniform.h"
#include "arena.h"
#include "huge.h"

/* fifo and lifo are two ways to read one list. */
static enum sr_selector structure(uint32_t kind) {
    return kind == SR_SEL_LIFO ? SR_SEL_FIFO : (enum sr_selector)kind;
}

_Noreturn static void unknown_kind(uint32_t kind) {
    char what[64];
    snprintf(what, sizeof what, "no selector has the number %u", kind);
    sr_damage(what, __FILE__, __LINE__);
}

/* Bytes that array k needs for this many slots; 0: there is no such array. */
static uint64_t array_bytes(uint32_t kind, uint32_t k, uint64_t slots) {
    switch (structure(kind)) {
    case SR_SEL_FIFO: return sr_list_array_bytes(k, slots);
    case SR_SEL_UNIFORM:
    case SR_SEL_EPOCH: return sr_uniform_array_bytes(k, slots);
    case SR_SEL_PRIORITIZED: return sr_tree_array_bytes(k, slots);
    case SR_SEL_MIN_HEAP:
    case SR_SEL_MAX_HEAP: return sr_heap_array_bytes(k, slots);
    default: unknown_kind(kind);
    }
}

uint64_t sr_index_region_bytes(enum sr_selector kind, uint64_t slots_max) {
    uint64_t bytes = 0;
    for (uint32_t k = 0; k < SR_TREE_LEVELS; k++)
        bytes += sr_align(array_bytes(kind, k, slots_max), SR_PAGE);
    return bytes;
}

void sr_index_init(sr_index *ix, enum sr_selector kind, double exponent, uint64_t region,
                   uint64_t slots_max) {
    SR_ASSERT(region % SR_PAGE == 0 && slots_max < SR_NONE);
    memset(ix, 0, sizeof *ix);
    ix->kind = structure(kind);
    ix->exponent = exponent;
    ix->head = ix->tail = SR_NONE;
    if (kind == SR_SEL_EPOCH) sr_epoch_clear(ix);
    for (uint32_t k = 0; k < SR_TREE_LEVELS; k++) {
        uint64_t bytes = sr_align(array_bytes(kind, k, slots_max), SR_PAGE);
        if (bytes == 0) continue;
        ix->array_off[k] = region;
        region += bytes;
    }
}

int sr_index_grow(sr_store *st, sr_index *ix, uint64_t slots) {
    if (slots <= ix->slots_cap) return SR_OK;
    for (uint32_t k = 0; k < SR_TREE_LEVELS; k++) {
        uint64_t need = sr_align(array_bytes(ix->kind, k, slots), SR_PAGE);
        uint64_t have = ix->array_committed[k];
        if (need <= have) continue;
        /* Beyond the slots_max of sr_index_init the array would run into the next. */
        SR_ASSERT(ix->array_off[k] != 0);
        SR_ASSERT(k + 1 == SR_TREE_LEVELS || ix->array_off[k + 1] == 0 ||
                  ix->array_off[k] + need <= ix->array_off[k + 1]);
        int rc = sr_commit(st, ix->array_off[k] + have, need - have, need - have);
        if (rc != SR_OK) return rc; /* arrays that did get memory keep it for the next attempt */
        sr_huge_grown(st, ix->array_off[k], ix->array_off[k] + have, ix->array_off[k] + need);
        ix->array_committed[k] = need;
    }
    if (ix->kind == SR_SEL_PRIORITIZED) sr_tree_grown(st, ix, slots);
    ix->slots_cap = slots;
    return SR_OK;
}

void sr_index_insert(sr_store *st, sr_index *ix, uint32_t slot, double prio, uint64_t touch) {
    SR_ASSERT(slot < ix->slots_cap && ix->count < ix->slots_cap);
    switch (ix->kind) {
    case SR_SEL_FIFO: sr_list_insert(st, ix, slot); break;
    case SR_SEL_UNIFORM: sr_uniform_insert(st, ix, slot); break;
    case SR_SEL_EPOCH: sr_epoch_insert(st, ix, slot); break;
    case SR_SEL_PRIORITIZED: sr_tree_insert(st, ix, slot, prio); break;
    case SR_SEL_MIN_HEAP:
    case SR_SEL_MAX_HEAP: sr_heap_insert(st, ix, slot, prio, touch); break;
    default: unknown_kind(ix->kind);
    }
}

void sr_index_remove(sr_store *st, sr_index *ix, uint32_t slot) {
    SR_ASSERT(slot < ix->slots_cap && ix->count > 0);
    switch (ix->kind) {
    case SR_SEL_FIFO: sr_list_remove(st, ix, slot); break;
    case SR_SEL_UNIFORM: sr_uniform_remove(st, ix, slot); break;
    case SR_SEL_EPOCH: sr_epoch_remove(st, ix, slot); break;
    case SR_SEL_PRIORITIZED: sr_tree_remove(st, ix, slot); break;
    case SR_SEL_MIN_HEAP:
    case SR_SEL_MAX_HEAP: sr_heap_remove(st, ix, slot); break;
    default: unknown_kind(ix->kind);
    }
}

void sr_index_update(sr_store *st, sr_index *ix, uint32_t slot, double prio, uint64_t touch) {
    sr_index_update_many(st, ix, 1, &slot, &prio, &touch);
}

void sr_index_update_many(sr_store *st, sr_index *ix, uint32_t n, const uint32_t *slots,
                          const double *prios, const uint64_t *touches) {
    switch (ix->kind) {
    case SR_SEL_FIFO:
    case SR_SEL_UNIFORM:
    case SR_SEL_EPOCH: break; /* none of them knows of priorities */
    case SR_SEL_PRIORITIZED: sr_tree_update_many(st, ix, n, slots, prios); break;
    case SR_SEL_MIN_HEAP:
    case SR_SEL_MAX_HEAP:
        for (uint32_t i = 0; i < n; i++) {
            SR_ASSERT(slots[i] < ix->slots_cap);
            sr_heap_update(st, ix, slots[i], prios[i], touches[i]);
        }
        break;
    default: unknown_kind(ix->kind);
    }
}

void sr_index_clear(sr_store *st, sr_index *ix) {
    switch (ix->kind) {
    case SR_SEL_FIFO: sr_list_clear(ix); break;
    case SR_SEL_UNIFORM: sr_uniform_clear(ix); break;
    case SR_SEL_EPOCH: sr_epoch_clear(ix); break;
    case SR_SEL_PRIORITIZED: sr_tree_clear(st, ix); break;
    case SR_SEL_MIN_HEAP:
    case SR_SEL_MAX_HEAP: sr_heap_clear(ix); break;
    default: unknown_kind(ix->kind);
    }
}

/* Does every array have memory for slots_cap slots, inside the segment? */
static int arrays_ok(const sr_store *st, const sr_index *ix, uint64_t slots_used) {
    if (slots_used > ix->slots_cap || ix->slots_cap >= SR_NONE) return 0;
    for (uint32_t k = 0; k < SR_TREE_LEVELS; k++) {
        uint64_t need = array_bytes(ix->kind, k, ix->slots_cap);
        if (need > ix->array_committed[k]) return 0;
        if (ix->array_committed[k] > 0 &&
            (ix->array_off[k] % SR_PAGE != 0 ||
             sr_at(st, ix->array_off[k], ix->array_committed[k]) == NULL)) {
            return 0;
        }
    }
    return 1;
}

int sr_index_rebuild(sr_store *st, sr_index *ix, uint64_t slots_used, uint64_t n,
                     const uint32_t *slots, const double *prios, const uint64_t *touches) {
    if (ix->kind < SR_SEL_FIFO || ix->kind > SR_SEL_EPOCH || ix->kind == SR_SEL_LIFO ||
        !arrays_ok(st, ix, slots_used)) {
        return SR_CORRUPT;
    }
    if (ix->kind == SR_SEL_PRIORITIZED) {
        sr_tree_rebuild(st, ix, n, slots, prios);
        return SR_OK;
    }
    sr_index_clear(st, ix);
    for (uint64_t i = 0; i < n; i++) sr_index_insert(st, ix, slots[i], prios[i], touches[i]);
    return SR_OK;
}

static void same_slot(const sr_index *ix, uint32_t slot, uint32_t n, uint32_t *slots,
                      double *prob) {
    SR_ASSERT(slot < ix->slots_cap);
    for (uint32_t i = 0; i < n; i++) {
        slots[i] = slot;
        prob[i] = 1.0;
    }
}

void sr_index_sample(sr_store *st, sr_index *ix, enum sr_selector kind, uint64_t *rng,
                     uint32_t n, uint32_t *slots, double *prob) {
    SR_ASSERT(structure(kind) == ix->kind && ix->count > 0);
    switch (kind) {
    case SR_SEL_FIFO: same_slot(ix, ix->head, n, slots, prob); break;
    case SR_SEL_LIFO: same_slot(ix, ix->tail, n, slots, prob); break;
    case SR_SEL_UNIFORM: sr_uniform_sample(st, ix, rng, n, slots, prob); break;
    case SR_SEL_EPOCH: sr_epoch_sample(st, ix, rng, n, slots, prob); break;
    case SR_SEL_PRIORITIZED: sr_tree_sample(st, ix, rng, n, slots, prob); break;
    case SR_SEL_MIN_HEAP:
    case SR_SEL_MAX_HEAP: same_slot(ix, sr_heap_top(st, ix), n, slots, prob); break;
    default: unknown_kind(kind);
    }
}

double sr_index_mass(const sr_store *st, const sr_index *ix) {
    return ix->kind == SR_SEL_PRIORITIZED ? sr_tree_total(st, ix) : (double)ix->count;
}

int sr_index_check(sr_store *st, const sr_index *ix, uint64_t slots_used, sr_live_fn live,
                   void *ctx) {
    double prio;
    uint64_t touch, seq, n_live = 0;
    if (slots_used > ix->slots_cap) return -__LINE__;
    for (uint64_t slot = 0; slot < slots_used; slot++)
        n_live += live(ctx, (uint32_t)slot, &prio, &touch, &seq) != 0;
    /* As many entries as live slots; the structures show that each entry is a live slot and that
     * none is there twice. */
    if (n_live != ix->count) return -__LINE__;
    switch (ix->kind) {
    case SR_SEL_FIFO: return sr_list_check(st, ix, slots_used, live, ctx);
    case SR_SEL_UNIFORM: return sr_uniform_check(st, ix, slots_used, live, ctx);
    case SR_SEL_EPOCH: return sr_epoch_check(st, ix, slots_used, live, ctx);
    case SR_SEL_PRIORITIZED: return sr_tree_check(st, ix, slots_used, live, ctx);
    case SR_SEL_MIN_HEAP:
    case SR_SEL_MAX_HEAP: return sr_heap_check(st, ix, slots_used, live, ctx);
    default: return -__LINE__;
    }
}
