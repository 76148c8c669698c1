/* arena.c: allocating and freeing. How the memory gets there: commit.c. */
#include "arena_chunks.h"
#include "fault.h"
#include "lock.h"

#define PAYLOAD_MAX (1ull << 46)
#define CLASS_WALK 32u /* chunks tried in the one class whose members may or may not fit */

/* ------------------------------------------------------------------ finding */

/* A free chunk of at least `size` bytes in *found (0: none). Its list entry is checked, not
 * removed. */
static inline int find_fit(const sr_store *st, const sr_arena *a, uint64_t size, uint64_t *found) {
    uint32_t fl, sl;
    *found = 0;
    class_of(size, &fl, &sl);
    /* The class of `size` itself holds chunks a little smaller and a little larger. Its first is
     * worth a look: blocks of one writer all have one size, and without this none of them would fit
     * where another was. */
    uint64_t c = a->head[fl][sl];
    if (c == 0 || !in_arena(st, a, c) || size_of(flags_get(chunk_at(st, c))) < size) {
        uint32_t bits = a->sl_bitmap[fl] & (~1u << sl);
        if (bits == 0) {
            uint64_t up = a->fl_bitmap & (~1ull << fl);
            if (up == 0) return SR_OK;
            fl = (uint32_t)__builtin_ctzll(up);
            if (fl >= SR_FL_COUNT) return SR_CORRUPT;
            bits = a->sl_bitmap[fl];
        }
        if ((bits & ((1u << SR_SL_COUNT) - 1)) == 0) return SR_CORRUPT;
        c = a->head[fl][__builtin_ctz(bits)];
    }
    if (!free_chunk_ok(st, a, c) || size_of(flags_get(chunk_at(st, c))) < size) return SR_CORRUPT;
    *found = c;
    return SR_OK;
}

/* Before more memory is committed: further into the class of `size`, where some chunks fit and some
 * do not. */
static int find_in_class(const sr_store *st, const sr_arena *a, uint64_t size, uint64_t *found) {
    uint32_t fl, sl;
    class_of(size, &fl, &sl);
    uint64_t c = a->head[fl][sl];
    for (uint32_t i = 0; i < CLASS_WALK && c != 0; i++, c = links_at(st, c)->next) {
        if (!free_chunk_ok(st, a, c)) return SR_CORRUPT;
        if (size_of(flags_get(chunk_at(st, c))) < size) continue;
        *found = c;
        return SR_OK;
    }
    return SR_OK;
}
/* ------------------------------------------------------------------ allocating */

int sr_arena_init(sr_store *st, sr_arena *a, uint64_t start, uint64_t end) {
    SR_ASSERT(start % SR_PAGE == 0 && end % SR_PAGE == 0 && start < end && end <= st->bytes);
    memset(a, 0, sizeof *a);
    a->start = a->committed_end = start;
    a->end = end;
    if (a == arenas(st)) {
        st->arena_start = start;
        st->arena_span = end - start;
    }
    return sr_mutex_init(&a->lock);
}

/* Make `size` bytes at the front of free chunk c an allocation; the rest stays free. Under the
 * lock. */
static inline void carve(sr_store *st, sr_arena *a, uint64_t c, uint64_t size, enum sr_kind kind) {
    uint64_t whole = size_of(flags_get(chunk_at(st, c)));
    list_remove(st, a, c, whole);
    if (whole == size) {
        sr_chunk *after = chunk_at(st, c + whole);
        flags_set(after, flags_get(after) & ~SR_CHUNK_PREV_FREE);
    } else {
        list_add(st, a, c + size, whole - size);
    }
    flags_set(chunk_at(st, c), size | (uint64_t)kind << KIND_SHIFT);
    a->used_bytes += size;
    a->kind_bytes[kind] += size;
    a->free_bytes -= size;
    a->n_allocs++;
}

