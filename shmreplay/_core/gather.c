/* Reading pinned items: views and gathering into batches. No locks: a pinned item's rows never
 * change. */
#include "steps.h"

#define AHEAD 8u   /* items whose rows are prefetched before they are copied */
#define GROUP 256u /* items whose blocks are looked up before their rows are copied */
#define PREFETCH_MAX 512u /* bytes of a row worth prefetching; the rest is left to the hardware */
#define SLOW_FROM 2048u   /* glibc's rep movsb starts here */
#define SLOW_TO (1u << 20)

#if defined(__x86_64__)
typedef char vec32 __attribute__((vector_size(32), aligned(1), may_alias));

/* glibc 2.36's memcpy falls to 2 GB/s on AMD Zen 3 where the destination lies 1 to 31 bytes past
 * the source modulo 4,096 (it uses rep movsb from 2 kB on). A plain vector loop does not. n >= 32,
 * and what remains at the end is copied with the bytes before it that make it 32. */
__attribute__((target("avx2"))) static inline void copy_avx2(char *dst, const char *src,
                                                             uint64_t n) {
    vec32 last = *(const vec32 *)(src + n - 32);
    char *end = dst + n - 32;
    while (n >= 128) {
        vec32 a = *(const vec32 *)src, b = *(const vec32 *)(src + 32);
        vec32 c = *(const vec32 *)(src + 64), d = *(const vec32 *)(src + 96);
        *(vec32 *)dst = a;
        *(vec32 *)(dst + 32) = b;
        *(vec32 *)(dst + 64) = c;
        *(vec32 *)(dst + 96) = d;
        src += 128;
        dst += 128;
        n -= 128;
    }
    for (; n >= 32; n -= 32, src += 32, dst += 32) *(vec32 *)dst = *(const vec32 *)src;
    *(vec32 *)end = last;
}
#endif

void sr_copy(void *dst, const void *src, uint64_t n) {
#if defined(__x86_64__)
    if (n >= SLOW_FROM && n <= SLOW_TO && __builtin_cpu_supports("avx2")) {
        copy_avx2(dst, src, n);
        return;
    }
#endif
    memcpy(dst, src, n);
}

static inline void copy_small(char *dst, const char *src, uint64_t n) {
    switch (n) {
    case 1: *dst = *src; return;
    case 4: memcpy(dst, src, 4); return;
    case 8: memcpy(dst, src, 8); return;
    default: sr_copy(dst, src, n);
    }
}

/* The block of an item that is whole rows of one, NULL where it has no such rows. */
static sr_block *item_block(const sr_store *st, const sr_sampled *item) {
    uint64_t off = SR_REF_OFF(item->ref);
    if (SR_UNLIKELY(!sr_block_sound(st, off))) return NULL;
    sr_block *b = sr_ptr(st, off);
    return sr_rows_ok(b, item->row_start, SR_COL_LENGTH(item->row_count), 1) ? b : NULL;
}
static sr_traj *item_traj(const sr_store *st, const sr_sampled *item) {
    uint64_t off = SR_REF_OFF(item->ref);
    int sound = SR_REF_KIND(item->ref) == SR_KIND_TRAJ && sr_traj_sound(st, off);
    return sound ? sr_ptr(st, off) : NULL;
}
/* The segments [*first, *last) of a column of a sound trajectory, NULL where it has none. */
static const sr_seg *segs_of(sr_traj *t, uint32_t c, uint32_t *first, uint32_t *last) {
    const sr_traj_col *cols = sr_traj_cols(t);
    *first = cols[c].first_seg;
    *last = cols[c + 1].first_seg;
    return *first < *last && *last <= t->n_segs ? sr_traj_segs(t) : NULL;
}

/* Bytes of a row of a column whose `length` rows lie apart. */
static int bytes_apart(const sr_block *b, uint32_t c, uint64_t length, uint64_t *row_bytes) {
    uint64_t bytes;
    if (!sr_lies_apart(b)) return SR_CORRUPT;
    *row_bytes = ((const sr_block_col *)(b + 1))[c].row_bytes;
    int fits = !__builtin_mul_overflow(*row_bytes, length, &bytes) && bytes <= 1ull << 46;
    return fits ? SR_OK : SR_CORRUPT;
}

