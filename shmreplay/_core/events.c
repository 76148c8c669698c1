/* events.c: what a table tells its extensions. Contract: shmreplay.h; the ring: layout.h. */
#include "events.h"

#include "arena.h"
#include "ledger.h"
#include "limiter.h"
#include "lock.h"
#include "reach.h"
#include "shape.h"
#include "steps.h"
#include "stripe.h"

/* A process dies between two instructions: it is their order that counts, and not that others see
 * them in it, which the lock sees to. */
static inline void in_order(void) { atomic_signal_fence(memory_order_seq_cst); }

static sr_event *at(const sr_ring *r, uint64_t number) {
    return (sr_event *)(uintptr_t)(r + 1) + number % r->capacity;
}

static sr_stripe *only_stripe(const sr_store *st, const sr_table *t) {
    return sr_stripe_at(st, t, 0);
}

static int lock_ring(sr_store *st, sr_table *t, sr_ring **r) {
    int rc = sr_lock_stripe(st, t, only_stripe(st, t));
    if (rc != SR_OK) return rc;
    *r = sr_events_ring(st, t);
    if (*r != NULL) return SR_OK;
    sr_unlock(&only_stripe(st, t)->lock);
    return SR_CORRUPT;
}

static void unlock_ring(sr_store *st, sr_table *t) { sr_unlock(&only_stripe(st, t)->lock); }

uint64_t sr_events_bytes(uint32_t n_events) {
    if (n_events == 0) return 0;
    return sr_align(sizeof(sr_ring) + n_events * sizeof(sr_event), SR_PAGE);
}

/* What never changes in a ring. */
static void place_ring(sr_ring *r, uint32_t table, uint64_t region, uint32_t n_events) {
    r->magic = SR_RING_MAGIC ^ region;
    r->table = table;
    r->capacity = n_events;
}

void sr_events_init(sr_store *st, sr_table *t, uint32_t table, uint64_t region, uint32_t n_events) {
    place_ring(sr_ptr(st, region), table, region, n_events);
    t->events_off = region;
}

void sr_events_place(sr_store *st, sr_table *t, uint32_t table) {
    place_ring(sr_known(st, t->events_off), table, t->events_off,
               (uint32_t)st->tables[table].n_events);
}

/* Where it was laid out, whatever it counts. */
static sr_ring *placed_ring(const sr_store *st, const sr_table *t) {
    uint32_t table = (uint32_t)(t - sr_table_at(st, 0));
    const sr_table_shape *k = &st->tables[table];
    if (t->events_off == 0 || t->events_off != k->events_off) return NULL;
    sr_ring *r = sr_known(st, t->events_off);
    int placed = r->magic == (SR_RING_MAGIC ^ t->events_off) && r->table == table &&
                 r->capacity == k->n_events;
    return placed ? r : NULL;
}

sr_ring *sr_events_ring(const sr_store *st, const sr_table *t) {
    sr_ring *r = placed_ring(st, t);
    if (r != NULL && r->head - r->tail <= r->capacity && r->staged <= r->capacity &&
        r->promised <= r->capacity) {
        return r;
    }
    sr_suspect(st);
    return NULL;
}

int sr_table_has_events(const sr_store *st, uint32_t table) {
    const sr_table *t = sr_table_at(st, table);
    return t != NULL && t->events_off != 0;
}

/* ------------------------------------------------------------------ room */

static uint64_t room_of(const sr_ring *r) {
    if (r->unserved) return UINT64_MAX;
    uint64_t taken = r->head - r->tail + r->staged + r->promised;
    return taken < r->capacity ? r->capacity - taken : 0;
}

static void refuse(sr_ses *ses, const sr_table *t, sr_ring *r) {
    /* SYNC POINT: the mark is set and the words read under the lock under which whoever makes room
     * looks at the mark: it then changes the words. */
    r->wanted = 1;
    ses->room_seq = atomic_load(&t->insert_seq);
    ses->sample_seq = atomic_load(&t->sample_seq);
    ses->behind = 1;
}

