#include "internal.h"

#include "lock.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#define TOLD_MAX 100u /* messages of one process: a store that is broken is met again and again */

_Thread_local sr_guard *sr_inside;

static void tell(const char *what, const char *file, int line) {
    static _Atomic uint32_t told;
    if (atomic_fetch_add_explicit(&told, 1, memory_order_relaxed) >= TOLD_MAX) return;
    fprintf(stderr, "shmreplay: assertion failed: %s (%s:%d)\n", what, file, line);
}

/* ------------------------------------------------------------------ which locks are held
 *
 * Every thread has a list of the robust mutexes that it holds: the kernel reads it when the thread
 * dies. So locking notes nothing for the sake of checks that hardly ever fail; where one does, the
 * list tells what is to be let go of. An entry lies inside its mutex; at which distance from the
 * mutex's beginning is the C library's affair, and is measured once. */

typedef struct robust_list entry;

static struct robust_list_head *list_of_thread(void) {
    struct robust_list_head *head = NULL;
    size_t bytes = 0;
    return syscall(SYS_get_robust_list, 0, &head, &bytes) == 0 ? head : NULL;
}

static pthread_once_t learning = PTHREAD_ONCE_INIT;
static ptrdiff_t entry_in_mutex = -1; /* -1: unknown */

static void learn(void) {
    pthread_mutexattr_t attr;
    pthread_mutex_t m;
    if (pthread_mutexattr_init(&attr) != 0) return;
    int bad = pthread_mutexattr_setrobust(&attr, PTHREAD_MUTEX_ROBUST) |
              pthread_mutex_init(&m, &attr);
    pthread_mutexattr_destroy(&attr);
    if (bad || pthread_mutex_lock(&m) != 0) return;
    const struct robust_list_head *head = list_of_thread();
    if (head != NULL) {
        ptrdiff_t at = (char *)head->list.next - (char *)&m;
        if (at >= 0 && at < (ptrdiff_t)sizeof m) entry_in_mutex = at;
    }
    pthread_mutex_unlock(&m);
    pthread_mutex_destroy(&m);
}

void sr_guard_learn(void) { pthread_once(&learning, learn); }

/* Let go of what this thread holds of this store, the last first. The list goes through shared
 * memory, but only through mutexes that this thread holds, which nobody else writes. */
static void let_go(const sr_store *st) {
    const struct robust_list_head *head = list_of_thread();
    if (head == NULL || entry_in_mutex < 0) abort(); /* the kernel tells the others */
    const entry *at = head->list.next;
    for (uint32_t i = 0; i < SR_LOCKS_MAX && at != &head->list && at != NULL; i++) {
        char *m = (char *)at - entry_in_mutex;
        at = at->next;
        if (m > st->base && m < st->base + st->bytes) sr_unlock((sr_mutex *)(void *)m);
    }
}

void sr_damage(const char *what, const char *file, int line) {
    tell(what, file, line);
    sr_guard *g = sr_inside;
    if (g == NULL) abort();
    /* Nothing below may come here again. */
    sr_inside = NULL;
    /* SYNC POINT: marked before the first lock goes, as in sr_lock_inner: whoever takes one of them
     * next sees that what it protects is not to be trusted. */
    atomic_store(&g->st->hdr->dirty, 1);
    if (g->leave != NULL) g->leave(g->st);
    let_go(g->st);
    longjmp(g->place, 1);
}

/* Where that cannot be done now the store stays dirty, for who comes next. */
void sr_guard_mend(const sr_guard *g) { (void)sr_repair(g->st); }

void sr_suspect(const sr_store *st) {
    if (sr_inside != NULL) atomic_store(&st->hdr->dirty, 1);
}
