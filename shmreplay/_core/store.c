/* Laying a store out, attaching to one, closing it, and what it holds. */
#include "arena.h"
#include "events.h"
#include "fault.h"
#include "huge.h"
#include "ledger.h"
#include "limiter.h"
#include "lock.h"
#include "shape.h"
#include "stripe.h"
#include "table.h"

#include <float.h>
#include <sys/mman.h>
#include <time.h>

static _Thread_local sr_detail detail;
sr_detail *sr_last_detail(void) { return &detail; }

static uint64_t mix(uint64_t h, uint64_t x) {
    uint64_t state = h ^ x;
    return sr_splitmix64(&state);
}

uint64_t sr_layout_signature(void) {
    const uint64_t parts[] = {
        sizeof(void *),
        sizeof(pthread_mutex_t),
        _Alignof(pthread_mutex_t),
        sizeof(sr_header),
        sizeof(sr_participant),
        sizeof(sr_session),
        sizeof(sr_arena),
        sizeof(sr_block),
        sizeof(sr_traj),
        sizeof(sr_packed) + sizeof(sr_packed_col),
        sizeof(sr_slot),
        sizeof(sr_receipt),
        sizeof(sr_stripe),
        sizeof(sr_table),
        sizeof(sr_ring) + sizeof(sr_event),
        offsetof(sr_header, config_off),
        offsetof(sr_table, sample_seq),
        offsetof(sr_stripe, index),
#if defined(__GLIBC__)
        1,
#else
        2,
#endif
        1 /* little endian: the first byte of a 1 */,
    };
    uint64_t h = 0;
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) h = mix(h, parts[i]);
    const uint32_t one = 1;
    return mix(h, *(const unsigned char *)&one);
}

typedef struct {
    uint64_t participants, sessions, tables, stripes, arenas, schemas, session_locks, config,
        fixed_end, receipts, index_start, arena_start, arena_span, end;
    uint32_t n_stripes;
} plan;

static void make_plan(const sr_store_config *cfg, const sr_table_config *tables, plan *p) {
    uint64_t at = sr_align(sizeof(sr_header), SR_PAGE);
    p->participants = at;
    at = sr_align(at + cfg->n_participants * sizeof(sr_participant), SR_PAGE);
    p->sessions = at;
    at = sr_align(at + cfg->n_sessions * sizeof(sr_session), SR_PAGE);
    p->tables = at;
    at += cfg->n_tables * sizeof(sr_table);
    p->n_stripes = 0;
    for (uint32_t i = 0; i < cfg->n_tables; i++) p->n_stripes += tables[i].n_stripes;
    p->stripes = sr_align(at, SR_LINE);
    at = p->stripes + p->n_stripes * sizeof(sr_stripe);
    p->arenas = sr_align(at, SR_LINE);
    at = p->arenas + cfg->n_arenas * sizeof(sr_arena);
    p->schemas = sr_align(at, SR_LINE);
    at = p->schemas + SR_SCHEMAS_MAX * sizeof(sr_schema);
    p->session_locks = at;
    at += SR_SESSION_LOCKS * sizeof(sr_mutex);
    p->config = at;
    p->fixed_end = sr_align(at + cfg->config_bytes, SR_PAGE);
    p->receipts = p->fixed_end;
    p->index_start = sr_align(p->receipts + SR_RECEIPTS_MAX * sizeof(sr_receipt), SR_PAGE);
    at = p->index_start;
    for (uint32_t i = 0; i < cfg->n_tables; i++) {
        uint64_t slots = sr_stripe_slots_max(&tables[i], cfg->capacity_bytes);
        at += tables[i].n_stripes * sr_stripe_region_bytes(&tables[i], slots);
        at += sr_events_bytes(tables[i].n_events);
    }
    p->arena_start = sr_align(at, SR_HUGE_PAGE);
    p->arena_span = sr_align(cfg->capacity_bytes, SR_HUGE_PAGE);
    p->end = p->arena_start + cfg->n_arenas * p->arena_span;
}

uint64_t sr_store_bytes(const sr_store_config *cfg, const sr_table_config *tables) {
    plan p;
    make_plan(cfg, tables, &p);
    return p.end;
}

void sr_store_unmap(sr_store *st) {
    sr_store_detach(st);
    if (st->base != NULL) (void)munmap(st->base, st->bytes);
    st->base = NULL;
}