uint32_t sr_item_columns(const sr_store *st, const sr_sampled *item) {
    if (SR_REF_KIND(item->ref) == SR_KIND_BLOCK) {
        const sr_block *b = item_block(st, item);
        return b == NULL ? 0 : b->n_cols;
    }
    const sr_traj *t = item_traj(st, item);
    return t == NULL ? 0 : t->n_cols;
}

int sr_item_column(const sr_store *st, const sr_sampled *item, uint32_t c, uint32_t *length_flags,
                   uint64_t *row_bytes) {
    uint32_t n_cols = sr_item_columns(st, item);
    if (c >= n_cols) return n_cols == 0 ? SR_CORRUPT : SR_INVALID;
    if (SR_REF_KIND(item->ref) == SR_KIND_BLOCK) {
        *length_flags = item->row_count;
        const sr_block *whole = item_block(st, item);
        const char *rows = sr_block_rows(whole, c, item->row_start,
                                         SR_COL_LENGTH(item->row_count), row_bytes);
        if (SR_LIKELY(rows != NULL)) return SR_OK;
        return bytes_apart(whole, c, SR_COL_LENGTH(item->row_count), row_bytes);
    }
    sr_traj *t = item_traj(st, item);
    uint32_t first, last;
    const sr_seg *segs = segs_of(t, c, &first, &last);
    const sr_block *b = segs == NULL ? NULL : sr_segment_block(st, t, &segs[first]);
    if (b == NULL) return SR_CORRUPT;
    uint64_t length = 0;
    for (uint32_t i = first; i < last; i++) length += segs[i].count;
    *length_flags = sr_traj_cols(t)[c].length_flags;
    if (SR_COL_LENGTH(*length_flags) != length) return SR_CORRUPT;
    if (SR_LIKELY(sr_block_rows(b, segs[first].col, segs[first].start, 1, row_bytes) != NULL)) {
        return SR_OK;
    }
    return bytes_apart(b, segs[first].col, length, row_bytes);
}

int sr_item_run(const sr_store *st, const sr_sampled *item, uint32_t c, uint32_t number,
                sr_run *out) {
    if (c >= sr_item_columns(st, item)) return SR_CORRUPT;
    if (SR_REF_KIND(item->ref) == SR_KIND_BLOCK) {
        *out = (sr_run){.block = SR_REF_OFF(item->ref),
                        .col = c,
                        .start = item->row_start,
                        .count = SR_COL_LENGTH(item->row_count),
                        .stride = 1};
        return number == 0;
    }
    sr_traj *t = item_traj(st, item);
    uint32_t first, last;
    const sr_seg *segs = segs_of(t, c, &first, &last);
    if (segs == NULL) return SR_CORRUPT;
    if (number >= last - first) return 0;
    const sr_seg *seg = &segs[first + number];
    if (sr_segment_block(st, t, seg) == NULL) return SR_CORRUPT;
    *out = (sr_run){.block = sr_traj_blocks(t)[seg->block],
                    .col = seg->col,
                    .start = seg->start,
                    .count = seg->count,
                    .stride = seg->stride};
    return 1;
}

const void *sr_item_view(const sr_store *st, const sr_sampled *item, uint32_t c) {
    uint64_t row_bytes;
    if (c >= sr_item_columns(st, item)) return NULL;
    if (SR_REF_KIND(item->ref) == SR_KIND_BLOCK) {
        return sr_block_rows(item_block(st, item), c, item->row_start,
                             SR_COL_LENGTH(item->row_count), &row_bytes);
    }
    sr_traj *t = item_traj(st, item);
    uint32_t first, last;
    const sr_seg *segs = segs_of(t, c, &first, &last);
    if (segs == NULL || last != first + 1) return NULL;
    const sr_seg *seg = &segs[first];
    if (seg->stride != 1 && seg->count > 1) return NULL;
    const sr_block *b = sr_segment_block(st, t, seg);
    if (b == NULL || seg->count != SR_COL_LENGTH(sr_traj_cols(t)[c].length_flags)) return NULL;
    return sr_block_rows(b, seg->col, seg->start, seg->count, &row_bytes);
}

