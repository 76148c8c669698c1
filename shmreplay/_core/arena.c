#define _GNU_SOURCE
#include "arena.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/statvfs.h>

#include "lock.h"

/* How the bytes lie: chunks tile [start + 48, committed_end - 16), each a multiple of 64 bytes, so
 * that every payload (16 bytes after its header) starts on a cache line. The last 16 bytes are the
 * header of an end marker: size 0, never free. Adding an extent turns the marker into an ordinary
 * chunk. */
#define FIRST_CHUNK 48u
#define OVERHEAD (FIRST_CHUNK + SR_CHUNK_HEAD)
#define CHUNK_MIN 64u
#define PAYLOAD_MAX (1ull << 46)
#define KIND_SHIFT 56
#define RESERVED_BITS 0x3cull
#define FL_SHIFT 6u         /* the first class starts at 2^6 */
#define SL_LOG2 4u          /* 16 second-level classes */
#define CLASS_WALK 32u      /* chunks tried in the one class whose members may or may not fit */
#define FALLOCATE_TRIES 100 /* against EINTR; all signals but the fatal one are blocked meanwhile */

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

/* ------------------------------------------------------------------ memory for the segment */

/* SYNC POINT: compare-and-swap rather than add and take back: a refused charge is never visible to
 * others, who would be refused in turn although there is room for them. */
static int charge_capacity(sr_header *hdr, uint64_t bytes) {
    uint64_t have = atomic_load_explicit(&hdr->committed_bytes, memory_order_relaxed);
    do {
        if (have > hdr->capacity_bytes || bytes > hdr->capacity_bytes - have) return SR_FULL;
    } while (!atomic_compare_exchange_weak_explicit(&hdr->committed_bytes, &have, have + bytes,
                                                    memory_order_relaxed, memory_order_relaxed));
    return SR_OK;
}

static uint64_t capacity_left(const sr_header *hdr) {
    uint64_t have = atomic_load_explicit(&hdr->committed_bytes, memory_order_relaxed);
    return have < hdr->capacity_bytes ? hdr->capacity_bytes - have : 0;
}

static uint64_t file_system_left(int fd) {
    struct statvfs vfs;
    if (fstatvfs(fd, &vfs) != 0) return 0; /* only a figure for the message of another error */
    return (uint64_t)vfs.f_bavail * vfs.f_frsize;
}

static int fail(int status, uint64_t asked, uint64_t available, int sys_errno) {
    sr_detail *d = sr_last_detail();
    *d = (sr_detail){.asked = asked, .available = available, .sys_errno = sys_errno};
    return status;
}

/* Returns an errno. A signal makes tmpfs undo the whole call and return EINTR: a profiler's timer
 * could do so for ever. */
static int fallocate_uninterrupted(int fd, uint64_t off, uint64_t bytes) {
    sigset_t all, old;
    sigfillset(&all);
    int rc = pthread_sigmask(SIG_SETMASK, &all, &old);
    SR_ASSERT(rc == 0);
    for (int i = 0; i < FALLOCATE_TRIES; i++) {
        rc = posix_fallocate(fd, (off_t)off, (off_t)bytes);
        if (rc != EINTR) break;
    }
    int restored = pthread_sigmask(SIG_SETMASK, &old, NULL);
    SR_ASSERT(restored == 0);
    return rc;
}

int sr_commit(sr_store *st, uint64_t off, uint64_t bytes, uint64_t charge) {
    if (bytes == 0 || off > st->bytes || bytes > st->bytes - off) {
        return fail(SR_INVALID, bytes, st->bytes, 0);
    }
    uint64_t from = off & ~(uint64_t)(SR_PAGE - 1), to = sr_align(off + bytes, SR_PAGE);
    if (charge != 0 && charge_capacity(st->hdr, charge) != SR_OK) {
        return fail(SR_FULL, charge, capacity_left(st->hdr), 0);
    }
    /* Crash window: charged and not recorded. Callers that charge hold the arena (or stripe) lock,
     * so a death here marks the store dirty, and the repair counts again. */
    int err = fallocate_uninterrupted(st->fd, from, to - from);
    if (SR_LIKELY(err == 0)) return SR_OK;
    if (charge != 0) {
        atomic_fetch_sub_explicit(&st->hdr->committed_bytes, charge, memory_order_relaxed);
    }
    int none = err == ENOSPC || err == ENOMEM || err == EDQUOT;
    return fail(none ? SR_NOSPACE : SR_SYS, bytes, file_system_left(st->fd), err);
}

