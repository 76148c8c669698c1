#include "guard.h"

#include "lock.h"

#define TOLD_MAX 100u /* messages of one process: a store that is broken is met again and again */

_Thread_local sr_guard *sr_inside;

static void tell(const char *what, const char *file, int line) {
    static _Atomic uint32_t told;
    if (atomic_fetch_add_explicit(&told, 1, memory_order_relaxed) >= TOLD_MAX) return;
    fprintf(stderr, "shmreplay: assertion failed: %s (%s:%d)\n", what, file, line);
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
    while (g->n_held > 0) sr_unlock_untold(g->held[--g->n_held]);
    if (g->leave != NULL) g->leave(g->st);
    longjmp(g->place, 1);
}

/* Where that cannot be done now the store stays dirty, for who comes next. */
void sr_guard_mend(const sr_guard *g) { (void)sr_repair(g->st); }

void sr_suspect(const sr_store *st) {
    if (sr_inside != NULL) atomic_store(&st->hdr->dirty, 1);
}
