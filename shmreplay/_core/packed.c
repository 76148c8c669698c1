/* Blocks whose rows lie apart: made raw, packed when no more rows come, read by whoever holds the
 * block.
 *
 * What is encoded, and how it is decoded, is the binding's: here its bytes are placed, described
 * and counted. */
#include "packed.h"

#include "arena.h"
#include "bytes.h"
#include "fault.h"
#include "ledger.h"
#include "steps.h"
#include "table.h"

#define COLUMN_BYTES_MAX (1ull << 46) /* as of a block's column */

/* ------------------------------------------------------------------ is it sound? */

static int column_sound(const sr_packed *p, const sr_packed_col *c) {
    uint64_t raw;
    if (__builtin_mul_overflow(c->row_bytes, (uint64_t)p->rows, &raw) || raw > COLUMN_BYTES_MAX ||
        c->off > p->bytes || c->stored_bytes > p->bytes - c->off || c->group_rows == 0) {
        return 0;
    }
    if (c->encoding == SR_PLAIN) return c->stored_bytes == raw;
    uint64_t ends = sr_packed_groups(p, c) * sizeof(uint64_t);
    return c->encoding <= SR_LZ4_XOR && c->ends_off % sizeof(uint64_t) == 0 &&
           c->ends_off <= p->bytes && ends <= p->bytes - c->ends_off;
}

static int head_sound(const sr_packed *p, uint64_t room) {
    return room >= sizeof *p && p->kind == SR_KIND_PACKED && p->n_cols - 1 < SR_COLUMNS_MAX &&
           p->rows > 0 && p->bytes <= room &&
           sizeof *p + p->n_cols * sizeof(sr_packed_col) <= p->bytes;
}

int sr_packed_sound(const sr_packed *p, uint64_t room) {
    if (!head_sound(p, room)) return 0;
    for (uint32_t c = 0; c < p->n_cols; c++) {
        if (!column_sound(p, &sr_packed_cols(p)[c])) return 0;
    }
    return 1;
}

/* The packed rows that lie there, NULL where none do. */
static const sr_packed *packed_at(const sr_store *st, uint64_t off) {
    if (!sr_fits(st, off, sizeof(sr_packed))) return NULL;
    const sr_packed *p = sr_ptr(st, off);
    return head_sound(p, st->bytes - off) ? p : NULL;
}

void sr_packed_note(const sr_store *st, const sr_packed *p) {
    sr_header *h = st->hdr;
    atomic_fetch_add_explicit(&h->packed_raw_bytes, p->raw_bytes, memory_order_relaxed);
    atomic_fetch_add_explicit(&h->packed_stored_bytes, p->bytes, memory_order_relaxed);
}

void sr_packed_forget(const sr_store *st, const sr_packed *p) {
    sr_header *h = st->hdr;
    atomic_fetch_sub_explicit(&h->packed_raw_bytes, p->raw_bytes, memory_order_relaxed);
    atomic_fetch_sub_explicit(&h->packed_stored_bytes, p->bytes, memory_order_relaxed);
}

/* ------------------------------------------------------------------ packing */

/* Where the parts lie: fills in *p and its columns (both NULL: only the size is asked for). */
static uint64_t lay_out(uint32_t n_cols, uint32_t rows, const sr_pack_col *cols, sr_packed *p) {
    uint64_t at = sr_align(sizeof *p + n_cols * sizeof(sr_packed_col), SR_LINE), raw_bytes = 0;
    for (uint32_t c = 0; c < n_cols; c++) {
        sr_packed_col out = {.row_bytes = cols[c].row_bytes,
                             .encoding = cols[c].encoding,
                             .group_rows = cols[c].encoding == SR_PLAIN ? rows
                                                                        : cols[c].group_rows};
        uint64_t groups = ((uint64_t)rows + out.group_rows - 1) / out.group_rows;
        if (out.encoding != SR_PLAIN) {
            out.ends_off = at;
            at = sr_align(at + groups * sizeof(uint64_t), SR_LINE);
        }
        out.off = at;
        for (uint64_t g = 0; g < groups; g++) out.stored_bytes += cols[c].parts[g].bytes;
        at = sr_align(at + out.stored_bytes, SR_LINE);
        raw_bytes += cols[c].row_bytes * rows;
        if (p != NULL) ((sr_packed_col *)(p + 1))[c] = out;
    }
    if (p == NULL) return at;
    p->kind = SR_KIND_PACKED;
    p->n_cols = n_cols;
    p->rows = rows;
    p->bytes = at;
    p->raw_bytes = raw_bytes;
    return at;
}

