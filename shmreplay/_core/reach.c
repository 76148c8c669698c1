#include "reach.h"

#include "arena.h"
#include "fault.h"
#include "ledger.h"
#include "packed.h"
#include "steps.h"

int sr_reach_begin(sr_store *st, sr_reach *r) {
    *r = (sr_reach){.st = st};
    /* Counted anew as packed rows are met. */
    atomic_store_explicit(&st->hdr->packed_raw_bytes, 0, memory_order_relaxed);
    atomic_store_explicit(&st->hdr->packed_stored_bytes, 0, memory_order_relaxed);
    for (uint32_t i = 0; i < st->shape.n_arenas; i++) {
        const sr_arena *a = sr_arena_at(st, i);
        if (!sr_arena_bounds_ok(st, a)) {
            sr_reach_end(r);
            return SR_CORRUPT;
        }
        uint64_t words = (a->committed_end - a->start) / SR_LINE / 64 + 1;
        r->marks[i] = SR_FAULT_POINT("calloc") ? NULL : calloc(words, sizeof *r->marks[i]);
        if (r->marks[i] == NULL) {
            sr_reach_end(r);
            return SR_SYS;
        }
    }
    return SR_OK;
}

void sr_reach_end(sr_reach *r) {
    for (uint32_t i = 0; i < SR_ARENAS_MAX; i++) free(r->marks[i]);
}

/* 1 if it was not marked before. `off` is a live payload: 64-byte aligned, in committed memory. */
static int mark(sr_reach *r, uint64_t off) {
    uint32_t number = sr_arena_number(r->st, off);
    uint64_t line = (off - sr_arena_at(r->st, number)->start) / SR_LINE;
    uint64_t *word = &r->marks[number][line >> 6], bit = 1ull << (line & 63);
    int fresh = (*word & bit) == 0;
    *word |= bit;
    return fresh;
}

static int reach_episode(sr_reach *r, uint64_t off, uint64_t bytes) {
    uint64_t counters = r->st->shape.n_tables * sizeof(uint32_t);
    sr_episode *e = sr_ptr(r->st, off);
    if (bytes < sizeof *e + counters || e->kind != SR_KIND_EPISODE) return 0;
    if (!mark(r, off)) {
        atomic_fetch_add_explicit(&e->refs, 1, memory_order_relaxed);
        return 1;
    }
    atomic_store_explicit(&e->refs, 1, memory_order_relaxed);
    memset((void *)e->items, 0, counters); /* counted again from the slots */
    return 1;
}

static int block_ok(uint32_t n_tables, const sr_block *b, uint64_t bytes) {
    if (bytes < sizeof *b || b->kind != SR_KIND_BLOCK || b->bytes > bytes || b->n_cols == 0 ||
        b->n_cols > SR_COLUMNS_MAX || b->episodes_off % sizeof(uint64_t) != 0) {
        return 0;
    }
    uint64_t head = sr_block_head_bytes(n_tables, b->n_cols);
    uint64_t rows = (uint64_t)b->rows_cap * sizeof(uint64_t);
    if (head > b->bytes || b->episodes_off < head || rows > b->bytes ||
        b->episodes_off > b->bytes - rows ||
        atomic_load_explicit(&b->published, memory_order_relaxed) > b->rows_cap) {
        return 0;
    }
    const sr_block_col *cols = (const sr_block_col *)(b + 1);
    for (uint32_t c = 0; c < b->n_cols; c++) {
        if (cols[c].off == SR_APART && cols[0].off == SR_APART) continue;
        unsigned __int128 column = (unsigned __int128)cols[c].row_bytes * b->rows_cap;
        if (cols[c].off > b->bytes || column > b->bytes - cols[c].off) return 0;
    }
    return 1;
}

/* Is this a block whose rows lie in itself, and that has room for all of another's? */
static int raw_ok(const sr_reach *r, uint64_t off, const sr_block *b) {
    const sr_block *raw = sr_ptr(r->st, off);
    return raw->n_cols == b->n_cols && raw->rows_cap == b->rows_cap && !sr_lies_apart(raw) &&
           atomic_load_explicit(&raw->rows, memory_order_relaxed) == 0;
}

/* Where the rows of a block lie that has them elsewhere. One that was just made has none. */
static int reach_rows(sr_reach *r, const sr_block *b) {
    uint64_t rows = atomic_load_explicit(&b->rows, memory_order_relaxed);
    uint32_t published = atomic_load_explicit(&b->published, memory_order_relaxed);
    if (!sr_lies_apart(b)) return rows == 0;
    if (rows == 0) return published == 0;
    uint64_t off = SR_REF_OFF(rows);
    if (sr_alloc_bytes(r->st, off) < sizeof(sr_packed)) return 0;
    if (SR_REF_KIND(rows) == SR_KIND_BLOCK) return raw_ok(r, off, b) && sr_reach_ref(r, rows);
    const sr_packed *p = sr_ptr(r->st, off);
    return SR_REF_KIND(rows) == SR_KIND_PACKED && p->n_cols == b->n_cols &&
           published <= p->rows && sr_reach_ref(r, rows);
}

static int reach_packed(sr_reach *r, uint64_t off, uint64_t bytes) {
    sr_packed *p = sr_ptr(r->st, off);
    if (!mark(r, off)) {
        atomic_fetch_add_explicit(&p->refs, 1, memory_order_relaxed);
        return 1;
    }
    if (!sr_packed_sound(p, bytes)) return 0;
    atomic_store_explicit(&p->refs, 1, memory_order_relaxed);
    sr_packed_note(r->st, p);
    if (p->serial > atomic_load_explicit(&r->st->hdr->packed_serial, memory_order_relaxed)) {
        atomic_store_explicit(&r->st->hdr->packed_serial, p->serial, memory_order_relaxed);
    }
    return 1;
}

