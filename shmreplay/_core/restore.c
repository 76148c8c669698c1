/* restore.c: putting a checkpoint into a store that nobody else has.
 *
 * Only what is truth is written here: objects, slots, counters. All that follows from it is made by
 * a repair, and checked by it. */
#include "arena.h"
#include "bytes.h"
#include "checkpoint.h"
#include "events.h"
#include "evict.h"
#include "index.h"
#include "limiter.h"
#include "lock.h"
#include "packed.h"
#include "shape.h"
#include "steps.h"
#include "stripe.h"
#include "table.h"

#include <math.h>

void sr_restore_begin(sr_store *st) { atomic_store(&st->hdr->state, SR_STATE_CLOSED); }

uint32_t sr_checkpointer(const sr_store *st) {
    return atomic_load_explicit(&st->hdr->checkpointer, memory_order_acquire);
}

void sr_checkpointer_set(sr_store *st, uint32_t schema) {
    atomic_store_explicit(&st->hdr->checkpointer, schema, memory_order_release);
}

/* ------------------------------------------------------------------ objects */

/* By turns, so that all arenas have some. */
static int make(sr_store *st, uint64_t i, enum sr_kind kind, uint64_t bytes, uint64_t *off) {
    return sr_alloc_outer(st, (uint32_t)(i % st->shape.n_arenas), kind, bytes, NULL, off);
}

int sr_restore_episodes(sr_store *st, uint64_t n, const uint64_t *ids, uint64_t *offs) {
    SR_GUARDED(st, SR_CORRUPT)
    uint64_t bytes = sizeof(sr_episode) + st->shape.n_tables * sizeof(uint32_t);
    for (uint64_t i = 0; i < n; i++) {
        int rc = make(st, i, SR_KIND_EPISODE, bytes, &offs[i]);
        if (rc != SR_OK) return rc;
        sr_episode *e = sr_ptr(st, offs[i]);
        memset(e, 0, bytes);
        e->kind = SR_KIND_EPISODE;
        e->id = ids[i];
        atomic_store_explicit(&e->refs, 1, memory_order_relaxed);
    }
    return SR_OK;
}

static int name_episodes(sr_block *b, const sr_block_head *h, const sr_run_of_rows *runs,
                         uint64_t n_episodes, const uint64_t *episodes) {
    uint64_t *of_row = (uint64_t *)(void *)((char *)b + b->episodes_off);
    uint64_t row = 0;
    for (uint32_t i = 0; i < h->n_runs; i++) {
        if (runs[i].episode >= n_episodes || runs[i].rows > h->rows - row) return SR_INVALID;
        for (uint32_t r = 0; r < runs[i].rows; r++) of_row[row++] = episodes[runs[i].episode];
    }
    return row == h->rows ? SR_OK : SR_INVALID;
}

/* A block, without its rows. Packed rows get their place: whoever fails leaves the store to be
 * removed. */
static int make_block(sr_store *st, uint64_t i, const sr_block_head *h, const uint64_t *row_bytes,
                      uint64_t *off) {
    int packed = h->encoding == SR_SAVED_PACKED;
    uint64_t at;
    uint64_t bytes = sr_block_bytes(st->shape.n_tables, h->n_cols, row_bytes, h->rows);
    if (bytes == 0 || (packed && h->bytes < sizeof(sr_packed))) return SR_INVALID;
    if (packed) bytes = sr_block_apart_bytes(st->shape.n_tables, h->n_cols, h->rows);
    int rc = make(st, i, SR_KIND_BLOCK, bytes, off);
    if (rc != SR_OK) return rc;
    sr_block *b = sr_block_format(st, *off, h->n_cols, row_bytes, h->rows, packed);
    b->uid = h->uid;
    if (!packed) return SR_OK;
    rc = make(st, i, SR_KIND_PACKED, h->bytes, &at);
    if (rc != SR_OK) return rc;
    atomic_store_explicit(&b->rows, SR_REF(at, SR_KIND_PACKED), memory_order_relaxed);
    return SR_OK;
}

static int make_blocks(sr_store *st, uint64_t n, const sr_block_head *heads,
                       const uint64_t *row_bytes, const sr_run_of_rows *runs, uint64_t n_episodes,
                       const uint64_t *episodes, uint64_t *offs) {
    for (uint64_t i = 0; i < n; i++) {
        const sr_block_head *h = &heads[i];
        if (h->n_cols == 0 || h->n_cols > SR_COLUMNS_MAX || h->rows == 0 ||
            h->encoding > SR_SAVED_PACKED) {
            return SR_INVALID;
        }
        int rc = make_block(st, i, h, row_bytes, &offs[i]);
        if (rc != SR_OK) return rc;
        sr_block *b = sr_ptr(st, offs[i]);
        rc = name_episodes(b, h, runs, n_episodes, episodes);
        if (rc != SR_OK) return rc;
        atomic_store_explicit(&b->published, h->rows, memory_order_release);
        row_bytes += h->n_cols;
        runs += h->n_runs;
    }
    return SR_OK;
}

