/* test_arena.c: the allocator against a shadow model, at its limits, and with threads. */
#include "arena_fixture.h"

#include <errno.h>
#include <pthread.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>

/* ---------------------------------------------------------------- shadow model */

#define LIVE_MAX 400u
typedef struct {
    uint64_t off, bytes, stamp;
    enum sr_kind kind;
} live;
typedef struct {
    live l[LIVE_MAX];
    uint32_t n;
} shadow;

static void stamp_write(sr_store *st, const live *l) {
    uint64_t s = l->stamp;
    char *p = sr_ptr(st, l->off);
    for (uint64_t i = 0; i < l->bytes; i++) p[i] = (char)(s + i * 131 + (i >> 8));
}
static void stamp_check(const sr_store *st, const live *l) {
    uint64_t s = l->stamp;
    const char *p = sr_ptr(st, l->off);
    for (uint64_t i = 0; i < l->bytes; i++) CHECK(p[i] == (char)(s + i * 131 + (i >> 8)));
}

/* 1 byte to 32 KiB, every order of magnitude alike; now and then sizes of the allocator's own grid,
 * and 0. */
static uint64_t random_bytes(uint64_t *rng) {
    uint64_t bytes = sr_random_below(rng, 1ull << (1 + sr_random_below(rng, 15)));
    return sr_random_below(rng, 4) == 0 ? bytes / 64 * 64 + 48 : bytes;
}

/* Returns the status of the allocation. */
static int shadow_add(sr_store *st, shadow *sh, uint32_t arena, uint64_t *rng) {
    live *l = &sh->l[sh->n];
    _Atomic uint64_t inflight = 0;
    l->bytes = random_bytes(rng);
    l->kind = (enum sr_kind)(1 + sr_random_below(rng, SR_KIND_END - 1));
    l->stamp = sr_splitmix64(rng);
    int rc = sr_alloc(st, arena, l->kind, l->bytes, &inflight, &l->off);
    if (rc != SR_OK) {
        CHECK(inflight == 0);
        return rc;
    }
    CHECK(inflight == l->off);
    CHECK(l->off % 64 == 0);
    CHECK(sr_at(st, l->off, l->bytes) != NULL);
    CHECK(sr_alloc_bytes(st, l->off) == sr_align(l->bytes + HEAD, 64) - HEAD);
    CHECK(sr_alloc_kind(st, l->off) == l->kind);
    stamp_write(st, l);
    sh->n++;
    return SR_OK;
}

static void shadow_remove(sr_store *st, shadow *sh, uint32_t i) {
    stamp_check(st, &sh->l[i]);
    CHECK(sr_free(st, sh->l[i].off) == SR_OK);
    sh->l[i] = sh->l[--sh->n];
}

static void shadow_visit(void *ctx, uint64_t off, enum sr_kind kind, uint64_t payload) {
    shadow *left = ctx; /* each allocation is found and taken out exactly once */
    for (uint32_t i = 0; i < left->n; i++) {
        if (left->l[i].off != off) continue;
        CHECK(left->l[i].kind == kind && left->l[i].bytes <= payload);
        left->l[i] = left->l[--left->n];
        return;
    }
    CHECK(!"an allocation that the model does not know");
}

static void shadow_compare(sr_store *st, const shadow *sh) {
    shadow left = *sh;
    for (uint32_t i = 0; i < st->shape.n_arenas; i++) {
        CHECK(sr_arena_check(st, i, shadow_visit, &left) == 0);
    }
    CHECK(left.n == 0);
    check_charges(st);
}

/* More than the capacity is asked for, so that a full store is met again and again. */
static void test_random(uint64_t seed, uint32_t n_arenas) {
    sr_store st = store_open(2 * MIB, MIB / 2, n_arenas);
    static shadow sh;
    uint64_t rng = seed, full = 0;
    sh.n = 0;
    for (uint32_t step = 0; step < 12000; step++) {
        /* Long waves of growing and of shrinking. */
        uint64_t grow = step / 1500 % 2 == 0 ? 6 : 4;
        if (sh.n < LIVE_MAX && (sh.n == 0 || sr_random_below(&rng, 10) < grow)) {
            int rc = shadow_add(&st, &sh, (uint32_t)sr_random_below(&rng, n_arenas), &rng);
            CHECK(rc == SR_OK || rc == SR_FULL);
            full += rc == SR_FULL;
        } else {
            shadow_remove(&st, &sh, (uint32_t)sr_random_below(&rng, sh.n));
        }
        if (step % 200 == 0) shadow_compare(&st, &sh);
    }
    CHECK(full > 0);
    while (sh.n > 0) shadow_remove(&st, &sh, (uint32_t)sr_random_below(&rng, sh.n));
    for (uint32_t i = 0; i < n_arenas; i++) check_empty(&st, i);
    check_charges(&st);
    store_close(&st);
}

