/* flip_checkpoint.h: saving a small store and putting what was saved into another one, as the
 * package does it with arrays, where either store may be damaged. */
#ifndef SR_FLIP_CHECKPOINT_H
#define SR_FLIP_CHECKPOINT_H

#include "checkpoint.h"
#include "shape.h"
#include "step_world.h"

#define SAVED_STRIPES 16u
#define SAVED_SLOTS 64u
#define SAVED_OBJECTS 256u
#define SAVED_BYTES (16ull << 20) /* more is not asked for: the store has less */

typedef struct {
    uint64_t n, off[SAVED_OBJECTS];
} saved_offs;

typedef struct {
    sr_stripe_image stripe[SAVED_STRIPES];
    sr_slot slot[SAVED_STRIPES][SAVED_SLOTS];
    uint32_t order[SAVED_STRIPES][2][SAVED_SLOTS];
    sr_table_image table[SR_TABLES_MAX];
    saved_offs trajs, blocks, episodes;
    sr_traj_head traj_head[SAVED_OBJECTS];
    sr_block_head block_head[SAVED_OBJECTS];
    uint64_t where[SAVED_OBJECTS], episode_id[SAVED_OBJECTS];
    /* On the heap, one after the other for all trajectories or blocks. */
    uint64_t *traj_blocks, *row_bytes;
    sr_traj_col *cols;
    sr_seg *segs;
    sr_run_of_rows *runs;
    char *rows;
    uint64_t n_traj_blocks, n_cols, n_segs, n_row_bytes, n_runs, n_bytes;
} flip_saved;

static inline void saved_drop(flip_saved *s) {
    free(s->traj_blocks);
    free(s->row_bytes);
    free(s->cols);
    free(s->segs);
    free(s->runs);
    free(s->rows);
    s->traj_blocks = s->row_bytes = NULL;
    s->cols = NULL;
    s->segs = NULL;
    s->runs = NULL;
    s->rows = NULL;
}

/* The number of an offset in a list, which gets it if it has it not. SAVED_OBJECTS: no room. */
static inline uint64_t saved_number(saved_offs *list, uint64_t off) {
    for (uint64_t i = 0; i < list->n; i++) {
        if (list->off[i] == off) return i;
    }
    if (list->n == SAVED_OBJECTS) return SAVED_OBJECTS;
    list->off[list->n] = off;
    return list->n++;
}

/* ---------------------------------------------------------------- saving */

/* 1: it is copied and held. */
static inline int save_index(sr_store *st, flip_saved *s) {
    uint64_t ns;
    const uint32_t n = st->shape.n_stripes;
    CHECK(n <= SAVED_STRIPES);
    if (sr_hold_claim(st, SURVIVOR) != SR_OK) return 0;
    for (uint32_t i = 0; i < n; i++) {
        s->stripe[i] = (sr_stripe_image){.slots = s->slot[i],
                                         .order = {s->order[i][0], s->order[i][1]},
                                         .room = SAVED_SLOTS};
        if (sr_hold_prepare(st, i, SAVED_SLOTS) != SR_OK) return 0;
    }
    return sr_snapshot(st, s->stripe, s->table, &ns) == SR_OK;
}

static inline int save_items(const sr_store *st, flip_saved *s) {
    s->trajs.n = s->blocks.n = s->episodes.n = 0;
    for (uint32_t i = 0; i < st->shape.n_stripes; i++) {
        for (uint64_t k = 0; k < s->stripe[i].n_slots; k++) {
            uint64_t ref = s->slot[i][k].ref;
            saved_offs *of = SR_REF_KIND(ref) == SR_KIND_BLOCK ? &s->blocks : &s->trajs;
            if (ref != 0 && saved_number(of, SR_REF_OFF(ref)) == SAVED_OBJECTS) return 0;
        }
    }
    return 1;
}

static inline void *saved_array(uint64_t n, uint64_t size) {
    void *p = n < SAVED_BYTES ? malloc(n * size + 1) : NULL;
    CHECK(p != NULL || n >= SAVED_BYTES);
    return p;
}

static inline int save_trajs(const sr_store *st, flip_saved *s) {
    const uint64_t n = s->trajs.n;
    s->n_traj_blocks = s->n_cols = s->n_segs = 0;
    if (sr_image_traj_heads(st, n, s->trajs.off, s->traj_head) != SR_OK) return 0;
    for (uint64_t i = 0; i < n; i++) {
        s->n_traj_blocks += s->traj_head[i].n_blocks;
        s->n_cols += s->traj_head[i].n_cols + 1ull;
        s->n_segs += s->traj_head[i].n_segs;
    }
    s->traj_blocks = saved_array(s->n_traj_blocks, sizeof *s->traj_blocks);
    s->cols = saved_array(s->n_cols, sizeof *s->cols);
    s->segs = saved_array(s->n_segs, sizeof *s->segs);
    if (s->traj_blocks == NULL || s->cols == NULL || s->segs == NULL) return 0;
    if (sr_image_trajs(st, n, s->trajs.off, s->traj_head, s->traj_blocks, s->cols, s->segs) !=
        SR_OK) {
        return 0;
    }
    for (uint64_t i = 0; i < s->n_traj_blocks; i++) {
        s->traj_blocks[i] = saved_number(&s->blocks, s->traj_blocks[i]);
        if (s->traj_blocks[i] == SAVED_OBJECTS) return 0;
    }
    return 1;
}

