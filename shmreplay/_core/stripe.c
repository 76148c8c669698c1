#include "stripe.h"

#include "arena.h"
#include "bytes.h"
#include "events.h"
#include "hold.h"
#include "huge.h"
#include "index.h"
#include "lock.h"
#include "shape.h"
#include "steps.h"
#include "table.h"

#define TABLE_BITS 6u /* SR_TABLES_MAX */
/* Items that may be in a table beyond max_size for a moment: inserted and not yet evicted, by
 * all inserters together. */
#define SLACK_SLOTS 65536u
#define GROW_SLOTS_MIN 1024u

/* How far max_size may be raised later: addresses cost nothing, and are fixed at the start. */
#define RAISE 8u

/* Never more slots than the capacity could hold if it held nothing else. */
static uint64_t slots_of_capacity(uint64_t capacity_bytes) {
    return capacity_bytes / sizeof(sr_slot) + GROW_SLOTS_MIN;
}

/* Slots that keys with so many bits can name. */
static uint64_t slots_of_bits(uint32_t bits) { return (1ull << bits) - 1; }

int sr_slot_bits_fit(uint32_t bits, int64_t max_size, uint64_t capacity_bytes) {
    uint64_t need = (uint64_t)max_size + SLACK_SLOTS, most = slots_of_capacity(capacity_bytes);
    return bits > 0 && bits < 32 && (need < most ? need : most) <= slots_of_bits(bits);
}

int64_t sr_stripe_max_size_limit(const sr_table_config *cfg, uint64_t capacity_bytes) {
    uint64_t declared = (uint64_t)cfg->max_size, limit = declared * RAISE;
    uint64_t most = slots_of_capacity(capacity_bytes);
    if (most > SR_MAX_SIZE) most = SR_MAX_SIZE;
    if (limit > most) limit = most;
    uint64_t room = cfg->slot_bits != 0 ? slots_of_bits(cfg->slot_bits) : UINT64_MAX;
    room = room > SLACK_SLOTS ? room - SLACK_SLOTS : 0;
    if (limit > room) limit = room;
    return (int64_t)(limit > declared ? limit : declared);
}

uint64_t sr_stripe_slots_max(const sr_table_config *cfg, uint64_t capacity_bytes) {
    uint64_t n = (uint64_t)sr_stripe_max_size_limit(cfg, capacity_bytes) + SLACK_SLOTS;
    uint64_t most = slots_of_capacity(capacity_bytes);
    if (n > most) n = most;
    if (n < cfg->slots_min) n = cfg->slots_min;
    if (cfg->slot_bits != 0 && n > slots_of_bits(cfg->slot_bits)) n = slots_of_bits(cfg->slot_bits);
    return n < SR_NONE ? n : SR_NONE - 1;
}

static int same_index(const sr_table_config *cfg) {
    uint32_t a = cfg->sampler_kind == SR_SEL_LIFO ? SR_SEL_FIFO : cfg->sampler_kind;
    uint32_t b = cfg->remover_kind == SR_SEL_LIFO ? SR_SEL_FIFO : cfg->remover_kind;
    return a == b && (a != SR_SEL_PRIORITIZED || cfg->sampler_exponent == cfg->remover_exponent);
}

uint64_t sr_stripe_region_bytes(const sr_table_config *cfg, uint64_t slots_max) {
    uint64_t bytes = sr_align(slots_max * sizeof(sr_slot), SR_PAGE);
    bytes += sr_align(slots_max * sizeof(uint64_t), SR_PAGE); /* hold.h */
    bytes += sr_index_region_bytes((enum sr_selector)cfg->sampler_kind, slots_max);
    if (!same_index(cfg)) {
        bytes += sr_index_region_bytes((enum sr_selector)cfg->remover_kind, slots_max);
    }
    return bytes;
}

int sr_stripe_init(sr_stripe *s, const sr_table_config *cfg, uint32_t table, uint32_t number,
                   uint64_t region, uint64_t slots_max) {
    if (sr_mutex_init(&s->lock) != SR_OK) return SR_SYS;
    s->table = table;
    s->number = number;
    s->slots_off = region;
    s->slots_max = slots_max;
    s->free_head = SR_NONE;
    uint64_t at = region + sr_align(slots_max * sizeof(sr_slot), SR_PAGE) +
                  sr_align(slots_max * sizeof(uint64_t), SR_PAGE);
    sr_index_init(&s->index[0], (enum sr_selector)cfg->sampler_kind, cfg->sampler_exponent, at,
                  slots_max);
    s->n_indexes = 1;
    if (!same_index(cfg)) {
        at += sr_index_region_bytes((enum sr_selector)cfg->sampler_kind, slots_max);
        sr_index_init(&s->index[1], (enum sr_selector)cfg->remover_kind, cfg->remover_exponent, at,
                      slots_max);
        s->n_indexes = 2;
        s->remover = 1;
    }
    atomic_store_explicit(&s->oldest_seq, UINT64_MAX, memory_order_relaxed);
    return SR_OK;
}

