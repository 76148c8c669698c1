/* shmreplay.h: the contract of the core. For each function: lock state, crash behaviour, errors.
 *
 * The core knows nothing of Python. A process has one sr_store for each store it is attached to,
 * and one sr_session for each place it holds there. Functions are safe to call from several threads
 * unless they take an sr_session: a session belongs to one thread at a time (the caller sees to
 * that).
 *
 * Lock order: see layout.h. No function returns holding a lock.
 *
 * Crash behaviour, everywhere: a slot is published by its last store, so an item is there wholly or
 * not at all. A process that dies inside a lock leaves it to the next as EOWNERDEAD, who repairs
 * the store (sr_repair) and goes on; one that dies between two locks leaves its session's busy word
 * set and what it owes in its session (sr_participant_reclaim). Either way the slots, the ledgers
 * and the open blocks are the truth, and everything else is rebuilt from them. */
#ifndef SHMREPLAY_H
#define SHMREPLAY_H

#include <stdint.h>

#include "account.h"
#include "handles.h"
#include "layout.h"
#include "rows_apart.h"

enum sr_status {
    SR_OK = 0,
    SR_WOULD_BLOCK = -1, /* the rate limiter, or a table's ring of events, says no; unchanged */
    SR_FULL = -2,        /* the store's capacity is used up; see sr_last_detail */
    SR_NOSPACE = -3,     /* the file system (/dev/shm) has no memory left; see sr_last_detail */
    SR_CLOSED = -4,      /* the server closed the store */
    SR_CORRUPT = -5,     /* a check failed; a table is poisoned */
    SR_INVALID = -6,     /* an argument is out of range: the caller's defect */
    SR_VERSION = -7,     /* another layout version or signature; see sr_last_detail */
    SR_LIMIT = -8,       /* no free participant, session or schema entry */
    SR_SYS = -9,         /* a system call failed; errno in sr_last_detail */
    SR_DIRTY = -10,      /* inside the core only: a repair comes first (lock.h) */
    SR_ELSEWHERE = -11,  /* rows lie apart from their block: see rows_apart.h */
    SR_TOO_LARGE = -12   /* an item alone has more bytes than its table may: sr_last_detail */
};

/* What the last failing call on this thread has to say. */
typedef struct {
    uint64_t asked, available; /* bytes, or for SR_VERSION: found and expected */
    uint64_t expected_signature, found_signature;
    int sys_errno;
} sr_detail;
sr_detail *sr_last_detail(void);

/* ---------------------------------------------------------------- store */

typedef struct {
    char name[SR_NAME_BYTES];
    uint32_t sampler_kind, remover_kind;
    double sampler_exponent, remover_exponent;
    int64_t max_size;
    int32_t max_times_sampled;
    uint32_t n_stripes;
    double samples_per_insert, min_diff, max_diff;
    int64_t min_size_to_sample;
    uint64_t seed;
    uint32_t n_events; /* of its ring, SR_EVENTS_MIN to SR_EVENTS_MAX, one stripe; 0: no ring */
    /* For keys of another store: bits of a slot's number in them, 0: as many as it needs; and slots
     * of a stripe at least. */
    uint32_t slot_bits;
    uint64_t slots_min;
    int64_t max_bytes; /* bound on what its items keep in memory (bytes.h); 0: none */
} sr_table_config;

typedef struct {
    uint64_t capacity_bytes, generation, config_bytes;
    uint32_t n_arenas, n_participants, n_sessions, n_tables;
} sr_store_config;

/* Sizes, alignments and the libc mutex of this build, hashed: two builds that differ refuse each
 * other. */
uint64_t sr_layout_signature(void);
/* 1 if keys with so many bits for a slot's number do for such a table. */
int sr_slot_bits_fit(uint32_t bits, int64_t max_size, uint64_t capacity_bytes);
/* Virtual size of the segment that a store of this shape needs. */
uint64_t sr_store_bytes(const sr_store_config *cfg, const sr_table_config *tables);
/* Map a segment of so many bytes, so that huge pages fit it; the descriptor stays the caller's.
 * SR_OK; SR_SYS: there is no address space, and nothing is mapped. */
