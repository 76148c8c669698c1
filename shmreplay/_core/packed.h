/* packed.h: rows of blocks that lie apart from them, for the layers inside the core. */
#ifndef SR_PACKED_H
#define SR_PACKED_H

#include "internal.h"

static inline const sr_packed_col *sr_packed_cols(const sr_packed *p) {
    return (const sr_packed_col *)(p + 1);
}
static inline uint64_t sr_packed_groups(const sr_packed *p, const sr_packed_col *c) {
    return ((uint64_t)p->rows + c->group_rows - 1) / c->group_rows;
}
/* Is what it says of itself, and of all its columns, inside of the `room` bytes there? */
int sr_packed_sound(const sr_packed *p, uint64_t room);
/* Give rows that were just put together their one reference, and a serial of their own. */
void sr_packed_number(const sr_store *st, sr_packed *p);
/* Add it to the sums in the header, or take it out of them. Under a lock that keeps a repair
 * out. */
void sr_packed_note(const sr_store *st, const sr_packed *p);
void sr_packed_forget(const sr_store *st, const sr_packed *p);

#endif
