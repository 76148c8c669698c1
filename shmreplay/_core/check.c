/* Walking all invariants: selectors against slots, counters against slots, references against
 * what refers to them, allocators. */
#include "arena.h"
#include "bytes.h"
#include "events.h"
#include "hold.h"
#include "fault.h"
#include "index.h"
#include "ledger.h"
#include "limiter.h"
#include "lock.h"
#include "lock_all.h"
#include "shape.h"
#include "packed.h"
#include "steps.h"
#include "stripe.h"
#include "table.h"

typedef struct {
    char *text;
    uint64_t bytes;
} why;

#define FAIL(w, ...)                                     \
    do {                                                 \
        snprintf((w)->text, (w)->bytes, __VA_ARGS__);    \
        return SR_CORRUPT;                               \
    } while (0)

typedef struct {
    sr_store *st;
    sr_stripe *s;
} live_ctx;

static int live(void *ctx, uint32_t slot, double *prio, uint64_t *touch, uint64_t *seq) {
    const live_ctx *c = ctx;
    const sr_slot *p = sr_slot_at(c->st, c->s, slot);
    *prio = p->priority;
    *touch = p->touch;
    *seq = p->seq;
    return sr_slot_live(p);
}

static int ref_ok(const sr_store *st, uint64_t ref) {
    uint32_t kind = SR_REF_KIND(ref);
    return (kind == SR_KIND_BLOCK || kind == SR_KIND_TRAJ) &&
           sr_alloc_kind(st, SR_REF_OFF(ref)) == (enum sr_kind)kind;
}

static int check_slots(sr_store *st, const sr_table *t, sr_stripe *s, uint64_t *n_live, why *w) {
    *n_live = 0;
    const int32_t most_times = sr_max_times_sampled(t);
    for (uint32_t i = 0; i < s->slots_used; i++) {
        const sr_slot *p = sr_slot_at(st, s, i);
        if (!sr_slot_live(p)) continue;
        (*n_live)++;
        if (sr_key_slot(t, p->key) != i || sr_key_stripe(t, p->key) != s->number) {
            FAIL(w, "table %.63s stripe %u slot %u: key %llx names another place", t->name,
                 s->number, i, (unsigned long long)p->key);
        }
        if (!ref_ok(st, p->ref)) {
            FAIL(w, "table %.63s stripe %u slot %u: reference to nothing", t->name, s->number, i);
        }
        if (!(p->priority <= sr_load_double(&t->max_priority_bits))) {
            FAIL(w, "table %.63s stripe %u slot %u: priority %g is above the largest seen", t->name,
                 s->number, i, p->priority);
        }
        if (most_times > 0 && p->times_sampled >= (uint32_t)most_times) {
            FAIL(w, "table %.63s stripe %u slot %u: sampled %u times and still there", t->name,
                 s->number, i, p->times_sampled);
        }
    }
    uint64_t n_free = 0;
    for (uint32_t i = s->free_head; i != SR_NONE; i = sr_slot_at(st, s, i)->row_start) {
        if (i >= s->slots_used || sr_slot_live(sr_slot_at(st, s, i)) || ++n_free > s->slots_used) {
            FAIL(w, "table %.63s stripe %u: list of free slots is broken at %u", t->name, s->number,
                 i);
        }
    }
    if (n_free + *n_live != s->slots_used) {
        FAIL(w, "table %.63s stripe %u: slots lost", t->name, s->number);
    }
    return SR_OK;
}

static int check_stripe(sr_store *st, const sr_table *t, sr_stripe *s, uint64_t *n_live, why *w) {
    if (!sr_shape_stripe_ok(st, s)) FAIL(w, "table %.63s: a stripe is not where it was", t->name);
    int rc = check_slots(st, t, s, n_live, w);
    if (rc != SR_OK) return rc;
    live_ctx ctx = {.st = st, .s = s};
    for (uint32_t k = 0; k < s->n_indexes; k++) {
        int line = sr_index_check(st, &s->index[k], s->slots_used, live, &ctx);
        if (line != 0) {
            FAIL(w, "table %.63s stripe %u: selector %u of kind %u fails check %d", t->name,
                 s->number, k, s->index[k].kind, -line);
        }
        if (s->index[k].count != *n_live) {
            FAIL(w, "table %.63s stripe %u: selector %u counts wrongly", t->name, s->number, k);
        }
    }
    if (atomic_load(&s->size) != *n_live) {
        FAIL(w, "table %.63s stripe %u: published size is wrong", t->name, s->number);
    }
    if (sr_load_double(&s->mass_bits) != sr_index_mass(st, &s->index[s->sampler])) {
        FAIL(w, "table %.63s stripe %u: published mass is wrong", t->name, s->number);
    }
    return SR_OK;
}

