/* huge.c: huge pages for arenas, slots and selectors.
 *
 * Random rows of a large table lie in as many pages, and a processor remembers where only so many
 * small ones are. /dev/shm gives small pages unless its administrator says otherwise, but from
 * Linux 6.1 on MADV_COLLAPSE makes a huge page of small ones, whatever its mount says. Of a range
 * with a single page in it that costs a tenth of giving memory to 512 small ones.
 *
 * All of it is advice: who reads or writes the range sees the same bytes before, meanwhile and
 * after, so nothing here needs a lock, and dying here leaves nothing to repair. */
#include "huge.h"
#include "arena_chunks.h"
#include "fault.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

/* Huge pages fit a mapping only where addresses and offsets agree modulo their size: so much more
 * address space is reserved, and what is too much given back. NULL and errno where there is
 * none. */
static char *map_aligned(int fd, uint64_t bytes) {
    uint64_t span = bytes + SR_HUGE_PAGE;
    errno = ENOMEM;
    if (span < bytes || SR_FAULT_POINT("mmap")) return NULL;
    char *room = mmap(NULL, span, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (room == MAP_FAILED) return NULL;
    char *base = (char *)sr_align((uintptr_t)room, SR_HUGE_PAGE);
    char *end = base + sr_align(bytes, SR_PAGE);
    void *at = mmap(base, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0);
    if (at == MAP_FAILED) {
        int why = errno;
        munmap(room, span);
        errno = why;
        return NULL;
    }
    if (base > room) munmap(room, (uint64_t)(base - room));
    if (room + span > end) munmap(end, (uint64_t)(room + span - end));
    return base;
}

int sr_store_map(sr_store *st, int fd, uint64_t bytes) {
    *st = (sr_store){.fd = fd};
    char *base = map_aligned(fd, bytes);
    if (base == NULL) return sr_fail(SR_SYS, bytes, 0, errno);
    st->base = base;
    st->bytes = bytes;
    /* Advice, and refused by kernels that cannot: neither is needed for correctness. */
    if (!SR_FAULT_POINT("dump")) (void)madvise(base, bytes, MADV_DONTDUMP);
    if (!SR_FAULT_POINT("huge")) (void)madvise(base, bytes, MADV_HUGEPAGE);
    return SR_OK;
}

/* SYNC POINT: relaxed: who sees the flag too late asks the kernel once more for nothing. */
static int refused(const sr_store *st) {
    return __atomic_load_n(&st->small_pages, __ATOMIC_RELAXED);
}
static void collapse(sr_store *st, uint64_t from, uint64_t to) {
    if (SR_FAULT_POINT("collapse")) return;
    /* EINVAL: this kernel or this file cannot, now or later. Else memory is in pieces just now. */
    if (madvise(st->base + from, to - from, MADV_COLLAPSE) != 0 && errno == EINVAL) {
        __atomic_store_n(&st->small_pages, 1, __ATOMIC_RELAXED);
    }
}

int sr_huge_ahead(sr_store *st, uint64_t off, uint64_t bytes) {
    uint64_t from = sr_align(off, SR_HUGE_PAGE), to = (off + bytes) & ~(SR_HUGE_PAGE - 1);
    if (from >= to || refused(st)) return 0;
    uint64_t left = sr_file_system_left(st); /* 0: full, which is noticed below, or without limit */
    if (left != 0 && left / 2 < bytes) return 0;
    for (uint64_t page = from; page < to; page += SR_HUGE_PAGE) {
        /* Memory before its first touch: without it that could be a bus error. */
        if (fallocate(st->fd, 0, (off_t)page, SR_PAGE) != 0) return page > from;
        sr_populate(st, page, SR_PAGE);
    }
    collapse(st, from, to);
    return 1;
}

void sr_huge_grown(sr_store *st, uint64_t start, uint64_t from, uint64_t end) {
    uint64_t first = sr_align(start, SR_HUGE_PAGE), to = end & ~(SR_HUGE_PAGE - 1);
    uint64_t page = from & ~(SR_HUGE_PAGE - 1);
    if (page < first) page = first;
    if (page < to && !refused(st)) collapse(st, page, to);
}