int sr_events_room(sr_ses *ses, sr_table *t, uint64_t n) {
    ses->behind = 0;
    sr_ring *r = sr_events_ring(ses->st, t);
    if (r == NULL) return SR_CORRUPT;
    if (room_of(r) >= n) return SR_OK;
    refuse(ses, t, r);
    return SR_WOULD_BLOCK;
}

/* 1 if somebody waits, who is then to be woken after the lock. */
static int take_wanted(sr_ring *r) {
    int wanted = r->wanted != 0 && room_of(r) > 0;
    if (wanted) r->wanted = 0;
    return wanted;
}

static void keep_promise(sr_ring *r, sr_session *s, uint64_t n) {
    uint32_t most = r->promised < s->promised ? r->promised : s->promised;
    uint32_t used = n < most ? (uint32_t)n : most;
    r->promised -= used;
    s->promised -= used;
}

int sr_events_promise(sr_ses *ses, sr_table *t, uint64_t *want) {
    sr_ring *r;
    int rc = lock_ring(ses->st, t, &r);
    if (rc != SR_OK) return rc;
    keep_promise(r, ses->shared, UINT32_MAX);
    uint64_t room = room_of(r) / 2;
    if (*want > room) *want = room;
    if (*want == 0) refuse(ses, t, r);
    uint32_t events = (uint32_t)(2 * *want);
    /* Crash: a repair adds up what the sessions say. */
    ses->shared->promised = events;
    r->promised += events;
    unlock_ring(ses->st, t);
    return *want == 0 ? SR_WOULD_BLOCK : SR_OK;
}

void sr_events_unpromise(sr_ses *ses, sr_table *t) {
    sr_ring *r;
    if (lock_ring(ses->st, t, &r) != SR_OK) {
        ses->shared->promised = 0; /* the table is shut */
        return;
    }
    keep_promise(r, ses->shared, UINT32_MAX);
    int wanted = take_wanted(r);
    unlock_ring(ses->st, t);
    if (wanted) sr_limiter_wake_all(t);
}

void sr_events_spend_promise(sr_ses *ses, sr_table *t, uint64_t n) {
    sr_ring *r = sr_events_ring(ses->st, t);
    if (r != NULL) keep_promise(r, ses->shared, n);
}

/* ------------------------------------------------------------------ putting */

static void stage(sr_store *st, sr_table *t, const sr_event *e) {
    sr_ring *r = sr_events_ring(st, t);
    if (r == NULL) return;
    if (r->unserved || room_of(r) == 0) {
        r->dropped++;
        return;
    }
    uint64_t number = r->head + r->staged;
    sr_event *place = at(r, number);
    place->number = 0;
    in_order();
    *place = *e;
    if (e->ref != 0) sr_ref_retain(st, e->ref);
    in_order();
    /* From here on it is staged: a repair looks whether its change has happened. */
    place->number = number + 1;
    r->staged++;
    in_order();
}

static sr_event of_slot(enum sr_event_kind kind, const sr_slot *slot, uint64_t ref) {
    return (sr_event){.key = slot->key,
                      .ref = ref,
                      .row_start = slot->row_start,
                      .row_count = slot->row_count,
                      .priority = slot->priority,
                      .inserted_ns = slot->inserted_ns,
                      .kind = kind,
                      .times_sampled = slot->times_sampled,
                      .schema = slot->schema};
}

void sr_events_stage_item(sr_store *st, sr_table *t, enum sr_event_kind kind, const sr_slot *slot,
                          uint64_t ref) {
    sr_event e = of_slot(kind, slot, ref);
    stage(st, t, &e);
}

void sr_events_stage_update(sr_store *st, sr_table *t, const sr_slot *slot, double priority) {
    uint64_t ref = atomic_load_explicit(&slot->ref, memory_order_relaxed);
    sr_event e = of_slot(SR_EVENT_UPDATE, slot, ref);
    e.priority = priority;
    stage(st, t, &e);
}

void sr_events_stage_reset(sr_store *st, sr_table *t) {
    stage(st, t, &(sr_event){.kind = SR_EVENT_RESET});
}

void sr_events_commit_staged(sr_store *st, sr_table *t) {
    sr_ring *r = sr_events_ring(st, t);
    if (r == NULL) return;
    in_order();
    /* Crash: before this store the event is staged, and its change has happened; after it, it is
     * there. */
    uint64_t head = r->head + r->staged;
    r->staged = 0;
    in_order();
    r->head = head;
    in_order();
}