/* Is no operation in progress? Those that are may have inserted and not evicted yet. */
static int quiet(const sr_store *st) {
    const sr_session *s = sr_known(st, st->shape.sessions_off);
    for (uint32_t i = 0; i < st->shape.n_sessions; i++) {
        if (atomic_load_explicit(&s[i].busy, memory_order_acquire) != SR_IDLE) return 0;
    }
    return 1;
}

int sr_check_table_locked(sr_store *st, uint32_t table, char *text, uint64_t text_bytes) {
    why place = {.text = text, .bytes = text_bytes}, *w = &place;
    sr_table *t = sr_table_at(st, table);
    uint32_t poisoned = atomic_load_explicit(&t->poisoned, memory_order_relaxed);
    if (poisoned != SR_SOUND) FAIL(w, "table %.63s is poisoned (reason %u)", t->name, poisoned);
    if (!sr_shape_table_ok(st, t, table)) FAIL(w, "table %u is not what it was", table);
    int64_t total = 0;
    for (uint32_t k = 0; k < t->n_stripes; k++) {
        uint64_t n_live;
        int rc = check_stripe(st, t, sr_stripe_at(st, t, k), &n_live, w);
        if (rc != SR_OK) return rc;
        total += (int64_t)n_live;
    }
    const char *events = sr_events_check(st, t, table);
    if (events != NULL) FAIL(w, "table %.63s: %s", t->name, events);
    const char *bytes = sr_bytes_check(st, t, table);
    if (bytes != NULL) FAIL(w, "table %.63s: %s", t->name, bytes);
    sr_books b = sr_limiter_books(st, table);
    if (t->pending != b.inserts || t->pending_samples != b.samples) {
        FAIL(w, "table %.63s: limiter budget lost: %lld and %lld pending, %lld and %lld reserved",
             t->name, (long long)t->pending, (long long)t->pending_samples, (long long)b.inserts,
             (long long)b.samples);
    }
    if (t->inserts - t->deletes + b.owed != total) {
        FAIL(w, "table %.63s: %lld inserted, %lld deleted, %lld on their way, but %lld there",
             t->name, (long long)t->inserts, (long long)t->deletes, (long long)b.owed,
             (long long)total);
    }
    if (sr_bytes_over(st, t) && !sr_has_events(t) && quiet(st)) {
        FAIL(w, "table %.63s: %lld bytes, at most %lld", t->name, (long long)sr_bytes_of(st, t),
             (long long)sr_max_bytes(t));
    }
    if (total > t->max_size && quiet(st)) {
        FAIL(w, "table %.63s: %lld items, at most %lld", t->name, (long long)total,
             (long long)t->max_size);
    }
    return SR_OK;
}

/* -------------------------------------------------- references */

typedef struct {
    uint64_t off;
    uint32_t expected;
    uint16_t kind, inflight; /* in flight: its content is nobody's yet, or any more */
} object;

typedef struct {
    object *list;
    uint64_t n, cap;
    int failed;
} objects;

static void collect(void *ctx, uint64_t off, enum sr_kind kind, uint64_t payload_bytes) {
    (void)payload_bytes;
    objects *o = ctx;
    if (o->n == o->cap) {
        uint64_t cap = o->cap > 0 ? o->cap * 2 : 1024;
        object *list =
            SR_FAULT_POINT("realloc") ? NULL : realloc(o->list, cap * sizeof *list);
        if (list == NULL) {
            o->failed = 1;
            return;
        }
        o->list = list;
        o->cap = cap;
    }
    o->list[o->n++] = (object){.off = off, .kind = (uint16_t)kind};
}

static int by_offset(const void *a, const void *b) {
    const object *x = a, *y = b;
    return (x->off > y->off) - (x->off < y->off);
}

static object *find(const objects *o, uint64_t off) {
    object key = {.off = off};
    return o->n == 0 ? NULL : bsearch(&key, o->list, o->n, sizeof *o->list, by_offset);
}

static int refer(const objects *o, uint64_t ref) {
    object *found = find(o, SR_REF_OFF(ref));
    if (found == NULL || found->kind != SR_REF_KIND(ref)) return 0;
    found->expected++;
    return 1;
}

