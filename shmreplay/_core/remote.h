/* remote.h: the part of the contract (shmreplay.h) that is for who serves remote clients.
 *
 * Somebody numbers his items, and may come again after the death of the process that inserted
 * them: a receipt, one a sequence of numbers, says which are in their tables. It stays until it is
 * closed, whoever dies. There are at most SR_RECEIPTS_MAX, whose memory is not counted against the
 * capacity. */
#ifndef SR_REMOTE_H
#define SR_REMOTE_H

#include "shmreplay.h"

typedef struct {
    uint64_t name[2], lane;
    uint64_t done, key; /* number and key of the last item that is in its table; 0: none */
    uint32_t owner;
} sr_receipt_info;
/* A new one. SR_OK, SR_LIMIT, SR_NOSPACE, SR_CORRUPT. Crash: it is there, or one fewer can be. */
int sr_receipt_open(sr_store *st, const uint64_t name[2], uint64_t lane, uint32_t owner,
                    uint32_t *number);
void sr_receipt_close(sr_store *st, uint32_t number);
/* It is another's from now on, as are all that his predecessors left. */
void sr_receipt_take(sr_store *st, uint32_t number, uint32_t owner);
/* Write down what is no insert. Only by its owner, while no insert is on its way. */
void sr_receipt_note(sr_store *st, uint32_t number, uint64_t done, uint64_t key);
/* 0 where it is free. */
int sr_receipt_get(sr_store *st, uint32_t number, sr_receipt_info *out);
/* All have lower numbers than this. Repairs first where somebody died inside a lock, so that they
 * say what is there. SR_OK, SR_CORRUPT, SR_SYS. */
int sr_receipts(sr_store *st, uint32_t *n);
/* What this session inserts from now on has the numbers next, next + 1, ... of this receipt (or of
 * none: SR_NONE). Crash: an item that is in its table is in the receipt, and no other. */
void sr_session_receipt(sr_ses *ses, uint32_t number, uint64_t next);
/* Number of resets of a table. No lock. */
uint64_t sr_table_epoch(const sr_store *st, uint32_t table);

#endif
