/* Reference counts. A count changes only while a lock is held that keeps a repair out: a stripe's,
 * or that of the session that does it. */
#include "arena.h"
#include "ledger.h"
#include "lock.h"
#include "steps.h"
#include "table.h"

#define EPISODES_PER_ITEM 64u

static _Atomic uint32_t *refs_of(const sr_store *st, uint64_t ref) {
    void *object = sr_ptr(st, SR_REF_OFF(ref));
    switch (SR_REF_KIND(ref)) {
    case SR_KIND_BLOCK: return &((sr_block *)object)->refs;
    case SR_KIND_TRAJ: return &((sr_traj *)object)->refs;
    case SR_KIND_EPISODE: return &((sr_episode *)object)->refs;
    default: SR_ASSERT(!"a reference of unknown kind"); return NULL;
    }
}

void sr_ref_retain(const sr_store *st, uint64_t ref) {
    atomic_fetch_add_explicit(refs_of(st, ref), 1, memory_order_relaxed);
}

static int drop_episodes_of(sr_store *st, sr_block *b) {
    const uint64_t *episodes = (const uint64_t *)((const char *)b + b->episodes_off);
    uint32_t rows = atomic_load_explicit(&b->published, memory_order_relaxed);
    int result = SR_OK;
    for (uint32_t r = 0; r < rows; r++) {
        if (r > 0 && episodes[r] == episodes[r - 1]) continue;
        int rc = sr_ref_drop(st, SR_REF(episodes[r], SR_KIND_EPISODE));
        if (rc != SR_OK) result = rc;
    }
    return result;
}

int sr_ref_drop(sr_store *st, uint64_t ref) {
    uint32_t before = atomic_fetch_sub_explicit(refs_of(st, ref), 1, memory_order_acq_rel);
    SR_ASSERT(before > 0);
    if (before > 1) return SR_OK;
    void *object = sr_ptr(st, SR_REF_OFF(ref));
    int result = SR_OK;
    if (SR_REF_KIND(ref) == SR_KIND_BLOCK) result = drop_episodes_of(st, object);
    if (SR_REF_KIND(ref) == SR_KIND_TRAJ) {
        sr_traj *t = object;
        for (uint32_t i = 0; i < t->n_blocks; i++) {
            int rc = sr_ref_drop(st, SR_REF(sr_traj_blocks(t)[i], SR_KIND_BLOCK));
            if (rc != SR_OK) result = rc;
        }
    }
    int rc = sr_free(st, SR_REF_OFF(ref));
    return rc != SR_OK ? rc : result;
}

/* The distinct episodes of an item, at most EPISODES_PER_ITEM, in the order of its rows. */
typedef struct {
    uint64_t list[EPISODES_PER_ITEM];
    uint32_t n;
} episode_set;

static void add_rows(const sr_store *st, episode_set *set, uint64_t block, uint32_t start,
                     uint32_t count, int32_t stride) {
    const sr_block *b = sr_ptr(st, block);
    const uint64_t *episodes = (const uint64_t *)((const char *)b + b->episodes_off);
    if (stride == 1 && episodes[start] == episodes[start + count - 1] && set->n > 0 &&
        set->list[set->n - 1] == episodes[start]) {
        return;
    }
    int64_t row = start;
    uint64_t last = 0;
    for (uint32_t i = 0; i < count; i++, row += stride) {
        uint64_t e = episodes[row];
        if (e == last) continue;
        last = e;
        uint32_t k = 0;
        while (k < set->n && set->list[k] != e) k++;
        if (k == set->n && set->n < EPISODES_PER_ITEM) set->list[set->n++] = e;
    }
}

static void collect(const sr_store *st, episode_set *set, uint64_t ref, uint32_t row_start,
                    uint32_t row_count) {
    set->n = 0;
    if (SR_REF_KIND(ref) == SR_KIND_BLOCK) {
        add_rows(st, set, SR_REF_OFF(ref), row_start, SR_COL_LENGTH(row_count), 1);
        return;
    }
    sr_traj *t = sr_ptr(st, SR_REF_OFF(ref));
    const uint64_t *blocks = sr_traj_blocks(t);
    const sr_seg *segs = sr_traj_segs(t);
    for (uint32_t i = 0; i < t->n_segs; i++) {
        add_rows(st, set, blocks[segs[i].block], segs[i].start, segs[i].count, segs[i].stride);
    }
}

void sr_episodes_enter(const sr_store *st, sr_table *t, uint32_t table, uint64_t ref,
                       uint32_t row_start, uint32_t row_count) {
    episode_set set;
    collect(st, &set, ref, row_start, row_count);
    for (uint32_t i = 0; i < set.n; i++) {
        sr_episode *e = sr_ptr(st, set.list[i]);
        if (atomic_fetch_add_explicit(&e->items[table], 1, memory_order_relaxed) == 0) {
            atomic_fetch_add_explicit(&t->num_episodes, 1, memory_order_relaxed);
        }
    }
}

void sr_episodes_leave(const sr_store *st, sr_table *t, uint32_t table, uint64_t ref,
                       uint32_t row_start, uint32_t row_count, int count_deleted) {
    episode_set set;
    collect(st, &set, ref, row_start, row_count);
    for (uint32_t i = 0; i < set.n; i++) {
        sr_episode *e = sr_ptr(st, set.list[i]);
        if (atomic_fetch_sub_explicit(&e->items[table], 1, memory_order_relaxed) == 1) {
            atomic_fetch_sub_explicit(&t->num_episodes, 1, memory_order_relaxed);
            if (count_deleted) {
                atomic_fetch_add_explicit(&t->num_deleted_episodes, 1, memory_order_relaxed);
            }
        }
    }
}