/* Prefetching an address that does not exist does nothing: nothing is checked but what is read to
 * find it. */
static inline void prefetch(uintptr_t src, uint64_t n) {
    uint64_t stop = n < PREFETCH_MAX ? n : PREFETCH_MAX;
    for (uint64_t i = 0; i < stop; i += SR_LINE) __builtin_prefetch((const void *)(src + i));
    __builtin_prefetch((const void *)(src + stop - 1));
}

static void prefetch_traj(const sr_store *st, const sr_sampled *item) {
    sr_traj *t = item_traj(st, item);
    if (t == NULL) return;
    const sr_seg *segs = sr_traj_segs(t);
    for (uint32_t i = 0; i < t->n_segs && i < 16; i++) {
        sr_block *b = sr_segment_block(st, t, &segs[i]);
        if (b == NULL) continue;
        const sr_block_col *col = &sr_block_cols(b)[segs[i].col];
        prefetch((uintptr_t)b + col->off + col->row_bytes * segs[i].start, col->row_bytes);
    }
}

/* Rows of items that are rows of blocks, a group of them at a time. */
typedef struct {
    const sr_block *block[GROUP]; /* with the wanted number of columns, inside of the segment */
    uint32_t start[GROUP], rows[GROUP];
    const char *src[GROUP]; /* of one column */
} group;

/* As sr_block_sound and sr_rows_ok, as far as it matters for reading rows: the columns lie in the
 * segment, and so does all that the block says to have. */
static int find_blocks(const sr_store *st, const sr_sampled *items, uint32_t n, uint32_t n_cols,
                       group *g, uint32_t *bad) {
    const uint64_t head = sizeof(sr_block) + (uint64_t)n_cols * sizeof(sr_block_col);
    for (uint32_t i = 0; i < n; i++) {
        const uint64_t off = SR_REF_OFF(items[i].ref);
        *bad = i;
        if (SR_UNLIKELY(!sr_fits(st, off, head))) return SR_CORRUPT;
        const sr_block *b = sr_known(st, off);
        const uint64_t start = items[i].row_start, rows = SR_COL_LENGTH(items[i].row_count);
        if (SR_UNLIKELY(b->kind != SR_KIND_BLOCK || b->bytes > st->bytes - off || rows == 0 ||
                        start + rows > atomic_load_explicit(&b->published, memory_order_relaxed))) {
            return SR_CORRUPT;
        }
        if (SR_UNLIKELY(b->n_cols != n_cols)) return SR_INVALID;
        g->block[i] = b;
        g->start[i] = items[i].row_start;
        g->rows[i] = (uint32_t)rows;
    }
    return SR_OK;
}

/* Where the rows of a column are, which have `bytes` an item. */
static int find_any_rows(group *g, uint32_t n, uint32_t col, uint64_t bytes, uint32_t *bad) {
    uint64_t row_bytes;
    for (uint32_t i = 0; i < n; i++) {
        g->src[i] = sr_block_rows(g->block[i], col, g->start[i], g->rows[i], &row_bytes);
        if (SR_UNLIKELY(g->src[i] == NULL || row_bytes * g->rows[i] != bytes)) {
            *bad = i;
            if (g->src[i] != NULL) return SR_INVALID;
            return sr_lies_apart(g->block[i]) ? SR_ELSEWHERE : SR_CORRUPT;
        }
    }
    return SR_OK;
}
/* Where the rows of a column are, which have `bytes` an item. As sr_block_rows; where all items
 * have equally many rows, what it divides and looks out for is known beforehand. */
