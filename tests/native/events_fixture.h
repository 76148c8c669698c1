/* events_fixture.h: a table made of the events of another. */
#ifndef SR_EVENTS_FIXTURE_H
#define SR_EVENTS_FIXTURE_H

#include "events.h"
#include "stripe.h"
#include "table_fixture.h"

#define RING SR_EVENTS_MIN

typedef struct {
    uint64_t key, row;
    double priority;
    int32_t times_sampled;
} entry;

typedef struct {
    entry list[SR_EVENTS_MIN];
    uint32_t n;
    int64_t inserts, deletes, samples; /* since the last reset */
} replica;

static inline entry *replica_find(replica *r, uint64_t key) {
    for (uint32_t i = 0; i < r->n; i++) {
        if (r->list[i].key == key) return &r->list[i];
    }
    return NULL;
}

static inline void replica_apply(replica *r, const sr_store *st, uint32_t kind,
                                 const sr_sampled *item) {
    if (kind == SR_EVENT_RESET) {
        *r = (replica){0};
        return;
    }
    uint64_t row = item_check(st, item);
    entry *e = replica_find(r, item->key);
    if (kind == SR_EVENT_INSERT) {
        CHECK(e == NULL && r->n < SR_EVENTS_MIN);
        e = &r->list[r->n++];
        *e = (entry){.key = item->key, .row = row};
        r->inserts++;
    }
    if (kind == SR_EVENT_UPDATE && e != NULL) e->row = row; /* perhaps of other data */
    CHECK(e != NULL && e->row == row);
    e->priority = item->priority;
    if (kind == SR_EVENT_SAMPLE) r->samples++;
    e->times_sampled = item->times_sampled;
    if (kind == SR_EVENT_DELETE) {
        *e = r->list[--r->n];
        r->deletes++;
    }
}

/* Apply what waits. Gives the number of events. */
static inline uint32_t drain(sr_ses *ses, uint32_t table, replica *r) {
    sr_sampled items[64];
    uint32_t kinds[64], positions[64], n_items, n, total = 0;
    do {
        CHECK(sr_events_take(ses, table, 64, items, kinds, &n_items, &n) == SR_OK);
        uint32_t k = 0;
        for (uint32_t i = 0; i < n; i++) {
            replica_apply(r, ses->st, kinds[i], &items[k]);
            if (kinds[i] != SR_EVENT_RESET) k++;
        }
        CHECK(k == n_items);
        for (uint32_t i = 0; i < n_items; i++) positions[i] = items[i].position;
        CHECK(sr_release(ses, n_items, positions) == SR_OK);
        total += n;
    } while (n > 0);
    return total;
}

/* The replica and the table are the same. */
static inline void compare(sr_store *st, uint32_t table, const replica *r) {
    const sr_table *t = sr_table_at(st, table);
    const sr_stripe *s = sr_stripe_at(st, t, 0);
    sr_table_info info = info_of(st, table);
    CHECK(info.size == r->n && info.inserts == r->inserts && info.deletes == r->deletes);
    for (uint32_t i = 0; i < r->n; i++) {
        uint32_t slot = sr_stripe_find(st, t, s, r->list[i].key);
        CHECK(slot != SR_NONE && sr_slot_at(st, s, slot)->priority == r->list[i].priority);
        const sr_slot *p = sr_slot_at(st, s, slot);
        sr_sampled item = {.ref = p->ref, .row_start = p->row_start, .row_count = p->row_count};
        CHECK(item_check(st, &item) == r->list[i].row);
    }
}

#endif
