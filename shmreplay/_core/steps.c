/* Blocks of steps, trajectory records and episodes: making them. */
#include "steps.h"

#include "arena.h"
#include "fault.h"
#include "ledger.h"
#include "table.h"

/* Allocate, let `fill` initialise it with one reference, note that in the ledger.
 * Crash: between allocation and note the object stands in the session's inflight word. */
static int new_object(sr_ses *ses, enum sr_kind kind, uint64_t bytes, uint64_t *off) {
    sr_begin(ses, SR_BUSY_BLOCK);
    int rc =
        sr_alloc_outer(ses->st, ses->shared->arena, kind, bytes, &ses->shared->inflight[0], off);
    if (rc != SR_OK) sr_end(ses);
    return rc;
}

static int note_object(sr_ses *ses, uint64_t off, enum sr_kind kind, uint32_t *position) {
    int rc = sr_lock_session(ses);
    if (rc == SR_OK) {
        *position = sr_ledger_note(ses, SR_REF(off, kind));
        atomic_store_explicit(&ses->shared->inflight[0], 0, memory_order_release);
        sr_unlock_session(ses);
    }
    sr_end(ses);
    return rc;
}

int sr_episode_new(sr_ses *ses, uint64_t id, uint64_t *off, uint32_t *position) {
    SR_GUARDED_SES(ses)
    int rc = sr_ledger_reserve(ses, 1);
    if (rc != SR_OK) return rc;
    uint64_t bytes = sizeof(sr_episode) + ses->st->shape.n_tables * sizeof(uint32_t);
    rc = new_object(ses, SR_KIND_EPISODE, bytes, off);
    if (rc != SR_OK) return rc;
    sr_episode *e = sr_ptr(ses->st, *off);
    memset(e, 0, bytes);
    e->kind = SR_KIND_EPISODE;
    e->id = id;
    atomic_store_explicit(&e->refs, 1, memory_order_relaxed);
    return note_object(ses, *off, SR_KIND_EPISODE, position);
}

/* Where the parts of a block lie. Gives its size, or 0 where that would not fit 63 bits. */
static uint64_t lay_out(uint32_t n_tables, uint32_t n_cols, const uint64_t *row_bytes,
                        uint32_t rows_cap, sr_block_col *cols, uint64_t *episodes_off) {
    uint64_t at = sr_align(sr_block_head_bytes(n_tables, n_cols), SR_LINE);
    *episodes_off = at;
    at = sr_align(at + (uint64_t)rows_cap * sizeof(uint64_t), SR_LINE);
    for (uint32_t c = 0; c < n_cols; c++) {
        unsigned __int128 bytes = (unsigned __int128)row_bytes[c] * rows_cap;
        if (bytes > (1ull << 46)) return 0;
        if (cols != NULL) cols[c] = (sr_block_col){.off = at, .row_bytes = row_bytes[c]};
        at = sr_align(at + (uint64_t)bytes, SR_LINE);
    }
    return at;
}

uint64_t sr_block_bytes(uint32_t n_tables, uint32_t n_cols, const uint64_t *row_bytes,
                        uint32_t rows_cap) {
    uint64_t episodes_off;
    return lay_out(n_tables, n_cols, row_bytes, rows_cap, NULL, &episodes_off);
}

/* Numbers of two stores meet only where their random beginnings lie within as many of each other as
 * one of them makes blocks. */
static uint64_t next_uid(const sr_store *st) {
    uint64_t generation = st->shape.generation;
    return sr_splitmix64(&generation) +
           atomic_fetch_add_explicit(&st->hdr->next_block, 1, memory_order_relaxed);
}

sr_block *sr_block_format(const sr_store *st, uint64_t off, uint32_t n_cols,
                          const uint64_t *row_bytes, uint32_t rows_cap, int apart) {
    sr_block *b = sr_ptr(st, off);
    const uint32_t n_tables = st->shape.n_tables;
    memset(b, 0, sr_block_head_bytes(n_tables, n_cols));
    b->kind = SR_KIND_BLOCK;
    b->n_cols = n_cols;
    b->rows_cap = rows_cap;
    b->uid = next_uid(st);
    b->bytes =
        lay_out(n_tables, n_cols, row_bytes, rows_cap, sr_block_cols(b), &b->episodes_off);
    if (apart) {
        for (uint32_t c = 0; c < n_cols; c++) sr_block_cols(b)[c].off = SR_APART;
        b->bytes = b->episodes_off + (uint64_t)rows_cap * sizeof(uint64_t);
    }
    atomic_store_explicit(&b->refs, 1, memory_order_relaxed);
    return b;
}

