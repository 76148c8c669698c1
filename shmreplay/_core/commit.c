/* commit.c: giving memory to the segment, and to the arenas, on demand and ahead of it. */
#include "arena_chunks.h"
#include "fault.h"
#include "lock.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/statvfs.h>

#define FALLOCATE_TRIES 100 /* against EINTR; all signals but the fatal one are blocked meanwhile */

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

/* ------------------------------------------------------------------ memory for the segment */

/* SYNC POINT: compare-and-swap rather than add and take back: a refused charge is never visible to
 * others, who would be refused in turn although there is room for them. */
static int charge_capacity(sr_store *st, uint64_t bytes) {
    uint64_t have = atomic_load_explicit(&st->hdr->committed_bytes, memory_order_relaxed);
    const uint64_t most = st->shape.capacity_bytes;
    if (SR_FAULT_POINT("capacity")) return SR_FULL;
    do {
        if (have > most || bytes > most - have) return SR_FULL;
    } while (!atomic_compare_exchange_weak_explicit(&st->hdr->committed_bytes, &have, have + bytes,
                                                    memory_order_relaxed, memory_order_relaxed));
    return SR_OK;
}

uint64_t sr_file_system_left(const sr_store *st) {
    struct statvfs vfs;
    if (fstatvfs(st->fd, &vfs) != 0) return 0; /* only a figure for the message of another error */
    return (uint64_t)vfs.f_bavail * vfs.f_frsize;
}

/* Returns an errno. A signal makes tmpfs undo the whole call and return EINTR: a profiler's timer
 * could do so for ever. */
static int fallocate_uninterrupted(int fd, uint64_t off, uint64_t bytes) {
    sigset_t all, old;
    sigfillset(&all);
    int rc = pthread_sigmask(SIG_SETMASK, &all, &old);
    SR_ASSERT(rc == 0);
    for (int i = 0; i < FALLOCATE_TRIES; i++) {
        rc = SR_FAULT_POINT("fallocate") ? ENOSPC
                                         : posix_fallocate(fd, (off_t)off, (off_t)bytes);
        if (rc != EINTR) break;
    }
    int restored = pthread_sigmask(SIG_SETMASK, &old, NULL);
    SR_ASSERT(restored == 0);
    return rc;
}

/* Where the rest is refused, what asking for huge pages took would stay: nobody counts it, and
 * others lack it. Only for who holds the lock of the range, so that there is no other grower. Who
 * commits ahead without it takes the count of cuts for a sign that what it gave memory to may have
 * none again; so the count comes first. Dying in between leaves the pages for the next growth.
 *
 * Not the pages of both ends that are not all of the range: what else is in them is in use. */
static void take_back(sr_store *st, uint64_t off, uint64_t bytes) {
    uint64_t from = sr_align(off, SR_PAGE), to = (off + bytes) & ~(uint64_t)(SR_PAGE - 1);
    sr_arena *a = arena_of(st, off);
    if (a != NULL) a->n_cuts++;
    /* No look at the result: they then stay, uncounted, for the next growth. */
    if (from < to) {
        (void)fallocate(st->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)from,
                        (off_t)(to - from));
    }
}

int sr_commit(sr_store *st, uint64_t off, uint64_t bytes, uint64_t charge) {
    if (bytes == 0 || off > st->bytes || bytes > st->bytes - off) {
        return sr_fail(SR_INVALID, bytes, st->bytes, 0);
    }
    uint64_t from = off & ~(uint64_t)(SR_PAGE - 1), to = sr_align(off + bytes, SR_PAGE);
    if (charge != 0 && charge_capacity(st, charge) != SR_OK) {
        return sr_fail(SR_FULL, charge, capacity_left(st), 0);
    }
    int huge = sr_huge_ahead(st, from, to - from);
    /* Crash window: charged and not recorded. Callers that charge hold the arena (or stripe) lock,
     * so a death here marks the store dirty, and the repair counts again. */
    int err = fallocate_uninterrupted(st->fd, from, to - from);
    if (SR_LIKELY(err == 0)) return SR_OK;
    if (charge != 0) {
        if (huge) take_back(st, off, bytes);
        atomic_fetch_sub_explicit(&st->hdr->committed_bytes, charge, memory_order_relaxed);
    }
    int none = err == ENOSPC || err == ENOMEM || err == EDQUOT;
    return sr_fail(none ? SR_NOSPACE : SR_SYS, bytes, sr_file_system_left(st), err);
}

/* Mapped at once around a block: its neighbours are next, or this process counts them soon. */
#define TOUCH_WINDOW (1ull << 20)

void sr_populate(sr_store *st, uint64_t off, uint64_t bytes) {
    if (bytes == 0 || sr_at(st, off, bytes) == NULL || SR_FAULT_POINT("populate")) return;
    uint64_t from = off & ~(uint64_t)(SR_PAGE - 1), to = sr_align(off + bytes, SR_PAGE);
    /* Advice: without it the first touch of each page takes a fault, and that is all. Hence no look
     * at the result. */
    (void)madvise(st->base + from, to - from, MADV_POPULATE_WRITE);
}

/* Set the bits of pages [from, to]; were some of them new? Relaxed: a page that two threads map at
 * once is mapped, and nothing depends on the bit. */
static int mark_pages(sr_store *st, uint64_t from, uint64_t to) {
    int fresh = 0;
    for (uint64_t w = from >> 6; w <= to >> 6; w++) {
        uint64_t bits = ~0ull;
        if (w == from >> 6) bits &= ~0ull << (from & 63);
        if (w == to >> 6) bits &= ~0ull >> (63 - (to & 63));
        if ((atomic_load_explicit(&st->touched[w], memory_order_relaxed) & bits) == bits) continue;
        atomic_fetch_or_explicit(&st->touched[w], bits, memory_order_relaxed);
        fresh = 1;
    }
    return fresh;
}

