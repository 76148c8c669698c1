/* test_fault_points.c: each thing that may fail is made to fail, one after the other, in each
 * operation: memory of the process and of the store, its mapping, its capacity, waiting. Built with
 * SR_FAULT. After a failure nothing has changed, and the same call succeeds.
 *
 * Locks are not among them: a robust mutex fails only once what it protects is given up. */
#include "arena_chunks.h"
#include "step_survivor.h"

#include <sys/stat.h>
#include <sys/wait.h>

#define POINTS_MAX 200u

static uint32_t armed, passed; /* the armed-th point from now fails; 0: none does */
static const char *failed, *always; /* NULL: none fails always */

int sr_fault(const char *name) {
    if (always != NULL && strcmp(name, always) == 0) return 1;
    if (armed == 0 || ++passed != armed) return 0;
    failed = name;
    return 1;
}

static void arm(uint32_t n) {
    armed = n;
    passed = 0;
    failed = NULL;
}

/* Without these the operation is slower, and succeeds. */
static int is_help_only(const char *name) {
    static const char *const help[] = {"populate", "pages", "futex",
                                       "dump",     "huge",  "collapse"};
    for (size_t i = 0; i < sizeof help / sizeof *help; i++) {
        if (strcmp(name, help[i]) == 0) return 1;
    }
    return 0;
}

/* What the operation did before it failed is what it says. */
static void unchanged(const operation *op, world *w) {
    contents now;
    contents_read(&w->st, &now);
    int64_t done = op->effect == INSERTS ? w->done : 0;
    CHECK(now.info.inserts == w->before.info.inserts + done);
    CHECK(now.info.samples == w->before.info.samples);
    CHECK(now.info.pending == 0 && now.info.num_episodes >= w->before.info.num_episodes);
    if (done > 0) return;
    CHECK(now.n == w->before.n && now.info.deletes == w->before.info.deletes);
    for (uint32_t i = 0; i < now.n; i++) {
        const content *old = contents_find(&w->before, now.item[i].key);
        CHECK(old != NULL && old->priority == now.item[i].priority);
        CHECK(old->times_sampled == now.item[i].times_sampled);
    }
}

static void leaves_nothing(world *w) {
    if (w->actor.free_stack != NULL) CHECK(sr_session_close(&w->actor) == SR_OK);
    if (w->third.free_stack != NULL) CHECK(sr_session_close(&w->third) == SR_OK);
    for (uint32_t i = ACTOR; i <= THIRD; i++) CHECK(sr_participant_reclaim(&w->st, i) >= 0);
    survivor_works(w, 0);
    survivor_leaves_nothing(w);
}

static char where[128]; /* for whoever sees a check fail */

static void say_where(void) {
    if (where[0] != 0) fprintf(stderr, "in %s\n", where);
}

/* The operation with its n-th point failing. 0: it has no so many. */
static int fail_at(const operation *op, const kind *k, uint32_t n) {
    world w;
    world_make(&w, k, op->fill);
    contents_read(&w.st, &w.before);
    if (op->prepare != NULL) op->prepare(&w);
    contents_read(&w.st, &w.before);
    uint64_t objects = n_objects(&w.st);
    w.status = SR_OK;
    w.done = 0;
    arm(n);
    op->run(&w);
    const char *point = failed;
    arm(0);
    snprintf(where, sizeof where, "%s/%s, point %u (%s), status %d", op->name, k->name, n,
             point != NULL ? point : "none", w.status);
    survivor_check(&w.st, "after the failure");
    int blocked = w.status == SR_WOULD_BLOCK; /* by a limiter that holds */
    if (point != NULL && !is_help_only(point) && w.status != SR_OK && !blocked) {
        CHECK(w.status != SR_CORRUPT || op->run == run_reclaim);
        CHECK(op->effect == INSERTS || n_objects(&w.st) == objects);
        unchanged(op, &w);
        if (op->effect == INSERTS) { /* what is left of it */
            uint32_t in = w.done;
            w.status = sr_insert(&w.actor, 0, op->n - in, w.item + in, w.keys + in, &w.done,
                                 &w.seq);
            w.done += in;
        } else {
            op->run(&w);
        }
        blocked = w.status == SR_WOULD_BLOCK;
    }
    CHECK(w.status == SR_OK || blocked);
    survivor_effect(op, &w, w.done);
    leaves_nothing(&w);
    world_drop(&w);
    return point != NULL;
}

