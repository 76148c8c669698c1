/* receipt.h: what became of the items that somebody numbered, over the death of who inserts them.
 *
 * An item is announced, placed and confirmed under one hold of its stripe's lock. Who dies in
 * between leaves the lock to a repair, which looks whether the item is there. */
#ifndef SR_RECEIPT_H
#define SR_RECEIPT_H

#include "internal.h"
#include "remote.h"

/* The next item of the session is about to be placed in this table. Where its key is to be written
 * before it is there. */
static inline uint64_t *sr_receipt_announce(const sr_ses *ses, uint32_t table) {
    sr_receipt *r = ses->receipt;
    r->table = table;
    r->next_key = 0;
    /* Crash window: announced. The item is there or not; a key of 0 is nobody's. */
    atomic_store_explicit(&r->next, ses->receipt_next, memory_order_release);
    return &r->next_key;
}
/* It is there. */
static inline void sr_receipt_confirm(sr_receipt *r) {
    uint64_t next = atomic_load_explicit(&r->next, memory_order_relaxed);
    atomic_store_explicit(&r->key, r->next_key, memory_order_relaxed);
    /* SYNC POINT: release: a number is never there before its key. */
    atomic_store_explicit(&r->done, next, memory_order_release);
    atomic_store_explicit(&r->next, 0, memory_order_release);
}

/* Confirm what was announced and is there; forget what is not. Under all locks. */
void sr_receipts_repair(sr_store *st);

#endif