void sr_touch(sr_store *st, uint64_t off, uint64_t bytes) {
    if (st->touched == NULL || bytes == 0) return;
    if (mark_pages(st, off / SR_PAGE, (off + bytes - 1) / SR_PAGE)) sr_populate(st, off, bytes);
}

void sr_touch_around(sr_store *st, uint64_t off, uint64_t bytes) {
    const sr_arena *a = arena_of(st, off);
    uint64_t end = a == NULL ? 0 : committed_end(a);
    if (off + bytes > end) return;
    uint64_t from = off & ~(TOUCH_WINDOW - 1), to = sr_align(off + bytes, TOUCH_WINDOW);
    if (from < a->start) from = a->start;
    if (to > end) to = end;
    sr_touch(st, from, to - from);
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

uint64_t sr_arena_tail(const sr_store *st, const sr_arena *a) {
    uint64_t bytes = tail_bytes(st, a);
    return bytes == UINT64_MAX ? 0 : bytes;
}

int sr_arena_grow(sr_store *st, sr_arena *a, uint64_t size, uint64_t *found) {
    uint64_t tail = tail_bytes(st, a), end = committed_end(a);
    if (tail == UINT64_MAX) return SR_CORRUPT;
    if (tail < size) {
        uint64_t room = a->end - end;
        uint64_t least = sr_align(size - tail + (end == a->start ? OVERHEAD : 0), SR_PAGE);
        if (least > room) return sr_fail(SR_FULL, least, room, 0);
        uint64_t step = extent_bytes(st, end);
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

/* 1 if an extent (or what others left of it) was added, 0 if not, or a negative status. */
static int commit_ahead(sr_store *st, sr_arena *a) {
    int rc = lock_arena(st, a);
    if (rc != SR_OK) return rc;
    uint64_t from = committed_end(a), bytes = ahead_bytes(st, a);
    uint32_t n_cuts = a->n_cuts;
    sr_unlock(&a->lock);
    if (bytes == 0) return 0;
    /* Not charged yet. Crash window: dying here leaves pages that nobody counts and that the next
     * commit of this range uses; a charge would stay behind for ever, since no lock is held that
     * could tell of our death. */
    rc = sr_commit(st, from, bytes, 0);
    if (rc != SR_OK) return rc;
    sr_populate(st, from, bytes);
    rc = lock_arena(st, a);
    if (rc != SR_OK) return rc;
    /* An allocation may have grown the arena meanwhile, into the pages that we just committed: the
     * rest is still good. Where the capacity went elsewhere, or pages were given back and these
     * perhaps with them, they stay, uncounted, for the arena's next growth: giving them back could
     * take them from under another committer. */
    uint64_t end = committed_end(a), left = from + bytes - end;
    int good = a->n_cuts == n_cuts && end >= from && end < from + bytes;
    int added = 0;
    if (tail_bytes(st, a) == UINT64_MAX) {
        added = SR_CORRUPT;
    } else if (good && charge_capacity(st, left) == SR_OK) {
        add_extent(st, a, left);
        added = 1;
    }
    sr_unlock(&a->lock);
    return added;
}

/* ------------------------------------------------------------------ giving back */

/* Take whole pages of the free chunk before the end marker out of the allocator, `bytes` or what
 * there is. Under the lock. */
static uint64_t cut_tail(sr_store *st, sr_arena *a, uint64_t bytes) {
    uint64_t tail = tail_bytes(st, a), end = committed_end(a);
    if (tail == UINT64_MAX || tail < SR_PAGE) return 0;
    uint64_t cut = sr_align(bytes, SR_PAGE), most = tail & ~(uint64_t)(SR_PAGE - 1);
    if (cut > most) cut = most;
    uint64_t c = end - SR_CHUNK_HEAD - tail;
    list_remove(st, a, c, tail);
    a->free_bytes -= cut;
    flags_set(chunk_at(st, end - cut - SR_CHUNK_HEAD), (uint64_t)SR_KIND_END << KIND_SHIFT);
    __atomic_store_n(&a->committed_end, end - cut, __ATOMIC_RELAXED);
    if (tail > cut) list_add(st, a, c, tail - cut);
    a->n_cuts++;
    return cut;
}

uint64_t sr_give_back(sr_store *st, uint64_t bytes) {
    SR_GUARDED(st, 0)
    uint64_t given = 0;
    for (uint32_t i = 0; i < st->shape.n_arenas && given < bytes; i++) {
        sr_arena *a = &arenas(st)[i];
        if (lock_arena(st, a) != SR_OK) continue; /* nothing there can be trusted now */
        uint64_t cut = cut_tail(st, a, bytes - given);
        if (cut > 0 && (SR_FAULT_POINT("punch") ||
                        fallocate(st->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                                  (off_t)committed_end(a), (off_t)cut) != 0)) {
            add_extent(st, a, cut);
            cut = 0;
        }
        atomic_fetch_sub_explicit(&st->hdr->committed_bytes, cut, memory_order_relaxed);
        sr_unlock(&a->lock);
        given += cut;
    }
    return given;
}

int sr_commit_ahead(sr_store *st) {
    SR_GUARDED(st, SR_CORRUPT)
    int added = 0;
    for (uint32_t i = 0; i < st->shape.n_arenas; i++) {
        int rc = commit_ahead(st, &arenas(st)[i]);
        if (rc < 0) return added > 0 && rc != SR_CORRUPT && rc != SR_DIRTY ? added : rc;
        added += rc;
    }
    return added;
}