static int find_rows(group *g, uint32_t n, uint32_t col, uint64_t bytes, uint32_t *bad) {
    const uint64_t rows = g->rows[0], row_bytes = bytes / rows;
    if (row_bytes * rows != bytes || row_bytes > UINT32_MAX) {
        return find_any_rows(g, n, col, bytes, bad);
    }
    for (uint32_t i = 0; i < n; i++) {
        const sr_block *b = g->block[i];
        const sr_block_col *at = (const sr_block_col *)(b + 1) + col;
        /* Published rows, so that there are fewer than 2^32 of them. */
        const uint64_t end = row_bytes * (g->start[i] + rows);
        if (SR_UNLIKELY(at->row_bytes != row_bytes || g->rows[i] != rows || at->off > b->bytes ||
                        end > b->bytes - at->off)) {
            return find_any_rows(g, n, col, bytes, bad);
        }
        g->src[i] = (const char *)b + at->off + (end - bytes);
    }
    return SR_OK;
}

#if defined(__x86_64__)
__attribute__((target("avx2"))) static void copy_rows_avx2(char *to, const char *const *src,
                                                           uint32_t n, uint64_t bytes) {
    for (uint32_t i = 0; i < n; i++, to += bytes) {
        if (i + AHEAD < n) prefetch((uintptr_t)src[i + AHEAD], bytes);
        copy_avx2(to, src[i], bytes);
    }
}
#endif

static void copy_rows(char *to, const char *const *src, uint32_t n, uint64_t bytes) {
    switch (bytes) {
    case 1:
        for (uint32_t i = 0; i < n; i++) to[i] = *src[i];
        return;
    case 4:
        for (uint32_t i = 0; i < n; i++) memcpy(to + 4 * i, src[i], 4);
        return;
    case 8:
        for (uint32_t i = 0; i < n; i++) memcpy(to + 8 * i, src[i], 8);
        return;
    default: break;
    }
    for (uint32_t i = 0; i < n && i < AHEAD; i++) prefetch((uintptr_t)src[i], bytes);
#if defined(__x86_64__)
    if (bytes >= 32 && bytes <= SLOW_TO && __builtin_cpu_supports("avx2")) {
        copy_rows_avx2(to, src, n, bytes);
        return;
    }
#endif
    for (uint32_t i = 0; i < n; i++) {
        if (i + AHEAD < n) prefetch((uintptr_t)src[i + AHEAD], bytes);
        sr_copy(to + bytes * i, src[i], bytes);
    }
}

/* As copy_rows, to rows that do not follow each other. */
static void spread_rows(char *to, const uint32_t *where, const char *const *src, uint32_t n,
                        uint64_t bytes) {
    for (uint32_t i = 0; i < n; i++) {
        if (i + AHEAD < n && bytes > 8) prefetch((uintptr_t)src[i + AHEAD], bytes);
        copy_small(to + bytes * where[i], src[i], bytes);
    }
}

/* At most GROUP items that are whole rows of blocks. Column after column: so the rows that are read
 * together lie as close as they can, and so do their copies. */
static int gather_blocks(const sr_store *st, const sr_sampled *items, uint32_t n, uint32_t n_cols,
                         const uint32_t *where, char *const *dst, const uint64_t *bytes,
                         uint64_t first, uint32_t *bad) {
    if (n == 0) return SR_OK;
    group g;
    int rc = find_blocks(st, items, n, n_cols, &g, bad);
    for (uint32_t c = 0; rc == SR_OK && c < n_cols; c++) {
        rc = find_rows(&g, n, c, bytes[c], bad);
        if (rc == SR_OK && where == NULL) copy_rows(dst[c] + bytes[c] * first, g.src, n, bytes[c]);
        else if (rc == SR_OK) spread_rows(dst[c], where + first, g.src, n, bytes[c]);
    }
    return rc;
}

