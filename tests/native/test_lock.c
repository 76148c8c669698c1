/* test_lock.c: a sleeper whose wake-up got lost looks again by itself. */
#include "check.h"
#include "lock.h"

#include <pthread.h>
#include <sched.h>
#include <unistd.h>

#define SLEEPERS 0x80000000 /* the C library's mark in the word: somebody sleeps */

static sr_mutex mutex;
static sr_header header;
static sr_store store = {.hdr = &header};

static void *sleeper(void *unused) {
    (void)unused;
    CHECK(sr_lock(&store, &mutex) == SR_OK);
    sr_unlock(&mutex);
    return NULL;
}

/* What is left where the one that was woken is killed before it could mark that another sleeps, and
 * a third one has the lock by then: held, without the mark. */
static void test_lost_wake_up(void) {
    CHECK(sr_mutex_init(&mutex) == SR_OK);
    CHECK(sr_lock(&store, &mutex) == SR_OK);
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, sleeper, NULL) == 0);
#if defined(__GLIBC__)
    while ((__atomic_load_n(&mutex.m.__data.__lock, __ATOMIC_RELAXED) & (int)SLEEPERS) == 0) {
        sched_yield();
    }
    __atomic_and_fetch(&mutex.m.__data.__lock, (int)~SLEEPERS, __ATOMIC_RELAXED);
#endif
    sr_unlock(&mutex);
    CHECK(pthread_join(thread, NULL) == 0);
}

int main(void) {
    alarm(60); /* where it would sleep for ever */
    test_lost_wake_up();
    return 0;
}