static int new_block(sr_ses *ses, uint32_t n_cols, const uint64_t *row_bytes, uint32_t rows_cap,
                     uint64_t bytes, int apart, uint64_t *off, uint32_t *position) {
    int rc = sr_ledger_reserve(ses, 1);
    if (rc != SR_OK) return rc;
    rc = new_object(ses, SR_KIND_BLOCK, bytes, off);
    if (rc != SR_OK) return rc;
    sr_touch_around(ses->st, *off, bytes);
    sr_block_format(ses->st, *off, n_cols, row_bytes, rows_cap, apart);
    return note_object(ses, *off, SR_KIND_BLOCK, position);
}

int sr_block_new(sr_ses *ses, uint32_t n_cols, const uint64_t *row_bytes, uint32_t rows_cap,
                 uint64_t *off, uint32_t *position) {
    SR_GUARDED_SES(ses)
    if (n_cols == 0 || n_cols > SR_COLUMNS_MAX || rows_cap == 0) return SR_INVALID;
    uint64_t bytes = sr_block_bytes(ses->st->shape.n_tables, n_cols, row_bytes, rows_cap);
    return bytes == 0 ? SR_INVALID
                      : new_block(ses, n_cols, row_bytes, rows_cap, bytes, 0, off, position);
}

int sr_block_new_head(sr_ses *ses, uint32_t n_cols, const uint64_t *row_bytes, uint32_t rows_cap,
                      uint64_t *off, uint32_t *position) {
    uint64_t bytes = sr_block_apart_bytes(ses->st->shape.n_tables, n_cols, rows_cap);
    return new_block(ses, n_cols, row_bytes, rows_cap, bytes, 1, off, position);
}

uint32_t sr_block_columns(const sr_store *st, uint64_t block) {
    return sr_block_sound(st, block) ? ((const sr_block *)sr_ptr(st, block))->n_cols : 0;
}

/* The rows of a block whose rows lie apart, as long as they are raw: for its writer, who alone
 * changes that. NULL: they are not, or the block is damaged. */
static __attribute__((noinline)) char *raw_rows(const sr_store *st, const sr_block *b,
                                                uint32_t col, uint32_t row, uint32_t count,
                                                uint64_t *row_bytes) {
    uint64_t rows = atomic_load_explicit(&b->rows, memory_order_relaxed);
    if (!sr_lies_apart(b) || col >= b->n_cols || SR_REF_KIND(rows) != SR_KIND_BLOCK ||
        !sr_block_sound(st, SR_REF_OFF(rows))) {
        return NULL;
    }
    const sr_block *raw = sr_ptr(st, SR_REF_OFF(rows));
    if (raw->rows_cap != b->rows_cap) return NULL;
    char *at = sr_block_rows(raw, col, row, count, row_bytes);
    return at != NULL && *row_bytes == sr_block_cols((sr_block *)b)[col].row_bytes ? at : NULL;
}

void *sr_block_cell(const sr_store *st, uint64_t block, uint32_t col, uint32_t row, uint32_t count,
                    uint64_t row_bytes) {
    if (SR_UNLIKELY(!sr_block_sound(st, block))) return NULL;
    const sr_block *b = sr_ptr(st, block);
    if (row >= b->rows_cap || count > b->rows_cap - row) return NULL;
    uint64_t found;
    void *cell = sr_block_rows(b, col, row, count, &found);
    if (SR_UNLIKELY(cell == NULL)) cell = raw_rows(st, b, col, row, count, &found);
    return cell != NULL && found == row_bytes ? cell : NULL;
}

static void publish(sr_block *b, uint32_t n, uint64_t episode) {
    uint64_t *episodes = (uint64_t *)(void *)((char *)b + b->episodes_off);
    uint32_t first = atomic_load_explicit(&b->published, memory_order_relaxed);
    for (uint32_t r = 0; r < n; r++) episodes[first + r] = episode;
    /* SYNC POINT: release: whoever reads `published` sees the rows below it whole, and they
     * never change again. */
    atomic_store_explicit(&b->published, first + n, memory_order_release);
}

/* The writer holds the episode, so that it is alive. A block counts once in it for each run of its
 * rows: where a run begins, count and rows change under one lock. */
