/* layout_kinds.h: what allocations are, and how they are referred to. A part of layout.h. */
#ifndef SR_LAYOUT_KINDS_H
#define SR_LAYOUT_KINDS_H

#include <stdint.h>

enum sr_kind {
    SR_KIND_NONE = 0,
    SR_KIND_BLOCK,
    SR_KIND_TRAJ,
    SR_KIND_EPISODE,
    SR_KIND_LEDGER,
    SR_KIND_SCHEMA,
    SR_KIND_PACKED,
    SR_KIND_END
};

/* A reference = payload offset | kind (payloads are 64-byte aligned, so the low bits are free). */
#define SR_REF_KIND_MASK 7ull
#define SR_REF(off, kind) ((uint64_t)(off) | (uint64_t)(kind))
#define SR_REF_OFF(ref) ((ref) & ~SR_REF_KIND_MASK)
#define SR_REF_KIND(ref) ((uint32_t)((ref) & SR_REF_KIND_MASK))

#endif
