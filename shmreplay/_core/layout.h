/* layout.h: every structure in shared memory, with its size and offsets pinned at compile time.
 *
 * The same bytes in words: LAYOUT.md. References between structures are byte offsets from the start
 * of the segment (0 means none); they are range-checked before use (sr_at). Nothing here holds a
 * pointer.
 *
 * Who may write what is said at each structure. "Under L" means: only while lock L is held. Lock
 * order: repair -> limiter -> stripe i -> stripe j > i -> session lock -> schemas -> arena i ->
 * arena j > i; only sr_check and sr_repair hold locks of two tables, two sessions or two arenas. */
#ifndef SR_LAYOUT_H
#define SR_LAYOUT_H

#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#include "layout_blocks.h"
#include "layout_events.h"
#include "layout_kinds.h"
#include "layout_participant.h"
#include "layout_receipts.h"

#define SR_MAGIC 0x3159414c50455253ULL /* "SREPLAY1" */
#define SR_LAYOUT_VERSION 4u
#define SR_PAGE 4096u
#define SR_LINE 64u
#define SR_NONE 0xffffffffu /* no slot */

#define SR_TABLES_MAX 64u
#define SR_STRIPES_MAX 64u /* a table */
#define SR_MAX_SIZE 0x7fffffff /* items of a table */
#define SR_ARENAS_MAX 16u
#define SR_COLUMNS_MAX 256u
#define SR_SCHEMAS_MAX 4096u
#define SR_NAME_BYTES 64u
#define SR_OWN_LEDGER 16u
#define SR_SESSION_LOCKS 32u
/* Most locks of a store. A repair holds all of them, and at its death the kernel passes on no more
 * than 2048 of what one thread holds (ROBUST_LIST_LIMIT). */
#define SR_LOCKS_MAX 1920u
#define SR_FL_COUNT 42u /* first-level classes: 2^6 .. 2^47 bytes */
#define SR_SL_COUNT 16u /* second-level classes in each */

typedef union {
    pthread_mutex_t m; /* process-shared, robust, normal; never destroyed */
    char pad[SR_LINE];
} sr_mutex;
_Static_assert(sizeof(sr_mutex) == SR_LINE, "a lock fills one cache line");

/* -------------------------------------------------- header: page 0 of the segment */

typedef struct {
    _Atomic uint64_t magic; /* written last: a segment without it is not ready */
    uint32_t layout_version;
    uint32_t n_tables;
    uint64_t layout_signature; /* sizes and alignments of this build, see sr_layout_signature() */
    uint64_t generation;       /* random; tells one life of a store name from the next */
    uint64_t file_bytes;       /* virtual size; most of it is never committed */
    uint64_t capacity_bytes;   /* bound on committed_bytes */
    uint64_t extent_bytes;     /* the step in which an arena commits */
    uint32_t n_arenas;
    uint32_t n_stripes;        /* of all tables together */
    uint32_t n_participants;
    uint32_t n_sessions;
    uint64_t participants_off, sessions_off, tables_off, stripes_off, arenas_off, schemas_off;
    uint64_t session_locks_off; /* sr_mutex[SR_SESSION_LOCKS] */
    uint64_t receipts_off;      /* sr_receipt[SR_RECEIPTS_MAX] */
    uint64_t config_off, config_bytes; /* JSON: the tables as the user declared them */
    uint64_t seal; /* hash of all that never changes, of tables and stripes too (shape.h) */
    uint64_t creator_pid;
    uint64_t created_ns; /* CLOCK_REALTIME */
    char _pad0[SR_LINE];
    _Atomic uint64_t committed_bytes; /* charged by who commits; given back if that fails */
    _Atomic uint32_t state;           /* enum sr_state */
    _Atomic uint32_t port;            /* TCP port that names this store on this machine; 0: none */
    /* A participant died inside a lock: nothing under any lock is to be trusted until sr_repair
     * has been there. Set by who meets the dead owner's lock, cleared by sr_repair under all
     * locks. Read after taking any lock. */
    _Atomic uint32_t dirty;
    _Atomic uint32_t commit_seq;      /* futex word: an arena runs low, the committer should look */
    _Atomic uint32_t commit_waiters;
    _Atomic uint32_t n_schemas;       /* published entries of the schema array */
    _Atomic uint32_t opened[4];       /* sessions so far, by kind: spreads them over stripes */
    _Atomic uint64_t repairs;         /* times that sr_repair had something to do */
    char _pad1[SR_LINE];
    sr_mutex schema_lock; /* appending to the schema array */
    sr_mutex repair_lock; /* one repairer at a time; taken before all others */
    _Atomic uint32_t event_seq, event_waiters; /* futex: a table has events for its extensions */
    uint32_t receipts_committed;  /* of them so many have memory; under the schema lock */
    _Atomic uint32_t receipts_used; /* and so many were used at least once */
    /* Of all packed rows: bytes uncompressed, and as they are stored. Changed under a session's or
     * a stripe's lock, and counted again by a repair. */
    _Atomic uint64_t packed_raw_bytes, packed_stored_bytes;
    _Atomic uint64_t packed_serial; /* the last that was given to packed rows */
    char _pad2[SR_LINE - 40];
    _Atomic uint64_t next_block; /* blocks made so far */
    _Atomic uint32_t hold, hold_unwanted, checkpointer; /* see hold.h; schema + 1, 0: none */
    char _pad3[SR_LINE - 20];
} sr_header;
_Static_assert(sizeof(sr_header) <= SR_PAGE, "the header is the first page");