void sr_events_notify(sr_store *st) {
    sr_futex_wake(&st->hdr->event_seq, &st->hdr->event_waiters, 1);
}

/* ------------------------------------------------------------------ taking */

static int is_whole(const sr_store *st, const sr_event *e) {
    return sr_alloc_kind(st, SR_REF_OFF(e->ref)) == (enum sr_kind)SR_REF_KIND(e->ref) &&
           sr_reach_item_ok(st, e->ref, e->row_start, e->row_count);
}

static void take(sr_ses *ses, const sr_event *e, sr_sampled *item) {
    *item = (sr_sampled){.key = e->key,
                         .ref = e->ref,
                         .row_start = e->row_start,
                         .row_count = e->row_count,
                         .priority = e->priority,
                         .times_sampled = (int32_t)e->times_sampled,
                         .schema = e->schema,
                         .inserted_ns = e->inserted_ns};
    /* The count goes from the ring to the ledger. Crash: in both, and counted anew. */
    item->position = sr_ledger_note(ses, e->ref);
}

int sr_events_take(sr_ses *ses, uint32_t table, uint32_t max, sr_sampled *items, uint32_t *kinds,
                   uint32_t *n_items, uint32_t *n) {
    *n = *n_items = 0;
    SR_GUARDED_SES(ses)
    sr_store *st = ses->st;
    sr_table *t = sr_table_at(st, table);
    if (t == NULL || !sr_has_events(t)) return SR_INVALID;
    SR_ASSERT(sr_shape_table_ok(st, t, table));
    int rc = sr_ledger_reserve(ses, max);
    if (rc != SR_OK) return rc;
    sr_ring *r;
    rc = lock_ring(st, t, &r);
    if (rc != SR_OK) return rc;
    while (*n < max && r->tail + *n != r->head) {
        const sr_event *e = at(r, r->tail + *n);
        if (e->ref != 0 && !is_whole(st, e)) {
            rc = SR_CORRUPT;
            break;
        }
        kinds[(*n)++] = e->kind;
        if (e->ref != 0) take(ses, e, &items[(*n_items)++]);
    }
    in_order();
    r->tail += *n;
    r->unserved = 0;
    int wanted = take_wanted(r);
    unlock_ring(st, t);
    if (wanted) sr_limiter_wake_all(t);
    return *n > 0 ? SR_OK : rc;
}

uint32_t sr_events_seq(const sr_store *st) { return atomic_load(&st->hdr->event_seq); }

void sr_events_wait(sr_store *st, uint32_t seq, uint32_t timeout_ms) {
    sr_futex_wait(&st->hdr->event_seq, seq, &st->hdr->event_waiters, timeout_ms);
}

int sr_events_behind(sr_store *st, uint32_t table) {
    SR_GUARDED(st, SR_CORRUPT)
    sr_table *t = sr_table_at(st, table);
    if (t == NULL || !sr_has_events(t)) return 0;
    sr_ring *r;
    int rc = lock_ring(st, t, &r);
    if (rc != SR_OK) return rc;
    int behind = room_of(r) < 2;
    unlock_ring(st, t);
    return behind;
}

void sr_events_count(const sr_store *st, const sr_table *t, sr_table_info *out) {
    const sr_ring *r = sr_has_events(t) ? placed_ring(st, t) : NULL;
    if (r == NULL) return;
    uint64_t tail = __atomic_load_n(&r->tail, __ATOMIC_RELAXED);
    out->events = (uint32_t)(__atomic_load_n(&r->head, __ATOMIC_RELAXED) - tail);
    if (out->events > r->capacity) out->events = r->capacity; /* of two moments */
    out->events_capacity = r->capacity;
    out->events_dropped = __atomic_load_n(&r->dropped, __ATOMIC_RELAXED);
}