static int format_table(sr_store *st, const sr_table_config *cfg, uint32_t number,
                        uint32_t first_stripe, uint64_t *region) {
    sr_table *t = sr_table_at(st, number);
    if (sr_mutex_init(&t->limiter_lock) != SR_OK) return SR_SYS;
    t->samples_per_insert = cfg->samples_per_insert;
    t->min_diff = cfg->min_diff;
    t->max_diff = cfg->max_diff;
    sr_limiter_derive(t);
    sr_reset_counters(t);
    t->min_size_to_sample = cfg->min_size_to_sample;
    t->rng = cfg->seed;
    t->sampler_kind = cfg->sampler_kind;
    t->remover_kind = cfg->remover_kind;
    t->sampler_exponent = cfg->sampler_exponent;
    t->remover_exponent = cfg->remover_exponent;
    t->max_size = cfg->max_size;
    t->max_size_limit = sr_stripe_max_size_limit(cfg, st->shape.capacity_bytes);
    atomic_store(&t->max_times_sampled, cfg->max_times_sampled);
    atomic_store(&t->max_bytes, cfg->max_bytes);
    atomic_store(&t->count_bytes, cfg->max_bytes > 0);
    t->n_stripes = cfg->n_stripes;
    t->first_stripe = first_stripe;
    memcpy(t->name, cfg->name, sizeof t->name);
    uint64_t slots = sr_stripe_slots_max(cfg, st->shape.capacity_bytes);
    t->slot_bits = cfg->slot_bits != 0 ? cfg->slot_bits : 64u - (uint32_t)__builtin_clzll(slots);
    t->stripe_bits = t->n_stripes > 1 ? 32u - (uint32_t)__builtin_clz(t->n_stripes - 1) : 0;
    for (uint32_t k = 0; k < t->n_stripes; k++) {
        int rc = sr_stripe_init(sr_stripe_at(st, t, k), cfg, number, k, *region, slots);
        if (rc != SR_OK) return rc;
        *region += sr_stripe_region_bytes(cfg, slots);
    }
    if (cfg->n_events == 0) return SR_OK;
    uint64_t bytes = sr_events_bytes(cfg->n_events);
    int rc = sr_commit(st, *region, bytes, bytes);
    if (rc != SR_OK) return rc;
    sr_events_init(st, t, number, *region, cfg->n_events);
    *region += bytes;
    return SR_OK;
}

/* Without the memory for it, pages are simply mapped at their first touch. */
static void keep_pages(sr_store *st) {
    if (st->touched != NULL) return;
    if (SR_FAULT_POINT("pages")) return;
    st->touched = calloc(st->bytes / SR_PAGE / 64 + 1, sizeof *st->touched);
}

void sr_store_detach(sr_store *st) {
    free((void *)st->touched);
    st->touched = NULL;
    sr_shape_drop(st);
}

/* Of the header: what never changes, and is read from the process's own memory. */
static void keep_header(sr_store *st) {
    memcpy(&st->shape.layout_version, &st->hdr->layout_version,
           offsetof(sr_header, seal) + sizeof st->shape.seal - offsetof(sr_header, layout_version));
}

static int config_ok(const sr_store_config *cfg, const sr_table_config *tables) {
    if (cfg->n_tables == 0 || cfg->n_tables > SR_TABLES_MAX || cfg->n_arenas == 0 ||
        cfg->n_arenas > SR_ARENAS_MAX) {
        return 0;
    }
    if (cfg->n_participants < 2 || cfg->n_sessions == 0 || cfg->capacity_bytes > (1ull << 46)) {
        return 0;
    }
    uint64_t locks = SR_SESSION_LOCKS + 2u + cfg->n_arenas;
    for (uint32_t i = 0; i < cfg->n_tables; i++) {
        const sr_table_config *t = &tables[i];
        locks += 1u + t->n_stripes;
        if (t->n_stripes == 0 || t->n_stripes > SR_STRIPES_MAX || t->max_size < 1 ||
            t->max_size > SR_MAX_SIZE || t->max_bytes < 0) {
            return 0;
        }
        if (t->slot_bits != 0 &&
            !sr_slot_bits_fit(t->slot_bits, t->max_size, cfg->capacity_bytes)) {
            return 0;
        }
        if (t->sampler_kind < SR_SEL_FIFO || t->sampler_kind > SR_SEL_EPOCH) return 0;
        if (t->sampler_kind == SR_SEL_EPOCH && t->n_stripes > 1) return 0;
        if (t->remover_kind < SR_SEL_FIFO || t->remover_kind > SR_SEL_MAX_HEAP) return 0;
        if (t->n_events > 0 && (t->n_stripes > 1 || t->n_events < SR_EVENTS_MIN ||
                                t->n_events > SR_EVENTS_MAX)) {
            return 0;
        }
        if (!(t->samples_per_insert > 0) || t->min_size_to_sample < 1) return 0;
    }
    return locks <= SR_LOCKS_MAX;
}