/* ---------------------------------------------------------------- limits */

/* Pages that the capacity has beyond whole extents are used too, to the last chunk. */
static void test_capacity(void) {
    sr_store st = store_open(4 * MIB, 2 * EXTENT + 3 * SR_PAGE, 2);
    uint64_t off[256], n = 0, next = 77;
    int rc;
    while ((rc = sr_alloc(&st, 0, SR_KIND_TRAJ, 1008, NULL, &off[n])) == SR_OK) n++;
    CHECK(rc == SR_FULL);
    CHECK(n == (2 * EXTENT + 3 * SR_PAGE - OVERHEAD) / 1024);
    CHECK(atomic_load(&st.hdr->committed_bytes) == 2 * EXTENT + 3 * SR_PAGE);
    uint64_t left = arena_at(&st, 0)->free_bytes;
    CHECK(sr_last_detail()->asked == 1008 && sr_last_detail()->available == left);
    CHECK(sr_alloc(&st, 0, SR_KIND_TRAJ, 1ull << 50, NULL, &next) == SR_FULL);
    CHECK(sr_last_detail()->asked == 1ull << 50);
    CHECK(sr_alloc(&st, 0, SR_KIND_TRAJ, UINT64_MAX, NULL, &next) == SR_FULL);
    CHECK(next == 77);
    CHECK(sr_alloc(&st, 2, SR_KIND_TRAJ, 8, NULL, &next) == SR_INVALID);
    CHECK(sr_alloc(&st, 0, SR_KIND_END, 8, NULL, &next) == SR_INVALID);
    /* What is left is exactly one chunk; the other arena finds it. */
    next = alloc_ok(&st, 1, left - HEAD);
    CHECK(arena_at(&st, 0)->free_bytes == 0);
    CHECK(arena_at(&st, 1)->committed_end == arena_at(&st, 1)->start);
    CHECK(sr_arena_check(&st, 0, NULL, NULL) == 0);
    CHECK(sr_free(&st, next) == SR_OK);
    for (uint64_t i = 0; i < n; i += 2) CHECK(sr_free(&st, off[i]) == SR_OK);
    CHECK(sr_alloc(&st, 0, SR_KIND_TRAJ, 2048, NULL, &next) == SR_FULL); /* holes of 1,024 only */
    CHECK(sr_last_detail()->available == arena_at(&st, 0)->free_bytes);
    for (uint64_t i = 1; i < n; i += 2) CHECK(sr_free(&st, off[i]) == SR_OK);
    check_empty(&st, 0);
    store_close(&st);
}

/* The end of one arena's range is not the end of the store; an allocation of a whole arena fits. */
static void test_range(void) {
    sr_store st = store_open(2 * MIB, 8 * MIB, 2);
    uint64_t a = alloc_ok(&st, 1, MIB - OVERHEAD - HEAD), b = alloc_ok(&st, 1, 100), off = 0;
    CHECK(a == arena_at(&st, 1)->start + 64 && arena_at(&st, 1)->free_bytes == 0);
    CHECK(b == arena_at(&st, 0)->start + 64); /* the other arena grew */
    CHECK(sr_alloc(&st, 0, SR_KIND_BLOCK, MIB - OVERHEAD - HEAD, NULL, &off) == SR_FULL);
    CHECK(sr_free(&st, a) == SR_OK && sr_free(&st, b) == SR_OK);
    check_empty(&st, 0);
    check_empty(&st, 1);
    check_charges(&st);
    store_close(&st);
}

