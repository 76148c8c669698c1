/* step_kill.c: a process dies after each single instruction of each operation, by SIGKILL; whoever
 * lives on must find all that was acknowledged, be able to work, and lose no memory.
 *
 * Each operation is walked once under ptrace. A death between two instructions that change nothing
 * in the store (nor the list of locks that the kernel walks for the dead) leaves the same behind as
 * the one before: by default these are left out. A death is a real one each time: a child is
 * forked, stopped at the place and killed.
 *
 *   step_kill                       every place that changes anything; of repairs only some
 *   step_kill --full                every instruction, and all of repairs: hours
 *   step_kill --share K --seed N    one of K of these places, other ones with another seed
 *   step_kill --only OPERATION[/KIND[@PLACE]]
 *   step_kill --failures N          places to name before giving up */
#include "step_trace.h"

#include "step_survivor.h"

#include <sys/mman.h>
#include <sys/resource.h>
#include <time.h>

#define DEADLINE_S 15

static struct {
    uint64_t seed;
    uint32_t share;
    int full;
    const char *only;
    uint64_t failures_max;
} options = {.share = 1, .failures_max = 20};

static struct {
    uint64_t places, deaths, failures, missed;
    double longest;
} total;

typedef struct {
    const operation *op;
    world *w;
    image pristine;
    trace steps;
    int report; /* file that the survivor's stderr goes to */
} scene;

/* ---------------------------------------------------------------- saying where */

static void add_lock(char *text, size_t bytes, const sr_mutex *m, pid_t pid, const char *name,
                     uint32_t number) {
    uint32_t word;
    memcpy(&word, &m->m.__data.__lock, sizeof word);
    if ((word & FUTEX_TID_MASK) != (uint32_t)pid) return;
    size_t at = strlen(text);
    snprintf(text + at, bytes - at, "%s%s %u", at > 0 ? ", " : "", name, number);
}

/* Which locks the process has, by the words that name their owner. */
static void locks_of(const sr_store *st, pid_t pid, char *text, size_t bytes) {
    const sr_header *h = st->hdr;
    text[0] = 0;
    add_lock(text, bytes, &h->schema_lock, pid, "schemas", 0);
    for (uint32_t i = 0; i < h->n_tables; i++) {
        add_lock(text, bytes, &sr_table_at(st, i)->limiter_lock, pid, "limiter", i);
    }
    for (uint32_t i = 0; i < h->n_stripes; i++) {
        add_lock(text, bytes, &((sr_stripe *)sr_ptr(st, h->stripes_off))[i].lock, pid, "stripe", i);
    }
    for (uint32_t i = 0; i < SR_SESSION_LOCKS; i++) {
        add_lock(text, bytes, sr_session_lock(st, i), pid, "session", i);
    }
    for (uint32_t i = 0; i < h->n_arenas; i++) {
        add_lock(text, bytes, &sr_arena_at(st, i)->lock, pid, "arena", i);
    }
    add_lock(text, bytes, &h->repair_lock, pid, "repair", 0);
}

extern const char __executable_start, etext;

/* The place in the core's own code where the process is, or that called where it is: by what looks
 * like a return address on its stack. */
static uint64_t own_code(pid_t pid, uint64_t pc) {
    const uint64_t from = (uint64_t)&__executable_start, to = (uint64_t)&etext;
    uint64_t stack = (uint64_t)ptrace(PTRACE_PEEKUSER, pid,
                                      offsetof(struct user_regs_struct, rsp), NULL);
    for (uint32_t i = 0; i < 64 && (pc < from || pc >= to); i++) pc = step_peek(pid, stack + 8 * i);
    return pc;
}

/* Function and line of an address, where addr2line is there to say so. */
static void name_place(uint64_t pc, char *text, size_t bytes) {
    char command[128], self[256];
    ssize_t n = readlink("/proc/self/exe", self, sizeof self - 1);
    text[0] = 0;
    if (n <= 0) return;
    self[n] = 0;
    snprintf(command, sizeof command, "addr2line -sfpe %.*s 0x%llx 2>/dev/null", 80, self,
             (unsigned long long)pc);
    FILE *f = popen(command, "r");
    if (f == NULL) return;
    if (fgets(text, (int)bytes, f) == NULL) text[0] = 0;
    text[strcspn(text, "\n")] = 0;
    pclose(f);
}

static void tell(const scene *s, uint32_t k, uint64_t pc, const char *locks, int janitor_first,
                 int status) {
    char where[256], what[512] = "";
    if (++total.failures > options.failures_max) return;
    name_place(pc, where, sizeof where);
    ssize_t n = pread(s->report, what, sizeof what - 1, 0);
    if (n > 0) what[strcspn(what, "\n")] = 0;
    printf("FAIL  %s/%s@%u of %u, %s, in %s, holding [%s]: ", s->op->name, s->w->kind->name, k,
           s->steps.n - 1, janitor_first ? "janitor first" : "work first", where, locks);
    if (WIFSIGNALED(status)) printf("signal %d: ", WTERMSIG(status));
    printf("%s\n", what);
    fflush(stdout);
}