void sr_populate(sr_store *st, uint64_t off, uint64_t bytes) {
    if (bytes == 0 || sr_at(st, off, bytes) == NULL) return;
    uint64_t from = off & ~(uint64_t)(SR_PAGE - 1), to = sr_align(off + bytes, SR_PAGE);
    /* Advice: without it the first touch of each page takes a fault, and that is all. Hence no look
     * at the result. */
    (void)madvise(st->base + from, to - from, MADV_POPULATE_WRITE);
}

/* ------------------------------------------------------------------ chunks */

static inline sr_arena *arenas(const sr_store *st) { return sr_ptr(st, st->hdr->arenas_off); }
static inline sr_chunk *chunk_at(const sr_store *st, uint64_t c) { return sr_ptr(st, c); }
static inline sr_free_links *links_at(const sr_store *st, uint64_t c) {
    return sr_ptr(st, c + SR_CHUNK_HEAD);
}

/* SYNC POINT: written under the arena lock; read without it by whoever holds the chunk
 * (sr_alloc_bytes), while a neighbour may be flipping SR_CHUNK_PREV_FREE in the same word. Relaxed:
 * size and kind do not change while it is held. */
static inline uint64_t flags_get(const sr_chunk *c) {
    return __atomic_load_n(&c->size_flags, __ATOMIC_RELAXED);
}
static inline void flags_set(sr_chunk *c, uint64_t v) {
    __atomic_store_n(&c->size_flags, v, __ATOMIC_RELAXED);
}
/* SYNC POINT: the same for the end of the committed range; it only grows. */
static inline uint64_t committed_end(const sr_arena *a) {
    return __atomic_load_n(&a->committed_end, __ATOMIC_RELAXED);
}

static inline uint64_t size_of(uint64_t flags) { return flags & SR_CHUNK_SIZE_MASK; }
static inline uint32_t kind_of(uint64_t flags) { return (uint32_t)(flags >> KIND_SHIFT); }

/* Could a chunk header of this arena lie at c? (Not: does one.) */
static inline int in_arena(const sr_store *st, const sr_arena *a, uint64_t c) {
    uint64_t end = committed_end(a);
    return c % SR_LINE == FIRST_CHUNK && c >= a->start + FIRST_CHUNK && end <= st->bytes &&
           c < end && end - c > SR_CHUNK_HEAD;
}
static inline int size_fits(const sr_arena *a, uint64_t c, uint64_t size) {
    return size >= CHUNK_MIN && size <= committed_end(a) - SR_CHUNK_HEAD - c;
}

static inline void class_of(uint64_t size, uint32_t *fl, uint32_t *sl) {
    uint32_t top = 63u - (uint32_t)__builtin_clzll(size);
    *fl = top - FL_SHIFT;
    *sl = (uint32_t)(size >> (top - SL_LOG2)) & (SR_SL_COUNT - 1);
}

/* Everything that unlinking this free chunk will rely on. */
static inline int free_chunk_ok(const sr_store *st, const sr_arena *a, uint64_t c) {
    if (!in_arena(st, a, c)) return 0;
    uint64_t flags = flags_get(chunk_at(st, c)), size = size_of(flags);
    if (flags != (size | SR_CHUNK_FREE) || !size_fits(a, c, size)) return 0;
    sr_free_links *l = links_at(st, c);
    uint32_t fl, sl;
    class_of(size, &fl, &sl);
    if (fl >= SR_FL_COUNT) return 0;
    if (l->prev == 0 ? a->head[fl][sl] != c
                     : (!in_arena(st, a, l->prev) || links_at(st, l->prev)->next != c)) {
        return 0;
    }
    return l->next == 0 || (in_arena(st, a, l->next) && links_at(st, l->next)->prev == c);
}