static int publish_run(sr_ses *ses, sr_block *b, uint32_t n, uint64_t episode) {
    SR_GUARDED_SES(ses)
    sr_begin(ses, SR_BUSY_BLOCK);
    int rc = sr_lock_session(ses);
    if (rc == SR_OK) {
        sr_ref_retain(ses->st, SR_REF(episode, SR_KIND_EPISODE));
        publish(b, n, episode);
        sr_unlock_session(ses);
    }
    sr_end(ses);
    return rc;
}

/* The block, if it has room for n more rows; NULL: it is damaged, or has not. */
static sr_block *writable(const sr_store *st, uint64_t block, uint32_t n) {
    if (SR_UNLIKELY(!sr_block_sound(st, block))) return NULL;
    sr_block *b = sr_ptr(st, block);
    uint32_t rows = atomic_load_explicit(&b->published, memory_order_relaxed);
    return n > 0 && n <= b->rows_cap - rows ? b : NULL;
}

static int publish_rows(sr_ses *ses, sr_block *b, uint32_t n, uint64_t episode) {
    const uint64_t *episodes = (const uint64_t *)(void *)((char *)b + b->episodes_off);
    uint32_t first = atomic_load_explicit(&b->published, memory_order_relaxed);
    if (first == 0 || episodes[first - 1] != episode) return publish_run(ses, b, n, episode);
    publish(b, n, episode);
    return SR_OK;
}

int sr_block_publish(sr_ses *ses, uint64_t block, uint32_t n, uint64_t episode) {
    sr_block *b = writable(ses->st, block, n);
    if (b == NULL) return SR_CORRUPT;
    const sr_block_col *cols = sr_block_cols(b);
    uint64_t row_bytes = 0;
    for (uint32_t c = 0; c < b->n_cols; c++) row_bytes += cols[c].row_bytes;
    sr_count(&ses->shared->bytes_in, row_bytes * n);
    return publish_rows(ses, b, n, episode);
}

/* No guard: of most steps nothing is looked at that would need one. */
int sr_block_append(sr_ses *ses, uint64_t block, uint32_t n_cols, uint64_t bytes,
                    const void *const *src, uint64_t episode) {
    sr_block *b = writable(ses->st, block, 1);
    if (SR_UNLIKELY(b == NULL || b->n_cols != n_cols)) return SR_CORRUPT;
    const sr_block_col *cols = sr_block_cols(b);
    uint32_t row = atomic_load_explicit(&b->published, memory_order_relaxed);
    uint64_t sum = 0, row_bytes;
    for (uint32_t c = 0; c < n_cols; c++) sum += cols[c].row_bytes;
    if (SR_UNLIKELY(sum != bytes)) return SR_CORRUPT; /* what the caller has may be shorter */
    for (uint32_t c = 0; c < n_cols; c++) {
        char *to = sr_block_rows(b, c, row, 1, &row_bytes);
        if (SR_UNLIKELY(to == NULL)) to = raw_rows(ses->st, b, c, row, 1, &row_bytes);
        if (SR_UNLIKELY(to == NULL)) return SR_CORRUPT;
        sr_copy(to, src[c], row_bytes);
    }
    sr_count(&ses->shared->bytes_in, bytes);
    return publish_rows(ses, b, 1, episode);
}

/* Are these runs inside published rows of live blocks? */
static int runs_ok(const sr_store *st, const sr_run *runs, uint32_t n) {
    for (uint32_t i = 0; i < n; i++) {
        if (runs[i].block == 0 || !sr_block_sound(st, runs[i].block)) return 0;
        const sr_block *b = sr_ptr(st, runs[i].block);
        if (runs[i].col >= b->n_cols || runs[i].count == 0) return 0;
        int64_t last = (int64_t)runs[i].start + (int64_t)runs[i].stride * (runs[i].count - 1);
        uint32_t rows = atomic_load_explicit(&b->published, memory_order_acquire);
        if (runs[i].start >= rows || last < 0 || last >= (int64_t)rows) return 0;
    }
    return 1;
}

/* Does every column have rows, and a length that fits beside its flag? */
static int columns_ok(uint32_t n_cols, const uint32_t *first_run, const sr_run *runs) {
    for (uint32_t c = 0; c < n_cols; c++) {
        uint64_t length = 0;
        for (uint32_t i = first_run[c]; i < first_run[c + 1]; i++) length += runs[i].count;
        if (length == 0 || length > SR_COL_LENGTH(UINT32_MAX)) return 0;
    }
    return 1;
}

