/* test_huge.c: huge pages are asked for where they fit, and what is in a range stays as it was. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "arena.h"
#include "check.h"
#include "huge.h"
#include "shmreplay.h"

#define BYTES (16 * SR_HUGE_PAGE)

static sr_header header;

static sr_store segment(void) {
    sr_store st;
    int fd = memfd_create("test_huge", MFD_CLOEXEC);
    CHECK(fd >= 0 && ftruncate(fd, BYTES) == 0);
    CHECK(sr_store_map(&st, fd, BYTES) == SR_OK);
    st.hdr = &header;
    st.shape.capacity_bytes = BYTES;
    return st;
}
static void done(sr_store *st) {
    CHECK(munmap(st->base, BYTES) == 0 && close(st->fd) == 0);
}

/* Kilobytes that the kernel maps as huge pages of shared memory at this address; -1 where it does
 * not say. */
static long huge_kb(const void *at) {
    char line[256], wanted[64];
    long kb = -1;
    int inside = 0;
    snprintf(wanted, sizeof wanted, "%lx-", (unsigned long)(uintptr_t)at);
    FILE *f = fopen("/proc/self/smaps", "r");
    if (f == NULL) return -1;
    while (fgets(line, sizeof line, f) != NULL) {
        if (strstr(line, " /memfd:") != NULL) inside = strncmp(line, wanted, strlen(wanted)) == 0;
        if (inside && sscanf(line, "ShmemPmdMapped: %ld kB", &kb) == 1) break;
    }
    fclose(f);
    return kb;
}

static void fill(sr_store *st, uint64_t from, uint64_t to) {
    for (uint64_t i = from; i < to; i += 64) st->base[i] = (char)(i >> 6 ^ i >> 14);
}
static void compare(const sr_store *st, uint64_t from, uint64_t to) {
    for (uint64_t i = from; i < to; i += 64) CHECK(st->base[i] == (char)(i >> 6 ^ i >> 14));
}

/* Where the kernel can, all whole huge pages of a range that gets memory are huge, and those of an
 * array that grew in small steps. */
static int test_pages(void) {
    sr_store st = segment();
    CHECK((uintptr_t)st.base % SR_HUGE_PAGE == 0);
    CHECK(sr_commit(&st, SR_PAGE, 3 * SR_HUGE_PAGE, 0) == SR_OK);
    int able = !st.small_pages;
    fill(&st, SR_PAGE, 3 * SR_HUGE_PAGE);
    long kb = huge_kb(st.base);
    if (able && kb >= 0) CHECK(kb == 2 * (long)(SR_HUGE_PAGE >> 10));

    uint64_t start = 8 * SR_HUGE_PAGE + 5 * SR_PAGE, end = start;
    while (end < 11 * SR_HUGE_PAGE + SR_PAGE) {
        uint64_t more = 100 * SR_PAGE;
        CHECK(sr_commit(&st, end, more, 0) == SR_OK);
        fill(&st, end, end + more);
        sr_huge_grown(&st, start, end, end + more);
        end += more;
    }
    compare(&st, SR_PAGE, 3 * SR_HUGE_PAGE);
    compare(&st, start, end);
    kb = huge_kb(st.base);
    if (able && kb >= 0) CHECK(kb == 4 * (long)(SR_HUGE_PAGE >> 10));
    done(&st);
    return able;
}

/* A range without a whole huge page gets no more memory than it asked for. */
static void test_small(void) {
    sr_store st = segment();
    CHECK(sr_commit(&st, SR_PAGE, SR_HUGE_PAGE, 0) == SR_OK);
    fill(&st, SR_PAGE, SR_PAGE + SR_HUGE_PAGE);
    sr_huge_grown(&st, SR_PAGE, SR_PAGE, SR_PAGE + SR_HUGE_PAGE);
    CHECK(lseek(st.fd, 0, SEEK_DATA) == (off_t)SR_PAGE);
    CHECK(lseek(st.fd, SR_PAGE, SEEK_HOLE) == (off_t)(SR_PAGE + SR_HUGE_PAGE));
    compare(&st, SR_PAGE, SR_PAGE + SR_HUGE_PAGE);
    done(&st);
}

/* A mapping that does not fit: refused by the kernel, noticed, and nothing else happens. */
static void test_elsewhere(void) {
    sr_store st = segment();
    char *room = mmap(NULL, BYTES + SR_HUGE_PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(room != MAP_FAILED);
    char *at = (char *)sr_align((uintptr_t)room, SR_HUGE_PAGE) + SR_PAGE;
    sr_store odd = st;
    odd.bytes = BYTES - SR_PAGE;
    odd.base = mmap(at, odd.bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, st.fd, 0);
    CHECK(odd.base == at);
    CHECK(sr_commit(&odd, 0, 4 * SR_HUGE_PAGE, 0) == SR_OK && odd.small_pages);
    fill(&odd, 0, 4 * SR_HUGE_PAGE);
    CHECK(sr_commit(&odd, 4 * SR_HUGE_PAGE, 4 * SR_HUGE_PAGE, 0) == SR_OK);
    compare(&odd, 0, 4 * SR_HUGE_PAGE);
    CHECK(munmap(room, BYTES + SR_HUGE_PAGE) == 0);
    done(&st);
}

static void test_bad_maps(void) {
    sr_store st;
    CHECK(sr_store_map(&st, -1, BYTES) == SR_SYS && sr_last_detail()->sys_errno == EBADF);
    CHECK(sr_store_map(&st, 0, UINT64_MAX) == SR_SYS && sr_last_detail()->sys_errno == ENOMEM);
    CHECK(sr_store_map(&st, 0, 1ull << 62) == SR_SYS && sr_last_detail()->sys_errno == ENOMEM);
    CHECK(st.base == NULL);
}

int main(void) {
    int able = test_pages();
    test_small();
    test_elsewhere();
    test_bad_maps();
    printf("ok%s\n", able ? "" : " (this kernel makes no huge pages of shared memory)");
    return 0;
}