static int reach_block(sr_reach *r, uint64_t off, uint64_t bytes) {
    sr_block *b = sr_ptr(r->st, off);
    if (!mark(r, off)) {
        atomic_fetch_add_explicit(&b->refs, 1, memory_order_relaxed);
        return 1;
    }
    const uint32_t n_tables = r->st->shape.n_tables;
    if (!block_ok(n_tables, b, bytes)) return 0;
    atomic_store_explicit(&b->refs, 1, memory_order_relaxed);
    /* Counted again from the slots. */
    memset((char *)b + sr_block_head_bytes(0, b->n_cols), 0, n_tables * sizeof(uint32_t));
    const uint64_t *episodes = (const uint64_t *)((const char *)b + b->episodes_off);
    uint32_t rows = atomic_load_explicit(&b->published, memory_order_relaxed);
    for (uint32_t i = 0; i < rows; i++) {
        if (i > 0 && episodes[i] == episodes[i - 1]) continue;
        if (!sr_reach_ref(r, SR_REF(episodes[i], SR_KIND_EPISODE))) return 0;
    }
    return reach_rows(r, b);
}

static int segment_ok(const sr_store *st, const uint64_t *blocks, uint32_t n_blocks,
                      const sr_seg *g) {
    if (g->block >= n_blocks || g->count == 0) return 0;
    const sr_block *b = sr_ptr(st, blocks[g->block]);
    uint32_t rows = atomic_load_explicit(&b->published, memory_order_relaxed);
    int64_t last = (int64_t)g->start + (int64_t)g->stride * ((int64_t)g->count - 1);
    return g->col < b->n_cols && g->start < rows && last >= 0 && last < (int64_t)rows;
}

static int reach_traj(sr_reach *r, uint64_t off, uint64_t bytes) {
    sr_traj *t = sr_ptr(r->st, off);
    if (!mark(r, off)) {
        atomic_fetch_add_explicit(&t->refs, 1, memory_order_relaxed);
        return 1;
    }
    if (bytes < sizeof *t || t->kind != SR_KIND_TRAJ || t->n_cols == 0 ||
        t->n_cols > SR_COLUMNS_MAX) {
        return 0;
    }
    uint64_t need = sizeof *t + t->n_blocks * sizeof(uint64_t) +
                    (t->n_cols + 1ull) * sizeof(sr_traj_col) + t->n_segs * sizeof(sr_seg);
    if (need > bytes) return 0;
    atomic_store_explicit(&t->refs, 1, memory_order_relaxed);
    const uint64_t *blocks = sr_traj_blocks(t);
    for (uint32_t i = 0; i < t->n_blocks; i++) {
        if (!sr_reach_ref(r, SR_REF(blocks[i], SR_KIND_BLOCK))) return 0;
    }
    const sr_traj_col *cols = sr_traj_cols(t);
    for (uint32_t c = 0; c < t->n_cols; c++) {
        if (cols[c].first_seg > cols[c + 1].first_seg) return 0;
    }
    if (cols[t->n_cols].first_seg > t->n_segs) return 0;
    for (uint32_t i = 0; i < t->n_segs; i++) {
        if (!segment_ok(r->st, blocks, t->n_blocks, &sr_traj_segs(t)[i])) return 0;
    }
    return 1;
}

int sr_reach_ref(sr_reach *r, uint64_t ref) {
    uint64_t off = SR_REF_OFF(ref);
    uint32_t kind = SR_REF_KIND(ref);
    uint64_t bytes = sr_alloc_bytes(r->st, off);
    if (bytes == 0 || sr_alloc_kind(r->st, off) != (enum sr_kind)kind) return 0;
    int whole = 0;
    switch (kind) {
    case SR_KIND_BLOCK: whole = reach_block(r, off, bytes); break;
    case SR_KIND_TRAJ: whole = reach_traj(r, off, bytes); break;
    case SR_KIND_EPISODE: whole = reach_episode(r, off, bytes); break;
    case SR_KIND_PACKED: whole = reach_packed(r, off, bytes); break;
    case SR_KIND_LEDGER:
    case SR_KIND_SCHEMA: return mark(r, off);
    default: return 0;
    }
    if (!whole) r->broken = 1;
    return whole;
}

int sr_reach_inflight(sr_reach *r, uint64_t off) {
    if (sr_alloc_bytes(r->st, off) == 0) return -1;
    return mark(r, off);
}

int sr_reach_item_ok(const sr_store *st, uint64_t ref, uint32_t row_start, uint32_t row_count) {
    if (SR_REF_KIND(ref) != SR_KIND_BLOCK) return SR_REF_KIND(ref) == SR_KIND_TRAJ;
    const sr_block *b = sr_ptr(st, SR_REF_OFF(ref));
    uint32_t rows = atomic_load_explicit(&b->published, memory_order_relaxed);
    uint32_t count = SR_COL_LENGTH(row_count);
    return count > 0 && row_start < rows && count <= rows - row_start;
}

uint64_t sr_reach_next(void *ctx, uint64_t from, uint64_t end) {
    const sr_reach *r = ctx;
    uint32_t number = sr_arena_number(r->st, from);
    uint64_t start = sr_arena_at(r->st, number)->start;
    uint64_t line = (from - start + SR_LINE - 1) / SR_LINE, last = (end - start) / SR_LINE;
    const uint64_t *marks = r->marks[number];
    while (line <= last) {
        uint64_t bits = marks[line >> 6] >> (line & 63);
        if (bits != 0) {
            line += (uint64_t)__builtin_ctzll(bits);
            return line <= last ? start + line * SR_LINE : 0;
        }
        line = (line | 63) + 1;
    }
    return 0;
}
