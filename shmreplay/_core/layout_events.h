/* layout_events.h: the part of layout.h that tells a table's extensions of its changes. */
#ifndef SR_LAYOUT_EVENTS_H
#define SR_LAYOUT_EVENTS_H

#include <stdint.h>

/* Events that one table's ring has: room for a batch of an insert and its evictions, and not more
 * than a reader who lags should pin. */
#define SR_EVENTS_MIN 512u
#define SR_EVENTS_MAX 65536u
#define SR_EVENTS_BATCH 64u /* keys that one update or delete takes, of a table with events */

enum sr_event_kind {
    SR_EVENT_INSERT = 1,
    SR_EVENT_DELETE,
    SR_EVENT_UPDATE,
    SR_EVENT_SAMPLE,
    SR_EVENT_RESET
};

/* One change of a table. Under its stripe's lock. */
typedef struct {
    uint64_t number; /* how many there are up to this one; stored last */
    uint64_t key;
    uint64_t ref; /* the item's data, counted; 0: none */
    uint32_t row_start, row_count;
    double priority;
    uint64_t inserted_ns;
    uint32_t kind; /* enum sr_event_kind */
    uint32_t times_sampled, schema;
    uint32_t _pad;
} sr_event;
_Static_assert(sizeof(sr_event) == 64, "an event fills one cache line");

/* The changes of a table that its extensions have not been told of: events [tail, head). What is
 * written at head and has its number is staged: the change that it tells of may have happened. A
 * table that has this has one stripe, under whose lock it is. Its events follow it. */
typedef struct {
    uint64_t magic; /* SR_RING_MAGIC ^ its own offset; constant, as the next two */
    uint32_t table, capacity;
    uint64_t head, tail; /* events put and taken so far */
    uint64_t dropped;    /* events that nobody will be told of */
    uint32_t staged;
    uint32_t promised; /* room that operations in progress will use: a sum over the sessions */
    uint32_t wanted;   /* somebody was refused for want of room */
    uint32_t unserved; /* 1: nobody takes events, and they are dropped */
    uint64_t _pad;
} sr_ring;
_Static_assert(sizeof(sr_ring) == 64, "a ring's head fills one cache line");
#define SR_RING_MAGIC 0x53544e4556455253ULL /* "SREVENTS" */

#endif
