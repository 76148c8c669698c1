/* layout_blocks.h: blocks of steps, and rows of them that are compressed. A part of layout.h. */
#ifndef SR_LAYOUT_BLOCKS_H
#define SR_LAYOUT_BLOCKS_H

#include <stdatomic.h>
#include <stdint.h>

/* refs: under no lock; atomic. Rows below `published` never change. */
typedef struct {
    uint32_t kind; /* SR_KIND_BLOCK */
    uint32_t n_cols;
    _Atomic uint32_t refs;
    uint32_t rows_cap;
    _Atomic uint32_t published;
    uint32_t _pad0;
    uint64_t bytes;        /* of the allocation's payload */
    uint64_t episodes_off; /* uint64[rows_cap], relative to the block: each row's episode record */
    uint64_t uid;          /* of this block and no other, in this store or one restored from it */
    /* Of a block whose rows lie apart (each `off` of its columns is SR_APART): where. A block of
     * the same columns, without rows of its own (`published` is 0), or, once no more rows come,
     * packed rows, from which it never changes again. 0: they lie here. Changed under the locks of
     * the writer's session and of the arena in which this block lies. */
    _Atomic uint64_t rows;
    char _pad1[8];
} sr_block;
typedef struct { /* n_cols of them follow the block */
    uint64_t off; /* relative to the block; 64-byte aligned; SR_APART: see `rows` */
    uint64_t row_bytes;
} sr_block_col;
#define SR_APART UINT64_MAX
/* uint32_t[n_tables] follows: how many items of each table that counts bytes refer to it. */
_Static_assert(sizeof(sr_block) == 64, "block header");

/* Rows of a block that takes no more of them, column by column compressed where that pays. All
 * offsets are relative to this, so that its bytes mean the same anywhere else. Immutable once a
 * block refers to it, refs aside. */
typedef struct {
    uint32_t kind; /* SR_KIND_PACKED */
    uint32_t n_cols;
    _Atomic uint32_t refs; /* one: its block's */
    uint32_t rows;
    uint64_t bytes;     /* of the allocation's payload */
    uint64_t raw_bytes; /* of these rows, uncompressed */
    uint64_t serial;    /* no other packed rows of this store ever have it */
    char _pad[24];
} sr_packed;
/* How a column of packed rows is encoded; n_cols of them follow. */
typedef struct {
    uint64_t off;          /* of its stored bytes; 64-byte aligned */
    uint64_t stored_bytes;
    uint64_t row_bytes;    /* uncompressed */
    uint64_t ends_off;     /* uint64[groups]: where the stored bytes of each end; 0: plain */
    uint32_t encoding;     /* enum sr_encoding */
    uint32_t group_rows;   /* rows encoded together; the last group may have fewer */
} sr_packed_col;
_Static_assert(sizeof(sr_packed) == 64, "packed rows");
_Static_assert(sizeof(sr_packed_col) == 40, "column of packed rows");

enum sr_encoding {
    SR_PLAIN = 0, /* the rows as they are, one after the other, in one group */
    SR_LZ4,       /* each group an LZ4 block */
    SR_LZ4_XOR    /* the same of a group in which each row but the first is xor-ed with the one
                     before it */
};

#endif