static void copy_parts(sr_packed *p, const sr_pack_col *cols) {
    char *base = (char *)p;
    for (uint32_t c = 0; c < p->n_cols; c++) {
        const sr_packed_col *col = &sr_packed_cols(p)[c];
        uint64_t *ends = col->ends_off == 0 ? NULL : (uint64_t *)(void *)(base + col->ends_off);
        uint64_t end = 0;
        for (uint64_t g = 0; g < sr_packed_groups(p, col); g++) {
            sr_copy(base + col->off + end, cols[c].parts[g].data, cols[c].parts[g].bytes);
            end += cols[c].parts[g].bytes;
            if (ends != NULL) ends[g] = end;
        }
    }
}

void sr_packed_number(const sr_store *st, sr_packed *p) {
    atomic_store_explicit(&p->refs, 1, memory_order_relaxed);
    p->serial =
        atomic_fetch_add_explicit(&st->hdr->packed_serial, 1, memory_order_relaxed) + 1;
}

/* Let the block refer to these rows, which stand in the inflight word, instead of what it refers to
 * now. Crash: before the store it has the old ones, and the new ones are in flight; after it, the
 * other way round, and inside of the locks the repair finds out which. */
static int switch_rows(sr_ses *ses, uint64_t block, uint64_t rows) {
    sr_store *st = ses->st;
    sr_block *b = sr_block_at(st, block);
    uint32_t number = sr_arena_number(st, block);
    SR_ASSERT(number != SR_NONE);
    int rc = sr_lock_session(ses);
    if (rc != SR_OK) return rc;
    sr_arena *a = sr_arena_at(st, number);
    rc = sr_lock_inner(st, &a->lock);
    if (rc == SR_OK) {
        uint64_t old = atomic_load_explicit(&b->rows, memory_order_relaxed);
        uint64_t before = sr_block_charge(st, b);
        /* SYNC POINT: release: who sees the rows sees all of them. */
        atomic_store_explicit(&b->rows, rows, memory_order_release);
        sr_bytes_moved(st, b, (int64_t)(sr_block_charge(st, b) - before));
        atomic_store_explicit(&ses->shared->inflight[0], 0, memory_order_release);
        sr_unlock(&a->lock);
        if (SR_REF_KIND(rows) == SR_KIND_PACKED) sr_packed_note(st, sr_ptr(st, SR_REF_OFF(rows)));
        /* SR_DIRTY: nothing refers to it any more, and the repair that comes frees it. */
        int dropped = old == 0 ? SR_OK : sr_ref_drop(st, old);
        if (dropped != SR_OK && dropped != SR_DIRTY) rc = dropped;
    }
    sr_unlock_session(ses);
    return rc;
}

static int switch_rows_outer(sr_ses *ses, uint64_t block, uint64_t rows) {
    int rc = switch_rows(ses, block, rows);
    while (SR_UNLIKELY(rc == SR_DIRTY)) {
        rc = sr_repair(ses->st);
        if (rc == SR_OK) rc = switch_rows(ses, block, rows);
    }
    if (rc != SR_OK) (void)sr_free_outer(ses->st, &ses->shared->inflight[0]);
    return rc;
}

