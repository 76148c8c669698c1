/* index_fifo.h: slots in insertion order, for fifo (oldest) and lifo (newest). Only index.c calls
 * these.
 *
 * array 0: uint32 next[slot], array 1: uint32 prev[slot]; SR_NONE ends both directions. */
#ifndef SR_INDEX_FIFO_H
#define SR_INDEX_FIFO_H

#include "index.h"

uint64_t sr_list_array_bytes(uint32_t k, uint64_t slots);
void sr_list_insert(sr_store *st, sr_index *ix, uint32_t slot);
void sr_list_remove(sr_store *st, sr_index *ix, uint32_t slot);
void sr_list_clear(sr_index *ix);
int sr_list_check(sr_store *st, const sr_index *ix, uint64_t slots_used, sr_live_fn live,
                  void *ctx);

#endif