static inline void list_remove(sr_store *st, sr_arena *a, uint64_t c, uint64_t size) {
    sr_free_links *l = links_at(st, c);
    if (l->next != 0) links_at(st, l->next)->prev = l->prev;
    if (l->prev != 0) {
        links_at(st, l->prev)->next = l->next;
        return;
    }
    uint32_t fl, sl;
    class_of(size, &fl, &sl);
    a->head[fl][sl] = l->next;
    if (l->next == 0) {
        a->sl_bitmap[fl] &= ~(1u << sl);
        if (a->sl_bitmap[fl] == 0) a->fl_bitmap &= ~(1ull << fl);
    }
}

/* Write the header of a free chunk, tell the chunk after it, and put it on its list. */
static inline void list_add(sr_store *st, sr_arena *a, uint64_t c, uint64_t size) {
    sr_chunk *after = chunk_at(st, c + size);
    flags_set(chunk_at(st, c), size | SR_CHUNK_FREE);
    flags_set(after, flags_get(after) | SR_CHUNK_PREV_FREE);
    after->prev_size = size;
    uint32_t fl, sl;
    class_of(size, &fl, &sl);
    uint64_t old = a->head[fl][sl];
    SR_ASSERT(old == 0 || in_arena(st, a, old));
    *links_at(st, c) = (sr_free_links){.next = old, .prev = 0};
    if (old != 0) links_at(st, old)->prev = c;
    a->head[fl][sl] = c;
    a->sl_bitmap[fl] |= 1u << sl;
    a->fl_bitmap |= 1ull << fl;
}

/* A free chunk of at least `size` bytes in *found (0: none). Its list entry is checked, not
 * removed. */
static inline int find_fit(const sr_store *st, const sr_arena *a, uint64_t size, uint64_t *found) {
    uint32_t fl, sl;
    *found = 0;
    class_of(size, &fl, &sl);
    /* The class of `size` itself holds chunks a little smaller and a little larger. Its first is
     * worth a look: blocks of one writer all have one size, and without this none of them would fit
     * where another was. */
    uint64_t c = a->head[fl][sl];
    if (c == 0 || !in_arena(st, a, c) || size_of(flags_get(chunk_at(st, c))) < size) {
        uint32_t bits = a->sl_bitmap[fl] & (~1u << sl);
        if (bits == 0) {
            uint64_t up = a->fl_bitmap & (~1ull << fl);
            if (up == 0) return SR_OK;
            fl = (uint32_t)__builtin_ctzll(up);
            if (fl >= SR_FL_COUNT) return SR_CORRUPT;
            bits = a->sl_bitmap[fl];
        }
        if ((bits & ((1u << SR_SL_COUNT) - 1)) == 0) return SR_CORRUPT;
        c = a->head[fl][__builtin_ctz(bits)];
    }
    if (!free_chunk_ok(st, a, c) || size_of(flags_get(chunk_at(st, c))) < size) return SR_CORRUPT;
    *found = c;
    return SR_OK;
}

/* Before more memory is committed: further into the class of `size`, where some chunks fit and some
 * do not. */
static int find_in_class(const sr_store *st, const sr_arena *a, uint64_t size, uint64_t *found) {
    uint32_t fl, sl;
    class_of(size, &fl, &sl);
    uint64_t c = a->head[fl][sl];
    for (uint32_t i = 0; i < CLASS_WALK && c != 0; i++, c = links_at(st, c)->next) {
        if (!free_chunk_ok(st, a, c)) return SR_CORRUPT;
        if (size_of(flags_get(chunk_at(st, c))) < size) continue;
        *found = c;
        return SR_OK;
    }
    return SR_OK;
}