/* Is it what it was? Once a call, however often it locks the stripe. */
static void look_at(const sr_store *st, const sr_stripe *s) {
    SR_ASSERT(sr_shape_stripe_ok(st, s));
    if (sr_inside != NULL) sr_inside->sound = s;
}

int sr_lock_stripe(sr_store *st, const sr_table *t, sr_stripe *s) {
    int rc = sr_lock(st, &s->lock);
    if (SR_UNLIKELY(rc != SR_OK)) return rc;
    if (SR_LIKELY(atomic_load_explicit(&t->poisoned, memory_order_relaxed) == SR_SOUND)) {
        if (SR_CRASH_SAFE && (sr_inside == NULL || sr_inside->sound != s)) look_at(st, s);
        return SR_OK;
    }
    sr_unlock(&s->lock);
    return SR_CORRUPT;
}

/* For how many slots a stripe gets memory once it has used up `have`. */
static uint64_t more_slots(uint64_t have, uint64_t slots_max) {
    uint64_t step = have / 8 > GROW_SLOTS_MIN ? sr_align(have / 8, GROW_SLOTS_MIN) : GROW_SLOTS_MIN;
    return have + step < slots_max ? have + step : slots_max;
}

uint64_t sr_stripe_bytes_for(const sr_table_config *cfg, uint64_t capacity_bytes, uint64_t slots) {
    uint64_t most = sr_stripe_slots_max(cfg, capacity_bytes), have = 0;
    while (have < slots && have < most) have = more_slots(have, most);
    /* A checkpoint brings the memory for what it holds itself, uncounted. */
    return sr_stripe_region_bytes(cfg, have) - sr_align(have * sizeof(uint64_t), SR_PAGE);
}

static int grow_once(sr_store *st, sr_stripe *s) {
    uint64_t have = s->slots_used >= s->slots_max ? s->slots_max
                                                   : s->slots_committed / sizeof(sr_slot);
    if (have >= s->slots_max) {
        *sr_last_detail() = (sr_detail){0};
        return SR_FULL;
    }
    uint64_t want = more_slots(have, s->slots_max);
    uint64_t bytes = sr_align(want * sizeof(sr_slot), SR_PAGE);
    for (uint32_t i = 0; i < s->n_indexes; i++) {
        int rc = sr_index_grow(st, &s->index[i], want);
        if (rc != SR_OK) return rc;
    }
    uint64_t more = bytes - s->slots_committed;
    int rc = sr_commit(st, s->slots_off + s->slots_committed, more, more);
    if (rc != SR_OK) return rc;
    sr_huge_grown(st, s->slots_off, s->slots_off + s->slots_committed, s->slots_off + bytes);
    /* SYNC POINT: relaxed: read without the lock only to map pages ahead of their use. */
    __atomic_store_n(&s->slots_committed, bytes, __ATOMIC_RELAXED);
    return SR_OK;
}

int sr_stripe_grow(sr_store *st, sr_stripe *s) {
    int rc = grow_once(st, s);
    /* The arenas may have all the memory, and no use for it any more. */
    while ((rc == SR_FULL || rc == SR_NOSPACE) && sr_give_back(st, sr_last_detail()->asked) > 0) {
        rc = grow_once(st, s);
    }
    /* An arena that waits for its repair gives nothing. */
    int waits = rc != SR_OK && atomic_load_explicit(&st->hdr->dirty, memory_order_relaxed) != 0;
    return waits ? SR_DIRTY : rc;
}

void sr_stripe_touch(sr_store *st, const sr_stripe *s) {
    uint64_t bytes = __atomic_load_n(&s->slots_committed, __ATOMIC_RELAXED);
    if (bytes == 0 || st->touched == NULL || sr_at(st, s->slots_off, bytes) == NULL) return;
    /* What was committed last tells whether there is anything new. */
    uint64_t last = (s->slots_off + bytes - 1) / SR_PAGE;
    uint64_t bits = atomic_load_explicit(&st->touched[last >> 6], memory_order_relaxed);
    if ((bits >> (last & 63) & 1) == 0) sr_touch(st, s->slots_off, bytes);
}