int sr_store_map(sr_store *st, int fd, uint64_t bytes);
/* Nothing of it is used any more: sr_store_detach, and the mapping goes. */
void sr_store_unmap(sr_store *st);
/* Lay a store out in the (mapped, never used) segment. `config_json` has cfg->config_bytes
 * bytes. The magic word is written last. SR_OK, SR_INVALID, SR_FULL, SR_NOSPACE, SR_SYS. Only
 * the creator, once; a crash leaves a segment without magic. */
int sr_store_format(sr_store *st, const sr_store_config *cfg, const sr_table_config *tables,
                    const char *config_json);
/* Check a mapped segment: magic, version, signature, size, and that every region lies inside.
 * SR_OK, SR_WOULD_BLOCK (no magic yet), SR_VERSION, SR_CORRUPT. */
int sr_store_attach(sr_store *st);
/* Give back what the process keeps about the store; the mapping is the caller's. Touches nothing
 * shared. */
void sr_store_detach(sr_store *st);
/* Mark the store closed and wake everybody that waits. Idempotent. No lock. */
void sr_store_close(sr_store *st);
int sr_store_is_closed(const sr_store *st);
/* The same of slots and selectors of a table of one stripe, and its ring, once it has used so many
 * slots (account.h). */
uint64_t sr_size_index(const sr_table_config *cfg, uint64_t capacity_bytes, uint64_t slots);
/* Background commit: wait (<= 100 ms) for an arena to run low, then sr_commit_ahead. Returns
 * extents added or a negative status. */
int sr_committer_step(sr_store *st);

/* Record who we are in participant entry `number`; the caller holds the record lock on that
 * byte. SR_OK, SR_INVALID, SR_WOULD_BLOCK (entry belongs to a dead participant that has not been
 * cleared). */
int sr_participant_set(sr_store *st, uint32_t number, uint32_t pid, uint64_t start_ticks,
                       uint64_t pid_namespace, const char *role);
void sr_participant_clear(sr_store *st, uint32_t number);
int sr_participant_in_use(const sr_store *st, uint32_t number);
/* The TCP port that names this store on its machine; 0: none. */
void sr_store_set_port(sr_store *st, uint32_t port);
uint32_t sr_store_port(const sr_store *st);

/* Claim a free session (compare-and-swap) and give it a ledger, which needs no memory before it
 * grows. SR_OK, SR_LIMIT, SR_CORRUPT. */
int sr_session_open(sr_store *st, uint32_t participant, enum sr_session_kind kind, sr_ses *out);
/* Drop every reference the session still holds and free it. */
int sr_session_close(sr_ses *ses);
/* Forget the process-local part only: for a handle that a forked child inherited. Touches
 * nothing shared. */
void sr_session_abandon(sr_ses *ses);
/* Of a participant whose record lock is free (it is dead), by who holds that lock now: settle what
 * its operations owed, drop the references of its sessions, free them and its entry. Crash: the
 * next one goes on where this one stopped. Returns the number of sessions freed or a negative
 * status. */
int sr_participant_reclaim(sr_store *st, uint32_t number);

/* After a death inside a lock: under all locks, rebuild everything that follows from the slots, the
 * ledgers and the blocks, and check it. A table whose items do not hold together is poisoned; the
 * others go on. Called by sr_lock; at once SR_OK where the store is not dirty. For who holds no
 * lock. Crash: the store stays dirty and the next one starts anew. SR_OK; SR_SYS (no memory in this
 * process) or SR_CORRUPT (a lock is unusable) with the store as dirty as before. */
int sr_repair(sr_store *st);

/* ---------------------------------------------------------------- schemas */

/* Find or append. `*id` is valid for the life of the store. SR_OK, SR_LIMIT, SR_FULL,
 * SR_NOSPACE, SR_CORRUPT. Takes the schema lock, then an arena lock. */
