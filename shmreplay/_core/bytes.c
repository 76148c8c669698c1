#include "bytes.h"

#include "arena.h"
#include "ledger.h"
#include "lock.h"
#include "packed.h"
#include "steps.h"
#include "stripe.h"
#include "table.h"

static _Atomic uint32_t *counter(const sr_store *st, sr_block *b, uint32_t table) {
    uint64_t at = sizeof *b + b->n_cols * sizeof(sr_block_col) + table * sizeof(uint32_t);
    SR_ASSERT(table < st->shape.n_tables && at + sizeof(uint32_t) <= b->episodes_off);
    return (_Atomic uint32_t *)(void *)((char *)b + at);
}

/* The blocks of an item, each once, by turns: `i` from 0 on until NULL. */
static sr_block *block_of(const sr_store *st, uint64_t ref, uint32_t i) {
    if (SR_REF_KIND(ref) == SR_KIND_BLOCK) {
        return i == 0 ? sr_block_at(st, SR_REF_OFF(ref)) : NULL;
    }
    sr_traj *t = sr_traj_at(st, SR_REF_OFF(ref));
    return i < t->n_blocks ? sr_block_at(st, sr_traj_blocks(t)[i]) : NULL;
}

static int64_t record_bytes(const sr_store *st, uint64_t ref) {
    if (SR_REF_KIND(ref) == SR_KIND_BLOCK) return 0;
    return (int64_t)sr_charge(sr_traj_at(st, SR_REF_OFF(ref))->bytes);
}

static int64_t episode_bytes(const sr_store *st) {
    return (int64_t)sr_charge(sizeof(sr_episode) + st->shape.n_tables * sizeof(uint32_t));
}

int64_t sr_bytes_of(const sr_store *st, const sr_table *t) {
    return atomic_load_explicit(&t->data_bytes, memory_order_relaxed) +
           atomic_load_explicit(&t->num_episodes, memory_order_relaxed) * episode_bytes(st);
}

uint64_t sr_block_charge(const sr_store *st, const sr_block *b) {
    uint64_t bytes = sr_charge(b->bytes);
    uint64_t rows = atomic_load_explicit(&b->rows, memory_order_acquire);
    if (SR_LIKELY(rows == 0)) return bytes;
    SR_ASSERT(sr_fits(st, SR_REF_OFF(rows), SR_LINE));
    const void *apart = sr_known(st, SR_REF_OFF(rows));
    return bytes + (SR_REF_KIND(rows) == SR_KIND_BLOCK
                        ? sr_charge(sr_block_at(st, SR_REF_OFF(rows))->bytes)
                        : sr_charge(((const sr_packed *)apart)->bytes));
}

/* One item more or less refers to the block: the bytes that come or go. Of a block whose rows may
 * move this is under the lock that they move under. */
static int64_t count_block(const sr_store *st, sr_block *b, uint32_t table, int come) {
    _Atomic uint32_t *items = counter(st, b, table);
    uint32_t before = come ? atomic_fetch_add_explicit(items, 1, memory_order_relaxed)
                           : atomic_fetch_sub_explicit(items, 1, memory_order_relaxed);
    if (before != (come ? 0u : 1u)) return 0;
    int64_t bytes = (int64_t)sr_block_charge(st, b);
    return come ? bytes : -bytes;
}

static void add_bytes(sr_table *t, int64_t bytes) {
    if (bytes != 0) atomic_fetch_add_explicit(&t->data_bytes, bytes, memory_order_relaxed);
}

/* Under which the rows of a block that lie apart move. */
static sr_mutex *lock_of(const sr_store *st, const sr_block *b) {
    uint32_t arena = sr_arena_number(st, (uint64_t)((const char *)b - st->base));
    SR_ASSERT(arena != SR_NONE);
    return &sr_arena_at(st, arena)->lock;
}

/* `locked`: all locks of the store are held. */
static void count_item(const sr_store *st, sr_table *t, uint32_t table, uint64_t ref, int come,
                       int locked) {
    add_bytes(t, come ? record_bytes(st, ref) : -record_bytes(st, ref));
    sr_block *b;
    for (uint32_t i = 0; (b = block_of(st, ref, i)) != NULL; i++) {
        sr_mutex *lock = NULL;
        if (!locked && SR_UNLIKELY(sr_lies_apart(b))) {
            lock = lock_of(st, b);
            /* A repair is due, which counts all of it. */
            if (sr_lock_inner((sr_store *)(uintptr_t)st, lock) != SR_OK) continue;
        }
        add_bytes(t, count_block(st, b, table, come));
        if (lock != NULL) sr_unlock(lock);
    }
}

void sr_bytes_enter(const sr_store *st, sr_table *t, uint32_t table, uint64_t ref) {
    count_item(st, t, table, ref, 1, 0);
}
void sr_bytes_leave(const sr_store *st, sr_table *t, uint32_t table, uint64_t ref) {
    count_item(st, t, table, ref, 0, 0);
}

void sr_bytes_moved(const sr_store *st, sr_block *b, int64_t more) {
    for (uint32_t i = 0; i < st->shape.n_tables; i++) {
        sr_table *t = sr_table_at(st, i);
        if (!sr_counts_bytes(t) || atomic_load(counter(st, b, i)) == 0) continue;
        add_bytes(t, more);
    }
}

/* ------------------------------------------------------------------ all items of a table */

