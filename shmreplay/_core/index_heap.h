/* index_heap.h: a binary heap on (priority, touch), lowest first. Only index.c calls these.
 *
 * array 0: sr_heap_entry heap[count], array 1: uint32 pos[slot]. A max heap keeps the priority
 * negated. Membership as in index_uniform.h. */
#ifndef SR_INDEX_HEAP_H
#define SR_INDEX_HEAP_H

#include "index.h"

typedef struct {
    double key;     /* the priority, negated in a max heap */
    uint64_t touch; /* unique in the stripe: decides ties, older first */
    uint32_t slot;
    uint32_t _pad;
} sr_heap_entry;
_Static_assert(sizeof(sr_heap_entry) == 24, "heap entry");

uint64_t sr_heap_array_bytes(uint32_t k, uint64_t slots);
void sr_heap_insert(sr_store *st, sr_index *ix, uint32_t slot, double prio, uint64_t touch);
void sr_heap_remove(sr_store *st, sr_index *ix, uint32_t slot);
void sr_heap_update(sr_store *st, sr_index *ix, uint32_t slot, double prio, uint64_t touch);
void sr_heap_clear(sr_index *ix);
uint32_t sr_heap_top(const sr_store *st, const sr_index *ix);
int sr_heap_check(sr_store *st, const sr_index *ix, uint64_t slots_used, sr_live_fn live,
                  void *ctx);

#endif
