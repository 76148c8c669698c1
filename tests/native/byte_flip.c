/* byte_flip.c: one byte of a small store is changed, and then every operation is tried: each must
 * give an error or go on, and none may crash or hang. So it is with a checkpoint, both of a damaged
 * store and into one.
 *
 * Left out are the locks: their bytes belong to the C library, and one that says that it is held by
 * somebody who does not exist is waited for by design. Bytes of rows are changed as well, but a
 * changed value is a value like another: nothing sums them up here.
 *
 *   byte_flip                     a share of the bytes, chosen by a seed that is printed
 *   byte_flip --share K --seed N  one byte in K, other ones with another seed; 1: all
 *   byte_flip --at OFFSET         one byte alone
 *   byte_flip --failures N        how many kinds of failure to name */
#include "flip_operations.h"

#include <sanitizer/common_interface_defs.h>
#include <signal.h>
#include <sys/wait.h>

#define DEADLINE_S 30 /* a machine may be busy elsewhere for seconds */
#define KINDS_MAX 512

static const unsigned char PATTERNS[] = {0x01, 0x80, 0xff, 0x10};

static struct {
    uint64_t seed, share, failures_max;
    int64_t at;
} options = {.share = 101, .failures_max = 40, .at = -1};

/* Shared with the children: how far they came. */
typedef struct {
    uint64_t next; /* number of the case to try next */
    uint64_t offset;
    uint32_t pattern;
    const char *operation;
} progress;

static struct {
    char text[200];
    uint64_t times;
} failure[KINDS_MAX];
static uint32_t n_failures;

/* ---------------------------------------------------------------- which bytes */

static int is_lock(const sr_store *st, uint64_t off) {
    const sr_header *h = &st->shape;
    const char *at = st->base + off;
    const char *m = (const char *)&st->hdr->schema_lock; /* the one for repairs follows it */
    if (at >= m && at < m + 2 * sizeof(sr_mutex)) return 1;
    m = (const char *)sr_session_lock(st, 0);
    if (at >= m && at < m + SR_SESSION_LOCKS * sizeof(sr_mutex)) return 1;
    for (uint32_t i = 0; i < h->n_tables; i++) {
        m = (const char *)&sr_table_at(st, i)->limiter_lock;
        if (at >= m && at < m + sizeof(sr_mutex)) return 1;
    }
    for (uint32_t i = 0; i < h->n_stripes; i++) {
        m = (const char *)&((sr_stripe *)sr_ptr(st, h->stripes_off))[i].lock;
        if (at >= m && at < m + sizeof(sr_mutex)) return 1;
    }
    for (uint32_t i = 0; i < h->n_arenas; i++) {
        m = (const char *)&sr_arena_at(st, i)->lock;
        if (at >= m && at < m + sizeof(sr_mutex)) return 1;
    }
    return 0;
}

/* In which structure a byte lies. */
static void name_byte(const sr_store *st, uint64_t off, char *text, size_t bytes) {
    const sr_header *h = &st->shape;
    const struct {
        const char *name;
        uint64_t from, size, n;
    } regions[] = {
        {"header", 0, sizeof(sr_header), 1},
        {"participant", h->participants_off, sizeof(sr_participant), h->n_participants},
        {"session", h->sessions_off, sizeof(sr_session), h->n_sessions},
        {"table", h->tables_off, sizeof(sr_table), h->n_tables},
        {"stripe", h->stripes_off, sizeof(sr_stripe), h->n_stripes},
        {"arena", h->arenas_off, sizeof(sr_arena), h->n_arenas},
        {"schema", h->schemas_off, sizeof(sr_schema), SR_SCHEMAS_MAX},
    };
    for (size_t i = 0; i < sizeof regions / sizeof *regions; i++) {
        uint64_t at = off - regions[i].from;
        if (off < regions[i].from || at >= regions[i].size * regions[i].n) continue;
        snprintf(text, bytes, "%s+%llu", regions[i].name,
                 (unsigned long long)(at % regions[i].size));
        return;
    }
    uint64_t arenas = sr_arena_at(st, 0)->start;
    snprintf(text, bytes, "%s at %llu", off < arenas ? "slots and selectors" : "arena memory",
             (unsigned long long)off);
}

/* ---------------------------------------------------------------- trying */

static progress *shared;

static void hangs(int number) {
    (void)number;
    signal(SIGALRM, SIG_DFL); /* what follows may hang as well */
    alarm(DEADLINE_S);
    static const char text[] = "HANGS\n";
    if (write(2, text, sizeof text - 1) < 0) _exit(3);
    __sanitizer_print_stack_trace();
    _exit(2);
}

static void aborts(int signal) {
    (void)signal;
    __sanitizer_print_stack_trace();
    _exit(4);
}

/* All cases from shared->next on, until one ends the process. */
static void try_from_here(const flip_store *pristine, const image *im, const uint64_t *cases,
                          uint64_t n) {
    const struct sigaction alarmed = {.sa_handler = hangs, .sa_flags = SA_NODEFER};
    CHECK(sigaction(SIGALRM, &alarmed, NULL) == 0);
    signal(SIGABRT, aborts);
    while (shared->next < n) {
        uint64_t number = cases[shared->next++];
        flip_store f = *pristine;
        shared->offset = number / sizeof PATTERNS;
        shared->pattern = PATTERNS[number % sizeof PATTERNS];
        image_restore(im, &f.st);
        f.st.base[shared->offset] ^= (char)shared->pattern;
        f.offset = shared->offset;
        f.pattern = (char)shared->pattern;
        f.held = (int)((shared->offset ^ number) & 1);
        alarm(DEADLINE_S);
        flip_all(&f, &shared->operation);
        alarm(0);
    }
    image_restore(im, &pristine->st);
}