enum sr_state { SR_STATE_OPEN = 1, SR_STATE_CLOSED = 2 };

/* ------------------------------------------------------------------ who is there */

/* What a critical section of a limiter found: whoever dies inside it has done nothing. Written by
 * the session's owner under that limiter's lock. */
typedef struct {
    _Atomic uint32_t valid; /* number of the table + 1: the section has begun and not ended */
    uint32_t reserved_inserts, reserved_samples;
    int32_t owed_inserts, owed_samples, owed_deletes;
    uint64_t owed_epoch;
    int64_t inserts, samples, deletes; /* of the table */
} sr_undo;
_Static_assert(sizeof(sr_undo) == SR_LINE - 8, "undo record");

/* One writer's or sampler's place. Written only by its owner; read by others under all locks
 * (repair). Ledger and inflight: under the session's lock, or a stripe's (pins). */
typedef struct {
    /* 0 free, 1 in use, else being claimed (by compare-and-swap): SR_CLAIMED | participant << 2 */
    _Atomic uint32_t state;
    uint32_t participant;     /* SR_NONE while free */
    _Atomic uint32_t busy;    /* enum sr_busy; non-zero in a dead session: died in an operation */
    uint32_t kind;            /* enum sr_session_kind, for people */
    uint32_t arena;           /* preferred arena */
    uint32_t stripe_hint;     /* preferred stripe, modulo a table's stripes */
    uint64_t ledger_off;      /* array of references, each counted once; 0 entries are free */
    uint32_t ledger_cap;
    uint32_t ledger_used;
    /* Allocations that nothing refers to yet, or any more; set and cleared under the arena's lock,
     * or cleared under the session's when something refers to them. Their content is nobody's. */
    _Atomic uint64_t inflight[2];
    /* What the operation in progress owes the limiter, so that it can be settled after a death:
     * each is set under the lock under which it comes to be, and cleared under the limiter. */
    _Atomic uint32_t table;   /* of the operation */
    uint32_t reserved_inserts, reserved_samples; /* budget taken: part of pending */
    int32_t owed_inserts, owed_samples; /* done in the stripes, not counted yet */
    int32_t owed_deletes;     /* the same; negative: counted, and still to be evicted */
    uint64_t owed_epoch;      /* the table's epoch then: a reset has settled what is older */
    /* Since when its batch is lent to the user (CLOCK_REALTIME); 0: none is. For people. */
    _Atomic uint64_t borrowed_ns;
    _Atomic uint64_t inserts, samples, updates, bytes_in; /* statistics, of all owners so far */
    /* The ledger until it grows: a session needs no memory to begin with, so that a store which is
     * full can still be sampled from, deleted from and reset. */
    uint64_t own_ledger[SR_OWN_LEDGER];
    sr_undo undo;
    uint32_t promised; /* room for events of the operation in progress; under the stripe's lock */
    uint32_t _pad1;
} sr_session;
_Static_assert(sizeof(sr_session) == 320, "session");
#define SR_CLAIMED 2u

enum sr_busy {
    SR_IDLE = 0,
    SR_BUSY_BLOCK,
    SR_BUSY_INSERT,
    SR_BUSY_SAMPLE,
    SR_BUSY_RELEASE,
    SR_BUSY_DELETE,
    SR_BUSY_LEDGER
};
enum sr_session_kind { SR_SESSION_CLIENT = 1, SR_SESSION_WRITER, SR_SESSION_SAMPLER };

/* -------------------------------------------------- arena: two-level segregated fit */

/* All fields under `lock`, except where said. Derived state: it can be rebuilt from the
 * reachable allocations. */
typedef struct {
    sr_mutex lock;
    /* Virtual range of this arena; constant, and on a line of their own: every free reads them. */
    uint64_t start, end;
    char _pad1[SR_LINE - 16];
    uint64_t committed_end;   /* [start, committed_end) has memory and belongs to the allocator */
    uint64_t used_bytes;      /* allocated, chunk headers included */
    uint64_t free_bytes;
    uint64_t n_allocs;
    uint64_t kind_bytes[SR_KIND_END]; /* used_bytes by enum sr_kind */
    uint64_t fl_bitmap;
    uint32_t sl_bitmap[SR_FL_COUNT];
    uint32_t n_cuts; /* how often committed_end was moved back: whoever commits ahead looks */
    uint64_t head[SR_FL_COUNT][SR_SL_COUNT]; /* offset of the first free chunk of the class */
} __attribute__((aligned(64))) sr_arena;
_Static_assert(sizeof(sr_arena) % SR_LINE == 0, "arenas do not share cache lines");

