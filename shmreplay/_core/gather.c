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
 * the source modulo 4,096 (it uses rep movsb from 2 kB on). A plain vector loop does not. */
__attribute__((target("avx2"))) static void copy_avx2(char *dst, const char *src, uint64_t n) {
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
    memcpy(dst, src, n);
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

/* Where the rows of a column of these items are, each of whose blocks is sound and has it. */
static int find_rows(const sr_sampled *items, const sr_block *const *blocks, uint32_t n,
                     uint32_t col, uint64_t bytes, const char **src, uint32_t *bad) {
    uint64_t row_bytes;
    for (uint32_t i = 0; i < n; i++) {
        uint64_t rows = SR_COL_LENGTH(items[i].row_count);
        src[i] = sr_block_rows(blocks[i], col, items[i].row_start, rows, &row_bytes);
        *bad = i;
        if (SR_UNLIKELY(src[i] == NULL)) {
            return sr_lies_apart(blocks[i]) ? SR_ELSEWHERE : SR_CORRUPT;
        }
        if (row_bytes * rows != bytes) return SR_INVALID;
    }
    return SR_OK;
}

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
    for (uint32_t i = 0; i < n; i++) {
        if (i + AHEAD < n) prefetch((uintptr_t)src[i + AHEAD], bytes);
        sr_copy(to + bytes * i, src[i], bytes);
    }
}

/* At most GROUP items that are whole rows of blocks. Column after column: so the rows that are read
 * together lie as close as they can, and so do their copies. */
static int gather_blocks(const sr_store *st, const sr_sampled *items, uint32_t n, uint32_t n_cols,
                         char *const *dst, const uint64_t *bytes, uint64_t first, uint32_t *bad) {
    const sr_block *blocks[GROUP];
    const char *src[GROUP];
    for (uint32_t i = 0; i < n; i++) {
        blocks[i] = item_block(st, &items[i]);
        *bad = i;
        if (SR_UNLIKELY(blocks[i] == NULL)) return SR_CORRUPT;
        if (blocks[i]->n_cols != n_cols) return SR_INVALID;
    }
    for (uint32_t c = 0; c < n_cols; c++) {
        int rc = find_rows(items, blocks, n, c, bytes[c], src, bad);
        if (rc != SR_OK) return rc;
        copy_rows(dst[c] + bytes[c] * first, src, n, bytes[c]);
    }
    return SR_OK;
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
                        uint32_t n_cols, char *const *dst, const uint64_t *bytes, uint32_t *stop) {
    for (uint32_t i = first; i < n && i < first + AHEAD; i++) prefetch_traj(st, &items[i]);
    for (*stop = first; *stop < n; ++*stop) {
        if (SR_REF_KIND(items[*stop].ref) == SR_KIND_BLOCK) break;
        if (*stop + AHEAD < n) prefetch_traj(st, &items[*stop + AHEAD]);
        int rc = gather_traj(st, &items[*stop], *stop, n_cols, dst, bytes);
        if (rc != SR_OK) return rc;
    }
    return SR_OK;
}

int sr_gather(const sr_store *st, uint32_t n, const sr_sampled *items, uint32_t n_cols,
              char *const *dst, const uint64_t *bytes, uint32_t *bad) {
    uint32_t i = 0;
    while (i < n) {
        uint32_t end = i, at = 0;
        while (end < n && end - i < GROUP && SR_REF_KIND(items[end].ref) == SR_KIND_BLOCK) end++;
        int rc = gather_blocks(st, items + i, end - i, n_cols, dst, bytes, i, &at);
        at += i;
        if (rc == SR_OK && end < n && SR_REF_KIND(items[end].ref) != SR_KIND_BLOCK) {
            rc = gather_trajs(st, items, end, n, n_cols, dst, bytes, &end);
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
