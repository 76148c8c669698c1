/* layout_participant.h: the part of layout.h that says which processes are attached. */
#ifndef SR_LAYOUT_PARTICIPANT_H
#define SR_LAYOUT_PARTICIPANT_H

#include <stdatomic.h>
#include <stdint.h>

/* Written by the process that holds the record lock on this participant's byte of the lease
 * file. */
typedef struct {
    _Atomic uint32_t state; /* 0 free, 1 in use */
    uint32_t pid;           /* for people; life is decided by the record lock */
    uint64_t start_ticks;   /* field 22 of /proc/PID/stat */
    uint64_t pid_namespace; /* inode of /proc/self/ns/pid */
    uint64_t attached_ns;
    char role[32];
    char _pad[64];
} sr_participant;
_Static_assert(sizeof(sr_participant) == 128, "participant");

#endif