int sr_restore_blocks(sr_store *st, uint64_t n, const sr_block_head *heads,
                      const uint64_t *row_bytes, const sr_run_of_rows *runs, uint64_t n_episodes,
                      const uint64_t *episodes, uint64_t *offs) {
    SR_GUARDED(st, SR_CORRUPT)
    return make_blocks(st, n, heads, row_bytes, runs, n_episodes, episodes, offs);
}

/* The other way round than copy_rows in snapshot.c. */
static int fill_rows(const sr_block *b, uint64_t from, const char *src, uint64_t bytes) {
    uint32_t rows = atomic_load_explicit(&b->published, memory_order_relaxed);
    for (uint32_t c = 0; c < b->n_cols && bytes > 0; c++) {
        uint64_t row_bytes;
        char *column = sr_block_rows(b, c, 0, rows, &row_bytes);
        if (column == NULL) return SR_CORRUPT;
        uint64_t all = row_bytes * rows;
        if (from >= all) {
            from -= all;
            continue;
        }
        uint64_t n = all - from < bytes ? all - from : bytes;
        sr_copy(column + from, src, n);
        src += n;
        bytes -= n;
        from = 0;
    }
    return bytes == 0 ? SR_OK : SR_INVALID;
}

/* Are the packed rows that were put there those of the block that its head describes? */
static int packed_fits(const sr_packed *p, sr_block *b, const sr_block_head *h) {
    uint64_t raw = 0;
    if (!sr_packed_sound(p, h->bytes) || p->bytes != h->bytes || p->n_cols != b->n_cols ||
        p->rows != h->rows) {
        return 0;
    }
    for (uint32_t c = 0; c < b->n_cols; c++) {
        if (sr_packed_cols(p)[c].row_bytes != sr_block_cols(b)[c].row_bytes) return 0;
        raw += sr_block_cols(b)[c].row_bytes * p->rows;
    }
    return raw == p->raw_bytes;
}

/* As fill_rows, of rows that are stored packed. They are looked at once the last byte is there. */
static int fill_packed(const sr_store *st, sr_block *b, const sr_block_head *h, uint64_t from,
                       const char *src, uint64_t bytes) {
    uint64_t off = SR_REF_OFF(atomic_load_explicit(&b->rows, memory_order_relaxed));
    if (bytes > h->bytes || from > h->bytes - bytes) return SR_INVALID;
    sr_copy((char *)sr_ptr(st, off) + from, src, bytes);
    if (from + bytes < h->bytes) return SR_OK;
    sr_packed *p = sr_ptr(st, off);
    if (!packed_fits(p, b, h)) return SR_INVALID;
    sr_packed_number(st, p);
    return SR_OK;
}

int sr_restore_rows(const sr_store *st, uint64_t n, const uint64_t *offs,
                    const sr_block_head *heads, const uint64_t *where, uint64_t *next,
                    const char *src, uint64_t from, uint64_t bytes) {
    SR_GUARDED(st, SR_CORRUPT)
    uint64_t end = from + bytes;
    for (uint64_t i = *next; i < n && where[i] < end; i++) {
        uint64_t last = where[i] + heads[i].bytes;
        uint64_t a = where[i] > from ? where[i] : from, z = last < end ? last : end;
        if (a < z) {
            sr_block *b = sr_block_at(st, offs[i]);
            const char *part = src + (a - from);
            int rc = sr_lies_apart(b)
                         ? fill_packed(st, b, &heads[i], a - where[i], part, z - a)
                         : fill_rows(b, a - where[i], part, z - a);
            if (rc != SR_OK) {
                *next = i;
                return rc;
            }
        }
        if (last <= end && *next == i) *next = i + 1;
    }
    return SR_OK;
}

