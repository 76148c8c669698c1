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
/* SR_OK, or SR_CORRUPT where the last owner died inside (the store is marked dirty, the mutex
 * stays inconsistent until a repair). */
int sr_lock(sr_store *st, sr_mutex *m);
void sr_unlock(sr_mutex *m);
/* Sleep while *word == expected, at most timeout_ms (<= 100). Counts itself in *waiters. Returns
 * at once on a wake, a signal or a change. */
void sr_futex_wait(_Atomic uint32_t *word, uint32_t expected, _Atomic uint32_t *waiters,
                   uint32_t timeout_ms);
/* Change the word and wake up to n of those that wait; no system call where nobody is counted. */
void sr_futex_wake(_Atomic uint32_t *word, _Atomic uint32_t *waiters, uint32_t n);

#endif
