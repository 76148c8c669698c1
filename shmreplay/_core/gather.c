/* Reading pinned items: views and gathering into batches. No locks: a pinned item's rows never
 * change. */
#include "steps.h"

#define AHEAD 8u /* items whose rows are prefetched before they are copied */
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

uint32_t sr_item_columns(const sr_store *st, const sr_sampled *item) {
    const void *object = sr_ptr(st, SR_REF_OFF(item->ref));
    return SR_REF_KIND(item->ref) == SR_KIND_BLOCK ? ((const sr_block *)object)->n_cols
                                                   : ((const sr_traj *)object)->n_cols;
}

int sr_item_column(const sr_store *st, const sr_sampled *item, uint32_t c, uint32_t *length_flags,
                   uint64_t *row_bytes) {
    if (c >= sr_item_columns(st, item)) return SR_INVALID;
    if (SR_REF_KIND(item->ref) == SR_KIND_BLOCK) {
        sr_block *b = sr_ptr(st, SR_REF_OFF(item->ref));
        *length_flags = item->row_count;
        *row_bytes = sr_block_cols(b)[c].row_bytes;
        return SR_OK;
    }
    sr_traj *t = sr_ptr(st, SR_REF_OFF(item->ref));
    const sr_traj_col *col = &sr_traj_cols(t)[c];
    *length_flags = col->length_flags;
    const sr_seg *seg = &sr_traj_segs(t)[col->first_seg];
    sr_block *b = sr_ptr(st, sr_traj_blocks(t)[seg->block]);
    *row_bytes = sr_block_cols(b)[seg->col].row_bytes;
    return SR_OK;
}

const void *sr_item_view(const sr_store *st, const sr_sampled *item, uint32_t c) {
    if (c >= sr_item_columns(st, item)) return NULL;
    if (SR_REF_KIND(item->ref) == SR_KIND_BLOCK) {
        return sr_block_cell(st, SR_REF_OFF(item->ref), c, item->row_start);
    }
    sr_traj *t = sr_ptr(st, SR_REF_OFF(item->ref));
    const sr_traj_col *col = &sr_traj_cols(t)[c];
    const sr_seg *seg = &sr_traj_segs(t)[col->first_seg];
    if (col[1].first_seg != col->first_seg + 1 || (seg->stride != 1 && seg->count > 1)) return NULL;
    return sr_block_cell(st, sr_traj_blocks(t)[seg->block], seg->col, seg->start);
}

static inline void prefetch_rows(const char *src, uint64_t n) {
    uint64_t stop = n < PREFETCH_MAX ? n : PREFETCH_MAX;
    for (uint64_t i = 0; i < stop; i += SR_LINE) __builtin_prefetch(src + i);
    __builtin_prefetch(src + stop - 1);
}

static void prefetch_item(const sr_store *st, const sr_sampled *item) {
    if (SR_REF_KIND(item->ref) == SR_KIND_BLOCK) {
        sr_block *b = sr_ptr(st, SR_REF_OFF(item->ref));
        const sr_block_col *cols = sr_block_cols(b);
        uint64_t rows = SR_COL_LENGTH(item->row_count);
        for (uint32_t c = 0; c < b->n_cols; c++) {
            prefetch_rows((const char *)b + cols[c].off + cols[c].row_bytes * item->row_start,
                          cols[c].row_bytes * rows);
        }
        return;
    }
    sr_traj *t = sr_ptr(st, SR_REF_OFF(item->ref));
    const sr_seg *segs = sr_traj_segs(t);
    for (uint32_t i = 0; i < t->n_segs && i < 16; i++) {
        sr_block *b = sr_ptr(st, sr_traj_blocks(t)[segs[i].block]);
        const sr_block_col *col = &sr_block_cols(b)[segs[i].col];
        prefetch_rows((const char *)b + col->off + col->row_bytes * segs[i].start, col->row_bytes);
    }
}

static int gather_block(const sr_store *st, const sr_sampled *item, uint32_t i, uint32_t n_cols,
                        char *const *dst, const uint64_t *bytes) {
    sr_block *b = sr_ptr(st, SR_REF_OFF(item->ref));
    const sr_block_col *cols = sr_block_cols(b);
    uint64_t rows = SR_COL_LENGTH(item->row_count);
    if (b->n_cols != n_cols) return SR_INVALID;
    for (uint32_t c = 0; c < n_cols; c++) {
        uint64_t n = cols[c].row_bytes * rows;
        if (n != bytes[c]) return SR_INVALID;
        copy_small(dst[c] + n * i,
                   (const char *)b + cols[c].off + cols[c].row_bytes * item->row_start, n);
    }
    return SR_OK;
}

static char *gather_seg(const sr_store *st, uint64_t block, const sr_seg *seg, char *to,
                        const char *end) {
    sr_block *b = sr_ptr(st, block);
    const sr_block_col *col = &sr_block_cols(b)[seg->col];
    uint64_t row = col->row_bytes;
    if (row * seg->count > (uint64_t)(end - to)) return NULL;
    const char *base = (const char *)b + col->off;
    if (seg->stride == 1) {
        copy_small(to, base + row * seg->start, row * seg->count);
        return to + row * seg->count;
    }
    int64_t r = seg->start;
    for (uint32_t k = 0; k < seg->count; k++, r += seg->stride, to += row) {
        copy_small(to, base + row * (uint64_t)r, row);
    }
    return to;
}

static int gather_traj(const sr_store *st, const sr_sampled *item, uint32_t i, uint32_t n_cols,
                       char *const *dst, const uint64_t *bytes) {
    sr_traj *t = sr_ptr(st, SR_REF_OFF(item->ref));
    const uint64_t *blocks = sr_traj_blocks(t);
    const sr_traj_col *cols = sr_traj_cols(t);
    const sr_seg *segs = sr_traj_segs(t);
    if (t->n_cols != n_cols) return SR_INVALID;
    for (uint32_t c = 0; c < n_cols; c++) {
        char *to = dst[c] + bytes[c] * i;
        char *end = to + bytes[c];
        for (uint32_t k = cols[c].first_seg; k < cols[c + 1].first_seg; k++) {
            to = gather_seg(st, blocks[segs[k].block], &segs[k], to, end);
            if (to == NULL) return SR_INVALID;
        }
        if (to != end) return SR_INVALID;
    }
    return SR_OK;
}

int sr_gather(const sr_store *st, uint32_t n, const sr_sampled *items, uint32_t n_cols,
              char *const *dst, const uint64_t *bytes, uint32_t *bad) {
    for (uint32_t i = 0; i < n && i < AHEAD; i++) prefetch_item(st, &items[i]);
    for (uint32_t i = 0; i < n; i++) {
        if (i + AHEAD < n) prefetch_item(st, &items[i + AHEAD]);
        int rc = SR_REF_KIND(items[i].ref) == SR_KIND_BLOCK
                     ? gather_block(st, &items[i], i, n_cols, dst, bytes)
                     : gather_traj(st, &items[i], i, n_cols, dst, bytes);
        if (rc != SR_OK) {
            *bad = i;
            return rc;
        }
    }
    return SR_OK;
}