/* ------------------------------------------------------------------ growing */

/* Hand `bytes` of committed memory after committed_end to the allocator. Under the lock. */
static void add_extent(sr_store *st, sr_arena *a, uint64_t bytes) {
    uint64_t end = committed_end(a), c, size;
    if (end == a->start) {
        c = end + FIRST_CHUNK;
        size = bytes - OVERHEAD;
    } else {
        c = end - SR_CHUNK_HEAD; /* the end marker becomes the header of the new chunk */
        size = bytes;
        sr_chunk *marker = chunk_at(st, c);
        if (flags_get(marker) & SR_CHUNK_PREV_FREE) {
            uint64_t last = marker->prev_size;
            list_remove(st, a, c - last, last);
            c -= last;
            size += last;
            a->free_bytes -= last;
        }
    }
    flags_set(chunk_at(st, end + bytes - SR_CHUNK_HEAD), (uint64_t)SR_KIND_END << KIND_SHIFT);
    __atomic_store_n(&a->committed_end, end + bytes, __ATOMIC_RELAXED);
    list_add(st, a, c, size);
    a->free_bytes += size;
}

/* The free chunk before the end marker: its size, or 0. UINT64_MAX where the marker or the chunk is
 * damaged. */
static uint64_t tail_bytes(const sr_store *st, const sr_arena *a) {
    uint64_t end = committed_end(a);
    if (end == a->start) return 0;
    if (end < a->start + SR_PAGE || end > a->end || end > st->bytes) return UINT64_MAX;
    sr_chunk *marker = chunk_at(st, end - SR_CHUNK_HEAD);
    uint64_t flags = flags_get(marker), last = marker->prev_size;
    if ((flags & ~SR_CHUNK_PREV_FREE) != (uint64_t)SR_KIND_END << KIND_SHIFT) return UINT64_MAX;
    if (!(flags & SR_CHUNK_PREV_FREE)) return 0;
    if (last > end - SR_CHUNK_HEAD || !free_chunk_ok(st, a, end - SR_CHUNK_HEAD - last) ||
        size_of(flags_get(chunk_at(st, end - SR_CHUNK_HEAD - last))) != last) {
        return UINT64_MAX;
    }
    return last;
}

static uint64_t extent_bytes(const sr_store *st) {
    return sr_align(st->hdr->extent_bytes, SR_PAGE);
}

/* Commit so much that the last chunk before committed_end is free and has `size` bytes: *found.
 * Under the lock, system call and all: whoever comes for memory while there is none has to wait for
 * it anyway. */
static int grow(sr_store *st, sr_arena *a, uint64_t size, uint64_t *found) {
    uint64_t tail = tail_bytes(st, a), end = committed_end(a);
    if (tail == UINT64_MAX) return SR_CORRUPT;
    if (tail < size) {
        uint64_t room = a->end - end;
        uint64_t least = sr_align(size - tail + (end == a->start ? OVERHEAD : 0), SR_PAGE);
        if (least > room) return fail(SR_FULL, least, room, 0);
        uint64_t step = extent_bytes(st);
        if (step > room) step = room;
        if (step < least) step = least;
        int rc = sr_commit(st, end, step, step);
        if ((rc == SR_FULL || rc == SR_NOSPACE) && step > least) {
            step = least;
            rc = sr_commit(st, end, step, step);
        }
        if (rc != SR_OK) return rc;
        add_extent(st, a, step);
        tail = tail_bytes(st, a);
        SR_ASSERT(tail != UINT64_MAX && tail >= size);
    }
    *found = committed_end(a) - SR_CHUNK_HEAD - tail;
    return SR_OK;
}