/* ---------------------------------------------------------------- one death */

/* In a process of its own, so that whatever it does, the next one starts afresh. */
static int survive(const scene *s, int janitor_first, int ended, uint32_t done) {
    struct timespec from, to;
    CHECK(ftruncate(s->report, 0) == 0);
    clock_gettime(CLOCK_MONOTONIC, &from);
    pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        CHECK(dup2(s->report, 2) == 2 && lseek(2, 0, SEEK_SET) == 0);
        setvbuf(stderr, NULL, _IOLBF, 0);
        signal(SIGALRM, survivor_hangs);
        alarm(DEADLINE_S);
        survivor_live(s->op, s->w, janitor_first, ended, done);
        _exit(0);
    }
    int status;
    CHECK(waitpid(pid, &status, 0) == pid);
    clock_gettime(CLOCK_MONOTONIC, &to);
    double took = (double)(to.tv_sec - from.tv_sec) + 1e-9 * (double)(to.tv_nsec - from.tv_nsec);
    if (took > total.longest) total.longest = took;
    return status;
}

/* What the call gave, out of the memory of a child that is at its end. */
static uint32_t read_done(const scene *s, pid_t pid) {
    world w;
    struct iovec mine = {.iov_base = &w, .iov_len = sizeof w};
    struct iovec its = {.iov_base = s->w, .iov_len = sizeof w};
    CHECK(process_vm_readv(pid, &mine, 1, &its, 1, 0) == (ssize_t)sizeof w);
    CHECK(w.status == SR_OK || w.status == SR_WOULD_BLOCK);
    return w.done;
}

static void die_at(scene *s, uint32_t k, int janitor_first) {
    char locks[128];
    int ended = k == s->steps.n - 1;
    /* A machine that was busy elsewhere for a second is no hang: a hang is one twice. */
    for (int attempt = 0; attempt < 2; attempt++) {
        uint32_t done = 0;
        image_restore(&s->pristine, &s->w->st);
        pid_t pid = trace_goto(&s->steps.list[k], s->op->run, s->w);
        if (pid == 0) {
            total.missed++;
            return;
        }
        if (ended && s->op->first == NULL) done = read_done(s, pid);
        locks_of(&s->w->st, pid, locks, sizeof locks);
        uint64_t pc = own_code(pid, s->steps.list[k].pc);
        step_kill(pid);
        total.deaths++;
        int status = survive(s, janitor_first, ended && s->op->first == NULL, done);
        if (status == 0) return;
        if (WIFEXITED(status) && WEXITSTATUS(status) == 2 && attempt == 0) continue;
        tell(s, k, pc, locks, janitor_first, status);
        return;
    }
}

/* ---------------------------------------------------------------- one operation */

/* A repair goes over everything: it has more places than all else together. */
#define REPAIR_SHARE 16u

static uint64_t share_of(const operation *op) {
    return options.share * (op->first != NULL && !options.full ? REPAIR_SHARE : 1ull);
}

/* Of the ways to come to a repair, too, only some are walked in one run; others than with a seed
 * that is greater by the share of places, so that all seeds together cover each place of each. */
static int chosen_part(const operation *op, size_t kind, uint32_t part) {
    if (op->first == NULL || options.full || options.only != NULL) return 1;
    return (kind * 5 + part + options.seed / share_of(op)) % REPAIR_SHARE == 0;
}

/* Is this place to be looked at in this run? By its number, so that all seeds cover all places. */
static int chosen(const scene *s, uint32_t k) {
    if (k == s->steps.n - 1) return 1;
    if (!options.full && !s->steps.list[k].fresh) return 0;
    return (k + options.seed) % share_of(s->op) == 0;
}

/* The first of two dies: `part` of the `PARTS` of the way through its operation, by places that
 * change something. */
#define PARTS 8u

static void die_before(scene *s, image *now, uint32_t part) {
    trace steps = {0};
    uint32_t fresh = 0, k = 0;
    image_take(&s->pristine, &s->w->st);
    trace_run(&steps, &s->w->st, now, s->op->first, s->w);
    for (uint32_t i = 0; i < steps.n; i++) fresh += steps.list[i].fresh;
    for (uint32_t left = fresh * part / PARTS; left > 0; k++) left -= steps.list[k].fresh;
    image_restore(&s->pristine, &s->w->st);
    pid_t pid = trace_goto(&steps.list[k], s->op->first, s->w);
    CHECK(pid != 0);
    step_kill(pid);
    free(steps.list);
}