int sr_block_pack(sr_ses *ses, uint64_t block, const sr_pack_col *cols) {
    SR_GUARDED_SES(ses)
    sr_store *st = ses->st;
    if (!sr_block_sound(st, block)) return SR_CORRUPT;
    const sr_block *b = sr_ptr(st, block);
    uint32_t rows = atomic_load_explicit(&b->published, memory_order_relaxed);
    uint64_t old = atomic_load_explicit(&b->rows, memory_order_relaxed), off;
    if (rows == 0 || SR_REF_KIND(old) != SR_KIND_BLOCK) return SR_INVALID;
    for (uint32_t c = 0; c < b->n_cols; c++) {
        if (cols[c].row_bytes != sr_block_cols(sr_ptr(st, block))[c].row_bytes ||
            cols[c].encoding > SR_LZ4_XOR ||
            (cols[c].encoding != SR_PLAIN && cols[c].group_rows == 0)) {
            return SR_INVALID;
        }
    }
    uint64_t bytes = lay_out(b->n_cols, rows, cols, NULL);
    sr_begin(ses, SR_BUSY_BLOCK);
    int rc = sr_alloc_outer(st, ses->shared->arena, SR_KIND_PACKED, bytes,
                            &ses->shared->inflight[0], &off);
    if (rc == SR_OK) {
        sr_touch_around(st, off, bytes);
        sr_packed *p = sr_ptr(st, off);
        memset(p, 0, sizeof *p);
        lay_out(b->n_cols, rows, cols, p);
        copy_parts(p, cols);
        sr_packed_number(st, p);
        rc = switch_rows_outer(ses, block, SR_REF(off, SR_KIND_PACKED));
    }
    sr_end(ses);
    return rc;
}

/* ------------------------------------------------------------------ blocks whose rows lie apart */

/* The raw rows of a block that was just made: a block of the same columns. */
static int attach_raw(sr_ses *ses, uint64_t block, uint32_t n_cols, const uint64_t *row_bytes,
                      uint32_t rows_cap) {
    uint64_t bytes = sr_block_bytes(ses->st->shape.n_tables, n_cols, row_bytes, rows_cap), off;
    sr_begin(ses, SR_BUSY_BLOCK);
    int rc = sr_alloc_outer(ses->st, ses->shared->arena, SR_KIND_BLOCK, bytes,
                            &ses->shared->inflight[0], &off);
    if (rc == SR_OK) {
        sr_touch_around(ses->st, off, bytes);
        sr_block_format(ses->st, off, n_cols, row_bytes, rows_cap, 0);
        rc = switch_rows_outer(ses, block, SR_REF(off, SR_KIND_BLOCK));
    }
    sr_end(ses);
    return rc;
}

/* A block that did not get its rows is given back. */
static int kept(sr_ses *ses, int rc, uint32_t position) {
    if (rc == SR_OK) return rc;
    sr_detail detail = *sr_last_detail(); /* of what failed, not of giving back */
    int released = sr_release(ses, 1, &position);
    *sr_last_detail() = detail;
    return released != SR_OK ? released : rc;
}

int sr_block_new_apart(sr_ses *ses, uint32_t n_cols, const uint64_t *row_bytes, uint32_t rows_cap,
                       uint64_t *off, uint32_t *position) {
    SR_GUARDED_SES(ses)
    if (n_cols == 0 || n_cols > SR_COLUMNS_MAX || rows_cap == 0 ||
        sr_block_bytes(ses->st->shape.n_tables, n_cols, row_bytes, rows_cap) == 0) {
        return SR_INVALID;
    }
    int rc = sr_block_new_head(ses, n_cols, row_bytes, rows_cap, off, position);
    if (rc != SR_OK) return rc;
    return kept(ses, attach_raw(ses, *off, n_cols, row_bytes, rows_cap), *position);
}

const void *sr_block_stored(const sr_store *st, uint64_t block, uint64_t *bytes) {
    if (!sr_block_sound(st, block)) return NULL;
    const sr_block *b = sr_ptr(st, block);
    uint64_t rows = atomic_load_explicit(&b->rows, memory_order_acquire);
    if (SR_REF_KIND(rows) != SR_KIND_PACKED) return NULL;
    const sr_packed *p = packed_at(st, SR_REF_OFF(rows));
    if (p == NULL || !sr_packed_sound(p, st->bytes - SR_REF_OFF(rows))) return NULL;
    *bytes = p->bytes;
    return p;
}

/* ------------------------------------------------------------------ reading */