static int make_trajs(sr_store *st, uint64_t n, const sr_traj_head *heads, const uint32_t *blocks,
                      const sr_traj_col *cols, const sr_seg *segs, uint64_t n_blocks,
                      const uint64_t *block_offs, uint64_t *offs) {
    for (uint64_t i = 0; i < n; i++) {
        const sr_traj_head *h = &heads[i];
        if (h->n_cols == 0 || h->n_cols > SR_COLUMNS_MAX) return SR_INVALID;
        uint64_t bytes = sizeof(sr_traj) + h->n_blocks * sizeof(uint64_t) +
                         (h->n_cols + 1ull) * sizeof(sr_traj_col) +
                         (uint64_t)h->n_segs * sizeof(sr_seg);
        int rc = make(st, i, SR_KIND_TRAJ, bytes, &offs[i]);
        if (rc != SR_OK) return rc;
        sr_traj *t = sr_ptr(st, offs[i]);
        *t = (sr_traj){.kind = SR_KIND_TRAJ,
                       .n_cols = h->n_cols,
                       .n_blocks = h->n_blocks,
                       .n_segs = h->n_segs,
                       .bytes = bytes};
        for (uint32_t k = 0; k < h->n_blocks; k++) {
            if (blocks[k] >= n_blocks) return SR_INVALID;
            sr_traj_blocks(t)[k] = block_offs[blocks[k]];
        }
        memcpy(sr_traj_cols(t), cols, (h->n_cols + 1ull) * sizeof *cols);
        memcpy(sr_traj_segs(t), segs, h->n_segs * sizeof *segs);
        atomic_store_explicit(&t->refs, 1, memory_order_relaxed);
        blocks += h->n_blocks;
        cols += h->n_cols + 1ull;
        segs += h->n_segs;
    }
    return SR_OK;
}

int sr_restore_trajs(sr_store *st, uint64_t n, const sr_traj_head *heads, const uint32_t *blocks,
                     const sr_traj_col *cols, const sr_seg *segs, uint64_t n_blocks,
                     const uint64_t *block_offs, uint64_t *offs) {
    SR_GUARDED(st, SR_CORRUPT)
    return make_trajs(st, n, heads, blocks, cols, segs, n_blocks, block_offs, offs);
}

/* ------------------------------------------------------------------ tables */

static sr_stripe *stripe_of(const sr_store *st, uint32_t table, uint32_t stripe) {
    const sr_table *t = sr_table_at(st, table);
    if (t == NULL || stripe >= sr_shape_stripes(st, table)) return NULL;
    SR_ASSERT(sr_shape_table_ok(st, t, table));
    sr_stripe *s = sr_stripe_at(st, t, stripe);
    SR_ASSERT(sr_shape_stripe_ok(st, s));
    return s;
}

int sr_restore_slots(sr_store *st, uint32_t table, uint32_t stripe, uint64_t n,
                     const sr_slot *slots, uint64_t touch_next) {
    SR_GUARDED(st, SR_CORRUPT)
    sr_stripe *s = stripe_of(st, table, stripe);
    if (s == NULL || n > s->slots_max || s->slots_used != 0) return SR_INVALID;
    while (s->slots_committed / sizeof(sr_slot) < n) {
        int rc = sr_stripe_grow(st, s);
        if (rc != SR_OK) return rc;
    }
    const sr_table *t = sr_table_at(st, table);
    for (uint64_t i = 0; i < n; i++) {
        sr_slot *p = sr_slot_at(st, s, (uint32_t)i);
        *p = slots[i];
        if (p->ref != 0 && p->key == 0) {
            p->key = sr_stripe_next_key(st, t, s, (uint32_t)i, 0);
        }
    }
    s->slots_used = n;
    s->touch_next = touch_next;
    return SR_OK;
}

int sr_restore_table(sr_store *st, uint32_t table, const sr_table_image *image, int seeded) {
    sr_table *t = sr_table_at(st, table);
    if (t == NULL) return SR_INVALID;
    t->inserts = image->inserts;
    t->samples = image->samples;
    t->deletes = image->deletes;
    if (seeded) t->rng = image->rng;
    atomic_store(&t->num_deleted_episodes, image->num_deleted_episodes);
    atomic_store(&t->num_unique_samples, image->num_unique_samples);
    atomic_store(&t->next_seq, image->next_seq);
    atomic_store(&t->missed_updates, image->missed_updates);
    atomic_store(&t->max_priority_bits, image->max_priority_bits);
    return SR_OK;
}

static int64_t live_in(const sr_store *st, const sr_table *t) {
    int64_t n = 0;
    for (uint32_t k = 0; k < t->n_stripes; k++) {
        const sr_stripe *s = sr_stripe_at(st, t, k);
        for (uint32_t i = 0; i < s->slots_used; i++) n += sr_slot_live(sr_slot_at(st, s, i));
    }
    return n;
}

int sr_restore_derive(sr_store *st) {
    SR_GUARDED(st, SR_CORRUPT)
    int64_t declared[SR_TABLES_MAX], declared_bytes[SR_TABLES_MAX];
    for (uint32_t i = 0; i < st->shape.n_tables; i++) {
        sr_table *t = sr_table_at(st, i);
        SR_ASSERT(sr_shape_table_ok(st, t, i));
        int64_t live = live_in(st, t);
        declared[i] = t->max_size;
        /* For the check at the end of the repair: what is too much goes later. */
        if (live > t->max_size) t->max_size = live;
        declared_bytes[i] = atomic_exchange(&t->max_bytes, 0);
    }
    atomic_store(&st->hdr->dirty, 1);
    int rc = sr_repair(st);
    atomic_store(&st->hdr->repairs, 0);
    for (uint32_t i = 0; i < st->shape.n_tables; i++) {
        sr_table *t = sr_table_at(st, i);
        t->max_size = declared[i];
        atomic_store(&t->max_bytes, declared_bytes[i]);
        if (rc == SR_OK && atomic_load(&t->poisoned) != SR_SOUND) rc = SR_CORRUPT;
    }
    return rc;
}

