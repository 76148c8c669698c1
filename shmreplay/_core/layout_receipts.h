/* layout_receipts.h: the part of layout.h that says what became of a remote client's inserts. */
#ifndef SR_LAYOUT_RECEIPTS_H
#define SR_LAYOUT_RECEIPTS_H

#include <stdatomic.h>
#include <stdint.h>

#define SR_RECEIPTS_MAX 65536u
#define SR_RECEIPT_OWNED 2u

/* One sequence of items that somebody, who may outlive the process that inserts them for him, has
 * numbered. Which of them are in their tables is written down under the lock under which they get
 * there, so that no death leaves it unknown. Written by the process that has it; the last four
 * also by a repair. */
typedef struct {
    /* 0 free, 1 being claimed, else its owner's number + SR_RECEIPT_OWNED */
    _Atomic uint32_t state;
    uint32_t table;        /* of the item that is being placed */
    uint64_t name[2];      /* whose it is */
    uint64_t lane;         /* which of his */
    _Atomic uint64_t done; /* number of the last item that is in its table; 0: none */
    _Atomic uint64_t key;  /* and its key */
    _Atomic uint64_t next; /* of the item that is being placed; 0: none is */
    uint64_t next_key;     /* and its key; 0: it has none yet */
} sr_receipt;
_Static_assert(sizeof(sr_receipt) == 64, "a receipt fills one cache line");

#endif
