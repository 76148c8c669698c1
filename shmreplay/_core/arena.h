/* arena.h: committing memory, and allocating it: two-level segregated fit (Masmano, Ripoll, Crespo,
 * Real 2004).
 *
 * Layer: lock.h below; steps, table and store above. See layout.h for the structures. */
#ifndef SR_ARENA_H
#define SR_ARENA_H

#include "internal.h"

/* Give memory to [off, off + bytes) of the segment, rounded out to pages: posix_fallocate (all
 * or nothing, retried on EINTR a bounded number of times with signals blocked), so that a full
 * /dev/shm is an error here and never SIGBUS later. `charge`: bytes to count against the
 * capacity (0 if that was done already). Returns SR_OK, SR_FULL (capacity), SR_NOSPACE (no
 * memory in the file system), SR_SYS. On an error nothing is charged. Fills sr_last_detail()
 * (asked, available). Lock state: any. Crash: memory committed and not yet recorded is committed
 * again by the next. */
int sr_commit(sr_store *st, uint64_t off, uint64_t bytes, uint64_t charge);

/* Take free memory at the ends of the arenas away from them, at least `bytes` if there is so much,
 * and give it back to the file system and to the capacity: for slots and selectors, which cannot
 * lie in an arena. Returns the bytes given back. Lock state: takes arena locks, one at a time.
 * Crash: inside an arena's lock. */
uint64_t sr_give_back(sr_store *st, uint64_t bytes);

/* Bytes of the free chunk at the arena's end, 0 if there is none. Under its lock. */
uint64_t sr_arena_tail(const sr_store *st, const sr_arena *a);

/* Bytes that the file system behind the segment has free; 0 where it does not say. */
uint64_t sr_file_system_left(const sr_store *st);

/* Populate the pages of this process's mapping (MADV_POPULATE_WRITE), ignoring kernels that
 * cannot. */
void sr_populate(sr_store *st, uint64_t off, uint64_t bytes);

/* The same once for each page of this process: many short faults become one call. */
void sr_touch(sr_store *st, uint64_t off, uint64_t bytes);
/* The same for an allocation and what lies around it in its arena. */
void sr_touch_around(sr_store *st, uint64_t off, uint64_t bytes);

/* Make an empty arena over [start, end). The range must not be in use. SR_OK, SR_SYS. */
int sr_arena_init(sr_store *st, sr_arena *a, uint64_t start, uint64_t end);

/* Allocate `bytes` of payload, 64-byte aligned, in the session's preferred arena, else in any
 * other. The offset is also stored in *inflight (if not NULL) under the arena lock, so that
 * repair can see it before anything refers to it. Order: free lists of the preferred arena;
 * commit more there (at least one extent, but a smaller step where the capacity does not allow a
 * whole one); free lists of the other arenas. Contents are not cleared. Returns SR_OK, SR_FULL,
 * SR_NOSPACE, SR_CORRUPT; SR_DIRTY (lock.h) with nothing allocated. Lock state: takes arena locks,
 * one at a time; caller may hold any lock that comes before. */
int sr_alloc(sr_store *st, uint32_t arena, enum sr_kind kind, uint64_t bytes,
             _Atomic uint64_t *inflight, uint64_t *off);

/* Return an allocation. `off` must be a live payload offset: checked (range, alignment, kind,
 * not free) -> SR_CORRUPT. Coalesces with free neighbours. Takes the arena's lock; SR_DIRTY: it is
 * not freed. */
int sr_free(sr_store *st, uint64_t off);
/* The same for what stands in an inflight word, which is cleared under the same lock, first: dying
 * after that leaves it to the repair, dying before it leaves the word. */
int sr_free_inflight(sr_store *st, _Atomic uint64_t *inflight);

/* sr_alloc and sr_free_inflight for who holds no lock: repair where that is needed, never
 * SR_DIRTY. */
int sr_alloc_outer(sr_store *st, uint32_t arena, enum sr_kind kind, uint64_t bytes,
                   _Atomic uint64_t *inflight, uint64_t *off);
int sr_free_outer(sr_store *st, _Atomic uint64_t *inflight);

/* Usable payload bytes of a live allocation, 0 if `off` is not one. No lock: for the holder of a
 * reference. */
uint64_t sr_alloc_bytes(const sr_store *st, uint64_t off);
/* Number of the arena in whose range `off` lies, SR_NONE: none. */
uint32_t sr_arena_number(const sr_store *st, uint64_t off);
enum sr_kind sr_alloc_kind(const sr_store *st, uint64_t off);

/* The committer's step, in the background: where an arena has less than half an extent free (in
 * one piece or not) and the capacity allows, commit and populate one extent outside the lock,
 * then hand it to the allocator under the lock (if nobody else moved committed_end meanwhile).
 * Returns the number of extents added, or a negative sr_status. */
int sr_commit_ahead(sr_store *st);

/* Walk the arena: chunk sizes tile [start, committed_end), flags agree with neighbours, free
 * chunks are on exactly the right list, no two adjacent free chunks, bitmaps, used/free/n_allocs
 * agree. Returns 0 or a negative line number of the failed check; `visit` (may be NULL) is
 * called for each live allocation. Takes the arena's lock. */
typedef void (*sr_visit)(void *ctx, uint64_t off, enum sr_kind kind, uint64_t payload_bytes);
int sr_arena_check(sr_store *st, uint32_t arena, sr_visit visit, void *ctx);
/* Make the books anew, for sr_repair: chunks, lists and sums from what is alive. `next` gives the
 * first live payload at or after `from` and before `end` (0: none); the headers of live chunks are
 * sound, nothing else is. SR_OK, or SR_CORRUPT where they overlap or leave the arena. Under the
 * lock. */
/* Do its range and its committed end make sense? */
int sr_arena_bounds_ok(const sr_store *st, const sr_arena *a);
typedef uint64_t (*sr_next_live)(void *ctx, uint64_t from, uint64_t end);
int sr_arena_rebuild(sr_store *st, sr_arena *a, sr_next_live next, void *ctx);

/* The same for who holds the arena's lock. */
int sr_arena_check_locked(const sr_store *st, const sr_arena *a, sr_visit visit, void *ctx);

#endif