/* A free chunk at the end counts towards what is needed: only the rest is committed. */
static void test_growth(void) {
    sr_store st = store_open(4 * MIB, 4 * MIB, 1);
    sr_arena *a = arena_at(&st, 0);
    uint64_t first = alloc_ok(&st, 0, 1000);
    CHECK(a->committed_end - a->start == EXTENT);
    uint64_t big = alloc_ok(&st, 0, EXTENT + 1000);
    CHECK(a->committed_end - a->start == 2 * EXTENT);
    CHECK(big == first + 1024);
    CHECK(sr_free(&st, big) == SR_OK);
    CHECK(alloc_ok(&st, 0, 2 * EXTENT - OVERHEAD - 1024 - HEAD) == big); /* to the last byte */
    CHECK(a->committed_end - a->start == 2 * EXTENT && a->free_bytes == 0);
    uint64_t next = alloc_ok(&st, 0, 100); /* now the end marker's predecessor is in use */
    CHECK(a->committed_end - a->start == 3 * EXTENT);
    CHECK(sr_free(&st, first) == SR_OK && sr_free(&st, next) == SR_OK);
    CHECK(sr_free(&st, big) == SR_OK);
    check_empty(&st, 0);
    store_close(&st);
    /* The first chunk needs room for the arena's own 64 bytes besides. */
    st = store_open(4 * MIB, 4 * MIB, 1);
    first = alloc_ok(&st, 0, 2 * EXTENT - HEAD);
    CHECK(arena_at(&st, 0)->committed_end == arena_at(&st, 0)->start + 2 * EXTENT + SR_PAGE);
    CHECK(sr_free(&st, first) == SR_OK);
    check_empty(&st, 0);
    store_close(&st);
    /* An arena that ends within an extent takes what there is of it, and nothing of the next
     * arena. */
    for (int ahead = 0; ahead < 2; ahead++) {
        st = store_open(3 * EXTENT, 4 * MIB, 2);
        alloc_ok(&st, 0, EXTENT - 1000);
        if (ahead) CHECK(sr_commit_ahead(&st) == 2);
        alloc_ok(&st, 0, 1000);
        CHECK(arena_at(&st, 0)->committed_end == arena_at(&st, 1)->start);
        CHECK(sr_arena_check(&st, 0, NULL, NULL) == 0);
        check_charges(&st);
        store_close(&st);
    }
}

/* Blocks of one size, not on the boundary of a size class, reuse each other's places and commit
 * nothing. */
static void test_same_size_reuse(void) {
    sr_store st = store_open(16 * MIB, 16 * MIB, 1);
    uint64_t off[100], rng = 5;
    for (uint32_t i = 0; i < 100; i++) off[i] = alloc_ok(&st, 0, 84500);
    uint64_t before = arena_at(&st, 0)->committed_end;
    for (uint32_t i = 0; i < 1000; i++) {
        uint32_t k = (uint32_t)sr_random_below(&rng, 98) + 1;
        CHECK(sr_free(&st, off[k]) == SR_OK);
        CHECK(alloc_ok(&st, 0, 84500) == off[k]);
    }
    /* The class's first chunk is 128 bytes too small, the next one fits. */
    CHECK(sr_free(&st, off[50]) == SR_OK);
    CHECK(alloc_ok(&st, 0, 84500 - 128) == off[50]);
    CHECK(alloc_ok(&st, 0, 112) == off[50] + 84544 - 128);
    CHECK(sr_free(&st, off[10]) == SR_OK && sr_free(&st, off[50]) == SR_OK);
    CHECK(alloc_ok(&st, 0, 84500) == off[10]);
    CHECK(arena_at(&st, 0)->committed_end == before);
    CHECK(sr_arena_check(&st, 0, NULL, NULL) == 0);
    store_close(&st);
}

/* ---------------------------------------------------------------- committing */

static void test_commit_errors(void) {
    sr_store st = store_open(4 * MIB, MIB, 1);
    _Atomic uint64_t *committed = &st.hdr->committed_bytes;
    uint64_t off = 0;
    CHECK(sr_commit(&st, FIXED + 1, SR_PAGE, 3 * SR_PAGE) == SR_OK);
    CHECK(atomic_load(committed) == 3 * SR_PAGE);
    CHECK(sr_commit(&st, FIXED, MIB, MIB) == SR_FULL);
    CHECK(sr_last_detail()->asked == MIB && sr_last_detail()->available == MIB - 3 * SR_PAGE);
    CHECK(sr_commit(&st, FIXED, MIB, 0) == SR_OK); /* charged before */
    CHECK(sr_commit(&st, st.bytes - SR_PAGE, SR_PAGE + 1, 0) == SR_INVALID);
    CHECK(sr_commit(&st, FIXED, UINT64_MAX, 0) == SR_INVALID);
    CHECK(sr_commit(&st, FIXED, 0, 0) == SR_INVALID);
    CHECK(atomic_load(committed) == 3 * SR_PAGE);
    atomic_store(committed, 0);
    /* A file that may not become as long as the segment: the system call fails. */
    CHECK(ftruncate(st.fd, FIXED + EXTENT) == 0);
    CHECK(fcntl(st.fd, F_ADD_SEALS, F_SEAL_GROW) == 0);
    CHECK(sr_commit(&st, FIXED + MIB, SR_PAGE, SR_PAGE) == SR_SYS);
    CHECK(sr_last_detail()->sys_errno == EPERM && atomic_load(committed) == 0);
    alloc_ok(&st, 0, 50000);
    CHECK(sr_alloc(&st, 0, SR_KIND_BLOCK, 50000, NULL, &off) == SR_SYS);
    CHECK(sr_last_detail()->sys_errno == EPERM && off == 0);
    CHECK(sr_arena_check(&st, 0, NULL, NULL) == 0);
    check_charges(&st);
    store_close(&st);
}

