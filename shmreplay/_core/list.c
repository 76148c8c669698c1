/* list.c: what is in a table, a few slots at a time. */
#include "lock.h"
#include "stripe.h"
#include "table.h"

int sr_list(sr_store *st, uint32_t table, uint64_t *cursor, uint32_t n, sr_listed *out,
            uint32_t *got) {
    *got = 0;
    SR_GUARDED(st, SR_CORRUPT)
    int rc = sr_table_usable(st, table);
    if (rc != SR_OK) return rc;
    const sr_table *t = sr_table_at(st, table);
    uint32_t number = (uint32_t)(*cursor >> 32);
    uint64_t at = *cursor & UINT32_MAX;
    if (number >= t->n_stripes || n == 0) return SR_INVALID;
    sr_stripe *s = sr_stripe_at(st, t, number);
    sr_stripe_touch(st, s);
    rc = sr_lock_stripe(st, t, s);
    if (rc != SR_OK) return rc;
    uint64_t end = at + n < s->slots_used ? at + n : s->slots_used;
    for (; at < end; at++) {
        const sr_slot *p = sr_slot_at(st, s, (uint32_t)at);
        if (!sr_slot_live(p)) continue;
        out[(*got)++] = (sr_listed){.key = p->key,
                                    .seq = p->seq,
                                    .inserted_ns = p->inserted_ns,
                                    .priority = p->priority,
                                    .times_sampled = p->times_sampled};
    }
    int more = at < s->slots_used;
    sr_unlock(&s->lock);
    *cursor = more                        ? (uint64_t)number << 32 | at
              : number + 1 < t->n_stripes ? (uint64_t)(number + 1) << 32
                                          : SR_LIST_END;
    return SR_OK;
}