/* What the committer should add to this arena now; 0: nothing. Under the lock. */
static inline uint64_t ahead_bytes(const sr_store *st, const sr_arena *a) {
    if (SR_LIKELY(a->free_bytes >= st->hdr->extent_bytes / 2)) return 0;
    uint64_t step = extent_bytes(st), room = a->end - committed_end(a);
    if (step > room) step = room;
    return step <= capacity_left(st->hdr) ? step : 0;
}

/* 1 if an extent (or what others left of it) was added, 0 if not, or a negative status. */
static int commit_ahead(sr_store *st, sr_arena *a) {
    int rc = sr_lock(st, &a->lock);
    if (rc != SR_OK) return rc;
    uint64_t from = committed_end(a), bytes = ahead_bytes(st, a);
    sr_unlock(&a->lock);
    if (bytes == 0) return 0;
    /* Not charged yet. Crash window: dying here leaves pages that nobody counts and that the next
     * commit of this range uses; a charge would stay behind for ever, since no lock is held that
     * could tell of our death. */
    rc = sr_commit(st, from, bytes, 0);
    if (rc != SR_OK) return rc;
    sr_populate(st, from, bytes);
    rc = sr_lock(st, &a->lock);
    if (rc != SR_OK) return rc;
    /* An allocation may have grown the arena meanwhile, into the pages that we just committed: the
     * rest is still good. Where the capacity went elsewhere the pages stay, uncounted, for the
     * arena's next growth: giving them back could take them from under another committer. */
    uint64_t end = committed_end(a), left = from + bytes - end;
    int added = 0;
    if (tail_bytes(st, a) == UINT64_MAX) {
        added = SR_CORRUPT;
    } else if (end >= from && end < from + bytes && charge_capacity(st->hdr, left) == SR_OK) {
        add_extent(st, a, left);
        added = 1;
    }
    sr_unlock(&a->lock);
    return added;
}

int sr_commit_ahead(sr_store *st) {
    int added = 0;
    for (uint32_t i = 0; i < st->hdr->n_arenas; i++) {
        int rc = commit_ahead(st, &arenas(st)[i]);
        if (rc < 0) return added > 0 && rc != SR_CORRUPT ? added : rc;
        added += rc;
    }
    return added;
}

/* ------------------------------------------------------------------ allocating */

void sr_arena_init(sr_store *st, sr_arena *a, uint64_t start, uint64_t end) {
    SR_ASSERT(start % SR_PAGE == 0 && end % SR_PAGE == 0 && start < end && end <= st->bytes);
    memset(a, 0, sizeof *a);
    int rc = sr_mutex_init(&a->lock);
    SR_ASSERT(rc == SR_OK);
    a->start = a->committed_end = start;
    a->end = end;
}

/* Make `size` bytes at the front of free chunk c an allocation; the rest stays free. Under the
 * lock. */
static inline void carve(sr_store *st, sr_arena *a, uint64_t c, uint64_t size, enum sr_kind kind) {
    uint64_t whole = size_of(flags_get(chunk_at(st, c)));
    list_remove(st, a, c, whole);
    if (whole == size) {
        sr_chunk *after = chunk_at(st, c + whole);
        flags_set(after, flags_get(after) & ~SR_CHUNK_PREV_FREE);
    } else {
        list_add(st, a, c + size, whole - size);
    }
    flags_set(chunk_at(st, c), size | (uint64_t)kind << KIND_SHIFT);
    a->used_bytes += size;
    a->free_bytes -= size;
    a->n_allocs++;
}

