/* Looking at a store without its locks: for people, and for what a dead or damaged one still holds.
 *
 * Nothing that is read here is believed: every offset and length is checked against committed
 * memory before it is used, as the store may be damaged, or change while it is looked at. */
#include "bytes.h"
#include "packed.h"
#include "peek.h"
#include "shape.h"
#include "steps.h"
#include "stripe.h"
#include "table.h"

static const sr_arena *arena_of(const sr_store *st, uint64_t off) {
    const sr_arena *arenas = sr_known(st, st->shape.arenas_off);
    for (uint32_t i = 0; i < st->shape.n_arenas; i++) {
        if (off >= arenas[i].start && off < arenas[i].committed_end) return &arenas[i];
    }
    return NULL;
}

/* An object of at least so many bytes in committed memory, else NULL; and what lies behind it. */
static const void *object_at(const sr_store *st, uint64_t off, uint64_t least, uint64_t *room) {
    const sr_arena *a = off % SR_LINE == 0 ? arena_of(st, off) : NULL;
    if (a == NULL) return NULL;
    uint64_t end = a->committed_end < st->bytes ? a->committed_end : st->bytes;
    if (off >= end || end - off < least) return NULL;
    *room = end - off;
    return sr_at(st, off, least);
}

/* A block all of whose columns lie in committed memory, else NULL. */
static const sr_block *block_at(const sr_store *st, uint64_t off) {
    uint64_t room;
    const sr_block *b = object_at(st, off, sizeof *b, &room);
    if (b == NULL || b->kind != SR_KIND_BLOCK || b->n_cols > SR_COLUMNS_MAX) return NULL;
    if (sizeof *b + b->n_cols * sizeof(sr_block_col) > room) return NULL;
    const sr_block_col *cols = (const sr_block_col *)(b + 1);
    for (uint32_t c = 0; c < b->n_cols; c++) {
        uint64_t bytes;
        if (cols[c].off == SR_APART) continue;
        if (cols[c].off > room ||
            __builtin_mul_overflow(cols[c].row_bytes, (uint64_t)b->rows_cap, &bytes) ||
            bytes > room - cols[c].off) {
            return NULL;
        }
    }
    return b;
}

/* A trajectory whose own arrays lie in committed memory, else NULL. */
static const sr_traj *traj_at(const sr_store *st, uint64_t off) {
    uint64_t room;
    const sr_traj *t = object_at(st, off, sizeof *t, &room);
    if (t == NULL || t->kind != SR_KIND_TRAJ || t->n_cols > SR_COLUMNS_MAX) return NULL;
    uint64_t bytes = sizeof *t + 8ull * t->n_blocks + sizeof(sr_traj_col) * (t->n_cols + 1ull) +
                     sizeof(sr_seg) * (uint64_t)t->n_segs;
    return bytes <= room ? t : NULL;
}

/* The segments [*first, *last) of a column of a trajectory; NULL where they are not in it. */
static const sr_seg *segs_of(const sr_traj *t, uint32_t c, uint32_t *first, uint32_t *last) {
    const sr_traj_col *cols =
        (const sr_traj_col *)((const uint64_t *)(t + 1) + t->n_blocks);
    if (c >= t->n_cols) return NULL;
    *first = cols[c].first_seg;
    *last = cols[c + 1].first_seg;
    if (*first > *last || *last > t->n_segs) return NULL;
    return (const sr_seg *)(cols + t->n_cols + 1);
}

/* The column of a block that a segment is of, if all of its rows are in the block. */
static const sr_block_col *column_of(const sr_store *st, const sr_traj *t, const sr_seg *seg,
                                     const sr_block **block) {
    if (seg->block >= t->n_blocks) return NULL;
    const sr_block *b = block_at(st, ((const uint64_t *)(t + 1))[seg->block]);
    if (b == NULL || seg->col >= b->n_cols || seg->start >= b->rows_cap) return NULL;
    int64_t end = (int64_t)seg->start + ((int64_t)seg->count - 1) * seg->stride;
    if (seg->count == 0 || end < 0 || end >= (int64_t)b->rows_cap) return NULL;
    *block = b;
    return (const sr_block_col *)(b + 1) + seg->col;
}

