/* One table of the core without Python, for bench/crash_safety.py, which compiles it twice: as it
 * is, and with -DSR_FRAGILE, where the death of a process is not provided for. Whole loops run
 * within one call. Functions give 0, or 1 where the core refuses. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <fcntl.h>
#include <float.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "shmreplay.h"

enum { COLUMNS = 5, BATCH = 256, BLOCK_ROWS = 96 };

typedef struct {
    sr_store st;
    sr_ses ses;
    uint64_t episode, block;
    uint32_t episode_position, block_position, rows;
    const void *row[COLUMNS];
    uint64_t keys[BATCH];
    double priorities[BATCH];
} bench;

static const uint64_t ROW_BYTES[COLUMNS] = {336, 336, 4, 4, 1};
#define ROW_TOTAL 681u

void bench_close(bench *b) {
    if (b == NULL) return;
    sr_session_close(&b->ses);
    sr_store_detach(&b->st);
    if (b->st.base != NULL) munmap(b->st.base, b->st.bytes);
    if (b->st.fd >= 0) close(b->st.fd);
    free((void *)b->row[0]);
    free(b);
}

/* A prioritized table of `rows` items; NULL where there is no memory. */
bench *bench_open(uint64_t rows) {
    bench *b = calloc(1, sizeof *b);
    char *row = calloc(COLUMNS, 512);
    if (b == NULL || row == NULL) {
        free(b);
        free(row);
        return NULL;
    }
    for (int c = 0; c < COLUMNS; c++) b->row[c] = row + c * 512;
    sr_table_config table = {.name = "t",
                             .sampler_kind = SR_SEL_PRIORITIZED,
                             .remover_kind = SR_SEL_FIFO,
                             .sampler_exponent = 1,
                             .remover_exponent = 1,
                             .max_size = (int64_t)rows,
                             .n_stripes = 1,
                             .samples_per_insert = 1,
                             .min_diff = -DBL_MAX,
                             .max_diff = DBL_MAX,
                             .min_size_to_sample = 1,
                             .seed = 1};
    sr_store_config cfg = {.capacity_bytes = (rows + 4096) * 1024 + (64u << 20),
                           .generation = 1,
                           .config_bytes = 2,
                           .n_arenas = 1,
                           .n_participants = 2,
                           .n_sessions = 4,
                           .n_tables = 1};
    b->st.bytes = sr_store_bytes(&cfg, &table);
    b->st.fd = memfd_create("bench", MFD_CLOEXEC);
    if (b->st.fd < 0 || posix_fallocate(b->st.fd, 0, 4096) != 0 ||
        ftruncate(b->st.fd, (off_t)b->st.bytes) != 0) {
        return NULL;
    }
    b->st.base = mmap(NULL, b->st.bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE,
                      b->st.fd, 0);
    if (b->st.base == MAP_FAILED || sr_store_format(&b->st, &cfg, &table, "{}") != SR_OK ||
        sr_session_open(&b->st, 1, SR_SESSION_WRITER, &b->ses) != SR_OK ||
        sr_episode_new(&b->ses, 1, &b->episode, &b->episode_position) != SR_OK) {
        return NULL;
    }
    return b;
}

/* Append a step and make it an item, so many times. */
int bench_insert(bench *b, uint64_t calls) {
    for (uint64_t i = 0; i < calls; i++) {
        if (b->block == 0 || b->rows == BLOCK_ROWS) {
            if (b->block != 0 && sr_release(&b->ses, 1, &b->block_position) != SR_OK) return 1;
            if (sr_block_new(&b->ses, COLUMNS, ROW_BYTES, BLOCK_ROWS, &b->block,
                             &b->block_position) != SR_OK) {
                return 1;
            }
            b->rows = 0;
        }
        if (sr_block_append(&b->ses, b->block, COLUMNS, ROW_TOTAL, b->row, b->episode) != SR_OK) {
            return 1;
        }
        sr_item item = {.ref = SR_REF(b->block, SR_KIND_BLOCK),
                        .row_start = b->rows++,
                        .row_count = 1 | SR_COL_SQUEEZED,
                        .priority = 1.0 + (double)(i % 7)};
        uint64_t key;
        uint32_t done, seq;
        if (sr_insert(&b->ses, 0, 1, &item, &key, &done, &seq) != SR_OK) return 1;
    }
    return 0;
}

/* Draw 256 and give them back, so many times. */
int bench_sample(bench *b, uint64_t calls) {
    sr_sampled drawn[BATCH];
    uint32_t positions[BATCH], done, seq;
    for (uint64_t i = 0; i < calls; i++) {
        if (sr_sample(&b->ses, 0, BATCH, drawn, &done, &seq) != SR_OK) return 1;
        for (uint32_t k = 0; k < BATCH; k++) {
            positions[k] = drawn[k].position;
            b->keys[k] = drawn[k].key;
            b->priorities[k] = 1.0 + (double)(k % 5);
        }
        if (sr_release(&b->ses, BATCH, positions) != SR_OK) return 1;
    }
    return 0;
}

/* New priorities for the last 256 drawn, so many times. */
int bench_update(bench *b, uint64_t calls) {
    uint32_t applied;
    for (uint64_t i = 0; i < calls; i++) {
        if (sr_update(&b->ses, 0, BATCH, b->keys, b->priorities, &applied) != SR_OK) return 1;
    }
    return 0;
}