static void test_operations(void) {
    uint32_t points = 0;
    for (size_t i = 0; i < N_OPERATIONS; i++) {
        for (size_t k = 0; k < N_KINDS; k++) {
            const operation *op = &OPERATIONS[i];
            if (op->first != NULL || (!op->every_kind && k != 1)) continue;
            uint32_t n = 1;
            while (n < POINTS_MAX && fail_at(op, &KINDS[k], n)) n++;
            CHECK(n < POINTS_MAX);
            points += n - 1;
        }
    }
    printf("%u points failed\n", points);
    CHECK(points > 50);
    where[0] = 0;
}

/* ---------------------------------------------------------------- laying out, joining, waiting */

static void test_create(void) {
    sr_table_config table = table_config(SR_SEL_UNIFORM, SR_SEL_FIFO, 10, 2);
    sr_store_config cfg = {.capacity_bytes = 1u << 20, .generation = 7, .config_bytes = 2,
                           .n_arenas = 2, .n_participants = 4, .n_sessions = 8, .n_tables = 1};
    for (uint32_t n = 1;; n++) {
        uint64_t bytes = sr_store_bytes(&cfg, &table);
        int fd = memfd_create("table", MFD_CLOEXEC);
        CHECK(fd >= 0 && ftruncate(fd, (off_t)bytes) == 0 && n < POINTS_MAX);
        sr_store st, other;
        arm(n);
        int rc = sr_store_map(&st, fd, bytes);
        if (rc == SR_OK) rc = sr_store_format(&st, &cfg, &table, "{}");
        const char *point = failed;
        arm(0);
        if (point != NULL && !is_help_only(point)) {
            CHECK(rc != SR_OK && (st.base != NULL || strcmp(point, "mmap") == 0));
            CHECK(sr_store_map(&other, fd, bytes) == SR_OK);
            CHECK(sr_store_attach(&other) == SR_WOULD_BLOCK); /* nobody joins it */
            sr_store_unmap(&other);
        } else {
            CHECK(rc == SR_OK);
            check_store(&st);
        }
        sr_store_unmap(&st);
        CHECK(close(fd) == 0);
        if (point != NULL) continue;
        CHECK(n > 4);
        return;
    }
}

static void test_join(void) {
    world w;
    world_make(&w, &KINDS[1], 4);
    contents_read(&w.st, &w.before);
    for (uint32_t n = 1;; n++) {
        sr_store other;
        arm(n);
        int rc = sr_store_map(&other, w.st.fd, w.st.bytes);
        if (rc == SR_OK) rc = sr_store_attach(&other);
        const char *point = failed;
        arm(0);
        CHECK(n < POINTS_MAX);
        CHECK((rc == SR_OK) == (point == NULL || is_help_only(point)));
        if (rc == SR_OK) {
            world seen = w;
            seen.st = other;
            unchanged(&(operation){.effect = NOTHING}, &seen);
        } else {
            CHECK(rc == SR_SYS && other.hdr == NULL);
        }
        sr_store_unmap(&other);
        if (point != NULL) continue;
        CHECK(n > 5); /* the mapping, two pieces of advice, two lists, the pages */
        break;
    }
    leaves_nothing(&w);
    world_drop(&w);
}

/* A wait that the kernel refuses ends at once, and is counted neither before nor after. */
static void test_wait(void) {
    world w;
    world_make(&w, &KINDS[0], 0);
    sr_table *t = sr_table_at(&w.st, 0);
    arm(1);
    sr_wait_sample(&w.st, 0, atomic_load(&t->sample_seq), 100);
    CHECK(failed != NULL && atomic_load(&t->sample_waiters) == 0);
    arm(1);
    sr_wait_insert(&w.st, 0, atomic_load(&t->insert_seq), 100);
    CHECK(failed != NULL && atomic_load(&t->insert_waiters) == 0);
    arm(0);
    leaves_nothing(&w);
    world_drop(&w);
}

/* A growth that asked for huge pages before it was refused takes nothing: neither what is counted
 * nor what the file system has. */
