/* account.c: where every byte of a store is, and who is there. */
#include "arena.h"
#include "bytes.h"
#include "events.h"
#include "fault.h"
#include "ledger.h"
#include "lock_all.h"
#include "shape.h"
#include "steps.h"
#include "stripe.h"
#include "table.h"

/* ------------------------------------------------------------------ what only sessions refer to */

typedef struct {
    uint64_t *list;
    uint64_t n, cap;
} refs;

static int add(refs *r, uint64_t ref) {
    if (r->n == r->cap) {
        uint64_t cap = r->cap > 0 ? r->cap * 2 : 256;
        uint64_t *list =
            SR_FAULT_POINT("realloc") ? NULL : realloc(r->list, cap * sizeof *list);
        if (list == NULL) return SR_SYS;
        r->list = list;
        r->cap = cap;
    }
    r->list[r->n++] = ref;
    return SR_OK;
}

static int by_value(const void *a, const void *b) {
    uint64_t x, y;
    memcpy(&x, a, sizeof x);
    memcpy(&y, b, sizeof y);
    return (x > y) - (x < y);
}

static int add_ledger(const sr_store *st, const sr_session *s, refs *trajs, refs *blocks) {
    uint64_t room = s->ledger_off == sr_own_ledger(st, s) ? sizeof s->own_ledger
                                                          : sr_alloc_bytes(st, s->ledger_off);
    SR_ASSERT(room / sizeof(uint64_t) >= s->ledger_cap);
    const uint64_t *list = sr_ptr(st, s->ledger_off);
    int rc = SR_OK;
    for (uint32_t p = 0; p < s->ledger_cap && rc == SR_OK; p++) {
        if (SR_REF_KIND(list[p]) == SR_KIND_TRAJ) rc = add(trajs, list[p]);
        if (SR_REF_KIND(list[p]) == SR_KIND_BLOCK) rc = add(blocks, list[p]);
    }
    return rc;
}

/* Of sorted references: how many are the same as number i, from there on. */
static uint32_t run_of(const refs *r, uint64_t i) {
    uint64_t k = i;
    while (k < r->n && r->list[k] == r->list[i]) k++;
    return (uint32_t)(k - i);
}

/* Trajectories to which nothing else refers count, and so do their references to blocks; then
 * blocks to which nothing else refers. */
static int count_pinned(sr_store *st, refs *trajs, refs *blocks, sr_store_stats *out) {
    uint64_t traj_bytes = 0, block_bytes = 0;
    if (trajs->n > 0) qsort(trajs->list, trajs->n, sizeof *trajs->list, by_value);
    for (uint64_t i = 0; i < trajs->n; i += run_of(trajs, i)) {
        sr_traj *t = sr_traj_at(st, SR_REF_OFF(trajs->list[i]));
        if (atomic_load_explicit(&t->refs, memory_order_relaxed) != run_of(trajs, i)) continue;
        traj_bytes += sr_charge(t->bytes);
        for (uint32_t k = 0; k < t->n_blocks; k++) {
            int rc = add(blocks, SR_REF(sr_traj_blocks(t)[k], SR_KIND_BLOCK));
            if (rc != SR_OK) return rc;
        }
    }
    if (blocks->n > 0) qsort(blocks->list, blocks->n, sizeof *blocks->list, by_value);
    for (uint64_t i = 0; i < blocks->n; i += run_of(blocks, i)) {
        const sr_block *b = sr_block_at(st, SR_REF_OFF(blocks->list[i]));
        if (atomic_load_explicit(&b->refs, memory_order_relaxed) != run_of(blocks, i)) continue;
        block_bytes += sr_block_charge(st, b);
    }
    out->pinned = traj_bytes + block_bytes;
    out->trajectories -= traj_bytes;
    out->blocks -= block_bytes;
    return SR_OK;
}

static int add_pinned(sr_store *st, sr_store_stats *out) {
    refs trajs = {0}, blocks = {0};
    int rc = SR_OK;
    for (uint32_t i = 0; i < st->shape.n_sessions && rc == SR_OK; i++) {
        const sr_session *s = sr_session_at(st, i);
        if (s->ledger_off != 0) rc = add_ledger(st, s, &trajs, &blocks);
    }
    if (rc == SR_OK) rc = count_pinned(st, &trajs, &blocks, out);
    free(trajs.list);
    free(blocks.list);
    return rc;
}

/* ------------------------------------------------------------------ all of it */

