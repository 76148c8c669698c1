#include "hold.h"

#include "arena.h"
#include "checkpoint.h"
#include "fault.h"
#include "lock.h"
#include "shape.h"
#include "steps.h"

#include <fcntl.h>

#define LOOK_AT 16384u /* places under one hold of a stripe's lock */
#define DROP_AT 256u   /* references dropped */

static sr_stripe *stripe_number(const sr_store *st, uint32_t i) {
    return (sr_stripe *)sr_known(st, st->shape.stripes_off) + i;
}

/* Where a stripe's array is, by what this process knows: read without a lock. */
static uint64_t array_off(const sr_store *st, uint32_t i) {
    const sr_stripe_shape *k = &st->stripes[i];
    return k->slots_off + sr_align(k->slots_max * sizeof(sr_slot), SR_PAGE);
}

int sr_hold_claim(sr_store *st, uint32_t participant) {
    uint32_t nobody = 0;
    if (!atomic_compare_exchange_strong(&st->hdr->hold, &nobody, participant + 1)) {
        return SR_WOULD_BLOCK;
    }
    atomic_store(&st->hdr->hold_unwanted, 0);
    return SR_OK;
}

int sr_hold_unwanted(const sr_store *st) {
    return (int)atomic_load_explicit(&st->hdr->hold_unwanted, memory_order_relaxed);
}

int sr_hold_ask_back(sr_store *st) {
    if (sr_hold_holder(st) == SR_NONE) return 0;
    atomic_store(&st->hdr->hold_unwanted, 1);
    return 1;
}

uint64_t sr_hold_memory(const sr_store *st) {
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < st->shape.n_stripes; i++) {
        uint64_t slots = __atomic_load_n(&stripe_number(st, i)->hold_slots, __ATOMIC_RELAXED);
        bytes += sr_align(slots * sizeof(uint64_t), SR_PAGE);
    }
    return bytes;
}

int sr_hold_prepare(sr_store *st, uint32_t stripe, uint64_t slots) {
    SR_GUARDED(st, SR_CORRUPT)
    if (stripe >= st->shape.n_stripes) return SR_INVALID;
    const uint64_t most = st->stripes[stripe].slots_max, n = slots < most ? slots : most;
    if (n == 0) return SR_OK;
    return sr_commit(st, array_off(st, stripe), n * sizeof(uint64_t), 0);
}

/* Give back some of what was left behind, from place *at on. Under the lock. */
static int drop_some(sr_store *st, sr_stripe *s, uint64_t *at) {
    uint64_t *parked = sr_hold_parked(st, s), n = sr_hold_slots(s);
    uint64_t end = *at + LOOK_AT < n ? *at + LOOK_AT : n;
    uint32_t dropped = 0;
    int result = SR_OK;
    for (; *at < end && dropped < DROP_AT; (*at)++) {
        uint64_t ref = parked[*at];
        if (ref == 0) continue;
        parked[*at] = 0;
        dropped++;
        int rc = sr_ref_drop(st, ref);
        /* SR_DIRTY: nothing refers to it any more, and the repair that comes frees it. */
        if (rc != SR_OK && rc != SR_DIRTY) result = rc;
    }
    return result;
}

static int release_stripe(sr_store *st, sr_stripe *s) {
    uint64_t at = 0;
    int more = 1, result = SR_OK;
    while (more) {
        int rc = sr_lock(st, &s->lock);
        if (rc != SR_OK) return rc;
        SR_ASSERT(sr_shape_stripe_ok(st, s));
        s->hold_seq = 0; /* nothing more is left behind */
        rc = drop_some(st, s, &at);
        if (rc != SR_OK) result = rc;
        more = at < sr_hold_slots(s);
        if (!more) s->hold_slots = 0;
        sr_unlock(&s->lock);
    }
    return result;
}

/* The memory of a stripe's array: nobody looks at it until the next checkpoint. Where it cannot be
 * given back now, it is used again then: all of it is zero. */
static void give_back(sr_store *st, uint32_t i) {
    uint64_t off = array_off(st, i);
    uint64_t bytes = sr_align(st->stripes[i].slots_max * sizeof(uint64_t), SR_PAGE);
    if (SR_FAULT_POINT("punch")) return;
    (void)fallocate(st->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)off, (off_t)bytes);
}

int sr_hold_release(sr_store *st) {
    SR_GUARDED(st, SR_CORRUPT)
    int result = SR_OK;
    for (uint32_t i = 0; i < st->shape.n_stripes; i++) {
        sr_stripe *s = stripe_number(st, i);
        int rc = release_stripe(st, s);
        if (rc == SR_OK) give_back(st, i);
        else result = rc;
    }
    /* SYNC POINT: release: whoever claims it next finds nothing left behind. */
    if (result == SR_OK) atomic_store_explicit(&st->hdr->hold, 0, memory_order_release);
    return result;
}