static void test_refused_growth(void) {
    enum { GROWTH = 8u << 20 };
    sr_table_config table = table_config(SR_SEL_UNIFORM, SR_SEL_FIFO, 10, 2);
    sr_store_config cfg = {.capacity_bytes = 4u * GROWTH, .generation = 7, .config_bytes = 2,
                           .n_arenas = 1, .n_participants = 4, .n_sessions = 8, .n_tables = 1};
    uint64_t bytes = sr_store_bytes(&cfg, &table);
    int fd = memfd_create("table", MFD_CLOEXEC);
    sr_store st;
    CHECK(fd >= 0 && ftruncate(fd, (off_t)bytes) == 0);
    CHECK(sr_store_map(&st, fd, bytes) == SR_OK);
    CHECK(sr_store_format(&st, &cfg, &table, "{}") == SR_OK);
    const sr_arena *a = arenas(&st);
    struct stat before, after;
    uint64_t counted = atomic_load(&st.hdr->committed_bytes);
    uint32_t cuts = a->n_cuts;
    uint64_t off = committed_end(a) + 40; /* what lies before it in its page stays */
    st.base[off - 1] = 1;
    CHECK(fstat(fd, &before) == 0);
    always = "fallocate";
    CHECK(sr_commit(&st, off, GROWTH, GROWTH) == SR_NOSPACE);
    always = NULL;
    CHECK(fstat(fd, &after) == 0);
    CHECK(after.st_blocks <= before.st_blocks && st.base[off - 1] == 1);
    CHECK(atomic_load(&st.hdr->committed_bytes) == counted && a->n_cuts == cuts + 1);
    CHECK(sr_commit(&st, off, GROWTH, GROWTH) == SR_OK);
    memset(st.base + off, 2, GROWTH);
    CHECK(atomic_load(&st.hdr->committed_bytes) == counted + GROWTH);
    sr_store_unmap(&st);
    CHECK(close(fd) == 0);
}

/* More runs than a trajectory's first memory: it asks the process for more. */
static void test_long_trajectory(void) {
    enum { RUNS = 100 };
    for (uint32_t n = 1;; n++) {
        world w;
        world_make(&w, &KINDS[0], 0);
        sr_run runs[RUNS];
        for (uint32_t i = 0; i < RUNS; i++) {
            runs[i] = (sr_run){.block = w.block.off, .start = i % 3, .count = 1, .stride = 1};
        }
        const uint32_t first[] = {0, RUNS}, flags[] = {0};
        uint64_t objects = n_objects(&w.st);
        held t;
        arm(n);
        int rc = sr_traj_new(&w.actor, 1, first, flags, runs, &t.off, &t.position);
        const char *point = failed;
        arm(0);
        if (point != NULL) {
            CHECK(rc != SR_OK && n_objects(&w.st) == objects);
            CHECK(sr_traj_new(&w.actor, 1, first, flags, runs, &t.off, &t.position) == SR_OK);
        }
        leaves_nothing(&w);
        world_drop(&w);
        if (point == NULL) return;
    }
}

/* Somebody dies inside a lock, and whoever comes next has not the memory to repair. */
static void test_repair(void) {
    for (uint32_t n = 1;; n++) {
        world w;
        world_make(&w, &KINDS[1], 4);
        contents_read(&w.st, &w.before);
        prepare_keys(&w);
        pid_t pid = fork();
        CHECK(pid >= 0);
        if (pid == 0) {
            _exit(sr_lock(&w.st, &sr_stripe_at(&w.st, sr_table_at(&w.st, 0), 1)->lock) != SR_OK);
        }
        int status;
        CHECK(waitpid(pid, &status, 0) == pid && status == 0 && n < POINTS_MAX);
        arm(n);
        run_update(&w);
        const char *point = failed;
        arm(0);
        if (point != NULL && !is_help_only(point)) {
            CHECK(w.status == SR_SYS && w.done <= 2);
            CHECK(atomic_load(&w.st.hdr->dirty) == 1);
            run_update(&w); /* with memory */
        }
        CHECK(w.status == SR_OK && w.done == 2 && atomic_load(&w.st.hdr->dirty) == 0);
        survivor_contents(&(operation){.effect = UPDATES, .n = 2}, &w);
        leaves_nothing(&w);
        world_drop(&w);
        if (point == NULL) {
            CHECK(n > 2 + 4 * 2); /* two arenas, four lists of each of two stripes */
            return;
        }
    }
}

int main(void) {
    CHECK(atexit(say_where) == 0);
    test_operations();
    test_create();
    test_join();
    test_wait();
    test_refused_growth();
    test_long_trajectory();
    test_repair();
    printf("test_fault_points: ok\n");
    return 0;
}