static uint64_t extent_for(uint64_t capacity) {
    uint64_t bytes = sr_align(capacity / 256, SR_PAGE);
    const uint64_t least = 256u << 10, most = 16u << 20;
    if (bytes > SR_HUGE_PAGE) bytes &= ~(SR_HUGE_PAGE - 1);
    return bytes < least ? least : bytes > most ? most : bytes;
}

static int format_regions(sr_store *st, const sr_store_config *cfg, const sr_table_config *tables,
                          const plan *p, const char *config_json) {
    sr_header *h = st->hdr;
    memcpy(st->base + p->config, config_json, cfg->config_bytes);
    uint64_t region = p->index_start;
    uint32_t first = 0;
    for (uint32_t i = 0; i < cfg->n_tables; i++) {
        int rc = format_table(st, &tables[i], i, first, &region);
        if (rc != SR_OK) return rc;
        first += tables[i].n_stripes;
    }
    for (uint32_t i = 0; i < cfg->n_arenas; i++) {
        int rc = sr_arena_init(st, sr_arena_at(st, i), p->arena_start + i * p->arena_span,
                               p->arena_start + (i + 1) * p->arena_span);
        if (rc != SR_OK) return rc;
    }
    for (uint32_t i = 0; i < SR_SESSION_LOCKS; i++) {
        if (sr_mutex_init(sr_session_lock(st, i)) != SR_OK) return SR_SYS;
    }
    int rc = sr_mutex_init(&h->schema_lock);
    return rc == SR_OK ? sr_mutex_init(&h->repair_lock) : rc;
}

int sr_store_format(sr_store *st, const sr_store_config *cfg, const sr_table_config *tables,
                    const char *config_json) {
    plan p;
    if (!config_ok(cfg, tables)) return SR_INVALID;
    make_plan(cfg, tables, &p);
    if (st->bytes != p.end) return SR_INVALID;
    if (p.fixed_end > cfg->capacity_bytes) {
        detail = (sr_detail){.asked = p.fixed_end, .available = cfg->capacity_bytes};
        return SR_FULL;
    }
    int rc = sr_commit(st, 0, p.fixed_end, 0);
    if (rc != SR_OK) return rc;
    sr_header *h = (sr_header *)st->base;
    st->hdr = h;
    h->layout_version = SR_LAYOUT_VERSION;
    h->layout_signature = sr_layout_signature();
    h->n_tables = cfg->n_tables;
    h->generation = cfg->generation;
    h->file_bytes = st->bytes;
    h->capacity_bytes = cfg->capacity_bytes;
    h->extent_bytes = extent_for(cfg->capacity_bytes);
    h->n_arenas = cfg->n_arenas;
    h->n_stripes = p.n_stripes;
    h->n_participants = cfg->n_participants;
    h->n_sessions = cfg->n_sessions;
    h->participants_off = p.participants;
    h->sessions_off = p.sessions;
    for (uint32_t i = 0; i < cfg->n_sessions; i++) {
        ((sr_session *)sr_ptr(st, p.sessions))[i].participant = SR_NONE;
    }
    h->tables_off = p.tables;
    h->stripes_off = p.stripes;
    h->arenas_off = p.arenas;
    h->schemas_off = p.schemas;
    h->session_locks_off = p.session_locks;
    h->receipts_off = p.receipts;
    h->config_off = p.config;
    h->config_bytes = cfg->config_bytes;
    struct timespec ts;
    clock_gettime(CLOCK_REALTIME, &ts);
    h->created_ns = (uint64_t)ts.tv_sec * 1000000000ull + (uint64_t)ts.tv_nsec;
    atomic_store(&h->committed_bytes, p.fixed_end);
    keep_header(st);
    keep_pages(st);
    rc = format_regions(st, cfg, tables, &p, config_json);
    if (rc == SR_OK) rc = sr_shape_keep(st);
    if (rc != SR_OK) return rc;
    h->seal = st->shape.seal = sr_shape_seal(st);
    atomic_store(&h->state, SR_STATE_OPEN);
    /* SYNC POINT: release: whoever sees the magic sees a store that is laid out. */
    atomic_store_explicit(&h->magic, SR_MAGIC, memory_order_release);
    return SR_OK;
}