int sr_rows_hold(sr_ses *ses, uint64_t block, uint64_t *rows, uint32_t *position) {
    SR_GUARDED_SES(ses)
    sr_store *st = ses->st;
    *position = SR_NONE;
    if (!sr_block_sound(st, block)) return SR_CORRUPT;
    const sr_block *b = sr_ptr(st, block);
    uint32_t number = sr_arena_number(st, block);
    *rows = sr_block_rows_ref(st, block);
    if (SR_REF_KIND(*rows) != SR_KIND_BLOCK) return SR_OK; /* that does not change any more */
    if (number == SR_NONE) return SR_CORRUPT;
    int rc = sr_ledger_reserve(ses, 1);
    while (rc == SR_OK) {
        rc = sr_lock_session(ses);
        if (rc != SR_OK) break;
        /* SYNC POINT: the writer changes `rows` under this lock, and drops what it referred to only
         * after that: what is found here is alive, and counted before it can be dropped. */
        sr_arena *a = sr_arena_at(st, number);
        rc = sr_lock_inner(st, &a->lock);
        if (rc == SR_OK) {
            *rows = atomic_load_explicit(&b->rows, memory_order_acquire);
            int raw = SR_REF_KIND(*rows) == SR_KIND_BLOCK;
            if (raw) sr_ref_retain(st, *rows);
            sr_unlock(&a->lock);
            if (raw) *position = sr_ledger_note(ses, *rows);
        }
        sr_unlock_session(ses);
        if (rc != SR_DIRTY) break;
        rc = sr_repair(st);
    }
    return rc;
}

uint64_t sr_block_rows_ref(const sr_store *st, uint64_t block) {
    if (!sr_block_sound(st, block)) return 0;
    /* SYNC POINT: acquire: with packed rows all of them are seen. */
    const sr_block *b = sr_ptr(st, block);
    return atomic_load_explicit(&b->rows, memory_order_acquire);
}

static int find_packed(const sr_store *st, uint64_t off, uint32_t col, uint32_t n_cols,
                       sr_rows_at *out) {
    const sr_packed *p = packed_at(st, off);
    if (p == NULL || p->n_cols != n_cols) return SR_CORRUPT;
    sr_packed_col c = sr_packed_cols(p)[col]; /* a copy: what was checked is what is used */
    if (!column_sound(p, &c) || c.row_bytes != out->row_bytes) return SR_CORRUPT;
    const char *base = (const char *)p;
    out->rows = p->rows;
    out->serial = p->serial;
    out->encoding = c.encoding;
    out->group_rows = c.group_rows;
    out->stored = base + c.off;
    out->stored_bytes = c.stored_bytes;
    if (c.encoding == SR_PLAIN) out->base = out->stored;
    else out->ends = (const uint64_t *)(const void *)(base + c.ends_off);
    return SR_OK;
}

int sr_rows_find(const sr_store *st, uint64_t block, uint64_t rows, uint32_t col,
                 sr_rows_at *out) {
    memset(out, 0, sizeof *out);
    if (!sr_block_sound(st, block)) return SR_CORRUPT;
    const sr_block *b = sr_ptr(st, block);
    if (col >= b->n_cols) return SR_CORRUPT;
    out->row_bytes = ((const sr_block_col *)(b + 1))[col].row_bytes;
    uint64_t at = rows == 0 ? block : SR_REF_OFF(rows), found;
    if (SR_REF_KIND(rows) == SR_KIND_PACKED) return find_packed(st, at, col, b->n_cols, out);
    if (!sr_block_sound(st, at)) return SR_CORRUPT;
    const sr_block *holder = sr_ptr(st, at);
    /* Acquire: rows that are published are there whole. */
    out->rows = atomic_load_explicit(&b->published, memory_order_acquire);
    if (holder->rows_cap < out->rows) return SR_CORRUPT;
    out->base = sr_block_rows(holder, col, 0, out->rows, &found);
    return out->base == NULL || found != out->row_bytes ? SR_CORRUPT : SR_OK;
}

/* ------------------------------------------------------------------ rows and those before them */

void sr_xor_rows(void *dst, const void *src, uint64_t row_bytes, uint64_t n) {
    const unsigned char *from = src;
    unsigned char *restrict to = dst;
    memcpy(to, from, row_bytes);
    for (uint64_t i = row_bytes; i < row_bytes * n; i++) to[i] = from[i] ^ from[i - row_bytes];
}

void sr_unxor_rows(void *rows, uint64_t row_bytes, uint64_t n) {
    unsigned char *row = rows;
    for (uint64_t r = 1; r < n; r++, row += row_bytes) {
        const unsigned char *restrict before = row;
        unsigned char *restrict to = row + row_bytes;
        for (uint64_t i = 0; i < row_bytes; i++) to[i] ^= before[i];
    }
}
