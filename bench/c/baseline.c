/* The floor that every figure is held against: the same bytes moved by bare C, with no table, no
 * lock and no Python around it. Whole loops run within one call, so that the caller's overhead is
 * not in the figure. Compiled at run time (cc -O3) by bench/baselines.py. */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum {
    CACHE_LINE = 64,
    ROWS_AHEAD = 8 /* how far the prefetching gather looks ahead; 4 to 16 do about as well */
};

/* Copies `calls` payloads of `bytes` bytes, one after the other, into a ring of `rows` rows, from a
 * pool of `sources` payloads taken in turn. position[0] is the row and position[1] the payload that
 * comes next; the call moves both on. */
void bench_memcpy_ring(char *ring, size_t ring_stride, size_t rows, const char *pool,
                       size_t pool_stride, size_t sources, size_t bytes, size_t calls,
                       size_t *position)
{
    size_t row = position[0];
    size_t source = position[1];
    for (size_t call = 0; call < calls; call++) {
        memcpy(ring + row * ring_stride, pool + source * pool_stride, bytes);
        /* Compare and reset: a division would cost as much as copying a small payload. */
        row = row + 1 == rows ? 0 : row + 1;
        source = source + 1 == sources ? 0 : source + 1;
    }
    position[0] = row;
    position[1] = source;
}

static inline void gather_rows(const char *source, char *restrict out, size_t bytes,
                               const int64_t *restrict index, size_t batch)
{
    for (size_t i = 0; i < batch; i++) {
        memcpy(out + i * bytes, source + (size_t)index[i] * bytes, bytes);
    }
}

static inline void gather_rows_ahead(const char *source, char *restrict out, size_t bytes,
                                     const int64_t *restrict index, size_t batch)
{
    for (size_t i = 0; i < batch; i++) {
        if (i + ROWS_AHEAD < batch) {
            const char *ahead = source + (size_t)index[i + ROWS_AHEAD] * bytes;
            for (size_t offset = 0; offset < bytes; offset += CACHE_LINE) {
                __builtin_prefetch(ahead + offset, 0, 0);
            }
            __builtin_prefetch(ahead + bytes - 1, 0, 0);
        }
        memcpy(out + i * bytes, source + (size_t)index[i] * bytes, bytes);
    }
}

/* One field of one batch. The sizes of scalars are spelled out, so that the compiler makes plain
 * loads and stores of them; any other row is a memcpy. */
static void gather_field(const char *source, char *restrict out, size_t bytes,
                         const int64_t *restrict index, size_t batch, int prefetch)
{
    if (prefetch) {
        switch (bytes) {
        case 1: gather_rows_ahead(source, out, 1, index, batch); break;
        case 4: gather_rows_ahead(source, out, 4, index, batch); break;
        case 8: gather_rows_ahead(source, out, 8, index, batch); break;
        default: gather_rows_ahead(source, out, bytes, index, batch); break;
        }
    } else {
        switch (bytes) {
        case 1: gather_rows(source, out, 1, index, batch); break;
        case 4: gather_rows(source, out, 4, index, batch); break;
        case 8: gather_rows(source, out, 8, index, batch); break;
        default: gather_rows(source, out, bytes, index, batch); break;
        }
    }
}

/* Gathers `batches` batches of `batch` rows of `fields` arrays into the caller's arrays. `index`
 * holds `sets` sets of `batch` rows drawn beforehand, used in turn from set `first`. Returns the
 * set that the next call begins with. */
size_t bench_gather(const char *const *sources, char *const *outs, const size_t *row_bytes,
                    size_t fields, const int64_t *index, size_t sets, size_t batch, size_t first,
                    size_t batches, int prefetch)
{
    size_t set = first;
    for (size_t i = 0; i < batches; i++) {
        const int64_t *rows = index + set * batch;
        for (size_t field = 0; field < fields; field++) {
            gather_field(sources[field], outs[field], row_bytes[field], rows, batch, prefetch);
        }
        set = set + 1 == sets ? 0 : set + 1;
    }
    return set;
}