/* More than the whole file system: refused at once. An extent that does not fit gives way to what
 * is needed. */
static void test_file_system_full(void) {
    struct statvfs vfs;
    if (statvfs("/dev/shm", &vfs) != 0 || vfs.f_blocks == 0 || vfs.f_bavail * vfs.f_frsize < MIB) {
        fprintf(stderr, "test_file_system_full: skipped, no /dev/shm with a limit and room\n");
        return;
    }
    uint64_t whole = sr_align((uint64_t)vfs.f_blocks * vfs.f_frsize, SR_PAGE) + MIB, off = 0;
    char name[64];
    snprintf(name, sizeof name, "/test_arena_%d", (int)getpid());
    int fd = shm_open(name, O_RDWR | O_CREAT | O_EXCL, 0600);
    CHECK(fd >= 0 && shm_unlink(name) == 0);
    sr_store st;
    store_map(&st, fd, FIXED + 2 * whole, 4 * whole, whole, 2);
    uint64_t small = alloc_ok(&st, 0, SR_PAGE - OVERHEAD - HEAD);
    CHECK(atomic_load(&st.hdr->committed_bytes) == SR_PAGE);
    /* In arena 0 for want of range, so it is arena 1 that asks the file system; and the other way
     * round. */
    const uint64_t asked = whole - OVERHEAD - HEAD;
    for (uint32_t i = 0; i < 2; i++) {
        CHECK(sr_alloc(&st, i, SR_KIND_BLOCK, asked, NULL, &off) == SR_NOSPACE);
        CHECK(off == 0 && sr_last_detail()->asked == asked);
        CHECK(sr_last_detail()->available < whole && sr_last_detail()->sys_errno == ENOSPC);
    }
    CHECK(sr_commit_ahead(&st) == SR_NOSPACE);
    check_charges(&st);
    CHECK(sr_free(&st, small) == SR_OK);
    check_empty(&st, 0);
    store_close(&st);
}

static void test_commit_ahead(void) {
    sr_store st = store_open(4 * MIB, 3 * EXTENT + SR_PAGE, 2);
    CHECK(sr_commit_ahead(&st) == 2); /* both were empty */
    CHECK(sr_commit_ahead(&st) == 0);
    check_empty(&st, 0);
    check_empty(&st, 1);
    uint32_t seq = atomic_load(&st.hdr->commit_seq);
    uint64_t a = alloc_ok(&st, 0, EXTENT - 1024);
    CHECK(atomic_load(&st.hdr->commit_seq) == seq); /* nobody waits */
    atomic_store(&st.hdr->commit_waiters, 1);
    uint64_t b = alloc_ok(&st, 0, 100);
    CHECK(atomic_load(&st.hdr->commit_seq) == seq + 1);
    CHECK(sr_commit_ahead(&st) == 1);
    uint64_t c = alloc_ok(&st, 0, 100);
    CHECK(atomic_load(&st.hdr->commit_seq) == seq + 1); /* enough is free */
    uint64_t d = alloc_ok(&st, 0, EXTENT - 1024);
    CHECK(atomic_load(&st.hdr->commit_seq) == seq + 1); /* the capacity has no room for an extent */
    CHECK(sr_commit_ahead(&st) == 0);
    check_charges(&st);
    CHECK(sr_free(&st, a) == SR_OK && sr_free(&st, c) == SR_OK);
    CHECK(sr_free(&st, b) == SR_OK && sr_free(&st, d) == SR_OK);
    check_empty(&st, 0);
    sr_populate(&st, FIXED + 100, EXTENT);
    sr_populate(&st, st.bytes, MIB); /* outside: nothing */
    store_close(&st);
}

/* The moment between a committer's pages and its taking the lock: it populates them there. The
 * test's madvise stands in for the C library's. */