/* One arena: SR_FULL if it has no chunk that fits and may not (or cannot) grow. */
static inline int alloc_in(sr_store *st, sr_arena *a, enum sr_kind kind, uint64_t size,
                           int may_grow, _Atomic uint64_t *inflight, uint64_t *off) {
    uint64_t c, low = 0;
    int rc = sr_lock(st, &a->lock);
    if (SR_UNLIKELY(rc != SR_OK)) return rc;
    rc = find_fit(st, a, size, &c);
    if (SR_UNLIKELY(rc == SR_OK && c == 0)) {
        rc = find_in_class(st, a, size, &c);
        if (rc == SR_OK && c == 0) rc = may_grow ? grow(st, a, size, &c) : SR_FULL;
    }
    if (SR_LIKELY(rc == SR_OK)) {
        carve(st, a, c, size, kind);
        *off = c + SR_CHUNK_HEAD;
        /* SYNC POINT: read by a repair, which holds all locks. Dying before the unlock leaves the
         * lock to tell of it. */
        if (inflight != NULL) atomic_store_explicit(inflight, *off, memory_order_release);
        low = ahead_bytes(st, a);
    }
    sr_unlock(&a->lock);
    /* SYNC POINT: a committer that starts to wait just now is missed; it looks again within its
     * slice of 100 ms. */
    if (SR_UNLIKELY(low != 0) &&
        atomic_load_explicit(&st->hdr->commit_waiters, memory_order_relaxed) != 0) {
        sr_futex_wake(&st->hdr->commit_seq, &st->hdr->commit_waiters, 1);
    }
    return rc;
}

static int alloc_failed(sr_store *st, int status, uint64_t bytes) {
    int sys_errno = status == SR_FULL ? 0 : sr_last_detail()->sys_errno;
    uint64_t left = status == SR_FULL ? capacity_left(st->hdr) : file_system_left(st->fd);
    for (uint32_t i = 0; i < st->hdr->n_arenas; i++) {
        sr_arena *a = &arenas(st)[i];
        int rc = sr_lock(st, &a->lock);
        if (rc != SR_OK) return rc;
        left += a->free_bytes;
        sr_unlock(&a->lock);
    }
    return fail(status, bytes, left, sys_errno);
}

int sr_alloc(sr_store *st, uint32_t arena, enum sr_kind kind, uint64_t bytes,
             _Atomic uint64_t *inflight, uint64_t *off) {
    uint32_t n = st->hdr->n_arenas;
    if (arena >= n || kind <= SR_KIND_NONE || kind >= SR_KIND_END) return SR_INVALID;
    if (bytes > PAYLOAD_MAX) return alloc_failed(st, SR_FULL, bytes);
    uint64_t size = sr_align(bytes + SR_CHUNK_HEAD, CHUNK_MIN);
    int rc = alloc_in(st, &arenas(st)[arena], kind, size, 1, inflight, off);
    if (SR_LIKELY(rc == SR_OK) || rc == SR_CORRUPT) return rc;
    /* Elsewhere what is there already; then, if it was only this arena that is at its end, more
     * memory elsewhere. */
    for (int may_grow = 0; may_grow <= (rc == SR_FULL); may_grow++) {
        for (uint32_t i = 1; i < n; i++) {
            sr_arena *a = &arenas(st)[(arena + i) % n];
            int other = alloc_in(st, a, kind, size, may_grow, inflight, off);
            if (other == SR_OK || other == SR_CORRUPT) return other;
            if (other != SR_FULL) rc = other;
        }
    }
    return alloc_failed(st, rc, bytes);
}

/* ------------------------------------------------------------------ freeing */

/* The arena whose range holds `off`, NULL if none. Ranges are constant, of one size, one after the
 * other. */
static inline sr_arena *arena_of(const sr_store *st, uint64_t off) {
    sr_arena *first = arenas(st), *a = first;
    uint64_t span = first->end - first->start;
    if (off < first->start) return NULL;
    if (off >= first->end) {
        uint64_t i = span == 0 ? UINT64_MAX : (off - first->start) / span;
        if (i >= st->hdr->n_arenas) return NULL;
        a = first + i;
    }
    return off >= a->start && off < a->end ? a : NULL;
}

