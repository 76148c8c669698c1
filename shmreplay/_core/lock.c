#include "lock.h"

#include "fault.h"

#include <errno.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

int sr_mutex_init(sr_mutex *m) {
    pthread_mutexattr_t attr;
    if (SR_FAULT_POINT("mutex") || pthread_mutexattr_init(&attr) != 0) return SR_SYS;
    int bad = pthread_mutexattr_setpshared(&attr, PTHREAD_PROCESS_SHARED) |
              (SR_CRASH_SAFE ? pthread_mutexattr_setrobust(&attr, PTHREAD_MUTEX_ROBUST) : 0) |
              pthread_mutexattr_settype(&attr, PTHREAD_MUTEX_NORMAL) |
              pthread_mutex_init(&m->m, &attr);
    pthread_mutexattr_destroy(&attr);
    return bad ? SR_SYS : SR_OK;
}

/* Critical sections last tens of nanoseconds, falling asleep and being woken tens of
 * microseconds: try for about two microseconds before sleeping. Longer would only burn time that
 * a preempted owner needs. */
#define SPINS 12u
#define LOCK_SLICE_MS 100

static inline void spin_pause(uint32_t n) {
    for (uint32_t i = 0; i < n; i++) {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#elif defined(__aarch64__)
        __asm__ volatile("yield");
#endif
    }
}

/* Seconds and nanoseconds since the epoch, `ms` from now. */
static struct timespec deadline_in(long ms) {
    struct timespec ts;
    clock_gettime(CLOCK_REALTIME, &ts);
    ts.tv_nsec += ms * 1000000L;
    ts.tv_sec += ts.tv_nsec / 1000000000L;
    ts.tv_nsec %= 1000000000L;
    return ts;
}

/* As pthread_mutex_lock, but looks again every 100 ms, because a wake-up can get lost: the owner
 * lets go and wakes B of two sleepers B and C; D takes the free lock, without the mark that says
 * that somebody sleeps; B is killed before it could set that again; D lets go and wakes nobody. The
 * kernel passes the wake-up of a dead one on only where the lock is still free. A deadline that
 * has passed costs nothing where the lock is free, so that the clock is read only to sleep. */
static int lock_in_slices(sr_mutex *m) {
    static const struct timespec passed = {0};
    struct timespec deadline = SR_UNLIKELY(sr_seems_held(m)) ? deadline_in(LOCK_SLICE_MS) : passed;
    int rc = pthread_mutex_timedlock(&m->m, &deadline);
    while (SR_UNLIKELY(rc == ETIMEDOUT)) {
        deadline = deadline_in(LOCK_SLICE_MS);
        rc = pthread_mutex_timedlock(&m->m, &deadline);
    }
    return rc;
}

static inline void give(sr_mutex *m) {
    int rc = pthread_mutex_unlock(&m->m);
    SR_ASSERT(rc == 0);
}

/* In one piece with each of those that it is called by: this is where the time goes. */
static inline int take(sr_store *st, sr_mutex *m) {
    for (uint32_t i = 0; SR_UNLIKELY(sr_seems_held(m)) && i < SPINS; i++) spin_pause(2 + i / 4);
    int rc = lock_in_slices(m);
    if (SR_LIKELY(rc == 0)) {
        /* SYNC POINT: relaxed: whoever met a dead owner in this lock marked the store dirty before
         * it let go of it. What lies under other locks is sound as long as this one is. */
        if (!SR_CRASH_SAFE) return SR_OK;
        if (SR_LIKELY(atomic_load_explicit(&st->hdr->dirty, memory_order_relaxed) == 0)) {
            return SR_OK;
        }
        give(m);
        return SR_DIRTY;
    }
    if (rc != EOWNERDEAD) return SR_CORRUPT;
    /* We own it, and what it protects may be half changed. Marked before anybody can have it:
     * the mutex is usable again, the store is not until it is repaired. Crash: before the mark the
     * next one gets EOWNERDEAD as we did; after it the mark is there. */
    atomic_store(&st->hdr->dirty, 1);
    rc = pthread_mutex_consistent(&m->m);
    SR_ASSERT(rc == 0);
    give(m);
    return SR_DIRTY;
}

int sr_lock_inner(sr_store *st, sr_mutex *m) { return take(st, m); }

int sr_lock(sr_store *st, sr_mutex *m) {
    for (;;) {
        int rc = take(st, m);
        if (SR_LIKELY(rc != SR_DIRTY)) return rc;
        rc = sr_repair(st);
        if (rc != SR_OK) return rc;
    }
}

int sr_lock_anyway(sr_mutex *m) {
    int rc = lock_in_slices(m);
    if (rc == EOWNERDEAD) rc = pthread_mutex_consistent(&m->m);
    return rc == 0 ? SR_OK : SR_CORRUPT;
}

void sr_unlock(sr_mutex *m) { give(m); }

void sr_futex_wait(_Atomic uint32_t *word, uint32_t expected, _Atomic uint32_t *waiters,
                   uint32_t timeout_ms) {
    struct timespec ts = {.tv_sec = timeout_ms / 1000,
                          .tv_nsec = (long)(timeout_ms % 1000) * 1000000L};
    /* SYNC POINT: the waiter counts itself before the kernel compares the word, the waker
     * changes the word before it reads the count (both sequentially consistent): either the
     * waker sees a waiter, or the waiter sees the change. A waiter that is killed leaves the
     * count too high, which costs wakers a system call and nothing else. */
    atomic_fetch_add(waiters, 1);
    /* Not the private flag: the word is shared between processes. Errors are all reasons to look
     * again. */
    if (!SR_FAULT_POINT("futex")) syscall(SYS_futex, word, FUTEX_WAIT, expected, &ts, NULL, 0);
    atomic_fetch_sub(waiters, 1);
}

void sr_futex_wake(_Atomic uint32_t *word, _Atomic uint32_t *waiters, uint32_t n) {
    atomic_fetch_add(word, 1);
    if (atomic_load(waiters) == 0) return;
    syscall(SYS_futex, word, FUTEX_WAKE, n > 0x7fffffffu ? 0x7fffffffu : n, NULL, NULL, 0);
}