static int count_inflight(const sr_session *s, uint32_t number, const objects *o, why *w) {
    for (uint32_t i = 0; i < 2; i++) {
        uint64_t off = atomic_load_explicit(&s->inflight[i], memory_order_acquire);
        if (off == 0) continue;
        object *found = find(o, off);
        if (found == NULL) FAIL(w, "session %u: what is in flight is not there", number);
        found->inflight = 1;
    }
    return SR_OK;
}

static int count_events(const sr_store *st, const sr_table *t, const objects *o, why *w) {
    const sr_event *e;
    for (uint64_t i = 0; sr_has_events(t) && (e = sr_events_nth(st, t, i)) != NULL; i++) {
        if (e->ref != 0 && !refer(o, e->ref)) FAIL(w, "table %.63s: an event of nothing", t->name);
    }
    return SR_OK;
}

static int count_roots(sr_store *st, const objects *o, why *w) {
    for (uint32_t i = 0; i < st->shape.n_tables; i++) {
        const sr_table *t = sr_table_at(st, i);
        for (uint32_t k = 0; k < t->n_stripes; k++) {
            const sr_stripe *s = sr_stripe_at(st, t, k);
            for (uint32_t j = 0; j < s->slots_used; j++) {
                uint64_t ref = sr_slot_at(st, s, j)->ref;
                if (ref != 0 && !refer(o, ref)) {
                    FAIL(w, "table %.63s: slot %u refers to nothing", t->name, j);
                }
            }
            const uint64_t *parked = sr_hold_parked(st, s);
            for (uint64_t j = 0; j < sr_hold_slots(s); j++) {
                if (parked[j] != 0 && !refer(o, parked[j])) {
                    FAIL(w, "table %.63s: a checkpoint holds what is not there", t->name);
                }
            }
        }
        int rc = count_events(st, t, o, w);
        if (rc != SR_OK) return rc;
    }
    const sr_session *s = sr_known(st, st->shape.sessions_off);
    for (uint32_t i = 0; i < st->shape.n_sessions; i++) {
        int rc = count_inflight(&s[i], i, o, w);
        if (rc != SR_OK) return rc;
        if (s[i].ledger_off == 0) continue;
        if (s[i].ledger_off != sr_own_ledger(st, &s[i]) &&
            !refer(o, SR_REF(s[i].ledger_off, SR_KIND_LEDGER))) {
            FAIL(w, "session %u: no ledger", i);
        }
        uint64_t room = s[i].ledger_off == sr_own_ledger(st, &s[i])
                            ? sizeof s[i].own_ledger
                            : sr_alloc_bytes(st, s[i].ledger_off);
        if (room / sizeof(uint64_t) < s[i].ledger_cap) FAIL(w, "session %u: short ledger", i);
        const uint64_t *list = sr_ptr(st, s[i].ledger_off);
        for (uint32_t p = 0; p < s[i].ledger_cap; p++) {
            if (list[p] != 0 && !refer(o, list[p])) {
                FAIL(w, "session %u: ledger entry %u refers to nothing", i, p);
            }
        }
    }
    const sr_schema *schemas = sr_known(st, st->shape.schemas_off);
    uint32_t n = atomic_load(&st->hdr->n_schemas);
    if (n > SR_SCHEMAS_MAX) FAIL(w, "%u schemas", n);
    for (uint32_t i = 0; i < n; i++) {
        if (!refer(o, SR_REF(schemas[i].off, SR_KIND_SCHEMA))) FAIL(w, "schema %u has no text", i);
    }
    return SR_OK;
}

static int count_inner(sr_store *st, const objects *o, why *w) {
    for (uint64_t i = 0; i < o->n; i++) {
        if (o->list[i].inflight) continue;
        if (o->list[i].kind == SR_KIND_TRAJ) {
            sr_traj *t = sr_traj_at(st, o->list[i].off);
            for (uint32_t b = 0; b < t->n_blocks; b++) {
                if (!refer(o, SR_REF(sr_traj_blocks(t)[b], SR_KIND_BLOCK))) {
                    FAIL(w, "a trajectory refers to a block that is not there");
                }
            }
        }
        if (o->list[i].kind != SR_KIND_BLOCK) continue;
        const sr_block *b = sr_block_at(st, o->list[i].off);
        const uint64_t *episodes = (const uint64_t *)((const char *)b + b->episodes_off);
        uint32_t rows = atomic_load(&b->published);
        for (uint32_t r = 0; r < rows; r++) {
            if (r > 0 && episodes[r] == episodes[r - 1]) continue;
            if (!refer(o, SR_REF(episodes[r], SR_KIND_EPISODE))) {
                FAIL(w, "a block refers to an episode that is not there");
            }
        }
        uint64_t apart = atomic_load(&b->rows);
        if (apart != 0 && !refer(o, apart)) FAIL(w, "a block refers to rows that are not there");
    }
    return SR_OK;
}

