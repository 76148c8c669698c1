/* handles.h: what a process has of a store and of a session, in its own memory. */
#ifndef SR_HANDLES_H
#define SR_HANDLES_H

#include "layout.h"

/* What never changes in a table, a selector and a stripe, as this process found it (shape.h). */
typedef struct {
    uint32_t n_stripes, first_stripe, slot_bits, stripe_bits, sampler_kind, remover_kind;
    double sampler_exponent, remover_exponent;
    uint64_t events_off, n_events;
    char name[SR_NAME_BYTES];
} sr_table_shape;
typedef struct {
    uint32_t kind, n_arrays; /* the most levels that a sum tree can have here */
    double exponent;
    uint64_t array_off[SR_TREE_LEVELS];
} sr_index_shape;
typedef struct {
    uint64_t slots_off, slots_max;
    uint32_t table, number, sampler, remover, n_indexes, _pad;
    sr_index_shape index[2];
} sr_stripe_shape;

/* A process's view of one store. */
typedef struct {
    char *base;
    uint64_t bytes;
    int fd;
    int small_pages; /* 1: the kernel makes no huge pages of this segment */
    sr_header *hdr;
    _Atomic uint64_t *touched; /* a bit a page: this process has mapped it; NULL: not kept */
    sr_table_shape *tables;
    sr_stripe_shape *stripes;
    uint64_t arena_start, arena_span; /* arena i begins at arena_start + i * arena_span */
    sr_header shape; /* of the header: what never changes, from layout_version to seal */
} sr_store;

/* A process's hold on one session of the store. Not shared. */
typedef struct {
    sr_store *st;
    sr_session *shared;
    uint32_t number;
    int behind;           /* 1: the last refusal was for want of room for events */
    uint32_t room_seq, sample_seq; /* then: insert_seq and sample_seq of the table */
    uint32_t n_free;      /* free ledger positions, a stack */
    uint32_t *free_stack; /* [ledger_cap] */
    uint64_t ledger_off;  /* as in the session, where only its owner changes them */
    uint32_t ledger_cap;
    sr_receipt *receipt;  /* where inserts are written down; NULL: nowhere */
    uint64_t receipt_next; /* number of the next item */
} sr_ses;

#endif