static void fill_traj(sr_traj *t, uint32_t n_cols, const uint32_t *first_run, const uint32_t *flags,
                      const sr_run *runs, const uint64_t *blocks, const uint16_t *block_of) {
    memcpy(sr_traj_blocks(t), blocks, t->n_blocks * sizeof *blocks);
    sr_traj_col *cols = sr_traj_cols(t);
    sr_seg *segs = sr_traj_segs(t);
    for (uint32_t c = 0; c < n_cols; c++) {
        uint32_t length = 0;
        for (uint32_t i = first_run[c]; i < first_run[c + 1]; i++) {
            segs[i] = (sr_seg){.block = block_of[i],
                               .col = (uint16_t)runs[i].col,
                               .start = runs[i].start,
                               .count = runs[i].count,
                               .stride = runs[i].stride};
            length += runs[i].count;
        }
        cols[c] = (sr_traj_col){.length_flags = length | flags[c], .first_seg = first_run[c]};
    }
    cols[n_cols] = (sr_traj_col){.length_flags = 0, .first_seg = first_run[n_cols]};
}

#define INLINE_RUNS 64u

/* Number the distinct blocks of the runs. Neighbouring runs mostly share one. */
static uint32_t number_blocks(const sr_run *runs, uint32_t n_runs, uint64_t *blocks,
                              uint16_t *block_of) {
    uint32_t n_blocks = 0;
    for (uint32_t i = 0; i < n_runs; i++) {
        uint32_t k = n_blocks;
        while (k > 0 && blocks[k - 1] != runs[i].block) k--;
        if (k == 0) {
            blocks[n_blocks++] = runs[i].block;
            k = n_blocks;
        }
        block_of[i] = (uint16_t)(k - 1);
    }
    return n_blocks;
}

int sr_traj_new(sr_ses *ses, uint32_t n_cols, const uint32_t *first_run, const uint32_t *flags,
                const sr_run *runs, uint64_t *off, uint32_t *position) {
    SR_GUARDED_SES(ses)
    sr_store *st = ses->st;
    uint32_t n_runs = first_run[n_cols];
    if (n_cols == 0 || n_cols > SR_COLUMNS_MAX || n_runs == 0 || n_runs > 0xffffu ||
        !runs_ok(st, runs, n_runs) || !columns_ok(n_cols, first_run, runs)) {
        return SR_INVALID;
    }
    uint64_t inline_blocks[INLINE_RUNS];
    uint16_t inline_numbers[INLINE_RUNS];
    uint64_t *blocks = inline_blocks;
    uint16_t *block_of = inline_numbers;
    void *spare = NULL;
    if (n_runs > INLINE_RUNS) {
        spare = SR_FAULT_POINT("malloc") ? NULL
                                         : malloc(n_runs * (sizeof *blocks + sizeof *block_of));
        if (spare == NULL) return SR_SYS;
        blocks = spare;
        block_of = (uint16_t *)(blocks + n_runs);
    }
    uint32_t n_blocks = number_blocks(runs, n_runs, blocks, block_of);
    uint64_t bytes = sizeof(sr_traj) + n_blocks * sizeof(uint64_t) +
                     (n_cols + 1) * sizeof(sr_traj_col) + n_runs * sizeof(sr_seg);
    int rc = sr_ledger_reserve(ses, 1);
    if (rc == SR_OK) rc = new_object(ses, SR_KIND_TRAJ, bytes, off);
    if (rc == SR_OK) {
        sr_traj *t = sr_ptr(st, *off);
        *t = (sr_traj){.kind = SR_KIND_TRAJ,
                       .n_cols = n_cols,
                       .n_blocks = n_blocks,
                       .n_segs = n_runs,
                       .bytes = bytes};
        atomic_store_explicit(&t->refs, 1, memory_order_relaxed);
        fill_traj(t, n_cols, first_run, flags, runs, blocks, block_of);
        rc = sr_lock_session(ses);
        if (rc == SR_OK) {
            for (uint32_t i = 0; i < n_blocks; i++) {
                sr_ref_retain(st, SR_REF(blocks[i], SR_KIND_BLOCK));
            }
            *position = sr_ledger_note(ses, SR_REF(*off, SR_KIND_TRAJ));
            atomic_store_explicit(&ses->shared->inflight[0], 0, memory_order_release);
            sr_unlock_session(ses);
        }
        sr_end(ses);
    }
    free(spare);
    return rc;
}
