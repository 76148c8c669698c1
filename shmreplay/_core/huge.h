/* huge.h: mapping the segment so that huge pages fit it, and asking for them. */
#ifndef SR_HUGE_H
#define SR_HUGE_H

#include "internal.h"

#define SR_HUGE_PAGE (2ull << 20)

/* Ask for huge pages in [off, off + bytes), none of which has memory yet: of each whole one that
 * lies in it the first small page gets memory, and the kernel the advice to make it a huge one.
 * The caller then gives memory to the whole range as if nothing had been done here. Nothing where
 * the kernel cannot, or the file system has not twice as much room. 1 if some of it has memory now.
 * Lock state: any. */
int sr_huge_ahead(sr_store *st, uint64_t off, uint64_t bytes);

/* The array [start, end), all of which has memory, was shorter before: ask the kernel to make one
 * huge page of the small ones of each that it has filled since it ended at `from`. Lock state:
 * any. */
void sr_huge_grown(sr_store *st, uint64_t start, uint64_t from, uint64_t end);

#endif