/* Header word of the live allocation at payload `off`, 0 if it is none. */
static inline uint64_t live_flags(const sr_store *st, const sr_arena *a, uint64_t off) {
    uint64_t c = off - SR_CHUNK_HEAD;
    if (!in_arena(st, a, c)) return 0;
    uint64_t flags = flags_get(chunk_at(st, c));
    uint32_t kind = kind_of(flags);
    int ok = (flags & (SR_CHUNK_FREE | RESERVED_BITS)) == 0 && kind > SR_KIND_NONE &&
             kind < SR_KIND_END && size_fits(a, c, size_of(flags));
    return ok ? flags : 0;
}

int sr_free(sr_store *st, uint64_t off) {
    sr_arena *a = off % SR_LINE == 0 ? arena_of(st, off) : NULL;
    if (SR_UNLIKELY(a == NULL)) return SR_CORRUPT;
    int rc = sr_lock(st, &a->lock);
    if (SR_UNLIKELY(rc != SR_OK)) return rc;
    uint64_t c = off - SR_CHUNK_HEAD, flags = live_flags(st, a, off), size = size_of(flags);
    uint64_t after = c + size, before = 0;
    uint64_t after_flags = flags == 0 ? 0 : flags_get(chunk_at(st, after));
    /* All checks come before the first change: a refused free leaves everything as it was. */
    int ok = flags != 0 && !(after_flags & SR_CHUNK_PREV_FREE) && size <= a->used_bytes;
    if (ok && (after_flags & SR_CHUNK_FREE)) ok = free_chunk_ok(st, a, after);
    if (ok && (flags & SR_CHUNK_PREV_FREE)) {
        before = chunk_at(st, c)->prev_size;
        ok = before != 0 && before < c && free_chunk_ok(st, a, c - before) &&
             size_of(flags_get(chunk_at(st, c - before))) == before;
    }
    if (SR_LIKELY(ok)) {
        a->used_bytes -= size;
        a->free_bytes += size;
        a->n_allocs--;
        /* Even where it becomes the inside of a larger free chunk: a second free must find it
         * free. */
        flags_set(chunk_at(st, c), SR_CHUNK_FREE);
        if (after_flags & SR_CHUNK_FREE) {
            list_remove(st, a, after, size_of(after_flags));
            size += size_of(after_flags);
        }
        if (before != 0) list_remove(st, a, c - before, before);
        list_add(st, a, c - before, size + before);
    }
    sr_unlock(&a->lock);
    return ok ? SR_OK : SR_CORRUPT;
}

uint64_t sr_alloc_bytes(const sr_store *st, uint64_t off) {
    const sr_arena *a = off % SR_LINE == 0 ? arena_of(st, off) : NULL;
    uint64_t flags = a == NULL ? 0 : live_flags(st, a, off);
    return flags == 0 ? 0 : size_of(flags) - SR_CHUNK_HEAD;
}

enum sr_kind sr_alloc_kind(const sr_store *st, uint64_t off) {
    const sr_arena *a = off % SR_LINE == 0 ? arena_of(st, off) : NULL;
    return a == NULL ? SR_KIND_NONE : (enum sr_kind)kind_of(live_flags(st, a, off));
}

/* ------------------------------------------------------------------ checking */

typedef struct {
    uint64_t used, free, n_allocs;
    uint64_t free_mark; /* sum of the free chunks' scrambled offsets: a set in a word */
} arena_count;

#define REQUIRE(cond) \
    do {              \
        if (!(cond)) return -__LINE__; \
    } while (0)

static uint64_t scramble(uint64_t off) { return sr_splitmix64(&off); }

