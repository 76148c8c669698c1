/* reach.h: which objects are reachable from slots, ledgers and schemas, and how often each is
 * referred to. For sr_repair, under all locks of the store. */
#ifndef SR_REACH_H
#define SR_REACH_H

#include "internal.h"

typedef struct {
    sr_store *st;
    uint64_t *marks[SR_ARENAS_MAX]; /* a bit for each 64 bytes that are committed */
    int broken; /* an object was met that contradicts itself or refers to nothing */
} sr_reach;

/* SR_OK; SR_SYS: no memory in this process; SR_CORRUPT: an arena's bounds make no sense. */
int sr_reach_begin(sr_store *st, sr_reach *r);
void sr_reach_end(sr_reach *r);
/* One more reference. What is met for the first time starts with a count of one, and what it refers
 * to is counted in turn. 1, or 0 where there is no object of that kind, or none that is whole. */
int sr_reach_ref(sr_reach *r, uint64_t ref);
/* Keep an allocation whose content is nobody's. 1; 0: something refers to it; -1: there is none. */
int sr_reach_inflight(sr_reach *r, uint64_t off);
/* Are these whole rows of a block, or a trajectory, as an item may have them? It is reachable. */
int sr_reach_item_ok(const sr_store *st, uint64_t ref, uint32_t row_start, uint32_t row_count);
/* For sr_arena_rebuild; ctx is the sr_reach. */
uint64_t sr_reach_next(void *ctx, uint64_t from, uint64_t end);

#endif
