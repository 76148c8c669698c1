/* hold.h: while a checkpoint is written, what its items refer to stays where it is.
 *
 * Nothing is counted or noted for that while all locks are held. From then on an item of the
 * checkpoint that leaves its slot, or gets other data, leaves its reference behind, in an array
 * beside the slots, where it is counted on. So all that the checkpoint's items referred to is
 * alive, and nothing changes it: rows that are published never do. The array has a place for each
 * slot, so there is always room; it has memory only while a checkpoint is written, which is not
 * charged to the store.
 *
 * Crash: `hold` names the participant. Who reclaims it gives back what was left behind; a repair
 * counts it like any other reference. A reference is left behind before its slot lets go of it:
 * dying in between leaves it counted twice and a lock whose owner died. */
#ifndef SR_HOLD_H
#define SR_HOLD_H

#include "stripe.h"
#include "table.h"

/* References left behind, by slot. Under the stripe's lock. */
static inline uint64_t *sr_hold_parked(const sr_store *st, const sr_stripe *s) {
    return sr_known(st, s->slots_off + sr_align(s->slots_max * sizeof(sr_slot), SR_PAGE));
}
/* How many of them there may be. */
static inline uint64_t sr_hold_slots(const sr_stripe *s) {
    return s->hold_slots < s->slots_used ? s->hold_slots : s->slots_used;
}
/* A live slot is about to let go of its reference. 1: it is left behind, not to be dropped. */
static inline int sr_hold_park(const sr_store *st, const sr_stripe *s, uint32_t slot) {
    if (SR_LIKELY(slot >= s->hold_slots)) return 0;
    const sr_slot *p = sr_slot_at(st, s, slot);
    uint64_t *parked = sr_hold_parked(st, s) + slot;
    /* Once a slot: what an item got since is none of the checkpoint's. */
    if (p->seq >= s->hold_seq || *parked != 0) return 0;
    *parked = atomic_load_explicit(&p->ref, memory_order_relaxed);
    /* SYNC POINT: it is counted here before it is not counted there. Only who repairs after a death
     * of this thread may see one without the other, so that the compiler's order is enough. */
    atomic_signal_fence(memory_order_seq_cst);
    return *parked != 0;
}

/* Number of the participant that writes a checkpoint, SR_NONE: nobody does. */
static inline uint32_t sr_hold_holder(const sr_store *st) {
    return atomic_load_explicit(&st->hdr->hold, memory_order_acquire) - 1u;
}

#endif