static inline int save_blocks(const sr_store *st, sr_ses *saver, flip_saved *s) {
    const uint64_t n = s->blocks.n;
    s->n_row_bytes = s->n_runs = s->n_bytes = 0;
    if (sr_image_block_heads(saver, n, s->blocks.off, s->block_head, s->where) != SR_OK) return 0;
    for (uint64_t i = 0; i < n; i++) {
        s->n_row_bytes += s->block_head[i].n_cols;
        s->n_runs += s->block_head[i].n_runs;
        s->n_bytes += s->block_head[i].bytes;
    }
    s->row_bytes = saved_array(s->n_row_bytes, sizeof *s->row_bytes);
    s->runs = saved_array(s->n_runs, sizeof *s->runs);
    s->rows = saved_array(s->n_bytes, 1);
    if (s->row_bytes == NULL || s->runs == NULL || s->rows == NULL) return 0;
    if (sr_image_blocks(st, n, s->blocks.off, s->block_head, s->row_bytes, s->runs) != SR_OK) {
        return 0;
    }
    for (uint64_t i = 0; i < s->n_runs; i++) {
        s->runs[i].episode = saved_number(&s->episodes, s->runs[i].episode);
        if (s->runs[i].episode == SAVED_OBJECTS) return 0;
    }
    sr_rows_cursor at = {0};
    uint64_t got = 1;
    for (uint64_t done = 0; at.block < n && got > 0; done += got) {
        uint64_t room = s->n_bytes - done < 100 ? s->n_bytes - done : 100;
        if (sr_image_rows(st, n, s->blocks.off, s->where, s->block_head, &at, s->rows + done, room,
                          &got) != SR_OK) {
            return 0;
        }
    }
    return at.block == n &&
           sr_image_episodes(st, s->episodes.n, s->episodes.off, s->episode_id) == SR_OK;
}

/* 1: all of the store is saved. What it holds stays held. */
static inline int flip_save(sr_store *st, flip_saved *s) {
    sr_ses saver;
    if (!save_index(st, s) || !save_items(st, s) || !save_trajs(st, s)) return 0;
    if (sr_session_open(st, SURVIVOR, SR_SESSION_CLIENT, &saver) != SR_OK) return 0;
    int whole = save_blocks(st, &saver, s);
    (void)sr_session_close(&saver);
    return whole;
}

static inline int same_index(const flip_saved *a, const flip_saved *b, uint32_t stripe) {
    const sr_stripe_image *x = &a->stripe[stripe], *y = &b->stripe[stripe];
    const size_t from = offsetof(sr_stripe_image, n_slots), bytes = sizeof *x - from;
    return memcmp((const char *)x + from, (const char *)y + from, bytes) == 0 &&
           memcmp(a->slot[stripe], b->slot[stripe], x->n_slots * sizeof(sr_slot)) == 0 &&
           memcmp(a->order[stripe][0], b->order[stripe][0], x->n_order[0] * 4) == 0 &&
           memcmp(a->order[stripe][1], b->order[stripe][1], x->n_order[1] * 4) == 0;
}

static inline int same_bytes(const void *a, uint64_t n, const void *b, uint64_t m, size_t size) {
    return n == m && memcmp(a, b, n * size) == 0;
}

/* Was the same saved? */
static inline int saved_same(const flip_saved *a, const flip_saved *b, uint32_t n_stripes) {
    int same = 1;
    for (uint32_t i = 0; i < n_stripes && same; i++) same = same_index(a, b, i);
    return same && memcmp(a->table, b->table, sizeof a->table) == 0 &&
           same_bytes(a->trajs.off, a->trajs.n, b->trajs.off, b->trajs.n, 8) &&
           same_bytes(a->blocks.off, a->blocks.n, b->blocks.off, b->blocks.n, 8) &&
           same_bytes(a->episode_id, a->episodes.n, b->episode_id, b->episodes.n, 8) &&
           memcmp(a->traj_head, b->traj_head, a->trajs.n * sizeof *a->traj_head) == 0 &&
           memcmp(a->block_head, b->block_head, a->blocks.n * sizeof *a->block_head) == 0 &&
           same_bytes(a->traj_blocks, a->n_traj_blocks, b->traj_blocks, b->n_traj_blocks, 8) &&
           same_bytes(a->row_bytes, a->n_row_bytes, b->row_bytes, b->n_row_bytes, 8) &&
           same_bytes(a->cols, a->n_cols, b->cols, b->n_cols, sizeof *a->cols) &&
           same_bytes(a->segs, a->n_segs, b->segs, b->n_segs, sizeof *a->segs) &&
           same_bytes(a->runs, a->n_runs, b->runs, b->n_runs, sizeof *a->runs) &&
           same_bytes(a->rows, a->n_bytes, b->rows, b->n_bytes, 1);
}