/* One arena: SR_FULL if it has no chunk that fits and may not (or cannot) grow. */
static inline int alloc_in(sr_store *st, sr_arena *a, enum sr_kind kind, uint64_t size,
                           int may_grow, _Atomic uint64_t *inflight, uint64_t *off) {
    uint64_t c, low = 0;
    int rc = lock_arena(st, a);
    if (SR_UNLIKELY(rc != SR_OK)) return rc;
    rc = find_fit(st, a, size, &c);
    if (SR_UNLIKELY(rc == SR_OK && c == 0)) {
        rc = find_in_class(st, a, size, &c);
        if (rc == SR_OK && c == 0) rc = may_grow ? sr_arena_grow(st, a, size, &c) : SR_FULL;
    }
    if (SR_LIKELY(rc == SR_OK)) {
        carve(st, a, c, size, kind);
        *off = c + SR_CHUNK_HEAD;
        /* SYNC POINT: read by a repair, which holds all locks. Dying before the unlock leaves the
         * lock to tell of it. */
        if (inflight != NULL) atomic_store_explicit(inflight, *off, memory_order_release);
        low = ahead_bytes(st, a);
    }
    if (SR_UNLIKELY(rc == SR_CORRUPT)) sr_suspect(st);
    sr_unlock(&a->lock);
    /* SYNC POINT: a committer that starts to wait just now is missed; it looks again within its
     * slice of 100 ms. */
    if (SR_UNLIKELY(low != 0) &&
        atomic_load_explicit(&st->hdr->commit_waiters, memory_order_relaxed) != 0) {
        sr_futex_wake(&st->hdr->commit_seq, &st->hdr->commit_waiters, 1);
    }
    return rc;
}

static int alloc_failed(sr_store *st, int status, uint64_t bytes) {
    int sys_errno = status == SR_FULL ? 0 : sr_last_detail()->sys_errno;
    uint64_t left = status == SR_FULL ? capacity_left(st) : sr_file_system_left(st);
    for (uint32_t i = 0; i < st->shape.n_arenas; i++) {
        sr_arena *a = &arenas(st)[i];
        int rc = lock_arena(st, a);
        if (rc != SR_OK) return rc;
        left += a->free_bytes;
        sr_unlock(&a->lock);
    }
    return sr_fail(status, bytes, left, sys_errno);
}

int sr_alloc(sr_store *st, uint32_t arena, enum sr_kind kind, uint64_t bytes,
             _Atomic uint64_t *inflight, uint64_t *off) {
    uint32_t n = st->shape.n_arenas;
    if (arena >= n || kind <= SR_KIND_NONE || kind >= SR_KIND_END) return SR_INVALID;
    if (bytes > PAYLOAD_MAX || SR_FAULT_POINT("alloc")) return alloc_failed(st, SR_FULL, bytes);
    uint64_t size = sr_align(bytes + SR_CHUNK_HEAD, CHUNK_MIN);
    int rc = alloc_in(st, &arenas(st)[arena], kind, size, 1, inflight, off);
    if (SR_LIKELY(rc == SR_OK) || rc == SR_CORRUPT || rc == SR_DIRTY) return rc;
    /* Elsewhere what is there already; then, if it was only this arena that is at its end, more
     * memory elsewhere. */
    for (int may_grow = 0; may_grow <= (rc == SR_FULL); may_grow++) {
        for (uint32_t i = 1; i < n; i++) {
            sr_arena *a = &arenas(st)[(arena + i) % n];
            int other = alloc_in(st, a, kind, size, may_grow, inflight, off);
            if (other == SR_OK || other == SR_CORRUPT || other == SR_DIRTY) return other;
            if (other != SR_FULL) rc = other;
        }
    }
    return alloc_failed(st, rc, bytes);
}

/* ------------------------------------------------------------------ freeing */

/* Header word of the live allocation at payload `off`, 0 if it is none. */
static inline uint64_t live_flags(const sr_store *st, const sr_arena *a, uint64_t off) {
    uint64_t c = off - SR_CHUNK_HEAD;
    if (!in_arena(st, a, c)) return 0;
    uint64_t flags = flags_get(chunk_at(st, c));
    uint32_t kind = kind_of(flags);
    int ok = (flags & (SR_CHUNK_FREE | RESERVED_BITS)) == 0 && kind > SR_KIND_NONE &&
             kind < SR_KIND_END && size_fits(a, c, size_of(flags));
    return ok ? flags : 0;
}