int sr_stripe_take_slot(sr_store *st, sr_stripe *s, uint32_t *slot) {
    if (s->free_head != SR_NONE) {
        *slot = s->free_head;
        SR_ASSERT(*slot < s->slots_used);
        const sr_slot *p = sr_slot_at(st, s, *slot);
        SR_ASSERT(!sr_slot_live(p));
        sr_set_free_head(s, p->row_start);
        return SR_OK;
    }
    if (s->slots_used >= s->slots_max ||
        (s->slots_used + 1) * sizeof(sr_slot) > s->slots_committed) {
        int rc = sr_stripe_grow(st, s);
        if (rc != SR_OK) return rc;
    }
    *slot = (uint32_t)s->slots_used++;
    return SR_OK;
}

uint64_t sr_stripe_next_key(const sr_store *st, const sr_table *t, const sr_stripe *s,
                            uint32_t slot, uint64_t last) {
    uint32_t low = t->slot_bits + t->stripe_bits + TABLE_BITS;
    if (last != 0) {
        uint64_t key = last + (1ull << low);
        return key != 0 ? key : key + (1ull << low);
    }
    /* The first generation differs from one store to the next, so that keys of a store that is
     * gone miss. */
    uint64_t seed = st->shape.generation;
    uint64_t generation = (sr_splitmix64(&seed) & ((1ull << (63 - low)) - 1)) | 1;
    return generation << low | (uint64_t)s->table << (t->slot_bits + t->stripe_bits) |
           (uint64_t)s->number << t->slot_bits | slot;
}

void sr_stripe_publish(sr_store *st, sr_table *t, sr_stripe *s, uint32_t slot, const sr_item *item,
                       uint64_t now_ns, uint64_t *key) {
    sr_slot *p = sr_slot_at(st, s, slot);
    p->key = sr_stripe_next_key(st, t, s, slot, p->key);
    p->row_start = item->row_start;
    p->row_count = item->row_count;
    p->priority = item->priority == item->priority ? item->priority : sr_max_priority(t);
    p->seq = atomic_fetch_add_explicit(&t->next_seq, 1, memory_order_relaxed);
    p->touch = s->touch_next++;
    p->inserted_ns = now_ns;
    p->times_sampled = 0;
    p->schema = item->schema;
    sr_ref_retain(st, item->ref);
    sr_episodes_enter(st, t, s->table, item->ref, item->row_start, item->row_count);
    if (SR_UNLIKELY(sr_counts_bytes(t))) sr_bytes_enter(st, t, s->table, item->ref);
    for (uint32_t i = 0; i < s->n_indexes; i++) {
        sr_index_insert(st, &s->index[i], slot, p->priority, p->touch);
    }
    *key = p->key;
    const int told = sr_has_events(t);
    if (told) sr_events_stage_item(st, t, SR_EVENT_INSERT, p, item->ref);
    /* SYNC POINT: the item exists from this store on; everything above is visible to whoever
     * sees it. Before it, a crash leaves a slot that is not live and a lock whose owner died. */
    atomic_store_explicit(&p->ref, item->ref, memory_order_release);
    sr_see_priority(t, p->priority); /* after it: of items that never came to be nothing is seen */
    if (told) sr_events_commit_staged(st, t);
}

void sr_raise_max_priority(sr_table *t, double priority) {
    uint64_t bits, seen = atomic_load_explicit(&t->max_priority_bits, memory_order_relaxed);
    double most;
    memcpy(&bits, &priority, sizeof bits);
    do {
        memcpy(&most, &seen, sizeof most);
        if (priority <= most) return;
    } while (!atomic_compare_exchange_weak_explicit(&t->max_priority_bits, &seen, bits,
                                                    memory_order_relaxed, memory_order_relaxed));
}

/* Where a repair is due, what could not be freed is freed by it: the item is out all the same. */
static int drop(sr_store *st, uint64_t ref) {
    int rc = sr_ref_drop(st, ref);
    return rc == SR_DIRTY ? SR_OK : rc;
}