int sr_schema_intern(sr_store *st, const char *json, uint64_t bytes, uint32_t *id);
/* Find; `*id` is SR_NONE where it is not there. SR_OK, SR_CORRUPT. No lock. */
int sr_schema_find(sr_store *st, const char *json, uint64_t bytes, uint32_t *id);
/* Text of schema `id`, NULL if there is none, or it is not what was written. No lock: entries never
 * change. */
const char *sr_schema_text(const sr_store *st, uint32_t id, uint64_t *bytes);

/* -------------------------------------------------- references: a session's ledger */

/* Room for n more entries. SR_OK, SR_FULL, SR_NOSPACE, SR_CORRUPT. */
int sr_ledger_reserve(sr_ses *ses, uint32_t n);
/* Count `ref` once more and note it in the ledger (room must have been reserved); gives the
 * position. The caller must know that the reference is alive. */
int sr_hold(sr_ses *ses, uint64_t ref, uint32_t *position);
/* Give back n held references; frees what nobody refers to any more. SR_OK, SR_CORRUPT,
 * SR_INVALID. */
int sr_release(sr_ses *ses, uint32_t n, const uint32_t *positions);

/* ---------------------------------------------------------------- steps */

/* A new episode record, held in the ledger. */
int sr_episode_new(sr_ses *ses, uint64_t id, uint64_t *off, uint32_t *position);
/* A new block for rows of these sizes, empty, held in the ledger. Column c of row r lies at
 * sr_block_cell. */
int sr_block_new(sr_ses *ses, uint32_t n_cols, const uint64_t *row_bytes, uint32_t rows_cap,
                 uint64_t *off, uint32_t *position);
/* Bytes that sr_block_new will ask for in a store of so many tables. */
uint64_t sr_block_bytes(uint32_t n_tables, uint32_t n_cols, const uint64_t *row_bytes,
                        uint32_t rows_cap);
/* Number of columns of a block; 0: no sound block lies there. */
uint32_t sr_block_columns(const sr_store *st, uint64_t block);
/* Address of a cell and those of the next count - 1 rows, of row_bytes each; for the owner of the
 * block (rows >= published may be written, rows below only read). NULL: the block has no such
 * cells, or is damaged. */
void *sr_block_cell(const sr_store *st, uint64_t block, uint32_t col, uint32_t row, uint32_t count,
                    uint64_t row_bytes);
/* Publish rows [published, published + n) as rows of `episode`. Only the block's writer. SR_OK,
 * SR_CORRUPT or SR_SYS: nothing published. */
int sr_block_publish(sr_ses *ses, uint64_t block, uint32_t n, uint64_t episode);
/* Copy n_cols row parts into the next row of the block (src[c] has row_bytes[c] bytes, all of them
 * `bytes`) and publish it: as sr_block_publish. */
int sr_block_append(sr_ses *ses, uint64_t block, uint32_t n_cols, uint64_t bytes,
                    const void *const *src, uint64_t episode);

/* Build a trajectory record from n_cols columns; column c has runs
 * [first_run[c], first_run[c + 1]) and flags (SR_COL_SQUEEZED or 0). Counts each distinct block
 * once more; the record itself is held in the ledger. Caller holds references to all blocks. */
int sr_traj_new(sr_ses *ses, uint32_t n_cols, const uint32_t *first_run, const uint32_t *flags,
                const sr_run *runs, uint64_t *off, uint32_t *position);

/* Copy without glibc's slow case; regions do not overlap. */
void sr_copy(void *dst, const void *src, uint64_t n);

/* ---------------------------------------------------------------- tables */

/* An item to insert: `ref` is a trajectory or a block reference that the session holds in its
 * ledger. */
typedef struct {
    uint64_t ref;
    uint32_t row_start, row_count; /* block reference: whole rows, | SR_COL_SQUEEZED */
    double priority; /* NaN: the largest that the table has seen */
    uint32_t schema;
} sr_item;