/* All deaths in one operation on one kind of table. */
static void play_scene(scene *s, uint32_t part, long place) {
    world *w = s->w;
    image now = {0};
    world_make(w, s->w->kind, s->op->fill);
    contents_read(&w->st, &w->before);
    if (s->op->prepare != NULL) s->op->prepare(w);
    contents_read(&w->st, &w->before);
    check_store(&w->st);
    if (s->op->first != NULL) die_before(s, &now, part);
    image_take(&s->pristine, &w->st);
    trace_run(&s->steps, &w->st, &now, s->op->run, w);
    for (uint32_t k = 0; k < s->steps.n; k++) {
        if (place >= 0 ? (uint32_t)place != k : !chosen(s, k)) continue;
        total.places++;
        if (options.full || place >= 0) {
            die_at(s, k, 1);
            die_at(s, k, 0);
        } else {
            die_at(s, k, (int)((k / share_of(s->op) + options.seed) & 1));
        }
    }
    image_drop(&now);
    image_drop(&s->pristine);
    world_drop(w);
}

static void play(const operation *op, const kind *kind, uint32_t part, long place) {
    world w = {.kind = kind};
    scene s = {.op = op, .w = &w, .report = memfd_create("report", MFD_CLOEXEC)};
    uint64_t failures = total.failures, deaths = total.deaths;
    uint32_t changes = 0;
    CHECK(s.report >= 0);
    play_scene(&s, part, place);
    for (uint32_t k = 0; k < s.steps.n; k++) changes += s.steps.list[k].fresh;
    printf("%-5s %s/%s", total.failures == failures ? "ok" : "FAIL", op->name, kind->name);
    if (op->first != NULL) printf(" part %u", part);
    printf(": %u instructions, %u change something, %llu deaths, %llu failures\n", s.steps.n - 1,
           changes, (unsigned long long)(total.deaths - deaths),
           (unsigned long long)(total.failures - failures));
    free(s.steps.list);
    close(s.report);
}

/* Does --only name this pair? The place that it names, or -1. */
static int named(const operation *op, const kind *kind, long *place) {
    char name[128];
    *place = -1;
    if (options.only == NULL) return 1;
    int n = snprintf(name, sizeof name, "%s/%s", op->name, kind->name);
    if (strcmp(options.only, op->name) == 0 || strcmp(options.only, name) == 0) return 1;
    if (strncmp(options.only, name, (size_t)n) != 0 || options.only[n] != '@') return 0;
    *place = strtol(options.only + n + 1, NULL, 10);
    return 1;
}

static void parse(int argc, char **argv) {
    for (int i = 1; i < argc; i++) {
        const char *value = i + 1 < argc ? argv[i + 1] : NULL;
        if (strcmp(argv[i], "--full") == 0) {
            options.full = 1;
        } else if (value != NULL && strcmp(argv[i], "--seed") == 0) {
            options.seed = strtoull(argv[++i], NULL, 10);
        } else if (value != NULL && strcmp(argv[i], "--share") == 0) {
            options.share = (uint32_t)strtoul(argv[++i], NULL, 10);
        } else if (value != NULL && strcmp(argv[i], "--only") == 0) {
            options.only = argv[++i];
        } else if (value != NULL && strcmp(argv[i], "--failures") == 0) {
            options.failures_max = strtoull(argv[++i], NULL, 10);
        } else {
            fprintf(stderr, "step_kill: what is %s?\n", argv[i]);
            exit(2);
        }
    }
    if (options.share == 0) options.share = 1;
}

int main(int argc, char **argv) {
    setvbuf(stdout, NULL, _IOLBF, 0); /* else children would print it again */
    parse(argc, argv);
    printf("step_kill: --seed %llu --share %u%s\n", (unsigned long long)options.seed, options.share,
           options.full ? " --full" : "");
    for (size_t i = 0; i < N_OPERATIONS; i++) {
        for (size_t k = 0; k < N_KINDS; k++) {
            long place;
            if (!OPERATIONS[i].every_kind && k != 1) continue;
            if (!named(&OPERATIONS[i], &KINDS[k], &place)) continue;
            for (uint32_t part = 1; part < (OPERATIONS[i].first != NULL ? PARTS : 2); part++) {
                if (!chosen_part(&OPERATIONS[i], k, part)) continue;
                play(&OPERATIONS[i], &KINDS[k], part, place);
            }
        }
    }
    printf("%llu places, %llu deaths, %llu failures, %llu not reached; the slowest survivor took "
           "%.3f s\n",
           (unsigned long long)total.places, (unsigned long long)total.deaths,
           (unsigned long long)total.failures, (unsigned long long)total.missed, total.longest);
    /* Who reads the clock while the kernel sets it goes round once more: then, and not again. */
    int lost = total.missed * 20 > total.places;
    return total.failures > 0 || lost || total.deaths == 0;
}