typedef struct {
    const sr_store *st;
    sr_table *t;
    uint32_t table;
    int64_t bytes;
    const char *wrong;
    int locked;
} walk;

static void each_item(walk *w, void (*visit)(walk *w, uint64_t ref)) {
    for (uint32_t k = 0; k < w->t->n_stripes; k++) {
        const sr_stripe *s = sr_stripe_at(w->st, w->t, k);
        for (uint32_t i = 0; i < s->slots_used; i++) {
            uint64_t ref = atomic_load_explicit(&sr_slot_at(w->st, s, i)->ref,
                                                memory_order_relaxed);
            if (ref != 0) visit(w, ref);
        }
    }
}

static void set_zero(walk *w, uint64_t ref) {
    sr_block *b;
    for (uint32_t i = 0; (b = block_of(w->st, ref, i)) != NULL; i++) {
        atomic_store_explicit(counter(w->st, b, w->table), 0, memory_order_relaxed);
    }
}
static void enter(walk *w, uint64_t ref) {
    count_item(w->st, w->t, w->table, ref, 1, w->locked);
}

void sr_bytes_forget(const sr_store *st, sr_table *t, uint32_t table) {
    walk w = {.st = st, .t = t, .table = table};
    each_item(&w, set_zero);
    atomic_store_explicit(&t->data_bytes, 0, memory_order_relaxed);
}

static void recount(const sr_store *st, sr_table *t, uint32_t table, int locked) {
    walk w = {.st = st, .t = t, .table = table, .locked = locked};
    sr_bytes_forget(st, t, table);
    each_item(&w, enter);
}
void sr_bytes_recount(const sr_store *st, sr_table *t, uint32_t table) {
    recount(st, t, table, 0);
}
void sr_bytes_recount_locked(const sr_store *st, sr_table *t, uint32_t table) {
    recount(st, t, table, 1);
}

/* Take each item's count away, ask for zero, and put them back: no memory is needed, and a death
 * meanwhile is one inside locks. */
static void take_away(walk *w, uint64_t ref) {
    sr_block *b;
    w->bytes += record_bytes(w->st, ref);
    for (uint32_t i = 0; (b = block_of(w->st, ref, i)) != NULL; i++) {
        w->bytes -= count_block(w->st, b, w->table, 0);
    }
}
static void ask_for_zero(walk *w, uint64_t ref) {
    sr_block *b;
    for (uint32_t i = 0; (b = block_of(w->st, ref, i)) != NULL; i++) {
        if (atomic_load_explicit(counter(w->st, b, w->table), memory_order_relaxed) != 0) {
            w->wrong = "a block counts other items than refer to it";
        }
    }
}
static void put_back(walk *w, uint64_t ref) {
    sr_block *b;
    for (uint32_t i = 0; (b = block_of(w->st, ref, i)) != NULL; i++) {
        atomic_fetch_add_explicit(counter(w->st, b, w->table), 1, memory_order_relaxed);
    }
}

const char *sr_bytes_check(const sr_store *st, sr_table *t, uint32_t table) {
    if (!sr_counts_bytes(t)) return sr_max_bytes(t) == 0 ? NULL : "a bound on bytes, uncounted";
    walk w = {.st = st, .t = t, .table = table};
    each_item(&w, take_away);
    each_item(&w, ask_for_zero);
    each_item(&w, put_back);
    if (w.wrong == NULL && w.bytes != atomic_load(&t->data_bytes)) {
        w.wrong = "its items take other bytes than are counted";
    }
    return w.wrong;
}

/* ------------------------------------------------------------------ before an insert */

/* A block of another writer may be packed meanwhile, and what its rows lay in be freed. */
static int add_charge(sr_store *st, const sr_block *b, int64_t *bytes) {
    sr_mutex *lock = SR_UNLIKELY(sr_lies_apart(b)) ? lock_of(st, b) : NULL;
    int rc = lock == NULL ? SR_OK : sr_lock(st, lock);
    if (rc != SR_OK) return rc;
    *bytes += (int64_t)sr_block_charge(st, b);
    if (lock != NULL) sr_unlock(lock);
    return SR_OK;
}

static int fit(sr_store *st, int64_t most, uint32_t n, const sr_item *items) {
    for (uint32_t i = 0; i < n; i++) {
        int64_t bytes = record_bytes(st, items[i].ref) + episode_bytes(st);
        const sr_block *b;
        for (uint32_t k = 0; (b = block_of(st, items[i].ref, k)) != NULL; k++) {
            int rc = add_charge(st, b, &bytes);
            if (rc != SR_OK) return rc;
        }
        if (bytes <= most) continue;
        *sr_last_detail() = (sr_detail){.asked = (uint64_t)bytes, .available = (uint64_t)most};
        return SR_TOO_LARGE;
    }
    return SR_OK;
}

static int fit_guarded(sr_store *st, int64_t most, uint32_t n, const sr_item *items) {
    SR_GUARDED(st, SR_CORRUPT)
    return fit(st, most, n, items);
}

int sr_items_fit(sr_store *st, uint32_t table, uint32_t n, const sr_item *items) {
    const sr_table *t = sr_table_at(st, table);
    if (t == NULL) return SR_INVALID;
    const int64_t most = sr_max_bytes(t);
    return SR_LIKELY(most <= 0) ? SR_OK : fit_guarded(st, most, n, items);
}
