/* step_image.h: all bytes of a small store, to go back to them after each death, and to tell
 * whether an instruction changed any. Only pages that the file has are looked at: the segment has
 * addresses for far more. */
#ifndef SR_STEP_IMAGE_H
#define SR_STEP_IMAGE_H

#include "table_fixture.h"

#include <fcntl.h>

typedef struct {
    uint32_t n, cap;
    uint32_t *page; /* numbers, rising */
    char *copy;     /* their bytes, in that order */
} image;

/* The next page of the file from `page` on that may hold something; its number, or SR_NONE. */
static inline uint32_t image_next(const sr_store *st, uint32_t page, uint32_t *end) {
    if (page < *end) return page;
    off_t from = lseek(st->fd, (off_t)page * SR_PAGE, SEEK_DATA);
    if (from < 0) return SR_NONE;
    *end = (uint32_t)(((uint64_t)lseek(st->fd, from, SEEK_HOLE) + SR_PAGE - 1) / SR_PAGE);
    return (uint32_t)((uint64_t)from / SR_PAGE);
}

static inline void image_take(image *im, const sr_store *st) {
    im->n = 0;
    uint32_t end = 0;
    for (uint32_t p = image_next(st, 0, &end); p != SR_NONE; p = image_next(st, p + 1, &end)) {
        if (im->n == im->cap) {
            im->cap = im->cap > 0 ? im->cap * 2 : 256;
            im->page = realloc(im->page, im->cap * sizeof *im->page);
            im->copy = realloc(im->copy, (uint64_t)im->cap * SR_PAGE);
            CHECK(im->page != NULL && im->copy != NULL);
        }
        im->page[im->n] = p;
        memcpy(im->copy + (uint64_t)im->n++ * SR_PAGE, st->base + (uint64_t)p * SR_PAGE, SR_PAGE);
    }
}

/* Bring the copy up to date with the pages it knows. Were they the same? */
static inline int image_same(image *im, const sr_store *st) {
    int same = 1;
    for (uint32_t i = 0; i < im->n; i++) {
        char *mine = im->copy + (uint64_t)i * SR_PAGE;
        const char *now = st->base + (uint64_t)im->page[i] * SR_PAGE;
        if (memcmp(mine, now, SR_PAGE) == 0) continue;
        memcpy(mine, now, SR_PAGE);
        same = 0;
    }
    return same;
}

/* Everything as it was, pages included that came since. */
static inline void image_restore(const image *im, const sr_store *st) {
    uint32_t i = 0, end = 0;
    for (uint32_t p = image_next(st, 0, &end); p != SR_NONE; p = image_next(st, p + 1, &end)) {
        while (i < im->n && im->page[i] < p) i++;
        if (i < im->n && im->page[i] == p) continue;
        uint32_t next = i < im->n && im->page[i] < end ? im->page[i] : end;
        CHECK(fallocate(st->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)p * SR_PAGE,
                        (off_t)(next - p) * SR_PAGE) == 0);
        p = next - 1;
    }
    for (i = 0; i < im->n; i++) {
        char *now = st->base + (uint64_t)im->page[i] * SR_PAGE;
        const char *old = im->copy + (uint64_t)i * SR_PAGE;
        if (memcmp(now, old, SR_PAGE) != 0) memcpy(now, old, SR_PAGE);
    }
}

static inline void image_drop(image *im) {
    free(im->page);
    free(im->copy);
    *im = (image){0};
}

#endif