static int region_ok(const sr_store *st, uint64_t off, uint64_t count, uint64_t size) {
    uint64_t align = size % SR_LINE == 0 ? SR_LINE : 8;
    return off % align == 0 && count <= st->bytes / size && sr_at(st, off, count * size) != NULL;
}

int sr_store_attach(sr_store *st) {
    if (st->bytes < sizeof(sr_header)) return SR_WOULD_BLOCK;
    sr_header *h = (sr_header *)st->base;
    if (atomic_load_explicit(&h->magic, memory_order_acquire) != SR_MAGIC) return SR_WOULD_BLOCK;
    if (h->layout_version != SR_LAYOUT_VERSION || h->layout_signature != sr_layout_signature()) {
        detail = (sr_detail){.asked = h->layout_version,
                             .available = SR_LAYOUT_VERSION,
                             .found_signature = h->layout_signature,
                             .expected_signature = sr_layout_signature()};
        return SR_VERSION;
    }
    if (h->file_bytes != st->bytes || h->n_tables == 0 || h->n_tables > SR_TABLES_MAX ||
        h->n_arenas == 0 || h->n_arenas > SR_ARENAS_MAX || h->n_stripes > SR_LOCKS_MAX ||
        !region_ok(st, h->participants_off, h->n_participants, sizeof(sr_participant)) ||
        !region_ok(st, h->sessions_off, h->n_sessions, sizeof(sr_session)) ||
        !region_ok(st, h->tables_off, h->n_tables, sizeof(sr_table)) ||
        !region_ok(st, h->stripes_off, h->n_stripes, sizeof(sr_stripe)) ||
        !region_ok(st, h->arenas_off, h->n_arenas, sizeof(sr_arena)) ||
        !region_ok(st, h->schemas_off, SR_SCHEMAS_MAX, sizeof(sr_schema)) ||
        !region_ok(st, h->session_locks_off, SR_SESSION_LOCKS, sizeof(sr_mutex)) ||
        !region_ok(st, h->receipts_off, SR_RECEIPTS_MAX, sizeof(sr_receipt)) ||
        sr_at(st, h->config_off, h->config_bytes) == NULL) {
        return SR_CORRUPT;
    }
    st->hdr = h;
    keep_header(st);
    int rc = sr_shape_keep(st);
    if (rc == SR_OK && sr_shape_seal(st) != st->shape.seal) rc = SR_CORRUPT;
    if (rc != SR_OK) {
        sr_shape_drop(st);
        st->hdr = NULL;
        return rc;
    }
    keep_pages(st);
    return SR_OK;
}

void sr_store_close(sr_store *st) {
    sr_header *h = st->hdr;
    atomic_store(&h->state, SR_STATE_CLOSED);
    for (uint32_t i = 0; i < st->shape.n_tables; i++) {
        sr_table *t = sr_table_at(st, i);
        sr_futex_wake(&t->insert_seq, &t->insert_waiters, UINT32_MAX);
        sr_futex_wake(&t->sample_seq, &t->sample_waiters, UINT32_MAX);
    }
    sr_futex_wake(&h->commit_seq, &h->commit_waiters, UINT32_MAX);
    sr_events_notify(st);
}

int sr_store_is_closed(const sr_store *st) {
    return atomic_load_explicit(&st->hdr->state, memory_order_relaxed) != SR_STATE_OPEN;
}

void sr_store_set_port(sr_store *st, uint32_t port) { atomic_store(&st->hdr->port, port); }
uint32_t sr_store_port(const sr_store *st) { return atomic_load(&st->hdr->port); }

int sr_committer_step(sr_store *st) {
    SR_GUARDED(st, SR_CORRUPT)
    uint32_t seq = atomic_load(&st->hdr->commit_seq);
    int added = sr_commit_ahead(st);
    if (added == SR_DIRTY) return sr_repair(st);
    if (added <= 0 && !sr_store_is_closed(st)) {
        sr_futex_wait(&st->hdr->commit_seq, seq, &st->hdr->commit_waiters, 100);
    }
    return added;
}