int sr_peek_columns(const sr_store *st, const sr_sampled *item) {
    uint64_t off = SR_REF_OFF(item->ref);
    if (SR_REF_KIND(item->ref) == SR_KIND_BLOCK) {
        const sr_block *b = block_at(st, off);
        if (b == NULL || item->row_start > b->rows_cap ||
            SR_COL_LENGTH(item->row_count) > b->rows_cap - item->row_start) {
            return SR_CORRUPT;
        }
        return (int)b->n_cols;
    }
    const sr_traj *t = SR_REF_KIND(item->ref) == SR_KIND_TRAJ ? traj_at(st, off) : NULL;
    return t == NULL ? SR_CORRUPT : (int)t->n_cols;
}

int sr_peek_column(const sr_store *st, const sr_sampled *item, uint32_t c, uint32_t *length_flags,
                   uint64_t *bytes) {
    if (sr_peek_columns(st, item) <= (int)c) return SR_CORRUPT;
    uint64_t off = SR_REF_OFF(item->ref);
    if (SR_REF_KIND(item->ref) == SR_KIND_BLOCK) {
        const sr_block *b = sr_ptr(st, off);
        *length_flags = item->row_count;
        const sr_block_col *col = (const sr_block_col *)(b + 1) + c;
        /* More than there is: damaged. All rows lay here before they were packed. */
        if (__builtin_mul_overflow(col->row_bytes, (uint64_t)SR_COL_LENGTH(item->row_count),
                                   bytes) ||
            *bytes > st->bytes) {
            return SR_CORRUPT;
        }
        return SR_OK;
    }
    const sr_traj *t = sr_ptr(st, off);
    uint32_t first = 0, last = 0;
    const sr_seg *segs = segs_of(t, c, &first, &last);
    if (segs == NULL) return SR_CORRUPT;
    const sr_traj_col *cols = (const sr_traj_col *)((const uint64_t *)(t + 1) + t->n_blocks);
    *length_flags = cols[c].length_flags;
    *bytes = 0;
    for (uint32_t i = first; i < last; i++) {
        const sr_block *b = NULL;
        const sr_block_col *col = column_of(st, t, &segs[i], &b);
        if (col == NULL) return SR_CORRUPT;
        *bytes += col->row_bytes * segs[i].count;
        /* More than there is: the counts are damaged. */
        if (*bytes > st->bytes) return SR_CORRUPT;
    }
    return SR_OK;
}

int sr_peek_copy(const sr_store *st, const sr_sampled *item, uint32_t c, char *dst,
                 uint64_t bytes) {
    uint32_t length_flags = 0, first = 0, last = 0;
    uint64_t now = 0;
    int rc = sr_peek_column(st, item, c, &length_flags, &now);
    if (rc != SR_OK) return rc;
    if (now != bytes) return SR_CORRUPT;
    uint64_t off = SR_REF_OFF(item->ref);
    if (SR_REF_KIND(item->ref) == SR_KIND_BLOCK) {
        const sr_block *b = sr_ptr(st, off);
        const sr_block_col *col = (const sr_block_col *)(b + 1) + c;
        if (col->off == SR_APART) return SR_ELSEWHERE;
        memcpy(dst, (const char *)b + col->off + col->row_bytes * item->row_start, bytes);
        return SR_OK;
    }
    const sr_traj *t = sr_ptr(st, off);
    const sr_seg *segs = segs_of(t, c, &first, &last);
    if (segs == NULL) return SR_CORRUPT;
    const char *end = dst + bytes;
    for (uint32_t i = first; i < last; i++) {
        sr_seg seg = segs[i]; /* a copy: what was checked is what is used */
        const sr_block *b = NULL;
        const sr_block_col *col = column_of(st, t, &seg, &b);
        if (col == NULL) return SR_CORRUPT;
        if (col->off == SR_APART) return SR_ELSEWHERE;
        uint64_t row_bytes = col->row_bytes;
        int64_t r = seg.start;
        for (uint32_t k = 0; k < seg.count; k++, r += seg.stride, dst += row_bytes) {
            if (row_bytes > (uint64_t)(end - dst)) return SR_CORRUPT;
            memcpy(dst, (const char *)b + col->off + row_bytes * (uint64_t)r, row_bytes);
        }
    }
    return dst == end ? SR_OK : SR_CORRUPT;
}

int sr_peek_run(const sr_store *st, const sr_sampled *item, uint32_t c, uint32_t number,
                sr_run *out) {
    if (sr_peek_columns(st, item) <= (int)c) return SR_CORRUPT;
    return sr_item_run(st, item, c, number, out);
}