static void add_arena(const sr_store *st, const sr_arena *a, sr_store_stats *out) {
    uint64_t tail = sr_arena_tail(st, a);
    out->arena_committed += a->committed_end - a->start;
    out->arena_used += a->used_bytes;
    out->arena_free += a->free_bytes;
    out->arena_allocs += a->n_allocs;
    out->margin += a->committed_end - a->start - a->used_bytes - a->free_bytes;
    out->blocks += a->kind_bytes[SR_KIND_BLOCK] + a->kind_bytes[SR_KIND_PACKED];
    out->trajectories += a->kind_bytes[SR_KIND_TRAJ];
    out->episodes += a->kind_bytes[SR_KIND_EPISODE];
    out->ledgers += a->kind_bytes[SR_KIND_LEDGER];
    out->schemas += a->kind_bytes[SR_KIND_SCHEMA];
    out->tail += tail;
    out->fragmented += a->free_bytes - tail;
}

static uint64_t index_bytes(const sr_store *st, const sr_table *t) {
    const sr_ring *ring = sr_has_events(t) ? sr_events_ring(st, t) : NULL;
    uint64_t bytes = ring != NULL ? sr_events_bytes(ring->capacity) : 0;
    for (uint32_t k = 0; k < t->n_stripes; k++) {
        const sr_stripe *s = sr_stripe_at(st, t, k);
        bytes += s->slots_committed;
        for (uint32_t i = 0; i < s->n_indexes && i < 2; i++) {
            for (uint32_t l = 0; l < SR_TREE_LEVELS; l++) bytes += s->index[i].array_committed[l];
        }
    }
    return bytes;
}

static void count_who(const sr_store *st, sr_store_stats *out) {
    const sr_participant *p = sr_known(st, st->shape.participants_off);
    for (uint32_t i = 0; i < st->shape.n_participants; i++) {
        out->participants += atomic_load_explicit(&p[i].state, memory_order_relaxed) != 0;
    }
    sr_sum_sessions(st, out);
}

int sr_store_get_stats(sr_store *st, sr_store_stats *out) {
    SR_GUARDED(st, SR_CORRUPT)
    const sr_header *h = st->hdr;
    memset(out, 0, sizeof *out);
    out->capacity = st->shape.capacity_bytes;
    out->fixed = sr_align(st->shape.config_off + st->shape.config_bytes, SR_PAGE);
    out->closed = (uint32_t)sr_store_is_closed(st);
    count_who(st, out);
    int rc = sr_lock_all(st);
    if (rc != SR_OK) return rc;
    out->committed = atomic_load_explicit(&h->committed_bytes, memory_order_relaxed);
    out->repairs = atomic_load_explicit(&h->repairs, memory_order_relaxed);
    out->packed_raw = atomic_load_explicit(&h->packed_raw_bytes, memory_order_relaxed);
    out->packed_stored = atomic_load_explicit(&h->packed_stored_bytes, memory_order_relaxed);
    for (uint32_t i = 0; i < st->shape.n_tables; i++) {
        const sr_table *t = sr_table_at(st, i);
        SR_ASSERT(sr_shape_table_ok(st, t, i));
        out->poisoned += atomic_load_explicit(&t->poisoned, memory_order_relaxed) != SR_SOUND;
        out->index_bytes[i] = index_bytes(st, t);
        out->index_committed += out->index_bytes[i];
    }
    for (uint32_t i = 0; i < st->shape.n_arenas; i++) add_arena(st, sr_arena_at(st, i), out);
    rc = add_pinned(st, out);
    sr_unlock_all(st);
    return rc;
}

/* ------------------------------------------------------------------ what things will take */

uint64_t sr_size_block(uint32_t n_tables, uint32_t n_cols, const uint64_t *row_bytes,
                       uint32_t rows) {
    return sr_charge(sr_block_bytes(n_tables, n_cols, row_bytes, rows));
}

uint64_t sr_size_traj(uint32_t n_cols, uint32_t n_blocks, uint32_t n_segs) {
    return sr_charge(sizeof(sr_traj) + (uint64_t)n_blocks * sizeof(uint64_t) +
                     (n_cols + 1ull) * sizeof(sr_traj_col) + (uint64_t)n_segs * sizeof(sr_seg));
}

uint64_t sr_size_episode(uint32_t n_tables) {
    return sr_charge(sizeof(sr_episode) + n_tables * sizeof(uint32_t));
}

uint64_t sr_size_index(const sr_table_config *cfg, uint64_t capacity_bytes, uint64_t slots) {
    return sr_stripe_bytes_for(cfg, capacity_bytes, slots) + sr_events_bytes(cfg->n_events);
}