int sr_stripe_remove(sr_store *st, sr_table *t, sr_stripe *s, uint32_t slot) {
    SR_ASSERT(slot < s->slots_used);
    sr_slot *p = sr_slot_at(st, s, slot);
    uint64_t ref = atomic_load_explicit(&p->ref, memory_order_relaxed);
    SR_ASSERT(ref != 0);
    const int told = sr_has_events(t);
    if (told) sr_events_stage_item(st, t, SR_EVENT_DELETE, p, ref);
    const int parked = sr_hold_park(st, s, slot);
    atomic_store_explicit(&p->ref, 0, memory_order_release);
    if (told) sr_events_commit_staged(st, t);
    for (uint32_t i = 0; i < s->n_indexes; i++) sr_index_remove(st, &s->index[i], slot);
    sr_episodes_leave(st, t, s->table, ref, p->row_start, p->row_count, 1);
    if (SR_UNLIKELY(sr_counts_bytes(t))) sr_bytes_leave(st, t, s->table, ref);
    p->row_start = s->free_head;
    sr_set_free_head(s, slot);
    return parked ? SR_OK : drop(st, ref);
}

int sr_stripe_replace(sr_store *st, sr_table *t, sr_stripe *s, uint32_t slot, uint64_t ref) {
    sr_slot *p = sr_slot_at(st, s, slot);
    SR_ASSERT(SR_REF_KIND(ref) == SR_KIND_TRAJ);
    uint64_t old = atomic_load_explicit(&p->ref, memory_order_relaxed);
    sr_ref_retain(st, ref);
    sr_episodes_enter(st, t, s->table, ref, 0, 0);
    if (sr_counts_bytes(t)) sr_bytes_enter(st, t, s->table, ref);
    sr_events_stage(st, t, SR_EVENT_UPDATE, p, ref);
    const int parked = sr_hold_park(st, s, slot);
    /* SYNC POINT: this one store changes the item, since of a trajectory row_start and row_count
     * are not read. A crash before it leaves the old data and after it the new, with counts of both
     * that are off and a lock whose owner died. */
    atomic_store_explicit(&p->ref, ref, memory_order_release);
    sr_events_commit(st, t);
    sr_episodes_leave(st, t, s->table, old, p->row_start, p->row_count, 1);
    if (sr_counts_bytes(t)) sr_bytes_leave(st, t, s->table, old);
    return parked ? SR_OK : drop(st, old);
}

int sr_stripe_clear(sr_store *st, sr_table *t, sr_stripe *s) {
    int result = SR_OK;
    for (uint32_t i = 0; i < s->n_indexes; i++) sr_index_clear(st, &s->index[i]);
    for (uint32_t slot = 0; slot < s->slots_used; slot++) {
        sr_slot *p = sr_slot_at(st, s, slot);
        uint64_t ref = atomic_load_explicit(&p->ref, memory_order_relaxed);
        if (ref == 0) continue;
        const int parked = sr_hold_park(st, s, slot);
        atomic_store_explicit(&p->ref, 0, memory_order_release);
        sr_episodes_leave(st, t, s->table, ref, p->row_start, p->row_count, 0);
        if (sr_counts_bytes(t)) sr_bytes_leave(st, t, s->table, ref);
        p->row_start = s->free_head;
        sr_set_free_head(s, slot);
        int rc = parked ? SR_OK : drop(st, ref);
        if (rc != SR_OK) result = rc;
    }
    sr_stripe_hints(st, s);
    return result;
}

void sr_stripe_hints(sr_store *st, sr_stripe *s) {
    const sr_index *sampler = &s->index[s->sampler];
    const sr_index *remover = &s->index[s->remover];
    atomic_store_explicit(&s->size, sampler->count, memory_order_relaxed);
    sr_store_double(&s->mass_bits, sr_index_mass(st, sampler));
    if (remover->kind == SR_SEL_PRIORITIZED) {
        sr_store_double(&s->remover_mass_bits, sr_index_mass(st, remover));
    }
    if (remover->kind == SR_SEL_FIFO || remover->kind == SR_SEL_LIFO) {
        SR_ASSERT(remover->head == SR_NONE || remover->head < s->slots_used);
        uint64_t seq =
            remover->head == SR_NONE ? UINT64_MAX : sr_slot_at(st, s, remover->head)->seq;
        atomic_store_explicit(&s->oldest_seq, seq, memory_order_relaxed);
    }
}

uint32_t sr_stripe_find(const sr_store *st, const sr_table *t, const sr_stripe *s, uint64_t key) {
    uint32_t slot = sr_key_slot(t, key);
    if (slot >= s->slots_used) return SR_NONE;
    const sr_slot *p = sr_slot_at(st, s, slot);
    return p->key == key && sr_slot_live(p) ? slot : SR_NONE;
}