/* Gives what remains to be written of the column, NULL where the segment is damaged or longer. */
static char *gather_seg(const sr_store *st, sr_traj *t, const sr_seg *seg, char *to,
                        const char *end) {
    const sr_block *b = sr_segment_block(st, t, seg);
    if (SR_UNLIKELY(b == NULL)) return NULL;
    int64_t r = seg->start, last_row = r + (int64_t)seg->stride * ((int64_t)seg->count - 1);
    uint64_t row, n, highest = (uint64_t)(last_row > r ? last_row : r);
    const char *base = sr_block_rows(b, seg->col, 0, highest + 1, &row);
    if (SR_UNLIKELY(base == NULL || __builtin_mul_overflow(row, (uint64_t)seg->count, &n) ||
                    n > (uint64_t)(end - to))) {
        return NULL;
    }
    if (seg->stride == 1) {
        copy_small(to, base + row * seg->start, n);
        return to + n;
    }
    for (uint32_t k = 0; k < seg->count; k++, r += seg->stride, to += row) {
        copy_small(to, base + row * (uint64_t)r, row);
    }
    return to;
}

/* A segment that was not copied: its rows lie apart, or it is another one than was expected. */
static int why_not(const sr_store *st, sr_traj *t, const sr_seg *seg) {
    const sr_block *b = sr_segment_block(st, t, seg);
    return b != NULL && sr_lies_apart(b) ? SR_ELSEWHERE : SR_INVALID;
}

static int gather_traj(const sr_store *st, const sr_sampled *item, uint32_t i, uint32_t n_cols,
                       char *const *dst, const uint64_t *bytes) {
    sr_traj *t = item_traj(st, item);
    if (SR_UNLIKELY(t == NULL)) return SR_CORRUPT;
    if (t->n_cols != n_cols) return SR_INVALID;
    for (uint32_t c = 0; c < n_cols; c++) {
        char *to = dst[c] + bytes[c] * i;
        char *end = to + bytes[c];
        uint32_t first, last;
        const sr_seg *segs = segs_of(t, c, &first, &last);
        if (SR_UNLIKELY(segs == NULL)) return SR_CORRUPT;
        for (uint32_t k = first; k < last; k++) {
            to = gather_seg(st, t, &segs[k], to, end);
            if (SR_UNLIKELY(to == NULL)) return why_not(st, t, &segs[k]);
        }
        if (to != end) return SR_INVALID;
    }
    return SR_OK;
}

/* The items from `first` on that are trajectories, up to the first that is not: `*stop`. */
static int gather_trajs(const sr_store *st, const sr_sampled *items, uint32_t first, uint32_t n,
                        uint32_t n_cols, const uint32_t *where, char *const *dst,
                        const uint64_t *bytes, uint32_t *stop) {
    for (uint32_t i = first; i < n && i < first + AHEAD; i++) prefetch_traj(st, &items[i]);
    for (*stop = first; *stop < n; ++*stop) {
        if (SR_REF_KIND(items[*stop].ref) == SR_KIND_BLOCK) break;
        if (*stop + AHEAD < n) prefetch_traj(st, &items[*stop + AHEAD]);
        uint32_t row = where == NULL ? *stop : where[*stop];
        int rc = gather_traj(st, &items[*stop], row, n_cols, dst, bytes);
        if (rc != SR_OK) return rc;
    }
    return SR_OK;
}

int sr_gather_to(const sr_store *st, uint32_t n, const sr_sampled *items, const uint32_t *where,
                 uint32_t n_cols, char *const *dst, const uint64_t *bytes, uint32_t *bad) {
    uint32_t i = 0;
    while (i < n) {
        uint32_t end = i, at = 0;
        while (end < n && end - i < GROUP && SR_REF_KIND(items[end].ref) == SR_KIND_BLOCK) end++;
        int rc = gather_blocks(st, items + i, end - i, n_cols, where, dst, bytes, i, &at);
        at += i;
        if (rc == SR_OK && end < n && SR_REF_KIND(items[end].ref) != SR_KIND_BLOCK) {
            rc = gather_trajs(st, items, end, n, n_cols, where, dst, bytes, &end);
            at = end;
        }
        if (rc != SR_OK) {
            *bad = at;
            return rc;
        }
        i = end;
    }
    return SR_OK;
}

int sr_gather(const sr_store *st, uint32_t n, const sr_sampled *items, uint32_t n_cols,
              char *const *dst, const uint64_t *bytes, uint32_t *bad) {
    return sr_gather_to(st, n, items, NULL, n_cols, dst, bytes, bad);
}
