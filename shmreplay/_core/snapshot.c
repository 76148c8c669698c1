/* snapshot.c: copying what is in a store, for a checkpoint. */
#include "hold.h"

#include "checkpoint.h"
#include "lock_all.h"
#include "packed.h"
#include "shape.h"
#include "steps.h"
#include "stripe.h"
#include "table.h"

#include <time.h>

static sr_stripe *stripe_number(const sr_store *st, uint32_t i) {
    return (sr_stripe *)sr_known(st, st->shape.stripes_off) + i;
}

static uint64_t clock_ns(void) {
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (uint64_t)ts.tv_sec * 1000000000ull + (uint64_t)ts.tv_nsec;
}

uint64_t sr_slots_used(const sr_store *st, uint32_t stripe) {
    return __atomic_load_n(&stripe_number(st, stripe)->slots_used, __ATOMIC_RELAXED);
}

/* ------------------------------------------------------------------ under all locks */

static void copy_stripe(const sr_store *st, const sr_stripe *s, sr_stripe_image *out) {
    out->n_slots = s->slots_used;
    out->free_head = s->free_head;
    out->touch_next = s->touch_next;
    memcpy(out->slots, sr_slot_at(st, s, 0), s->slots_used * sizeof *out->slots);
    for (uint32_t k = 0; k < 2; k++) {
        const sr_index *ix = &s->index[k];
        out->n_order[k] = 0;
        out->head[k] = 0;
        if (k >= s->n_indexes || (ix->kind != SR_SEL_UNIFORM && ix->kind != SR_SEL_EPOCH)) continue;
        out->n_order[k] = ix->count;
        out->head[k] = ix->kind == SR_SEL_EPOCH ? ix->head : 0;
        memcpy(out->order[k], sr_known(st, ix->array_off[0]), ix->count * sizeof(uint32_t));
    }
}

static uint64_t live_in(const sr_store *st, const sr_table *t) {
    uint64_t n = 0;
    for (uint32_t k = 0; k < t->n_stripes; k++) {
        n += atomic_load_explicit(&sr_stripe_at(st, t, k)->size, memory_order_relaxed);
    }
    return n;
}

/* As if what is on its way was counted. */
static void copy_table(const sr_store *st, const sr_table *t, sr_table_image *out) {
    *out = (sr_table_image){.inserts = t->inserts,
                            .samples = t->samples,
                            .deletes = t->deletes,
                            .rng = t->rng,
                            .slot_bits = t->slot_bits};
    int64_t surplus = (int64_t)live_in(st, t) - (t->inserts - t->deletes);
    if (surplus > 0) out->inserts += surplus;
    if (surplus < 0) out->deletes -= surplus;
    out->num_deleted_episodes =
        atomic_load_explicit(&t->num_deleted_episodes, memory_order_relaxed);
    out->num_unique_samples = atomic_load_explicit(&t->num_unique_samples, memory_order_relaxed);
    out->next_seq = atomic_load_explicit(&t->next_seq, memory_order_relaxed);
    out->missed_updates = atomic_load_explicit(&t->missed_updates, memory_order_relaxed);
    out->max_priority_bits = atomic_load_explicit(&t->max_priority_bits, memory_order_relaxed);
    out->poisoned = atomic_load_explicit(&t->poisoned, memory_order_relaxed);
}

static int fits(const sr_store *st, const sr_stripe_image *images) {
    for (uint32_t i = 0; i < st->shape.n_stripes; i++) {
        if (stripe_number(st, i)->slots_used > images[i].room) return 0;
    }
    return 1;
}

static void copy_all(sr_store *st, sr_stripe_image *stripes, sr_table_image *tables) {
    for (uint32_t i = 0; i < st->shape.n_tables; i++) {
        copy_table(st, sr_table_at(st, i), &tables[i]);
    }
    for (uint32_t i = 0; i < st->shape.n_stripes; i++) {
        sr_stripe *s = stripe_number(st, i);
        copy_stripe(st, s, &stripes[i]);
        /* Crash: in between some stripes hold and others do not, and whoever reclaims this process
         * ends that. The number comes last: before it nothing is left behind. */
        s->hold_slots = s->slots_used;
        s->hold_seq = tables[s->table].next_seq;
    }
}