/* May each of these items be in the table alone? SR_OK; SR_TOO_LARGE: one has more bytes than
 * max_bytes; SR_INVALID, SR_CORRUPT. To be asked when items are made. At most an arena's lock. */
int sr_items_fit(sr_store *st, uint32_t table, uint32_t n, const sr_item *items);
/* Would sr_insert of one item, as far as can be told without a lock, neither wait nor make a system
 * call? A guess: for who has something to let go of before he waits. */
int sr_insert_is_brief(const sr_ses *ses, uint32_t table);
/* Insert items in order, as many as the limiter allows now. *done says how many are in the
 * table; SR_OK if all, SR_WOULD_BLOCK if the limiter stopped it (with *seq to wait on). keys[i]
 * of the first *done are set. Evicts by the remover after each insert, to max_size and max_bytes.
 * Slots count references of their own: the ledger entries stay. Priorities were checked by
 * sr_priority_ok, or are NaN.
 * SR_FULL/SR_NOSPACE: the items before *done are in, the others not at all. */
int sr_insert(sr_ses *ses, uint32_t table, uint32_t n, const sr_item *items, uint64_t *keys,
              uint32_t *done, uint32_t *seq);

typedef struct {
    uint64_t key, ref;
    uint32_t row_start, row_count;
    double probability, priority;
    int64_t table_size;
    int32_t times_sampled;
    uint32_t schema;
    uint32_t position; /* of the pin in the ledger */
    uint32_t _pad;
    uint64_t inserted_ns;
} sr_sampled;

/* Draw up to n items, as many as the limiter allows now, and pin each in the session's ledger.
 * SR_OK if n were drawn; SR_WOULD_BLOCK with *done < n (perhaps 0) and *seq. */
int sr_sample(sr_ses *ses, uint32_t table, uint32_t n, sr_sampled *out, uint32_t *done,
              uint32_t *seq);

/* Pin the items of these keys, without counting as samples: out[] gets those that are there, in the
 * order of the keys, with probability 0. SR_OK, SR_FULL, SR_NOSPACE, SR_CORRUPT. */
int sr_pin(sr_ses *ses, uint32_t table, uint32_t n, const uint64_t *keys, sr_sampled *out,
           uint32_t *found);

/* What a table knows of an item. */
typedef struct {
    uint64_t key, seq, inserted_ns;
    double priority;
    uint32_t times_sampled, _pad;
} sr_listed;
#define SR_LIST_END UINT64_MAX
/* Look through n slots from *cursor (0: the first) on, under one stripe's lock: out[] gets the
 * items in them, and *cursor says where to go on, SR_LIST_END: nowhere. An item that is there all
 * the time is listed once. */
int sr_list(sr_store *st, uint32_t table, uint64_t *cursor, uint32_t n, sr_listed *out,
            uint32_t *got);

/* Wait until the table's samplers (or inserters) should look again: at most timeout_ms <= 100,
 * `seq` as the failing call gave it. */
void sr_wait_sample(sr_store *st, uint32_t table, uint32_t seq, uint32_t timeout_ms);
void sr_wait_insert(sr_store *st, uint32_t table, uint32_t seq, uint32_t timeout_ms);

/* 1 if this table takes this priority, else 0: never NaN; with a prioritized selector neither
 * negative nor infinite, and a finite weight. */
int sr_priority_ok(const sr_store *st, uint32_t table, double priority);
/* New priorities by key; *applied counts the keys that were there. All priorities are checked
 * first: SR_INVALID with nothing changed. Of a table with events at most SR_EVENTS_BATCH keys
 * (else SR_INVALID), as for sr_delete; SR_WOULD_BLOCK where there is no room for as many events. */
int sr_update(sr_ses *ses, uint32_t table, uint32_t n, const uint64_t *keys,
              const double *priorities, uint32_t *applied);