int sr_events_unserve(sr_store *st, uint32_t table, uint64_t server) {
    SR_GUARDED(st, SR_CORRUPT)
    sr_table *t = sr_table_at(st, table);
    if (t == NULL || !sr_has_events(t)) return SR_INVALID;
    sr_ring *r;
    int rc = lock_ring(st, t, &r);
    if (rc != SR_OK) return rc;
    /* SYNC POINT: a server that took the store over says who it is before it takes events: either
     * that is seen here, or its next take serves the ring again. */
    if (st->hdr->creator_pid == server) r->unserved = 1;
    unlock_ring(st, t);
    sr_limiter_wake_all(t);
    return SR_OK;
}

/* ------------------------------------------------------------------ after a death */

void sr_events_forget(sr_store *st, sr_table *t, sr_session *dead) {
    sr_ring *r = sr_has_events(t) ? sr_events_ring(st, t) : NULL;
    if (r != NULL) keep_promise(r, dead, UINT32_MAX);
    dead->promised = 0;
}

static uint32_t promises(const sr_store *st, uint32_t table) {
    uint32_t sum = 0;
    for (uint32_t i = 0; i < st->shape.n_sessions; i++) {
        const sr_session *s = sr_session_at(st, i);
        int used = atomic_load_explicit(&s->state, memory_order_acquire) == 1;
        if (used && s->table == table) sum += s->promised;
    }
    return sum;
}

/* Has what a staged event tells of happened? An update is made to: its call was still going on. */
static int has_happened(sr_store *st, const sr_table *t, const sr_event *e) {
    const sr_stripe *s = only_stripe(st, t);
    uint32_t slot = sr_stripe_find(st, t, s, e->key);
    switch (e->kind) {
    case SR_EVENT_INSERT: return slot != SR_NONE;
    case SR_EVENT_DELETE: return slot == SR_NONE;
    case SR_EVENT_UPDATE:
        if (slot == SR_NONE) return 0;
        sr_slot_at(st, s, slot)->priority = e->priority;
        /* Other data than before: a trajectory, see sr_stripe_replace. */
        atomic_store_explicit(&sr_slot_at(st, s, slot)->ref, e->ref, memory_order_release);
        return 1;
    default: return 0; /* a draw that nobody got, unless its item went with it */
    }
}

int sr_events_repair(sr_store *st, sr_table *t, uint32_t table, int reset) {
    if (!sr_has_events(t)) return 1;
    sr_ring *r = placed_ring(st, t); /* what is staged and promised is counted anew */
    if (r == NULL || r->head - r->tail > r->capacity ||
        !sr_stripe_slots_ok(st, only_stripe(st, t))) {
        return 0;
    }
    uint64_t n = r->head, whole = r->head;
    /* What is staged at head may be older than the head: it was moved after all else. */
    for (; n - r->tail < r->capacity && at(r, n)->number == n + 1; n++) {
        const sr_event *e = at(r, n);
        if (e->kind == SR_EVENT_RESET ? reset : has_happened(st, t, e)) whole = n + 1;
    }
    r->head = whole;
    in_order();
    /* Never again taken for staged. */
    while (n-- > whole) at(r, n)->number = 0;
    r->staged = 0;
    r->promised = promises(st, table);
    r->wanted = 0; /* all are woken after a repair */
    return 1;
}

const sr_event *sr_events_nth(const sr_store *st, const sr_table *t, uint64_t i) {
    const sr_ring *r = sr_events_ring(st, t);
    return r == NULL || i >= r->head - r->tail ? NULL : at(r, r->tail + i);
}

const char *sr_events_check(const sr_store *st, const sr_table *t, uint32_t table) {
    if (!sr_has_events(t)) return NULL;
    const sr_ring *r = sr_events_ring(st, t);
    if (r == NULL) return "its ring of events is damaged";
    if (r->staged != 0) return "an event is staged and nobody is there";
    if (r->promised != promises(st, table)) return "room for events is promised to nobody";
    for (uint64_t n = r->tail; n != r->head; n++) {
        const sr_event *e = at(r, n);
        if (e->number != n + 1) return "an event is missing";
        if (e->kind < SR_EVENT_INSERT || e->kind > SR_EVENT_RESET) return "an event of no kind";
        if ((e->ref == 0) != (e->kind == SR_EVENT_RESET)) return "an event without its item";
    }
    return NULL;
}