int sr_snapshot(sr_store *st, sr_stripe_image *stripes, sr_table_image *tables,
                uint64_t *held_ns) {
    SR_GUARDED(st, SR_CORRUPT)
    for (uint32_t i = 0; i < st->shape.n_stripes; i++) {
        sr_stripe_touch(st, stripe_number(st, i));
    }
    uint64_t began = clock_ns();
    int rc = sr_lock_all(st);
    if (rc != SR_OK) return rc;
    rc = SR_OK;
    for (uint32_t i = 0; i < st->shape.n_tables && rc == SR_OK; i++) {
        if (atomic_load(&sr_table_at(st, i)->poisoned) != SR_SOUND) rc = SR_CORRUPT;
    }
    for (uint32_t i = 0; i < st->shape.n_stripes; i++) {
        const sr_stripe *s = stripe_number(st, i);
        SR_ASSERT(sr_shape_stripe_ok(st, s));
        /* There is room for as many as there are slots. */
        SR_ASSERT(s->index[0].count <= s->slots_used);
        SR_ASSERT(s->n_indexes == 1 || s->index[1].count <= s->slots_used);
    }
    if (rc == SR_OK && !fits(st, stripes)) rc = SR_WOULD_BLOCK;
    if (rc == SR_OK) copy_all(st, stripes, tables);
    sr_unlock_all(st);
    *held_ns = clock_ns() - began;
    return rc;
}

/* ------------------------------------------------------------------ after that */

int sr_image_traj_heads(const sr_store *st, uint64_t n, const uint64_t *offs, sr_traj_head *out) {
    for (uint64_t i = 0; i < n; i++) {
        if (!sr_traj_sound(st, offs[i])) return SR_CORRUPT;
        const sr_traj *t = sr_ptr(st, offs[i]);
        out[i] = (sr_traj_head){.n_cols = t->n_cols, .n_blocks = t->n_blocks, .n_segs = t->n_segs};
    }
    return SR_OK;
}

int sr_image_trajs(const sr_store *st, uint64_t n, const uint64_t *offs, const sr_traj_head *heads,
                   uint64_t *blocks, sr_traj_col *cols, sr_seg *segs) {
    for (uint64_t i = 0; i < n; i++) {
        if (!sr_traj_sound(st, offs[i])) return SR_CORRUPT;
        sr_traj *t = sr_ptr(st, offs[i]);
        const sr_traj_head *h = &heads[i];
        if (t->n_cols != h->n_cols || t->n_blocks != h->n_blocks || t->n_segs != h->n_segs) {
            return SR_CORRUPT;
        }
        memcpy(blocks, sr_traj_blocks(t), h->n_blocks * sizeof *blocks);
        memcpy(cols, sr_traj_cols(t), (h->n_cols + 1ull) * sizeof *cols);
        memcpy(segs, sr_traj_segs(t), h->n_segs * sizeof *segs);
        blocks += h->n_blocks;
        cols += h->n_cols + 1ull;
        segs += h->n_segs;
    }
    return SR_OK;
}

static const uint64_t *episodes_of(const sr_block *b) {
    return (const uint64_t *)(const void *)((const char *)b + b->episodes_off);
}

/* The block in which the rows are that `rows` refers to, of this block; NULL: they are packed, or
 * damaged. */
static const sr_block *holder_of(const sr_store *st, const sr_block *b, uint64_t rows) {
    if (rows == 0) return b;
    if (SR_REF_KIND(rows) != SR_KIND_BLOCK || !sr_block_sound(st, SR_REF_OFF(rows))) return NULL;
    return sr_ptr(st, SR_REF_OFF(rows));
}

static int size_of_rows(const sr_store *st, uint64_t block, uint64_t where, sr_block_head *h) {
    const sr_block *b = sr_ptr(st, block);
    if (SR_REF_KIND(where) == SR_KIND_PACKED) {
        const sr_packed *p = sr_block_stored(st, block, &h->bytes);
        if (p == NULL || p->n_cols != b->n_cols || p->rows != h->rows) return SR_CORRUPT;
        h->encoding = SR_SAVED_PACKED;
        return SR_OK;
    }
    const sr_block *holder = holder_of(st, b, where);
    for (uint32_t c = 0; c < b->n_cols; c++) {
        uint64_t row_bytes;
        if (holder == NULL || holder->rows_cap < h->rows ||
            sr_block_rows(holder, c, 0, h->rows, &row_bytes) == NULL) {
            return SR_CORRUPT;
        }
        h->bytes += row_bytes * h->rows;
    }
    return SR_OK;
}

int sr_image_block_heads(sr_ses *ses, uint64_t n, const uint64_t *offs, sr_block_head *out,
                         uint64_t *rows) {
    const sr_store *st = ses->st;
    for (uint64_t i = 0; i < n; i++) {
        if (!sr_block_sound(st, offs[i])) return SR_CORRUPT;
        const sr_block *b = sr_ptr(st, offs[i]);
        uint32_t position; /* released when the session is closed */
        rows[i] = 0;
        int rc = sr_lies_apart(b) ? sr_rows_hold(ses, offs[i], &rows[i], &position) : SR_OK;
        if (rc != SR_OK) return rc;
        /* SYNC POINT: acquire: the rows below are whole, and never change again. After the above:
         * packed rows are all that were published. */
        uint32_t published = atomic_load_explicit(&b->published, memory_order_acquire);
        sr_block_head *h = &out[i];
        *h = (sr_block_head){.uid = b->uid, .n_cols = b->n_cols, .rows = published};
        rc = size_of_rows(st, offs[i], rows[i], h);
        if (rc != SR_OK) return rc;
        const uint64_t *episodes = episodes_of(b);
        for (uint32_t r = 0; r < published; r++) {
            h->n_runs += r == 0 || episodes[r] != episodes[r - 1];
        }
    }
    return SR_OK;
}

