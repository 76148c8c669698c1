/* rows_apart.h: blocks whose rows lie apart from them. A part of shmreplay.h, where all that holds
 * for every function is said. */
#ifndef SR_ROWS_APART_H
#define SR_ROWS_APART_H

#include <stdint.h>

#include "handles.h"
#include "layout.h"

/* One run of rows of a column: start, start + stride, ... */
typedef struct {
    uint64_t block;
    uint32_t col, start, count;
    int32_t stride;
} sr_run;

/* A block's rows may lie apart from it: raw while it is written, and packed (compressed, where that
 * pays) once it takes no more rows. What refers to the block does not notice; whoever reads its
 * rows looks where they are now. The core places, describes and counts what is stored, and does not
 * decode it. */

/* As sr_block_new, of a block whose rows lie apart, raw. Crash: a block without rows, or with them,
 * in the ledger. */
int sr_block_new_apart(sr_ses *ses, uint32_t n_cols, const uint64_t *row_bytes, uint32_t rows_cap,
                       uint64_t *off, uint32_t *position);
typedef struct {
    const void *data;
    uint64_t bytes;
} sr_part;
/* A column as it is to be stored. Plain: one part, all of its rows. Else a part for each group of
 * group_rows rows. */
typedef struct {
    uint64_t row_bytes; /* uncompressed */
    const sr_part *parts;
    uint32_t encoding; /* enum sr_encoding */
    uint32_t group_rows;
} sr_pack_col;
/* Pack the published rows of a block of sr_block_new_apart, of which there are some: `cols` has an
 * entry for each column. Only the block's writer, who adds no rows afterwards. The raw rows are
 * freed when nobody reads them any more. SR_OK; SR_FULL, SR_NOSPACE, SR_INVALID, SR_CORRUPT: they
 * stay raw. Crash: raw or packed. */
int sr_block_pack(sr_ses *ses, uint64_t block, const sr_pack_col *cols);
/* The packed rows of a block as they are stored, an sr_packed with all that belongs to it; NULL:
 * they are not packed, or damaged. For who holds the block: they never change. */
const void *sr_block_stored(const sr_store *st, uint64_t block, uint64_t *bytes);

/* Where the rows of a block are now, for sr_rows_find, and from where they do not go away before
 * `*position` is released (SR_NONE: nothing to release). The caller holds the block, or an item
 * with rows of it. SR_OK, SR_FULL, SR_NOSPACE, SR_CORRUPT. */
int sr_rows_hold(sr_ses *ses, uint64_t block, uint64_t *rows, uint32_t *position);
/* The same for the block's writer, and for who finds out afterwards that it has not changed. 0: in
 * the block itself. No lock. */
uint64_t sr_block_rows_ref(const sr_store *st, uint64_t block);
typedef struct {
    const char *base;     /* plain rows, one after the other; NULL: they are encoded */
    const char *stored;   /* encoded: the stored bytes of all groups */
    const uint64_t *ends; /* and where in them each group ends */
    uint64_t row_bytes, stored_bytes, serial;
    uint32_t rows; /* that there are */
    uint32_t group_rows, encoding, _pad;
} sr_rows_at;
/* A column of the block, whose rows are at `rows`. SR_OK or SR_CORRUPT. `ends` are for the caller
 * to check. */
int sr_rows_find(const sr_store *st, uint64_t block, uint64_t rows, uint32_t col, sr_rows_at *out);
/* The same for who holds nothing and believes nothing: all of it lies in committed memory. */
int sr_peek_rows(const sr_store *st, uint64_t block, uint64_t rows, uint32_t col, sr_rows_at *out);

/* n rows, each but the first xor-ed with the one before it; and back again, in place. */
void sr_xor_rows(void *dst, const void *src, uint64_t row_bytes, uint64_t n);
void sr_unxor_rows(void *rows, uint64_t row_bytes, uint64_t n);

#endif