/* A chunk starts 48 bytes after a 64-byte boundary, so that its payload starts on one. */
#define SR_CHUNK_HEAD 16u
typedef struct {
    /* Size (multiple of 64, header included) | SR_CHUNK_FREE | SR_CHUNK_PREV_FREE | kind << 56. */
    uint64_t size_flags;
    uint64_t prev_size;  /* size of the chunk before, valid if that one is free */
} sr_chunk;
typedef struct { /* payload of a free chunk */
    uint64_t next, prev;
} sr_free_links;
#define SR_CHUNK_FREE 1ull
#define SR_CHUNK_PREV_FREE 2ull
#define SR_CHUNK_SIZE_MASK 0x00ffffffffffffc0ull

/* ------------------------------------------------------------------ steps */

typedef struct {
    uint32_t kind; /* SR_KIND_EPISODE */
    _Atomic uint32_t refs; /* one for each block with rows of it, one for the writer inside it */
    uint64_t id;
    _Atomic uint32_t items[]; /* a table: how many of its items refer to rows of this episode */
} sr_episode;

/* A trajectory that is not simply whole consecutive rows of one block. Immutable once built,
 * refs aside. */
typedef struct {
    uint32_t kind; /* SR_KIND_TRAJ */
    uint32_t n_cols;
    _Atomic uint32_t refs;
    uint32_t n_blocks;
    uint32_t n_segs;
    uint32_t _pad;
    uint64_t bytes;
    /* uint64_t blocks[n_blocks]; sr_traj_col cols[n_cols + 1]; sr_seg segs[n_segs] */
} sr_traj;
typedef struct {
    uint32_t length_flags; /* rows of this column | SR_COL_SQUEEZED */
    uint32_t first_seg;    /* its segments end where the next column's begin */
} sr_traj_col;
typedef struct {
    uint16_t block, col;   /* index into blocks[], column of that block */
    uint32_t start, count;
    int32_t stride;        /* rows start, start + stride, ... */
} sr_seg;
#define SR_COL_SQUEEZED 0x80000000u
#define SR_COL_LENGTH(x) ((x) & 0x7fffffffu)
_Static_assert(sizeof(sr_seg) == 16, "segment");
_Static_assert(sizeof(sr_traj_col) == 8, "column of a trajectory");
_Static_assert(sizeof(sr_traj) == 32, "trajectory");

/* ------------------------------------------------------------------ tables */

/* An item. Under its stripe's lock. Live if ref != 0, which is stored last (release) at insert
 * and first at delete. */
typedef struct {
    /* Generation, table, stripe, slot; kept when the slot is freed, so that a key
     * comes again only after the slot's generations have all been used. */
    uint64_t key;
    _Atomic uint64_t ref; /* trajectory, or block for whole rows */
    uint32_t row_start;
    uint32_t row_count; /* of a block reference: rows | SR_COL_SQUEEZED */
    double priority;
    uint64_t seq;      /* insertion number, unique in the table */
    uint64_t touch;    /* order of insert or last update within the stripe (heap ties) */
    uint64_t inserted_ns; /* CLOCK_REALTIME */
    uint32_t times_sampled;
    uint32_t schema;   /* structure and types of the item */
} sr_slot;
_Static_assert(sizeof(sr_slot) == 64, "a slot fills one cache line");

enum sr_selector {
    SR_SEL_FIFO = 1,
    SR_SEL_LIFO,
    SR_SEL_UNIFORM,
    SR_SEL_PRIORITIZED,
    SR_SEL_MIN_HEAP,
    SR_SEL_MAX_HEAP,
    SR_SEL_EPOCH /* sampler only, one stripe */
};

#define SR_TREE_FAN 8u /* doubles in a cache line */
#define SR_TREE_LEVELS 12u

/* One selector's state in one stripe: a cache of the slots. Under the stripe's lock.
 * Its arrays lie in the stripe's index region, contiguous, committed as slots come into use. */
typedef struct {
    uint32_t kind; /* enum sr_selector; lifo is kept as fifo (one list serves both) */
    uint32_t n_levels; /* sum tree: levels in use, leaves being level 0 */
    double exponent;
    uint64_t count; /* entries */
    uint64_t slots_cap; /* slots for which the arrays have memory */
    uint32_t head, tail; /* list: oldest and newest slot; epoch: head of dense are to be drawn */
    /* list: next, prev; uniform, epoch: dense, position; heap: heap, position; tree: levels */
    uint64_t array_off[SR_TREE_LEVELS];
    uint64_t array_committed[SR_TREE_LEVELS]; /* bytes */
} sr_index;