int sr_image_blocks(const sr_store *st, uint64_t n, const uint64_t *offs,
                    const sr_block_head *heads, uint64_t *row_bytes, sr_run_of_rows *runs) {
    for (uint64_t i = 0; i < n; i++) {
        if (!sr_block_sound(st, offs[i])) return SR_CORRUPT;
        sr_block *b = sr_ptr(st, offs[i]);
        const sr_block_head *h = &heads[i];
        if (b->n_cols != h->n_cols || h->rows > b->rows_cap) return SR_CORRUPT;
        for (uint32_t c = 0; c < h->n_cols; c++) *row_bytes++ = sr_block_cols(b)[c].row_bytes;
        const uint64_t *episodes = episodes_of(b);
        const sr_run_of_rows *end = runs + h->n_runs;
        for (uint32_t r = 0; r < h->rows; r++) {
            if (r > 0 && episodes[r] == episodes[r - 1]) {
                runs[-1].rows++;
                continue;
            }
            if (runs == end) return SR_CORRUPT;
            *runs++ = (sr_run_of_rows){.episode = episodes[r], .rows = 1};
        }
        if (runs != end) return SR_CORRUPT;
    }
    return SR_OK;
}

int sr_image_episodes(const sr_store *st, uint64_t n, const uint64_t *offs, uint64_t *ids) {
    for (uint64_t i = 0; i < n; i++) {
        if (!sr_fits(st, offs[i], sizeof(sr_episode))) return SR_CORRUPT;
        const sr_episode *e = sr_ptr(st, offs[i]);
        if (e->kind != SR_KIND_EPISODE) return SR_CORRUPT;
        ids[i] = e->id;
    }
    return SR_OK;
}

/* Copy bytes [from, from + room) of a block's rows, columns one after the other, or what there is.
 * Gives how many, UINT64_MAX: it is damaged. */
static uint64_t copy_rows(const sr_block *b, uint32_t rows, uint64_t from, char *dst,
                          uint64_t room) {
    uint64_t done = 0;
    for (uint32_t c = 0; c < b->n_cols && done < room; c++) {
        uint64_t row_bytes;
        const char *column = sr_block_rows(b, c, 0, rows, &row_bytes);
        if (column == NULL) return UINT64_MAX;
        uint64_t bytes = row_bytes * rows;
        if (from >= bytes) {
            from -= bytes;
            continue;
        }
        uint64_t n = bytes - from < room - done ? bytes - from : room - done;
        sr_copy(dst + done, column + from, n);
        done += n;
        from = 0;
    }
    return done;
}

/* The same of rows wherever they are. */
static uint64_t copy_from(const sr_store *st, uint64_t block, uint64_t where,
                          const sr_block_head *h, uint64_t from, char *dst, uint64_t room) {
    if (h->encoding == SR_SAVED_RAW) {
        const sr_block *holder = holder_of(st, sr_ptr(st, block), where);
        return holder == NULL ? UINT64_MAX : copy_rows(holder, h->rows, from, dst, room);
    }
    uint64_t bytes;
    const char *stored = sr_block_stored(st, block, &bytes);
    if (stored == NULL || bytes != h->bytes || from > bytes) return UINT64_MAX;
    uint64_t n = bytes - from < room ? bytes - from : room;
    sr_copy(dst, stored + from, n);
    return n;
}

int sr_image_rows(const sr_store *st, uint64_t n, const uint64_t *offs, const uint64_t *rows,
                  const sr_block_head *heads, sr_rows_cursor *at, char *dst, uint64_t room,
                  uint64_t *got) {
    *got = 0;
    while (at->block < n && *got < room) {
        const sr_block_head *h = &heads[at->block];
        uint64_t off = offs[at->block];
        if (!sr_block_sound(st, off)) return SR_CORRUPT;
        const sr_block *b = sr_ptr(st, off);
        if (b->uid != h->uid || h->rows > b->rows_cap) return SR_CORRUPT;
        uint64_t copied =
            copy_from(st, off, rows[at->block], h, at->done, dst + *got, room - *got);
        if (copied == UINT64_MAX) return SR_CORRUPT;
        *got += copied;
        at->done += copied;
        if (at->done > h->bytes || (copied == 0 && at->done < h->bytes)) return SR_CORRUPT;
        if (at->done == h->bytes) *at = (sr_rows_cursor){.block = at->block + 1};
    }
    return SR_OK;
}