static int free_payload(sr_store *st, uint64_t off, _Atomic uint64_t *inflight) {
    sr_arena *a = off % SR_LINE == 0 ? arena_of(st, off) : NULL;
    if (SR_UNLIKELY(a == NULL)) return SR_CORRUPT;
    int rc = lock_arena(st, a);
    if (SR_UNLIKELY(rc != SR_OK)) return rc;
    if (inflight != NULL) atomic_store_explicit(inflight, 0, memory_order_release);
    uint64_t c = off - SR_CHUNK_HEAD, flags = live_flags(st, a, off), size = size_of(flags);
    uint64_t after = c + size, before = 0;
    uint64_t after_flags = flags == 0 ? 0 : flags_get(chunk_at(st, after));
    /* All checks come before the first change: a refused free leaves everything as it was. */
    int ok = flags != 0 && !(after_flags & SR_CHUNK_PREV_FREE) && size <= a->used_bytes;
    if (ok && (after_flags & SR_CHUNK_FREE)) ok = free_chunk_ok(st, a, after);
    if (ok && (flags & SR_CHUNK_PREV_FREE)) {
        before = chunk_at(st, c)->prev_size;
        ok = before != 0 && before < c && free_chunk_ok(st, a, c - before) &&
             size_of(flags_get(chunk_at(st, c - before))) == before;
    }
    if (SR_LIKELY(ok)) {
        a->used_bytes -= size;
        a->kind_bytes[kind_of(flags)] -= size;
        a->free_bytes += size;
        a->n_allocs--;
        /* Even where it becomes the inside of a larger free chunk: a second free must find it
         * free. */
        flags_set(chunk_at(st, c), SR_CHUNK_FREE);
        if (after_flags & SR_CHUNK_FREE) {
            list_remove(st, a, after, size_of(after_flags));
            size += size_of(after_flags);
        }
        if (before != 0) list_remove(st, a, c - before, before);
        list_add(st, a, c - before, size + before);
    } else {
        sr_suspect(st);
    }
    sr_unlock(&a->lock);
    return ok ? SR_OK : SR_CORRUPT;
}

int sr_free(sr_store *st, uint64_t off) { return free_payload(st, off, NULL); }

int sr_free_inflight(sr_store *st, _Atomic uint64_t *inflight) {
    uint64_t off = atomic_load_explicit(inflight, memory_order_relaxed);
    return off == 0 ? SR_OK : free_payload(st, off, inflight);
}

int sr_alloc_outer(sr_store *st, uint32_t arena, enum sr_kind kind, uint64_t bytes,
                   _Atomic uint64_t *inflight, uint64_t *off) {
    int rc = sr_alloc(st, arena, kind, bytes, inflight, off);
    while (SR_UNLIKELY(rc == SR_DIRTY)) {
        rc = sr_repair(st);
        if (rc == SR_OK) rc = sr_alloc(st, arena, kind, bytes, inflight, off);
    }
    return rc;
}

int sr_free_outer(sr_store *st, _Atomic uint64_t *inflight) {
    int rc = sr_free_inflight(st, inflight);
    while (SR_UNLIKELY(rc == SR_DIRTY)) {
        rc = sr_repair(st);
        if (rc == SR_OK) rc = sr_free_inflight(st, inflight);
    }
    return rc;
}

uint64_t sr_alloc_bytes(const sr_store *st, uint64_t off) {
    const sr_arena *a = off % SR_LINE == 0 ? arena_of(st, off) : NULL;
    uint64_t flags = a == NULL ? 0 : live_flags(st, a, off);
    return flags == 0 ? 0 : size_of(flags) - SR_CHUNK_HEAD;
}

uint32_t sr_arena_number(const sr_store *st, uint64_t off) {
    const sr_arena *a = arena_of(st, off);
    return a == NULL ? SR_NONE : (uint32_t)(a - arenas(st));
}

enum sr_kind sr_alloc_kind(const sr_store *st, uint64_t off) {
    const sr_arena *a = off % SR_LINE == 0 ? arena_of(st, off) : NULL;
    return a == NULL ? SR_KIND_NONE : (enum sr_kind)kind_of(live_flags(st, a, off));
}