/* The sums of packed rows: those that are in flight are not counted yet, or not any more. */
static int compare_packed(const sr_store *st, const objects *o, why *w) {
    uint64_t raw = 0, stored = 0;
    for (uint64_t i = 0; i < o->n; i++) {
        const object *x = &o->list[i];
        if (x->kind != SR_KIND_PACKED || x->expected == 0) continue;
        const sr_packed *p = sr_ptr(st, x->off);
        if (!sr_packed_sound(p, sr_alloc_bytes(st, x->off))) FAIL(w, "packed rows are damaged");
        raw += p->raw_bytes;
        stored += p->bytes;
    }
    if (raw != atomic_load(&st->hdr->packed_raw_bytes) ||
        stored != atomic_load(&st->hdr->packed_stored_bytes)) {
        FAIL(w, "packed rows have %llu bytes and take %llu, other sums are kept",
             (unsigned long long)raw, (unsigned long long)stored);
    }
    return SR_OK;
}

static int compare_counts(sr_store *st, const objects *o, why *w) {
    for (uint64_t i = 0; i < o->n; i++) {
        const object *x = &o->list[i];
        if (x->inflight && x->expected == 0) continue;
        const void *p = sr_ptr(st, x->off);
        uint32_t refs = 1;
        if (x->kind == SR_KIND_BLOCK) refs = atomic_load(&((const sr_block *)p)->refs);
        if (x->kind == SR_KIND_TRAJ) refs = atomic_load(&((const sr_traj *)p)->refs);
        if (x->kind == SR_KIND_EPISODE) refs = atomic_load(&((const sr_episode *)p)->refs);
        if (x->kind == SR_KIND_PACKED) refs = atomic_load(&((const sr_packed *)p)->refs);
        if (refs != x->expected) {
            FAIL(w, "object of kind %u at %llu: %u references counted, %u exist", x->kind,
                 (unsigned long long)x->off, refs, x->expected);
        }
    }
    return SR_OK;
}

static int check_references(sr_store *st, why *w) {
    objects o = {0};
    int rc = SR_OK;
    for (uint32_t i = 0; i < st->shape.n_arenas && rc == SR_OK; i++) {
        int line = sr_arena_check_locked(st, sr_arena_at(st, i), collect, &o);
        if (line != 0) {
            snprintf(w->text, w->bytes, "arena %u fails check %d", i, -line);
            rc = SR_CORRUPT;
        }
    }
    if (o.failed) rc = SR_SYS;
    if (rc == SR_OK) {
        if (o.n > 0) qsort(o.list, o.n, sizeof *o.list, by_offset);
        rc = count_roots(st, &o, w);
        if (rc == SR_OK) rc = count_inner(st, &o, w);
        if (rc == SR_OK) rc = compare_counts(st, &o, w);
        if (rc == SR_OK) rc = compare_packed(st, &o, w);
    }
    free(o.list);
    return rc;
}

static int check_one(sr_store *st, uint32_t table, char *text, uint64_t text_bytes) {
    sr_table *t = sr_table_at(st, table);
    int rc = sr_lock_table(st, t);
    if (rc != SR_OK) return rc;
    rc = sr_check_table_locked(st, table, text, text_bytes);
    sr_unlock_table(st, t);
    return rc;
}

static int contradicts(char *text, uint64_t text_bytes) {
    if (text_bytes > 0) snprintf(text, text_bytes, "an object contradicts itself");
    return SR_CORRUPT;
}

int sr_check(sr_store *st, uint32_t table, char *text, uint64_t text_bytes) {
    SR_GUARDED(st, contradicts(text, text_bytes))
    why w = {.text = text, .bytes = text_bytes};
    if (text_bytes > 0) text[0] = 0;
    if (table != SR_NONE && table >= st->shape.n_tables) return SR_INVALID;
    /* What counts bytes is only at rest under all locks. */
    if (table != SR_NONE && !sr_counts_bytes(sr_table_at(st, table))) {
        return check_one(st, table, text, text_bytes);
    }
    int rc = sr_lock_all(st);
    if (rc != SR_OK) return rc;
    for (uint32_t i = 0; i < st->shape.n_tables && rc == SR_OK; i++) {
        if (table == SR_NONE || table == i) rc = sr_check_table_locked(st, i, text, text_bytes);
    }
    if (rc == SR_OK && table == SR_NONE) rc = check_references(st, &w);
    sr_unlock_all(st);
    return rc;
}