/* Delete by key; *deleted counts. */
int sr_delete(sr_ses *ses, uint32_t table, uint32_t n, const uint64_t *keys, uint32_t *deleted);
/* Other data for an item: `ref` is a trajectory that the session holds (not a block), of structure
 * `schema`. The item keeps all else, its place in every order included; *found says whether it is
 * there. SR_OK; SR_INVALID: the item has another structure (*item_schema), nothing changed;
 * SR_WOULD_BLOCK, of a table with events: no room for one. Crash: the old data or the new. */
int sr_replace(sr_ses *ses, uint32_t table, uint64_t key, uint64_t ref, uint32_t schema,
               uint32_t *found, uint32_t *item_schema);
/* Remove everything and zero the counters; blocked inserts proceed. Holds all the table's locks.
 * SR_WOULD_BLOCK, of a table with events: no room for one. */
int sr_reset(sr_ses *ses, uint32_t table);
/* 1 if the key is in the table now. */
int sr_contains(sr_ses *ses, uint32_t table, uint64_t key);

/* Other bounds and another limiter for a table in use. */
enum sr_change_what { SR_SET_MAX_SIZE = 1, SR_SET_MAX_TIMES_SAMPLED = 2, SR_SET_LIMITER = 4,
                      SR_SET_MAX_BYTES = 8 };
typedef struct {
    uint32_t what; /* SR_SET_..., or-ed */
    int32_t max_times_sampled;
    int64_t max_size;
    double samples_per_insert, min_diff, max_diff;
    int64_t min_size_to_sample;
    int64_t max_bytes; /* 0: no bound */
} sr_table_change;
/* Apply the change under all the table's locks, and wake whoever waits. Items that were sampled as
 * often as is allowed from now on leave, and the remover evicts down to the new bounds. SR_OK;
 * SR_INVALID: out of range (sr_last_detail says the greatest max_size), nothing changed;
 * SR_WOULD_BLOCK, of a table with events: no room to tell of all that goes. What has gone has, no
 * setting has changed, and the call is to be made again. Crash:
 * some items gone that were to go, and each of the seven settings either old or new. */
int sr_table_configure(sr_ses *ses, uint32_t table, const sr_table_change *change);

typedef struct {
    int64_t size, inserts, samples, deletes, pending;
    int64_t num_episodes, num_deleted_episodes, num_unique_samples;
    uint64_t missed_updates;
    uint32_t sample_waiters, insert_waiters, poisoned;
    uint32_t events, events_capacity; /* that wait for the table's extensions */
    uint64_t events_dropped;
    /* Settings as they are now. */
    int32_t max_times_sampled;
    int64_t max_size, max_size_limit, min_size_to_sample;
    double samples_per_insert, min_diff, max_diff;
    int64_t max_bytes, bytes; /* 0, 0: no bound; else what its items keep in memory */
    double max_priority; /* of any insert or update since the last reset; 1 where there was none */
    double mass; /* sum of the sampler's weights: of priority**exponent, else the size */
    /* Since the last reset. Refused: the limiter granted nothing. Items that went: drawn for the
     * last time, by key, and all others, by the remover. */
    uint64_t updates, inserts_refused, samples_refused, insert_wait_ns, sample_wait_ns;
    uint64_t consumed, deleted, evicted;
} sr_table_info;
int sr_table_get_info(sr_store *st, uint32_t table, sr_table_info *out);
/* 1 if a draw is not made again: it takes items out of the table, or through a pass. No lock. */
int sr_table_consumes(const sr_store *st, uint32_t table);
int sr_can_sample(sr_store *st, uint32_t table, int64_t n); /* 1, 0, or a negative status */
int sr_can_insert(sr_store *st, uint32_t table, int64_t n);

