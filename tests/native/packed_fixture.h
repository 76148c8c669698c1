/* packed_fixture.h: blocks whose rows lie apart, packed in a manner that the tests can undo. The
 * core does not decode: "encoded" here means each byte inverted. */
#ifndef SR_PACKED_FIXTURE_H
#define SR_PACKED_FIXTURE_H

#include "table_fixture.h"

#define GROUP_ROWS 3u
#define PACKED_ROWS_MAX 64u

/* As block_try, of rows that lie apart. */
static inline int apart_try(sr_ses *ses, uint64_t first, uint32_t rows, uint32_t cap, held episode,
                            held *out) {
    int rc = sr_block_new_apart(ses, N_COLS, ROW_BYTES, cap, &out->off, &out->position);
    for (uint32_t r = 0; rc == SR_OK && r < rows; r++) {
        char cells[N_COLS][32];
        const void *src[N_COLS];
        for (uint32_t c = 0; c < N_COLS; c++) {
            cell_fill(cells[c], first + r, c);
            src[c] = cells[c];
        }
        rc = sr_block_append(ses, out->off, N_COLS, ROW_TOTAL, src, episode.off);
    }
    return rc;
}

static inline held apart_make(sr_ses *ses, uint64_t first, uint32_t rows, held episode) {
    held b;
    CHECK(apart_try(ses, first, rows, rows, episode, &b) == SR_OK);
    return b;
}

/* The first column plain, the others in groups. */
static inline int pack_try(sr_ses *ses, held block, uint32_t rows) {
    static char bytes[N_COLS][PACKED_ROWS_MAX * 32];
    sr_pack_col cols[N_COLS];
    sr_part parts[N_COLS][PACKED_ROWS_MAX];
    for (uint32_t c = 0; c < N_COLS; c++) {
        const char *raw = sr_block_cell(ses->st, block.off, c, 0, rows, ROW_BYTES[c]);
        if (raw == NULL) return SR_CORRUPT;
        cols[c] = (sr_pack_col){.row_bytes = ROW_BYTES[c],
                                .parts = parts[c],
                                .encoding = c == 0 ? SR_PLAIN : SR_LZ4,
                                .group_rows = GROUP_ROWS};
        parts[c][0] = (sr_part){.data = raw, .bytes = ROW_BYTES[c] * rows};
        if (c == 0) continue;
        for (uint64_t i = 0; i < ROW_BYTES[c] * rows; i++) bytes[c][i] = (char)~raw[i];
        for (uint32_t g = 0; g * GROUP_ROWS < rows; g++) {
            uint32_t n = rows - g * GROUP_ROWS < GROUP_ROWS ? rows - g * GROUP_ROWS : GROUP_ROWS;
            parts[c][g] = (sr_part){.data = bytes[c] + ROW_BYTES[c] * GROUP_ROWS * g,
                                    .bytes = ROW_BYTES[c] * n};
        }
    }
    return sr_block_pack(ses, block.off, cols);
}

/* Copy a row of a column from where it was found to be. 0: it is not there, or damaged. */
static inline int apart_cell(const sr_rows_at *at, uint32_t row, char *cell, uint64_t most) {
    if (row >= at->rows || at->row_bytes > most) return 0;
    if (at->base != NULL) {
        memcpy(cell, at->base + at->row_bytes * row, at->row_bytes);
        return 1;
    }
    uint32_t g = row / at->group_rows;
    uint64_t begin = g == 0 ? 0 : at->ends[g - 1], in = at->row_bytes * (row % at->group_rows);
    if (begin > at->ends[g] || at->ends[g] > at->stored_bytes ||
        in + at->row_bytes > at->ends[g] - begin) {
        return 0;
    }
    for (uint64_t i = 0; i < at->row_bytes; i++) cell[i] = (char)~at->stored[begin + in + i];
    return 1;
}

/* Are the rows first, first + 1, ... there, wherever they are? */
static inline void apart_check(const sr_store *st, uint64_t block, uint64_t rows_ref,
                               uint64_t first, uint32_t rows) {
    for (uint32_t c = 0; c < N_COLS; c++) {
        sr_rows_at at;
        char cell[32];
        CHECK(sr_rows_find(st, block, rows_ref, c, &at) == SR_OK && at.rows >= rows);
        for (uint32_t r = 0; r < rows; r++) {
            CHECK(apart_cell(&at, r, cell, sizeof cell));
            cell_check(cell, first + r, c);
        }
    }
}

#endif
