/* Reference counts. A count changes only while a lock is held that keeps a repair out: a stripe's,
 * or that of the session that does it. */
#include "arena.h"
#include "ledger.h"
#include "lock.h"
#include "packed.h"
#include "steps.h"
#include "table.h"

#define EPISODES_PER_ITEM 64u

static const uint64_t *episodes_of(const sr_block *b) {
    return (const uint64_t *)(const void *)((const char *)b + b->episodes_off);
}

static int drop_episodes_of(sr_store *st, const sr_block *b) {
    const uint64_t *episodes = episodes_of(b);
    uint32_t rows = atomic_load_explicit(&b->published, memory_order_relaxed);
    int result = SR_OK;
    for (uint32_t r = 0; r < rows; r++) {
        if (r > 0 && episodes[r] == episodes[r - 1]) continue;
        int rc = sr_ref_drop(st, SR_REF(episodes[r], SR_KIND_EPISODE));
        if (rc != SR_OK) result = rc;
    }
    return result;
}

/* What a block refers to. */
static int drop_block(sr_store *st, const sr_block *b) {
    int result = drop_episodes_of(st, b);
    uint64_t rows = atomic_load_explicit(&b->rows, memory_order_relaxed);
    if (rows == 0) return result;
    int rc = sr_ref_drop(st, rows);
    return rc != SR_OK ? rc : result;
}

int sr_ref_free(sr_store *st, uint64_t ref) {
    uint64_t off = SR_REF_OFF(ref);
    int result = SR_OK;
    if (SR_REF_KIND(ref) == SR_KIND_BLOCK) result = drop_block(st, sr_block_at(st, off));
    if (SR_REF_KIND(ref) == SR_KIND_PACKED) sr_packed_forget(st, sr_ptr(st, off));
    if (SR_REF_KIND(ref) == SR_KIND_TRAJ) {
        sr_traj *t = sr_traj_at(st, off);
        for (uint32_t i = 0; i < t->n_blocks; i++) {
            int rc = sr_ref_drop(st, SR_REF(sr_traj_blocks(t)[i], SR_KIND_BLOCK));
            if (rc != SR_OK) result = rc;
        }
    }
    int rc = sr_free(st, off);
    return rc != SR_OK ? rc : result;
}

/* The distinct episodes of an item, at most EPISODES_PER_ITEM, in the order of its rows. */
typedef struct {
    uint64_t list[EPISODES_PER_ITEM];
    uint32_t n;
} episode_set;

static void add_rows(episode_set *set, const sr_block *b, uint32_t start, uint32_t count,
                     int32_t stride) {
    const uint64_t *episodes = episodes_of(b);
    if (stride == 0) count = 1; /* one row, again and again */
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

/* Of each insert and each eviction: only what tells where these rows' episodes stand is checked. */
static inline const sr_block *block_with_rows(const sr_store *st, uint64_t off, uint32_t start,
                                              uint32_t count) {
    SR_ASSERT(sr_fits(st, off, sizeof(sr_block)));
    const sr_block *b = sr_known(st, off);
    uint64_t room = st->bytes - off, end = (uint64_t)start + count;
    SR_ASSERT(b->kind == SR_KIND_BLOCK && count > 0 &&
              end <= atomic_load_explicit(&b->published, memory_order_relaxed) &&
              b->episodes_off % sizeof(uint64_t) == 0 && b->episodes_off <= room &&
              end * sizeof(uint64_t) <= room - b->episodes_off);
    return b;
}

static void collect(const sr_store *st, episode_set *set, uint64_t ref, uint32_t row_start,
                    uint32_t row_count) {
    set->n = 0;
    if (SR_REF_KIND(ref) == SR_KIND_BLOCK) {
        uint32_t count = SR_COL_LENGTH(row_count);
        add_rows(set, block_with_rows(st, SR_REF_OFF(ref), row_start, count), row_start, count, 1);
        return;
    }
    sr_traj *t = sr_traj_at(st, SR_REF_OFF(ref));
    const sr_seg *segs = sr_traj_segs(t);
    for (uint32_t i = 0; i < t->n_segs; i++) {
        const sr_block *b = sr_segment_block(st, t, &segs[i]);
        SR_ASSERT(b != NULL);
        add_rows(set, b, segs[i].start, segs[i].count, segs[i].stride);
    }
}

/* The episode of rows of a block that are all of one, as they mostly are; 0: look at each row. In a
 * block an episode's rows follow each other. */
static inline uint64_t only_episode(const sr_store *st, uint64_t ref, uint32_t row_start,
                                    uint32_t row_count) {
    if (SR_REF_KIND(ref) != SR_KIND_BLOCK) return 0;
    uint32_t count = SR_COL_LENGTH(row_count);
    const uint64_t *episodes =
        episodes_of(block_with_rows(st, SR_REF_OFF(ref), row_start, count)) + row_start;
    return episodes[0] == episodes[count - 1] ? episodes[0] : 0;
}

static inline void enter(const sr_store *st, sr_table *t, uint32_t table, uint64_t episode) {
    sr_episode *e = sr_episode_at(st, episode);
    if (atomic_fetch_add_explicit(&e->items[table], 1, memory_order_relaxed) == 0) {
        atomic_fetch_add_explicit(&t->num_episodes, 1, memory_order_relaxed);
    }
}

static inline void leave(const sr_store *st, sr_table *t, uint32_t table, uint64_t episode,
                         int count_deleted) {
    sr_episode *e = sr_episode_at(st, episode);
    if (atomic_fetch_sub_explicit(&e->items[table], 1, memory_order_relaxed) == 1) {
        atomic_fetch_sub_explicit(&t->num_episodes, 1, memory_order_relaxed);
        if (count_deleted) {
            atomic_fetch_add_explicit(&t->num_deleted_episodes, 1, memory_order_relaxed);
        }
    }
}

void sr_episodes_enter(const sr_store *st, sr_table *t, uint32_t table, uint64_t ref,
                       uint32_t row_start, uint32_t row_count) {
    uint64_t only = only_episode(st, ref, row_start, row_count);
    if (only != 0) {
        enter(st, t, table, only);
        return;
    }
    episode_set set;
    collect(st, &set, ref, row_start, row_count);
    for (uint32_t i = 0; i < set.n; i++) enter(st, t, table, set.list[i]);
}

void sr_episodes_leave(const sr_store *st, sr_table *t, uint32_t table, uint64_t ref,
                       uint32_t row_start, uint32_t row_count, int count_deleted) {
    uint64_t only = only_episode(st, ref, row_start, row_count);
    if (only != 0) {
        leave(st, t, table, only, count_deleted);
        return;
    }
    episode_set set;
    collect(st, &set, ref, row_start, row_count);
    for (uint32_t i = 0; i < set.n; i++) leave(st, t, table, set.list[i], count_deleted);
}