static void (*on_populate)(sr_store *st);
static sr_store *on_populate_store;
int madvise(void *addr, size_t bytes, int advice) {
    if (on_populate != NULL) on_populate(on_populate_store);
    return (int)syscall(SYS_madvise, addr, bytes, advice);
}
static void grow_by_extent(sr_store *st) { alloc_ok(st, 0, 30000); }
static void grow_beyond(sr_store *st) { alloc_ok(st, 0, 3 * EXTENT); }
static void grow_by_page(sr_store *st) {
    st->shape.extent_bytes = SR_PAGE;
    alloc_ok(st, 0, 1000);
    st->shape.extent_bytes = EXTENT;
}
static void use_capacity(sr_store *st) {
    atomic_store(&st->hdr->committed_bytes, st->shape.capacity_bytes);
}

static void test_commit_ahead_overtaken(void) {
    static const struct {
        void (*hook)(sr_store *st);
        int added;
        uint64_t committed;
    } cases[] = {{NULL, 1, 2 * EXTENT},        {grow_by_extent, 0, 2 * EXTENT},
                 {grow_by_page, 1, 2 * EXTENT}, {grow_beyond, 0, 4 * EXTENT + SR_PAGE},
                 {use_capacity, 0, EXTENT}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        sr_store st = store_open(4 * MIB, MIB, 1);
        sr_arena *a = arena_at(&st, 0);
        alloc_ok(&st, 0, EXTENT - OVERHEAD - HEAD); /* nothing is left */
        on_populate = cases[i].hook;
        on_populate_store = &st;
        CHECK(sr_commit_ahead(&st) == cases[i].added);
        on_populate = NULL;
        CHECK(a->committed_end == a->start + cases[i].committed);
        CHECK(sr_arena_check(&st, 0, NULL, NULL) == 0);
        if (cases[i].hook != use_capacity) check_charges(&st);
        store_close(&st);
    }
}

/* ---------------------------------------------------------------- threads */

typedef struct {
    sr_store *st;
    uint32_t arena, steps;
    uint64_t seed;
    _Atomic uint32_t *running;
} job;

static void *work(void *arg) {
    job *j = arg;
    shadow *sh = calloc(1, sizeof *sh);
    CHECK(sh != NULL);
    for (uint32_t i = 0; i < j->steps; i++) {
        if (sh->n < 60 && (sh->n == 0 || sr_random_below(&j->seed, 2) == 0)) {
            int rc = shadow_add(j->st, sh, j->arena, &j->seed);
            CHECK(rc == SR_OK || rc == SR_FULL);
        } else {
            shadow_remove(j->st, sh, (uint32_t)sr_random_below(&j->seed, sh->n));
        }
    }
    while (sh->n > 0) shadow_remove(j->st, sh, sh->n - 1);
    free(sh);
    atomic_fetch_sub(j->running, 1);
    return NULL;
}

/* What a server's thread does: wait until an arena runs low, then commit. */
static void *commit(void *arg) {
    job *j = arg;
    while (atomic_load(j->running) != 0) {
        uint32_t seq = atomic_load(&j->st->hdr->commit_seq);
        CHECK(sr_commit_ahead(j->st) >= 0);
        sr_futex_wait(&j->st->hdr->commit_seq, seq, &j->st->hdr->commit_waiters, 1);
    }
    return NULL;
}

static void test_threads(uint32_t n_arenas, uint32_t n_committers, uint64_t capacity) {
    sr_store st = store_open(8 * MIB, capacity, n_arenas);
    st.shape.extent_bytes = 4 * SR_PAGE; /* so that growing happens often */
    _Atomic uint32_t running = 2;
    pthread_t t[4];
    job j[4];
    for (uint32_t i = 0; i < 2 + n_committers; i++) {
        j[i] = (job){&st, i % n_arenas, 4000, 1000 + i, &running};
        CHECK(pthread_create(&t[i], NULL, i < 2 ? work : commit, &j[i]) == 0);
    }
    for (uint32_t i = 0; i < 2 + n_committers; i++) CHECK(pthread_join(t[i], NULL) == 0);
    for (uint32_t i = 0; i < n_arenas; i++) check_empty(&st, i);
    CHECK(atomic_load(&st.hdr->committed_bytes) <= capacity);
    check_charges(&st);
    store_close(&st);
}

int main(void) {
    test_random(1, 1);
    test_random(2, 3);
    test_capacity();
    test_range();
    test_growth();
    test_same_size_reuse();
    test_commit_errors();
    test_file_system_full();
    test_commit_ahead();
    test_commit_ahead_overtaken();
    test_threads(2, 0, 8 * MIB);
    test_threads(1, 0, 8 * MIB);
    test_threads(1, 2, 8 * MIB);
    test_threads(2, 2, 40 * SR_PAGE); /* at the edge of the capacity */
    printf("test_arena: ok\n");
    return 0;
}
