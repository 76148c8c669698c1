/* step_trace.h: stopping a forked child after each instruction, or at a chosen one. x86-64.
 *
 * The child is a copy of its parent, address by address, so that a run repeats the one before:
 * place k of a run is where k instructions were executed since the start. A run is walked once
 * step by step; after that a place is reached by a breakpoint at its address and counting. */
#ifndef SR_STEP_TRACE_H
#define SR_STEP_TRACE_H

#include "step_image.h"

#include <errno.h>
#include <linux/futex.h>
#include <signal.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/user.h>
#include <sys/wait.h>

typedef struct {
    uint64_t pc;
    uint32_t nth; /* time that pc is reached, from 1 */
    uint32_t fresh; /* the instruction before changed what the dead leave behind */
} place;

typedef struct {
    place *list;
    uint32_t n, cap; /* the last one is the end: nothing is left to execute */
} trace;

/* What the child does. The two breakpoints are seen by the parent as its start and its end. */
__attribute__((noinline)) static void step_perform(void (*run)(void *), void *arg) {
    __asm__ volatile("int3" ::: "memory");
    run(arg);
    __asm__ volatile("int3" ::: "memory");
}

static inline uint64_t step_pc(pid_t pid) {
    errno = 0;
    long pc = ptrace(PTRACE_PEEKUSER, pid, offsetof(struct user_regs_struct, rip), NULL);
    CHECK(errno == 0);
    return (uint64_t)pc;
}

static inline uint64_t step_peek(pid_t pid, uint64_t at) {
    errno = 0;
    long word = ptrace(PTRACE_PEEKDATA, pid, (void *)at, NULL);
    CHECK(errno == 0);
    return (uint64_t)word;
}

static inline void step_poke(pid_t pid, uint64_t at, uint64_t word) {
    CHECK(ptrace(PTRACE_POKEDATA, pid, (void *)at, (void *)word) == 0);
}

/* Let the child go on, by one instruction or to the next trap. 1: at the end. */
static inline int step_on(pid_t pid, int single, uint64_t *pc) {
    int status;
    CHECK(ptrace(single ? PTRACE_SINGLESTEP : PTRACE_CONT, pid, NULL, NULL) == 0);
    CHECK(waitpid(pid, &status, __WALL) == pid);
    if (!WIFSTOPPED(status) || WSTOPSIG(status) != SIGTRAP) {
        fprintf(stderr, "the traced operation ended with status %x\n", (unsigned)status);
        exit(1);
    }
    *pc = step_pc(pid);
    return 0;
}

/* A child that is about to execute the first instruction of run(arg). */
static inline pid_t step_start(void (*run)(void *), void *arg) {
    pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        if (ptrace(PTRACE_TRACEME, 0, NULL, NULL) == 0) step_perform(run, arg);
        _exit(0);
    }
    int status;
    CHECK(waitpid(pid, &status, __WALL) == pid && WIFSTOPPED(status));
    CHECK(ptrace(PTRACE_SETOPTIONS, pid, NULL, (void *)PTRACE_O_EXITKILL) == 0);
    return pid;
}

/* Returns when the kernel has done all that it does for the dead: robust locks above all. */
static inline void step_kill(pid_t pid) {
    int status;
    CHECK(kill(pid, SIGKILL) == 0);
    CHECK(waitpid(pid, &status, __WALL) == pid && WIFSIGNALED(status));
}

/* Is the child at the breakpoint that ends step_perform? */
static inline int step_ended(pid_t pid, uint64_t pc) {
    return (step_peek(pid, pc) & 0xff) == 0xcc;
}

/* The list of locks that the kernel walks when the child dies: its head, in the child's own
 * memory. */
static inline void step_robust(pid_t pid, uint64_t out[3]) {
    void *head = NULL;
    size_t length = 0;
    CHECK(syscall(SYS_get_robust_list, pid, &head, &length) == 0);
    memset(out, 0, 3 * sizeof *out);
    struct iovec mine = {.iov_base = out, .iov_len = 24}, its = {.iov_base = head, .iov_len = 24};
    if (head != NULL) CHECK(process_vm_readv(pid, &mine, 1, &its, 1, 0) == 24);
}

static inline void trace_add(trace *t, uint64_t pc, int fresh) {
    if (t->n == t->cap) {
        t->cap = t->cap > 0 ? t->cap * 2 : 4096;
        t->list = realloc(t->list, t->cap * sizeof *t->list);
        CHECK(t->list != NULL);
    }
    t->list[t->n++] = (place){.pc = pc, .fresh = (uint32_t)fresh};
}

/* How often each address was reached before: by a table of addresses with open addressing. */
static inline void trace_count(trace *t) {
    uint32_t slots = 1024;
    while (slots < t->n * 2) slots *= 2;
    place *seen = calloc(slots, sizeof *seen);
    CHECK(seen != NULL);
    for (uint32_t k = 0; k < t->n; k++) {
        uint64_t state = t->list[k].pc;
        uint32_t i = (uint32_t)sr_splitmix64(&state) & (slots - 1);
        while (seen[i].pc != 0 && seen[i].pc != t->list[k].pc) i = (i + 1) & (slots - 1);
        seen[i].pc = t->list[k].pc;
        t->list[k].nth = ++seen[i].nth;
    }
    free(seen);
}

/* Walk the whole run. A place is fresh where the store or the list of held locks changed: a death
 * there leaves something else behind than a death one instruction before. */
static inline void trace_run(trace *t, const sr_store *st, image *now, void (*run)(void *),
                             void *arg) {
    uint64_t robust[3], before[3], pc;
    t->n = 0;
    image_take(now, st);
    pid_t pid = step_start(run, arg);
    step_robust(pid, before);
    pc = step_pc(pid);
    trace_add(t, pc, 1);
    while (!step_ended(pid, pc)) {
        int call = (step_peek(pid, pc) & 0xffff) == 0x050f;
        step_on(pid, 1, &pc);
        step_robust(pid, robust);
        int same = image_same(now, st) && memcmp(robust, before, sizeof robust) == 0;
        if (call) image_take(now, st); /* it may have brought pages */
        memcpy(before, robust, sizeof robust);
        trace_add(t, pc, !same || call);
    }
    step_kill(pid);
    trace_count(t);
}

/* A child that has executed exactly what leads to the place. 0: this run took another way. */
static inline pid_t trace_goto(const place *to, void (*run)(void *), void *arg) {
    pid_t pid = step_start(run, arg);
    uint64_t pc = step_pc(pid), word = step_peek(pid, to->pc);
    if ((word & 0xff) == 0xcc) { /* the end */
        step_on(pid, 0, &pc);
        if (pc == to->pc + 1) return pid;
        step_kill(pid);
        return 0;
    }
    uint32_t hits = pc == to->pc;
    while (hits < to->nth) {
        if (pc == to->pc) { /* off the place, or through one more round of a repeated move */
            step_on(pid, 1, &pc);
            hits += pc == to->pc;
            continue;
        }
        step_poke(pid, to->pc, (word & ~0xffull) | 0xcc);
        step_on(pid, 0, &pc);
        step_poke(pid, to->pc, word);
        if (pc != to->pc + 1) {
            step_kill(pid);
            return 0;
        }
        pc = to->pc;
        CHECK(ptrace(PTRACE_POKEUSER, pid, offsetof(struct user_regs_struct, rip), (void *)pc) ==
              0);
        hits++;
    }
    return pid;
}

#endif
