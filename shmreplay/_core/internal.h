/* internal.h: what the files of the core share and nobody else sees: assertions, access to the
 * segment, small maths. */
#ifndef SR_INTERNAL_H
#define SR_INTERNAL_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* robust mutexes, madvise, CLOCK_REALTIME_COARSE: Linux */
#endif

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "guard.h"
#include "layout.h"
#include "shmreplay.h"

/* Assertions stay on. One that fails is a defect of this library, or memory that somebody scribbled
 * over: the call ends, and the store is repaired (guard.h). */
#define SR_ASSERT(cond)                                                              \
    do {                                                                             \
        if (__builtin_expect(!(cond), 0)) sr_damage(#cond, __FILE__, __LINE__);      \
    } while (0)

/* 0 in a build that only bench/crash_safety.py makes: what it costs that any process may die. */
#ifdef SR_FRAGILE
#define SR_CRASH_SAFE 0
#else
#define SR_CRASH_SAFE 1
#endif

#define SR_LIKELY(x) __builtin_expect(!!(x), 1)
#define SR_UNLIKELY(x) __builtin_expect(!!(x), 0)

/* Every access to shared memory through an offset goes through here: inside the segment or NULL. */
static inline void *sr_at(const sr_store *st, uint64_t off, uint64_t bytes) {
    if (SR_UNLIKELY(off == 0 || off > st->bytes || bytes > st->bytes - off)) return NULL;
    return st->base + off;
}
/* Could a structure of so many bytes lie there, on a multiple of 8? Turned right by three, an
 * offset that is on none is larger than any that is: one compare. */
static inline int sr_fits(const sr_store *st, uint64_t off, uint64_t bytes) {
    return (off >> 3 | off << 61) <= (st->bytes - bytes) >> 3;
}
/* For offsets that this process has checked or computed itself: it begins inside of the segment,
 * which is all that is looked at here. */
static inline void *sr_ptr(const sr_store *st, uint64_t off) {
    if (SR_CRASH_SAFE) SR_ASSERT(sr_fits(st, off, SR_CHUNK_HEAD));
    return st->base + off;
}

/* For offsets that were compared with what this process knows (shape.h), or come from there. */
static inline void *sr_known(const sr_store *st, uint64_t off) { return st->base + off; }

/* What will be written soon. Prefetching an address that does not exist does nothing: nothing is
 * checked, and so it is no pointer until then. */
static inline void sr_prefetch(const sr_store *st, uint64_t off) {
    __builtin_prefetch((const void *)((uintptr_t)st->base + off), 1);
}

static inline uint64_t sr_align(uint64_t x, uint64_t a) { return (x + a - 1) & ~(a - 1); }

static inline uint64_t sr_splitmix64(uint64_t *state) {
    /* Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators". */
    uint64_t z = (*state += 0x9e3779b97f4a7c15ULL);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
    return z ^ (z >> 31);
}
/* Uniform in [0, 1): 53 bits. */
static inline double sr_random_double(uint64_t *state) {
    return (double)(sr_splitmix64(state) >> 11) * 0x1.0p-53;
}
/* Uniform in [0, n), without bias: Lemire 2019, "Fast random integer generation in an interval".
 * n > 0. */
static inline uint64_t sr_random_below(uint64_t *state, uint64_t n) {
    unsigned __int128 m = (unsigned __int128)sr_splitmix64(state) * n;
    if (SR_UNLIKELY((uint64_t)m < n)) {
        uint64_t floor = (0 - n) % n;
        while ((uint64_t)m < floor) m = (unsigned __int128)sr_splitmix64(state) * n;
    }
    return (uint64_t)(m >> 64);
}

static inline double sr_load_double(const _Atomic uint64_t *bits) {
    uint64_t u = atomic_load_explicit(bits, memory_order_relaxed);
    double d;
    memcpy(&d, &u, 8);
    return d;
}
static inline void sr_store_double(_Atomic uint64_t *bits, double d) {
    uint64_t u;
    memcpy(&u, &d, 8);
    atomic_store_explicit(bits, u, memory_order_relaxed);
}

#endif