int sr_restore_order(sr_store *st, uint32_t table, uint32_t stripe, uint32_t k, uint64_t n,
                     const uint32_t *slots, uint32_t head) {
    SR_GUARDED(st, SR_CORRUPT)
    sr_stripe *s = stripe_of(st, table, stripe);
    if (s == NULL || k >= s->n_indexes) return SR_INVALID;
    sr_index *ix = &s->index[k];
    if ((ix->kind != SR_SEL_UNIFORM && ix->kind != SR_SEL_EPOCH) || n != ix->count || head > n) {
        return SR_INVALID;
    }
    uint32_t *dense = sr_known(st, ix->array_off[0]), *pos = sr_known(st, ix->array_off[1]);
    /* A permutation of what is there: each live slot once. */
    for (uint64_t i = 0; i < n; i++) {
        if (slots[i] >= s->slots_used || !sr_slot_live(sr_slot_at(st, s, slots[i]))) {
            return SR_INVALID;
        }
        pos[slots[i]] = UINT32_MAX;
    }
    for (uint64_t i = 0; i < n; i++) {
        if (pos[slots[i]] != UINT32_MAX) return SR_CORRUPT; /* twice: the caller gives up */
        dense[i] = slots[i];
        pos[slots[i]] = (uint32_t)i;
    }
    if (ix->kind == SR_SEL_EPOCH) ix->head = head;
    return SR_OK;
}

int sr_restore_free(sr_store *st, uint32_t table, uint32_t stripe, uint64_t n,
                    const uint32_t *slots) {
    SR_GUARDED(st, SR_CORRUPT)
    sr_stripe *s = stripe_of(st, table, stripe);
    if (s == NULL || n + s->index[s->sampler].count != s->slots_used) return SR_INVALID;
    for (uint64_t i = 0; i < n; i++) {
        if (slots[i] >= s->slots_used || sr_slot_live(sr_slot_at(st, s, slots[i]))) {
            return SR_INVALID;
        }
    }
    /* A slot named twice would make a ring of it: the check at the end finds that. */
    sr_set_free_head(s, SR_NONE);
    for (uint64_t i = n; i-- > 0;) {
        sr_slot_at(st, s, slots[i])->row_start = s->free_head;
        sr_set_free_head(s, slots[i]);
    }
    return SR_OK;
}

/* Samples so far such that neither inserting nor sampling is ahead of the other. */
static void reset_limiter(sr_table *t, int64_t live) {
    t->inserts = live;
    t->deletes = t->samples = 0;
    double ahead = (double)live * t->samples_per_insert, middle = (t->min_diff + t->max_diff) / 2;
    int bounded = fabs(t->min_diff) < 1e300 && fabs(t->max_diff) < 1e300;
    if (bounded && ahead > middle) t->samples = (int64_t)(ahead - middle);
}

static int trim(sr_store *st, sr_table *t, uint32_t table, uint64_t *evicted) {
    int64_t live = live_in(st, t), over = live - t->max_size;
    if (over <= 0 && !sr_bytes_over(st, t)) return SR_OK;
    /* Nobody has heard of these items, so nobody is told that they go. */
    if (sr_has_events(t)) sr_events_unserve(st, table, st->hdr->creator_pid);
    int rc = sr_lock_table(st, t);
    if (rc != SR_OK) return rc;
    rc = over > 0 ? sr_evict_locked(st, t, (uint64_t)over) : SR_OK;
    if (rc == SR_OK) rc = sr_evict_bytes_locked(st, t);
    *evicted += (uint64_t)(live - live_in(st, t));
    sr_unlock_table(st, t);
    return rc;
}

int sr_restore_end(sr_store *st, int reset, uint64_t *evicted) {
    SR_GUARDED(st, SR_CORRUPT)
    *evicted = 0;
    for (uint32_t i = 0; i < st->shape.n_tables; i++) {
        sr_table *t = sr_table_at(st, i);
        int rc = trim(st, t, i, evicted);
        if (rc != SR_OK) return rc;
        if (reset) reset_limiter(t, live_in(st, t));
    }
    char why[160];
    int rc = sr_check(st, SR_NONE, why, sizeof why);
    if (rc != SR_OK) return rc;
    atomic_store(&st->hdr->state, SR_STATE_OPEN);
    return SR_OK;
}