static int check_chunks(const sr_store *st, const sr_arena *a, sr_visit visit, void *ctx,
                        arena_count *n) {
    uint64_t c = a->start + FIRST_CHUNK, end = a->committed_end - SR_CHUNK_HEAD, before = 0;
    while (c < end) {
        const sr_chunk *chunk = chunk_at(st, c);
        uint64_t flags = flags_get(chunk), size = size_of(flags);
        uint32_t kind = kind_of(flags);
        int is_free = (flags & SR_CHUNK_FREE) != 0;
        REQUIRE((flags & RESERVED_BITS) == 0);
        REQUIRE(size_fits(a, c, size));
        REQUIRE(((flags & SR_CHUNK_PREV_FREE) != 0) == (before != 0));
        REQUIRE(before == 0 || chunk->prev_size == before);
        if (is_free) {
            REQUIRE(kind == SR_KIND_NONE);
            REQUIRE(before == 0); /* else the two should be one */
            n->free += size;
            n->free_mark += scramble(c);
        } else {
            REQUIRE(kind > SR_KIND_NONE && kind < SR_KIND_END);
            n->used += size;
            n->n_allocs++;
            if (visit != NULL) {
                visit(ctx, c + SR_CHUNK_HEAD, (enum sr_kind)kind, size - SR_CHUNK_HEAD);
            }
        }
        before = is_free ? size : 0;
        c += size;
    }
    const sr_chunk *marker = chunk_at(st, end);
    REQUIRE((flags_get(marker) & ~SR_CHUNK_PREV_FREE) == (uint64_t)SR_KIND_END << KIND_SHIFT);
    REQUIRE(((flags_get(marker) & SR_CHUNK_PREV_FREE) != 0) == (before != 0));
    REQUIRE(before == 0 || marker->prev_size == before);
    return 0;
}

/* `n`: what the walk over the chunks found; the lists must hold exactly the same free chunks. */
static int check_lists(const sr_store *st, const sr_arena *a, const arena_count *n) {
    uint64_t mark = 0;
    REQUIRE(a->fl_bitmap >> SR_FL_COUNT == 0);
    for (uint32_t fl = 0; fl < SR_FL_COUNT; fl++) {
        REQUIRE(a->sl_bitmap[fl] >> SR_SL_COUNT == 0);
        REQUIRE((a->fl_bitmap >> fl & 1) == (a->sl_bitmap[fl] != 0));
        for (uint32_t sl = 0; sl < SR_SL_COUNT; sl++) {
            REQUIRE((a->sl_bitmap[fl] >> sl & 1) == (a->head[fl][sl] != 0));
            uint64_t before = 0;
            for (uint64_t c = a->head[fl][sl]; c != 0; c = links_at(st, c)->next) {
                uint32_t own_fl, own_sl;
                REQUIRE(in_arena(st, a, c));
                uint64_t flags = flags_get(chunk_at(st, c));
                REQUIRE((flags & SR_CHUNK_FREE) && size_fits(a, c, size_of(flags)));
                class_of(size_of(flags), &own_fl, &own_sl);
                REQUIRE(own_fl == fl && own_sl == sl);
                REQUIRE(links_at(st, c)->prev == before); /* also ends a circle */
                mark += scramble(c);
                before = c;
            }
        }
    }
    REQUIRE(mark == n->free_mark);
    return 0;
}

static int check_locked(const sr_store *st, const sr_arena *a, sr_visit visit, void *ctx) {
    arena_count n = {0};
    REQUIRE(a->start % SR_PAGE == 0 && a->end % SR_PAGE == 0 && a->committed_end % SR_PAGE == 0);
    REQUIRE(a->start <= a->committed_end && a->committed_end <= a->end && a->end <= st->bytes);
    int rc = a->committed_end == a->start ? 0 : check_chunks(st, a, visit, ctx, &n);
    if (rc == 0) rc = check_lists(st, a, &n);
    if (rc != 0) return rc;
    REQUIRE(a->used_bytes == n.used);
    REQUIRE(a->free_bytes == n.free);
    REQUIRE(a->n_allocs == n.n_allocs);
    return 0;
}

int sr_arena_check(sr_store *st, uint32_t arena, sr_visit visit, void *ctx) {
    if (arena >= st->hdr->n_arenas) return SR_INVALID;
    sr_arena *a = &arenas(st)[arena];
    int rc = sr_lock(st, &a->lock);
    if (rc != SR_OK) return rc;
    rc = check_locked(st, a, visit, ctx);
    sr_unlock(&a->lock);
    return rc;
}
