/* guard.h: what happens where the store contradicts itself.
 *
 * Each public function that reads shared structures begins with SR_GUARDED. A check that fails
 * deeper down (SR_ASSERT, sr_ptr, sr_damage) ends that call as the death of its process inside a
 * lock would: the store is marked dirty, this thread's locks are let go of, the store is repaired
 * (by this thread, or whoever takes a lock first), and the call gives SR_CORRUPT.
 *
 * Only the outermost call of a thread is a place to return to. Outside of one there is none, and a
 * failed check ends the process. */
#ifndef SR_GUARD_H
#define SR_GUARD_H

#include <setjmp.h>

#include "shmreplay.h"

typedef struct sr_guard {
    jmp_buf place;
    sr_store *st;
    /* Of who holds all locks of the store, or repairs it: what remains to be done at the end. */
    void (*leave)(sr_store *st);
    const sr_stripe *sound; /* looked at in this call, and found to be what it was */
} sr_guard;

/* The outermost call that this thread is in, NULL: none. Initial-exec, so that it costs as much as
 * any variable. */
extern _Thread_local sr_guard *sr_inside
    __attribute__((tls_model("initial-exec"), visibility("hidden")));

/* A check failed, and this says which. */
_Noreturn void sr_damage(const char *what, const char *file, int line) __attribute__((cold));
/* Learn how the list of a thread's robust mutexes leads to them: before the first check that fails.
 * Where it does not, a failed check that finds a store locked ends the process instead. */
void sr_guard_learn(void);
/* Where a failed check has ended the call, whose locks are let go of: repair. */
void sr_guard_mend(const sr_guard *g) __attribute__((cold));
/* What is broken can be told from outside of it: the call goes on, and whoever takes a lock next
 * repairs. */
void sr_suspect(const sr_store *st);

/* 1 if this is the outermost call. */
static inline int sr_guard_enter(sr_guard *g, const sr_store *st) {
    if (sr_inside != 0) return 0;
    g->st = (sr_store *)st;
    g->leave = 0;
    g->sound = 0;
    sr_inside = g;
    return 1;
}
static inline void sr_guard_leave(const sr_guard *g) {
    if (sr_inside == g) sr_inside = 0;
}

#ifdef SR_FRAGILE
#define SR_GUARDED(store, otherwise) (void)(store);
#else
/* To be the first statement. `otherwise`: what the function gives where a check failed. _setjmp:
 * without the signal mask, which nobody changes here. */
#define SR_GUARDED(store, otherwise)                                                     \
    sr_guard guard_ __attribute__((cleanup(sr_guard_leave)));                            \
    if (sr_guard_enter(&guard_, (store)) &&                                              \
        __builtin_expect(_setjmp(guard_.place) != 0, 0)) {                               \
        return sr_guard_mend(&guard_), otherwise;                                        \
    }
#endif

#endif
