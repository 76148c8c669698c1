/* lock.h: robust process-shared mutexes and futex waiting. The lowest layer.
 *
 * A mutex is locked and unlocked within one call into the core, on one thread; under it there is
 * no Python, no copying of step data and no system call, an extent's commit aside. */
#ifndef SR_LOCK_H
#define SR_LOCK_H

#include "internal.h"

/* Initialise: process-shared, robust, normal. Only by the creator, before the magic word is
 * published. Never destroyed. */
int sr_mutex_init(sr_mutex *m);
/* For who holds no lock. Where an owner died inside one, repairs the store first (sr_repair).
 * SR_OK, or SR_CORRUPT or SR_SYS where that could not be done, holding nothing. */
int sr_lock(sr_store *st, sr_mutex *m);
/* For who holds locks that come before this one. SR_OK; SR_DIRTY: an owner died inside this lock
 * or another, and this one is not held: whoever called lets go of all locks (what it leaves half
 * done is rebuilt like what the dead one left) and begins again from an outermost sr_lock;
 * SR_CORRUPT. */
int sr_lock_inner(sr_store *st, sr_mutex *m);
/* For sr_repair: held whatever happened to the last owner. SR_OK or SR_CORRUPT. */
int sr_lock_anyway(sr_mutex *m);
void sr_unlock(sr_mutex *m);
/* Does somebody hold it? Only to decide whether to spin, or where to wait. Not
 * pthread_mutex_trylock: where a mutex is not recoverable, glibc's (2.36, at least) says so but
 * leaves it locked, and the next one to lock it sleeps for ever. */
static inline int sr_seems_held(const sr_mutex *m) {
#if defined(__GLIBC__)
    return __atomic_load_n(&m->m.__data.__lock, __ATOMIC_RELAXED) != 0;
#else
    (void)m;
    return 0;
#endif
}
/* Sleep while *word == expected, at most timeout_ms (<= 100). Counts itself in *waiters. Returns
 * at once on a wake, a signal or a change. */
void sr_futex_wait(_Atomic uint32_t *word, uint32_t expected, _Atomic uint32_t *waiters,
                   uint32_t timeout_ms);
/* Change the word and wake up to n of those that wait; no system call where nobody is counted. */
void sr_futex_wake(_Atomic uint32_t *word, _Atomic uint32_t *waiters, uint32_t n);

#endif
