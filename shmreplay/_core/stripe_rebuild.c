/* stripe_rebuild.c: what follows from a stripe's slots, made anew. */
#include "fault.h"
#include "index.h"
#include "stripe.h"
#include "table.h"

typedef struct {
    uint64_t seq;
    uint32_t slot;
} place;

static int by_seq(const void *a, const void *b) {
    const place *x = a, *y = b;
    return (x->seq > y->seq) - (x->seq < y->seq);
}

int sr_stripe_slots_ok(const sr_store *st, const sr_stripe *s) {
    return s->slots_off % SR_PAGE == 0 && s->slots_used <= s->slots_max &&
           s->slots_used * sizeof(sr_slot) <= s->slots_committed &&
           (s->slots_committed == 0 || sr_at(st, s->slots_off, s->slots_committed) != NULL) &&
           s->n_indexes >= 1 && s->n_indexes <= 2 && s->sampler < s->n_indexes &&
           s->remover < s->n_indexes;
}

static int keys_ok(const sr_store *st, const sr_table *t, const sr_stripe *s) {
    for (uint32_t i = 0; i < s->slots_used; i++) {
        const sr_slot *p = sr_slot_at(st, s, i);
        if (!sr_slot_live(p)) continue;
        if (sr_key_slot(t, p->key) != i || sr_key_stripe(t, p->key) != s->number) return 0;
        if (!sr_priority_ok(st, s->table, p->priority)) return 0;
    }
    return 1;
}

/* Chain the free slots, find the live ones, and carry the counters past what the slots have. */
static uint64_t walk_slots(sr_store *st, sr_table *t, sr_stripe *s, place *live) {
    uint64_t n = 0, next_seq = atomic_load_explicit(&t->next_seq, memory_order_relaxed);
    sr_set_free_head(s, SR_NONE);
    for (uint32_t i = (uint32_t)s->slots_used; i-- > 0;) {
        sr_slot *p = sr_slot_at(st, s, i);
        if (!sr_slot_live(p)) {
            p->row_start = s->free_head;
            sr_set_free_head(s, i);
            continue;
        }
        /* Drawn for the last time by one who died before it took the item out: nobody got it. */
        uint32_t most = (uint32_t)sr_max_times_sampled(t);
        if (sr_max_times_sampled(t) > 0 && p->times_sampled >= most) {
            p->times_sampled = most - 1;
            if (most == 1) {
                atomic_fetch_sub_explicit(&t->num_unique_samples, 1, memory_order_relaxed);
            }
        }
        if (p->seq >= next_seq) next_seq = p->seq + 1;
        sr_see_priority(t, p->priority);
        if (p->touch >= s->touch_next) s->touch_next = p->touch + 1;
        live[n++] = (place){.seq = p->seq, .slot = i};
    }
    atomic_store_explicit(&t->next_seq, next_seq, memory_order_relaxed);
    return n;
}

int sr_stripe_rebuild(sr_store *st, sr_table *t, sr_stripe *s, uint64_t *n_live) {
    *n_live = 0;
    if (!sr_stripe_slots_ok(st, s) || !keys_ok(st, t, s)) return SR_CORRUPT;
    uint64_t most = s->slots_used + 1;
    place *live = SR_FAULT_POINT("malloc") ? NULL : malloc(most * sizeof *live);
    uint32_t *slots = SR_FAULT_POINT("malloc") ? NULL : malloc(most * sizeof *slots);
    double *prios = SR_FAULT_POINT("malloc") ? NULL : malloc(most * sizeof *prios);
    uint64_t *touches = SR_FAULT_POINT("malloc") ? NULL : malloc(most * sizeof *touches);
    int rc = SR_SYS;
    if (live != NULL && slots != NULL && prios != NULL && touches != NULL) {
        uint64_t n = walk_slots(st, t, s, live);
        qsort(live, n, sizeof *live, by_seq);
        for (uint64_t i = 0; i < n; i++) {
            const sr_slot *p = sr_slot_at(st, s, live[i].slot);
            slots[i] = live[i].slot;
            prios[i] = p->priority;
            touches[i] = p->touch;
        }
        rc = SR_OK;
        for (uint32_t k = 0; k < s->n_indexes && rc == SR_OK; k++) {
            rc = sr_index_rebuild(st, &s->index[k], s->slots_used, n, slots, prios, touches);
        }
        if (rc == SR_OK) sr_stripe_hints(st, s);
        *n_live = n;
    }
    free(live);
    free(slots);
    free(prios);
    free(touches);
    return rc;
}