int sr_peek_rows(const sr_store *st, uint64_t block, uint64_t rows, uint32_t col,
                 sr_rows_at *out) {
    uint64_t room;
    if (block_at(st, block) == NULL) return SR_CORRUPT;
    if (SR_REF_KIND(rows) == SR_KIND_BLOCK && block_at(st, SR_REF_OFF(rows)) == NULL) {
        return SR_CORRUPT;
    }
    if (SR_REF_KIND(rows) == SR_KIND_PACKED) {
        const sr_packed *p = object_at(st, SR_REF_OFF(rows), sizeof *p, &room);
        if (p == NULL || !sr_packed_sound(p, room)) return SR_CORRUPT;
    }
    return sr_rows_find(st, block, rows, col, out);
}

/* By what this process found when it came, whatever the table says now. */
static const sr_stripe *stripe_of(const sr_store *st, uint32_t table, uint32_t stripe) {
    const sr_stripe *stripes = sr_known(st, st->shape.stripes_off);
    return &stripes[st->tables[table].first_stripe + stripe];
}

uint64_t sr_peek_slots(const sr_store *st, uint32_t table, uint32_t stripe) {
    const sr_table *t = sr_table_at(st, table);
    if (t == NULL || stripe >= sr_shape_stripes(st, table)) return 0;
    const sr_stripe *s = stripe_of(st, table, stripe);
    if (s->slots_off != st->stripes[st->tables[table].first_stripe + stripe].slots_off) return 0;
    uint64_t n = s->slots_used < s->slots_max ? s->slots_used : s->slots_max;
    uint64_t backed = s->slots_committed / sizeof(sr_slot);
    n = n < backed ? n : backed;
    n = n < SR_NONE ? n : SR_NONE;
    return s->slots_off % SR_LINE == 0 && sr_at(st, s->slots_off, n * sizeof(sr_slot)) ? n : 0;
}

int sr_peek_slot(const sr_store *st, uint32_t table, uint32_t stripe, uint32_t slot,
                 sr_sampled *out, uint64_t *seq) {
    if (slot >= sr_peek_slots(st, table, stripe)) return 0;
    const sr_slot *s = sr_slot_at(st, stripe_of(st, table, stripe), slot);
    const volatile uint64_t *key = &s->key;
    memset(out, 0, sizeof *out);
    out->key = *key;
    atomic_thread_fence(memory_order_acquire);
    /* SYNC POINT: acquire: with the reference the whole item is seen. */
    out->ref = atomic_load_explicit(&s->ref, memory_order_acquire);
    if (out->ref == 0) return 0;
    out->row_start = s->row_start;
    out->row_count = s->row_count;
    out->priority = s->priority;
    out->times_sampled = (int32_t)s->times_sampled;
    out->schema = s->schema;
    out->inserted_ns = s->inserted_ns;
    *seq = s->seq;
    /* SYNC POINT: a slot's key changes before it is used anew: all of this is of one item, or the
     * one that was there has gone meanwhile. */
    atomic_thread_fence(memory_order_acquire);
    return *key == out->key;
}

int sr_peek_same(const sr_store *st, uint32_t table, uint32_t stripe, uint32_t slot,
                 const sr_sampled *item) {
    sr_sampled now;
    uint64_t seq;
    /* SYNC POINT: what was copied before is not read after this, and the memory of an item is not
     * given to others while it is live. */
    atomic_thread_fence(memory_order_acquire);
    return sr_peek_slot(st, table, stripe, slot, &now, &seq) && now.key == item->key &&
           now.ref == item->ref;
}

uint32_t sr_peek_stripes(const sr_store *st, uint32_t table) {
    const sr_table *t = sr_table_at(st, table);
    return t == NULL ? 0 : sr_shape_stripes(st, table);
}