/* ---------------------------------------------------------------- events, for extensions
 *
 * A table with a ring of events refuses what it has no room to tell of: sr_insert, sr_sample,
 * sr_update, sr_delete and sr_reset then give SR_WOULD_BLOCK with ses->behind set, having changed
 * nothing; sr_wait_insert (sr_wait_sample) on the word that they gave, or on ses->room_seq, ends
 * when there is room. An event is put under the lock under which the table changes: they are in the
 * order of the changes. Crash, of who makes a change: it is there with its event or not at all; a
 * draw that is not reported may count in its item's times_sampled. Of who takes events: those that
 * it took are lost. */

/* Its name, NULL if there is no such table. */
const char *sr_table_name(const sr_store *st, uint32_t table);
/* 1 if the table has a ring. No lock. */
int sr_table_has_events(const sr_store *st, uint32_t table);
/* Take at most `max` events, the oldest first. kinds[i] (enum sr_event_kind) of *n events; those
 * with an item have it in items[], in their order, *n_items of them, pinned in the ledger.
 * From then on the table counts as served. Also of a closed store. SR_OK (*n may be 0), SR_INVALID,
 * SR_CORRUPT, or what the ledger's growth says. */
int sr_events_take(sr_ses *ses, uint32_t table, uint32_t max, sr_sampled *items, uint32_t *kinds,
                   uint32_t *n_items, uint32_t *n);
/* The word that changes when events are put, and sleeping while it is `seq`, at most timeout_ms
 * <= 100. */
uint32_t sr_events_seq(const sr_store *st);
void sr_events_wait(sr_store *st, uint32_t seq, uint32_t timeout_ms);
/* 1 if the table refuses changes for want of room, else 0, or a negative status. */
int sr_events_behind(sr_store *st, uint32_t table);
/* The server, whose creator_pid was read before it was found dead, takes no events any more: from
 * now on they are dropped and counted, until sr_events_take. Unless it has a successor already. */
int sr_events_unserve(sr_store *st, uint32_t table, uint64_t server);

/* ---------------------------------------------------------------- reading */

/* Number of columns of a pinned item, 0 where it is damaged. Of column c: length (rows) and
 * squeeze; bytes of one row. SR_OK, SR_INVALID (no such column), SR_CORRUPT. */
uint32_t sr_item_columns(const sr_store *st, const sr_sampled *item);
int sr_item_column(const sr_store *st, const sr_sampled *item, uint32_t c, uint32_t *length_flags,
                   uint64_t *row_bytes);
/* If the column's rows lie one after the other in one block, and not apart from it: its address,
 * else NULL. */
const void *sr_item_view(const sr_store *st, const sr_sampled *item, uint32_t c);
/* Copy column c of each of n pinned items: dst[c] + i * bytes[c], where bytes[c] = length *
 * row_bytes. Every item must have n_cols columns and these byte counts: SR_INVALID names one
 * that has not in *bad, SR_CORRUPT one that is damaged, SR_ELSEWHERE one with rows that lie
 * apart: such items are to be read run by run. Runs without locks. */
int sr_gather(const sr_store *st, uint32_t n, const sr_sampled *items, uint32_t n_cols,
              char *const *dst, const uint64_t *bytes, uint32_t *bad);
/* The same, with item i at dst[c] + where[i] * bytes[c], among those of other batches. */
int sr_gather_to(const sr_store *st, uint32_t n, const sr_sampled *items, const uint32_t *where,
                 uint32_t n_cols, char *const *dst, const uint64_t *bytes, uint32_t *bad);
/* Run `number` of column c of a pinned item: 1; 0: the column has no more; SR_CORRUPT. */
int sr_item_run(const sr_store *st, const sr_sampled *item, uint32_t c, uint32_t number,
                sr_run *out);

/* ---------------------------------------------------------------- check */

/* Walk one table, or all and the arenas (table = SR_NONE), under all its locks. 0, or a negative
 * status with a line in `why` (a message of at most why_bytes). Selectors against slots, counts
 * against slots, references against what refers to them (only when table is SR_NONE),
 * allocators. */
int sr_check(sr_store *st, uint32_t table, char *why, uint64_t why_bytes);

#endif
