/* stripe.h: a table's share of slots with its selectors. All calls under the stripe's lock,
 * except where said. */
#ifndef SR_STRIPE_H
#define SR_STRIPE_H

#include "internal.h"

/* Address space that one stripe of this table needs, and the most slots it can have; and the
 * greatest max_size that the table can be given later. */
int64_t sr_stripe_max_size_limit(const sr_table_config *cfg, uint64_t capacity_bytes);
uint64_t sr_stripe_slots_max(const sr_table_config *cfg, uint64_t capacity_bytes);
uint64_t sr_stripe_region_bytes(const sr_table_config *cfg, uint64_t slots_max);
/* Bytes that a stripe has committed once it has used so many slots. */
uint64_t sr_stripe_bytes_for(const sr_table_config *cfg, uint64_t capacity_bytes, uint64_t slots);
int sr_stripe_init(sr_stripe *s, const sr_table_config *cfg, uint32_t table, uint32_t number,
                   uint64_t region, uint64_t slots_max);

static inline sr_slot *sr_slot_at(const sr_store *st, const sr_stripe *s, uint32_t slot) {
    return (sr_slot *)sr_known(st, s->slots_off) + slot;
}
static inline int sr_slot_live(const sr_slot *slot) {
    return atomic_load_explicit(&slot->ref, memory_order_relaxed) != 0;
}

/* SYNC POINT: relaxed: changed under the stripe's lock; without it, it is only read to guess
 * whether there is a free slot. */
static inline void sr_set_free_head(sr_stripe *s, uint32_t slot) {
    __atomic_store_n(&s->free_head, slot, __ATOMIC_RELAXED);
}
/* Map the slots into this process, if some are new to it. No lock; called before one is taken. */
void sr_stripe_touch(sr_store *st, const sr_stripe *s);
/* A free slot, with memory for it in every index. SR_OK, SR_FULL, SR_NOSPACE, SR_DIRTY. */
int sr_stripe_take_slot(sr_store *st, sr_stripe *s, uint32_t *slot);
/* Memory for more slots. As above. */
int sr_stripe_grow(sr_store *st, sr_stripe *s);
/* The key of the slot's next item, `last` being that of its last; 0: it had none. No lock. */
uint64_t sr_stripe_next_key(const sr_store *st, const sr_table *t, const sr_stripe *s,
                            uint32_t slot, uint64_t last);
/* Fill the slot, enter it in the selectors, count its references and publish it. */
void sr_stripe_publish(sr_store *st, sr_table *t, sr_stripe *s, uint32_t slot, const sr_item *item,
                       uint64_t now_ns, uint64_t *key);
/* Take the item out and drop its references. Frees what nobody else refers to (arena locks). */
int sr_stripe_remove(sr_store *st, sr_table *t, sr_stripe *s, uint32_t slot);
/* Refer to another trajectory, and drop the old references. */
int sr_stripe_replace(sr_store *st, sr_table *t, sr_stripe *s, uint32_t slot, uint64_t ref);
/* Remove everything, without counting deleted episodes. */
int sr_stripe_clear(sr_store *st, sr_table *t, sr_stripe *s);
/* Do its slots lie in memory that it says to have? Else nothing in it can be read. */
int sr_stripe_slots_ok(const sr_store *st, const sr_stripe *s);
/* For sr_repair: everything in the stripe that follows from its slots, made anew. Items that a dead
 * sampler had drawn for the last time and not taken out get that draw back. Gives the number of
 * items. SR_OK; SR_CORRUPT where a slot or what describes the slots makes no sense, with nothing
 * changed; SR_SYS where this process has no memory. */
int sr_stripe_rebuild(sr_store *st, sr_table *t, sr_stripe *s, uint64_t *n_live);

/* Publish size, masses and oldest item for those that choose a stripe without its lock. */
void sr_stripe_hints(sr_store *st, sr_stripe *s);

/* key -> slot if the key is live here, else SR_NONE. */
uint32_t sr_stripe_find(const sr_store *st, const sr_table *t, const sr_stripe *s, uint64_t key);

/* Parts of a key, from the top: generation, table, stripe, slot. */
static inline uint32_t sr_key_slot(const sr_table *t, uint64_t key) {
    return (uint32_t)(key & ((1ull << t->slot_bits) - 1));
}
static inline uint32_t sr_key_stripe(const sr_table *t, uint64_t key) {
    return (uint32_t)((key >> t->slot_bits) & ((1ull << t->stripe_bits) - 1));
}

#endif