typedef struct {
    sr_mutex lock;
    /* SYNC POINT, these four: stored under the lock, read without: hints, never trusted. */
    _Atomic uint64_t size;
    _Atomic uint64_t mass_bits;  /* double: sum of weights of the sampler */
    _Atomic uint64_t oldest_seq; /* insertion number of the oldest item; UINT64_MAX: none */
    _Atomic uint64_t remover_mass_bits;
    uint64_t touch_next;
    uint64_t slots_off, slots_max, slots_committed; /* max in slots, committed in bytes */
    uint64_t slots_used; /* slots below this have been used at least once */
    uint64_t hold_seq, hold_slots; /* while a checkpoint is written: see hold.h */
    uint32_t free_head;  /* freed slots, linked through row_start */
    uint32_t table, number; /* which stripe of which table */
    uint32_t sampler, remover; /* index into index[]; the same where one serves both */
    uint32_t n_indexes;
    sr_index index[2];
} __attribute__((aligned(64))) sr_stripe;

typedef struct {
    sr_mutex limiter_lock; /* protects the counters, `rng` and `*_wanted` */
    /* One cache line: all that changes with an insert. */
    int64_t inserts, samples, deletes;
    int64_t pending;  /* inserts allowed and on their way: samplers do not see them yet */
    int64_t pending_samples; /* samples allowed and on their way: inserters do not see them yet */
    uint64_t rng;     /* splitmix64 counter: each operation that draws takes one number */
    _Atomic uint64_t next_seq; /* insertion numbers; taken under a stripe lock */
    uint32_t sample_wanted, insert_wanted; /* somebody was refused since the word last changed */
    /* Changed by sr_table_configure, and the epoch by reset, under all locks of the table. */
    double samples_per_insert, min_diff, max_diff;
    int64_t min_size_to_sample;
    _Atomic uint64_t epoch;
    _Atomic uint32_t insert_free; /* 1: max_diff is infinite, no insert is ever refused */
    uint32_t _pad_free;
    /* Double: the largest priority of an insert or update since the last reset, NaN: of none.
     * Raised under a stripe's lock. */
    _Atomic uint64_t max_priority_bits;
    char _pad0[SR_LINE - 56];
    /* futex: something was inserted, or reset, or closed */
    _Atomic uint32_t sample_seq, sample_waiters;
    _Atomic uint64_t sample_wait_ns; /* here and below: statistics since the last reset */
    uint64_t samples_refused, consumed;
    char _pad1[SR_LINE - 32];
    /* Futex: something was sampled or deleted, or reset, or closed. */
    _Atomic uint32_t insert_seq, insert_waiters;
    _Atomic uint64_t insert_wait_ns, updates;
    uint64_t inserts_refused, deleted;
    char _pad2[SR_LINE - 40];
    _Atomic int64_t num_episodes, num_deleted_episodes, num_unique_samples;
    _Atomic uint64_t missed_updates;
    _Atomic uint32_t poisoned;  /* enum sr_poison; non-zero: every call is refused */
    _Atomic uint32_t resetting; /* a reset has begun and not ended; under all locks of the table */
    uint32_t sampler_kind, remover_kind;
    uint32_t n_stripes, first_stripe; /* in the header's stripe array */
    uint32_t slot_bits, stripe_bits;  /* of a key */
    _Atomic int32_t max_times_sampled; /* as max_size; below 1: no bound */
    _Atomic uint32_t count_bytes; /* 1: the bytes of its items are counted; as max_size */
    int64_t max_size;       /* read under the limiter, changed under all locks of the table */
    int64_t max_size_limit; /* constant: for so many items there is address space */
    double sampler_exponent, remover_exponent;
    uint64_t events_off; /* sr_ring; 0: the table has no extensions. Constant */
    char name[SR_NAME_BYTES];
    _Atomic int64_t max_bytes;  /* as max_size; 0: no bound */
    _Atomic int64_t data_bytes; /* blocks and trajectories of its items, if count_bytes */
} __attribute__((aligned(64))) sr_table;

enum sr_poison {
    SR_SOUND = 0,
    SR_POISON_ITEM,   /* an item refers to nothing, or to what is not whole */
    SR_POISON_CHECK,  /* a stripe, rebuilt, failed its check */
    SR_POISON_MEMORY  /* what the arenas hold contradicts itself */
};

/* -------------------------------------------------- schemas: append-only, never freed */

typedef struct {
    uint64_t hash;
    uint64_t off;  /* SR_KIND_SCHEMA payload: the JSON text */
    uint64_t bytes;
} sr_schema;

#endif