/* ---------------------------------------------------------------- restoring */

static inline int restore_objects(sr_store *st, const flip_saved *s, uint64_t *trajs,
                                  uint64_t *blocks) {
    uint64_t episodes[SAVED_OBJECTS], where[SAVED_OBJECTS], bytes = 0, next = 0;
    uint32_t *of_trajs = saved_array(s->n_traj_blocks, sizeof *of_trajs);
    for (uint64_t i = 0; i < s->n_traj_blocks; i++) of_trajs[i] = (uint32_t)s->traj_blocks[i];
    int rc = sr_restore_episodes(st, s->episodes.n, s->episode_id, episodes);
    if (rc == SR_OK) {
        rc = sr_restore_blocks(st, s->blocks.n, s->block_head, s->row_bytes, s->runs,
                               s->episodes.n, episodes, blocks);
    }
    if (rc == SR_OK) {
        rc = sr_restore_trajs(st, s->trajs.n, s->traj_head, of_trajs, s->cols, s->segs,
                              s->blocks.n, blocks, trajs);
    }
    free(of_trajs);
    for (uint64_t i = 0; i < s->blocks.n; i++) {
        where[i] = bytes;
        bytes += s->block_head[i].bytes;
    }
    for (uint64_t from = 0; rc == SR_OK && from < bytes; from += 128) {
        uint64_t n = bytes - from < 128 ? bytes - from : 128;
        rc = sr_restore_rows(st, s->blocks.n, blocks, s->block_head, where, &next, s->rows + from,
                             from, n);
    }
    return rc;
}

static inline int restore_slots(sr_store *st, flip_saved *s, const uint64_t *trajs,
                                const uint64_t *blocks) {
    uint32_t i = 0;
    for (uint32_t t = 0; t < st->shape.n_tables; t++) {
        for (uint32_t k = 0; k < sr_shape_stripes(st, t); k++, i++) {
            sr_slot slots[SAVED_SLOTS];
            for (uint64_t p = 0; p < s->stripe[i].n_slots; p++) {
                slots[p] = s->slot[i][p];
                uint64_t ref = slots[p].ref, off = SR_REF_OFF(ref);
                if (ref == 0) continue;
                slots[p].ref = SR_REF_KIND(ref) == SR_KIND_BLOCK
                                   ? SR_REF(blocks[saved_number(&s->blocks, off)], SR_KIND_BLOCK)
                                   : SR_REF(trajs[saved_number(&s->trajs, off)], SR_KIND_TRAJ);
            }
            int rc = sr_restore_slots(st, t, k, s->stripe[i].n_slots, slots,
                                      s->stripe[i].touch_next);
            if (rc != SR_OK) return rc;
        }
        int rc = sr_restore_table(st, t, &s->table[t], 1);
        if (rc != SR_OK) return rc;
    }
    return SR_OK;
}

/* The free slots of a stripe in the order in which they will be used. */
static inline uint64_t saved_free(const flip_saved *s, uint32_t i, uint32_t *slots) {
    uint64_t n = 0;
    for (uint32_t p = s->stripe[i].free_head; p < s->stripe[i].n_slots && n < SAVED_SLOTS; n++) {
        slots[n] = p;
        p = s->slot[i][p].row_start;
    }
    return n;
}

/* What does not fit is refused, and left as it is. */
static inline void restore_orders(sr_store *st, const flip_saved *s) {
    uint32_t i = 0, slots[SAVED_SLOTS];
    for (uint32_t t = 0; t < st->shape.n_tables; t++) {
        for (uint32_t k = 0; k < sr_shape_stripes(st, t); k++, i++) {
            uint64_t n = saved_free(s, i, slots);
            (void)sr_restore_free(st, t, k, n, slots);
            for (uint32_t x = 0; x < 2; x++) {
                (void)sr_restore_order(st, t, k, x, s->stripe[i].n_order[x], s->order[i][x],
                                       s->stripe[i].head[x]);
            }
        }
    }
}

/* Into a store that was just laid out. */
static inline int flip_restore(sr_store *st, flip_saved *s) {
    uint64_t trajs[SAVED_OBJECTS], blocks[SAVED_OBJECTS], evicted;
    sr_restore_begin(st);
    int rc = restore_objects(st, s, trajs, blocks);
    if (rc == SR_OK) rc = restore_slots(st, s, trajs, blocks);
    if (rc == SR_OK) rc = sr_restore_derive(st);
    if (rc == SR_OK) restore_orders(st, s);
    return rc == SR_OK ? sr_restore_end(st, 0, &evicted) : rc;
}

#endif
