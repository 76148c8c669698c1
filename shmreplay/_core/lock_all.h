/* lock_all.h: every lock of a store at once, for sr_check and sr_repair. */
#ifndef SR_LOCK_ALL_H
#define SR_LOCK_ALL_H

#include "internal.h"

/* Every lock of the store but the repair lock, in order, for who holds none (as sr_lock). */
int sr_lock_all(sr_store *st);
/* The same for sr_repair: whatever happened to their owners. SR_OK, or SR_CORRUPT holding none. */
int sr_lock_all_anyway(sr_store *st);
void sr_unlock_all(sr_store *st);

#endif