void sr_copy_info(const sr_store *st, const sr_table *t, sr_table_info *out) {
    out->poisoned = atomic_load_explicit(&t->poisoned, memory_order_relaxed);
    out->inserts = t->inserts;
    out->samples = t->samples;
    out->deletes = t->deletes;
    out->pending = t->pending;
    out->inserts_refused = t->inserts_refused;
    out->samples_refused = t->samples_refused;
    out->consumed = t->consumed;
    out->deleted = t->deleted;
    /* All others. Never below zero: a death may leave the two behind. */
    int64_t others = t->deletes - (int64_t)(t->consumed + t->deleted);
    out->evicted = others > 0 ? (uint64_t)others : 0;
    out->max_times_sampled = sr_max_times_sampled(t);
    out->max_size = t->max_size;
    out->max_size_limit = t->max_size_limit;
    out->min_size_to_sample = t->min_size_to_sample;
    out->samples_per_insert = t->samples_per_insert;
    out->min_diff = t->min_diff;
    out->max_diff = t->max_diff;
    out->max_bytes = sr_max_bytes(t);
    out->bytes = sr_counts_bytes(t) ? sr_bytes_of(st, t) : 0;
    out->max_priority = sr_max_priority(t);
    out->num_episodes = atomic_load_explicit(&t->num_episodes, memory_order_relaxed);
    out->num_deleted_episodes =
        atomic_load_explicit(&t->num_deleted_episodes, memory_order_relaxed);
    out->num_unique_samples = atomic_load_explicit(&t->num_unique_samples, memory_order_relaxed);
    out->updates = atomic_load_explicit(&t->updates, memory_order_relaxed);
    out->missed_updates = atomic_load_explicit(&t->missed_updates, memory_order_relaxed);
    out->sample_waiters = atomic_load_explicit(&t->sample_waiters, memory_order_relaxed);
    out->insert_waiters = atomic_load_explicit(&t->insert_waiters, memory_order_relaxed);
    out->insert_wait_ns = atomic_load_explicit(&t->insert_wait_ns, memory_order_relaxed);
    out->sample_wait_ns = atomic_load_explicit(&t->sample_wait_ns, memory_order_relaxed);
}

void sr_add_hints(const sr_stripe *s, sr_table_info *out) {
    out->size += (int64_t)atomic_load_explicit(&s->size, memory_order_relaxed);
    out->mass += sr_load_double(&s->mass_bits);
}

int sr_peek_table(const sr_store *st, uint32_t table, sr_table_info *out) {
    const sr_table *t = sr_table_at(st, table);
    if (t == NULL) return SR_INVALID;
    memset(out, 0, sizeof *out);
    sr_copy_info(st, t, out);
    for (uint32_t k = 0; k < sr_shape_stripes(st, table); k++) {
        sr_add_hints(stripe_of(st, table, k), out);
    }
    return SR_OK;
}

void sr_sum_sessions(const sr_store *st, sr_store_stats *out) {
    const sr_session *s = sr_known(st, st->shape.sessions_off);
    for (uint32_t i = 0; i < st->shape.n_sessions; i++) {
        out->sessions += atomic_load_explicit(&s[i].state, memory_order_relaxed) != 0;
        out->inserts += atomic_load_explicit(&s[i].inserts, memory_order_relaxed);
        out->samples += atomic_load_explicit(&s[i].samples, memory_order_relaxed);
        out->updates += atomic_load_explicit(&s[i].updates, memory_order_relaxed);
        out->bytes_in += atomic_load_explicit(&s[i].bytes_in, memory_order_relaxed);
    }
}

void sr_peek_store(const sr_store *st, sr_store_stats *out) {
    const sr_header *h = st->hdr;
    memset(out, 0, sizeof *out);
    out->capacity = st->shape.capacity_bytes;
    out->committed = atomic_load_explicit(&h->committed_bytes, memory_order_relaxed);
    out->fixed = sr_align(st->shape.config_off + st->shape.config_bytes, SR_PAGE);
    out->repairs = atomic_load_explicit(&h->repairs, memory_order_relaxed);
    out->packed_raw = atomic_load_explicit(&h->packed_raw_bytes, memory_order_relaxed);
    out->packed_stored = atomic_load_explicit(&h->packed_stored_bytes, memory_order_relaxed);
    for (uint32_t i = 0; i < st->shape.n_tables; i++) {
        out->poisoned +=
            atomic_load_explicit(&sr_table_at(st, i)->poisoned, memory_order_relaxed) != 0;
    }
    out->closed = (uint32_t)sr_store_is_closed(st);
    sr_sum_sessions(st, out);
    const sr_arena *arenas = sr_known(st, st->shape.arenas_off);
    for (uint32_t i = 0; i < st->shape.n_arenas; i++) {
        out->arena_committed += arenas[i].committed_end - arenas[i].start;
        out->arena_used += arenas[i].used_bytes;
        out->arena_free += arenas[i].free_bytes;
        out->arena_allocs += arenas[i].n_allocs;
    }
}