/* The line of a report that tells the place: of the core, if there is one. Checks that failed and
 * were survived come before it. */
static void place_of(char *report, char *text, size_t bytes) {
    char *core;
    char *end = report;
    while ((core = strstr(end, "assertion failed")) != NULL) end = core + strcspn(core, "\n");
    core = strstr(end, "_core/");
    const char *what = strstr(report, "HANGS") != NULL              ? "hang"
                       : strstr(report, "AddressSanitizer") != NULL ||
                               strstr(report, "runtime error") != NULL
                           ? "crash"
                           : "end";
    char *line = core;
    while (line != NULL && line > report && line[-1] != '\n') line--;
    char *name = line != NULL ? strstr(line, " in ") : NULL;
    size_t length = core != NULL ? strcspn(core, "\n)") : 0;
    snprintf(text, bytes, "%s in %.*s %.*s", what,
             name != NULL ? (int)strcspn(name + 4, " ") : 0, name != NULL ? name + 4 : "",
             (int)length, core != NULL ? core : "");
}

static void note(const flip_store *f, int report, int status) {
    static char text[1 << 16];
    char place[160], byte[64], whole[200];
    ssize_t n = pread(report, text, sizeof text - 1, 0);
    text[n > 0 ? n : 0] = 0;
    place_of(text, place, sizeof place);
    snprintf(whole, sizeof whole, "%s, %s", shared->operation, place);
    if (options.at >= 0) fprintf(stderr, "%s\n", text);
    for (uint32_t i = 0; i < n_failures; i++) {
        if (strcmp(failure[i].text, whole) != 0) continue;
        failure[i].times++;
        return;
    }
    name_byte(&f->st, shared->offset, byte, sizeof byte);
    if (n_failures < options.failures_max) {
        printf("FAIL  %s: --at %llu (%s) ^ %02x, status %x\n", whole,
               (unsigned long long)shared->offset, byte, shared->pattern, (unsigned)status);
    }
    if (n_failures == KINDS_MAX) return;
    memcpy(failure[n_failures].text, whole, sizeof whole);
    failure[n_failures++].times = 1;
}

static uint64_t *choose_cases(const flip_store *f, const image *im, uint64_t *n) {
    uint64_t most = (uint64_t)im->n * SR_PAGE * sizeof PATTERNS;
    uint64_t *cases = malloc(most * sizeof *cases);
    CHECK(cases != NULL);
    *n = 0;
    for (uint64_t i = 0; i < most; i++) {
        uint64_t byte = i / sizeof PATTERNS;
        uint64_t off = (uint64_t)im->page[byte / SR_PAGE] * SR_PAGE + byte % SR_PAGE;
        if (options.at >= 0 ? off != (uint64_t)options.at
                            : (i + options.seed) % options.share != 0) {
            continue;
        }
        if (!is_lock(&f->st, off)) cases[(*n)++] = off * sizeof PATTERNS + i % sizeof PATTERNS;
    }
    return cases;
}

static void parse(int argc, char **argv) {
    for (int i = 1; i < argc; i++) {
        uint64_t value = i + 1 < argc ? strtoull(argv[i + 1], NULL, 10) : 0;
        if (i + 1 < argc && strcmp(argv[i], "--seed") == 0) {
            options.seed = value;
        } else if (value > 0 && strcmp(argv[i], "--share") == 0) {
            options.share = value;
        } else if (i + 1 < argc && strcmp(argv[i], "--at") == 0) {
            options.at = (int64_t)value;
        } else if (i + 1 < argc && strcmp(argv[i], "--failures") == 0) {
            options.failures_max = value;
        } else {
            fprintf(stderr, "byte_flip: what is %s?\n", argv[i]);
            exit(2);
        }
        i++;
    }
}

int main(int argc, char **argv) {
    parse(argc, argv);
    setvbuf(stdout, NULL, _IOLBF, 0); /* else children would print it again */
    printf("byte_flip: --seed %llu --share %llu\n", (unsigned long long)options.seed,
           (unsigned long long)options.share);
    flip_store f;
    image im = {0};
    int report = memfd_create("report", MFD_CLOEXEC);
    shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(report >= 0 && shared != MAP_FAILED);
    flip_make(&f);
    image_restore(&f.empty, &f.target);
    CHECK(flip_fill_target(&f, f.good)); /* what is not damaged is restored */
    image_take(&im, &f.st);
    uint64_t n, failures = 0, *cases = choose_cases(&f, &im, &n);
    shared->next = 0;
    while (shared->next < n) {
        CHECK(ftruncate(report, 0) == 0);
        pid_t pid = fork();
        CHECK(pid >= 0);
        if (pid == 0) {
            CHECK(dup2(report, 2) == 2 && lseek(2, 0, SEEK_SET) == 0);
            try_from_here(&f, &im, cases, n);
            _exit(0);
        }
        int status;
        CHECK(waitpid(pid, &status, 0) == pid);
        if (status == 0) continue;
        failures++;
        note(&f, report, status);
    }
    for (uint32_t i = 0; i < n_failures; i++) {
        printf("%6llu times: %s\n", (unsigned long long)failure[i].times, failure[i].text);
    }
    printf("%llu bytes changed, %llu failures of %u kinds\n", (unsigned long long)n,
           (unsigned long long)failures, n_failures);
    image_restore(&im, &f.st);
    flip_drop(&f);
    image_drop(&im);
    free(cases);
    close(report);
    return failures > 0;
}
