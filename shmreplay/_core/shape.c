#include "shape.h"

#include "events.h"
#include "fault.h"
#include "ledger.h"
#include "stripe.h"
#include "table.h"

/* ------------------------------------------------------------------ keeping */

static sr_stripe *stripe_number(const sr_store *st, uint32_t i) {
    return (sr_stripe *)sr_known(st, st->shape.stripes_off) + i;
}

static int keep_ring(const sr_store *st, sr_table_shape *k) {
    if (k->events_off == 0) return 1;
    const sr_ring *r = k->events_off % SR_LINE == 0 ? sr_at(st, k->events_off, sizeof *r) : NULL;
    k->n_events = r == NULL ? 0 : r->capacity;
    return r != NULL && sr_at(st, k->events_off, sr_events_bytes(r->capacity)) != NULL;
}

static void keep_table(const sr_table *t, sr_table_shape *k) {
    k->n_stripes = t->n_stripes;
    k->first_stripe = t->first_stripe;
    k->slot_bits = t->slot_bits;
    k->stripe_bits = t->stripe_bits;
    k->sampler_kind = t->sampler_kind;
    k->remover_kind = t->remover_kind;
    k->sampler_exponent = t->sampler_exponent;
    k->remover_exponent = t->remover_exponent;
    k->events_off = t->events_off;
    memcpy(k->name, t->name, sizeof k->name);
}

static void keep_index(const sr_index *ix, sr_index_shape *k) {
    k->kind = ix->kind;
    k->exponent = ix->exponent;
    memcpy(k->array_off, ix->array_off, sizeof k->array_off);
    while (k->n_arrays < SR_TREE_LEVELS && k->array_off[k->n_arrays] != 0) k->n_arrays++;
}

static void keep_stripe(const sr_stripe *s, sr_stripe_shape *k) {
    k->slots_off = s->slots_off;
    k->slots_max = s->slots_max;
    k->table = s->table;
    k->number = s->number;
    k->sampler = s->sampler;
    k->remover = s->remover;
    k->n_indexes = s->n_indexes;
    for (uint32_t i = 0; i < 2; i++) keep_index(&s->index[i], &k->index[i]);
}

/* Do the tables share the stripes out, each as many as it says, and are their rings where they
 * say? */
static int tables_fit(const sr_store *st) {
    uint32_t first = 0;
    for (uint32_t i = 0; i < st->shape.n_tables; i++) {
        const sr_table_shape *k = &st->tables[i];
        if (k->n_stripes == 0 || k->n_stripes > SR_STRIPES_MAX || k->first_stripe != first) {
            return 0;
        }
        if (!keep_ring(st, &st->tables[i])) return 0;
        first += k->n_stripes;
    }
    return first == st->shape.n_stripes;
}

int sr_shape_keep(sr_store *st) {
    sr_guard_learn();
    uint32_t n = st->shape.n_tables;
    sr_shape_drop(st);
    st->tables = SR_FAULT_POINT("calloc") ? NULL : calloc(n, sizeof *st->tables);
    st->stripes =
        SR_FAULT_POINT("calloc") ? NULL : calloc(st->shape.n_stripes + 1u, sizeof *st->stripes);
    if (st->tables == NULL || st->stripes == NULL) {
        sr_shape_drop(st);
        return SR_SYS;
    }
    for (uint32_t i = 0; i < n; i++) keep_table(sr_table_at(st, i), &st->tables[i]);
    for (uint32_t i = 0; i < st->shape.n_stripes; i++) {
        keep_stripe(stripe_number(st, i), &st->stripes[i]);
    }
    const sr_arena *a = sr_arena_at(st, 0);
    st->arena_start = a->start;
    st->arena_span = a->end - a->start;
    if (tables_fit(st)) return SR_OK;
    sr_shape_drop(st);
    return SR_CORRUPT;
}

void sr_shape_drop(sr_store *st) {
    free(st->tables);
    free(st->stripes);
    st->tables = NULL;
    st->stripes = NULL;
}

/* ------------------------------------------------------------------ comparing */

static uint64_t mix(uint64_t h, const void *bytes, uint64_t n) {
    const unsigned char *p = bytes;
    while (n > 0) {
        uint64_t word = 0, m = n < sizeof word ? n : sizeof word;
        memcpy(&word, p, m);
        uint64_t state = h ^ word;
        h = sr_splitmix64(&state);
        p += m;
        n -= m;
    }
    return h;
}

uint64_t sr_shape_seal(const sr_store *st) {
    const sr_header *h = &st->shape;
    /* From the version to the last of what never changes, the seal itself aside. */
    uint64_t sum = mix(1, &h->layout_version,
                       offsetof(sr_header, seal) - offsetof(sr_header, layout_version));
    sum = mix(sum, st->tables, h->n_tables * sizeof *st->tables);
    sum = mix(sum, st->stripes, h->n_stripes * sizeof *st->stripes);
    for (uint32_t i = 0; i < h->n_arenas; i++) {
        const sr_arena *a = sr_arena_at(st, i);
        const uint64_t range[] = {a->start, a->end};
        sum = mix(sum, range, sizeof range);
    }
    return mix(sum, st->base + h->config_off, h->config_bytes);
}

/* ------------------------------------------------------------------ putting back */

static void restore_table(sr_table *t, const sr_table_shape *k) {
    t->n_stripes = k->n_stripes;
    t->first_stripe = k->first_stripe;
    t->slot_bits = k->slot_bits;
    t->stripe_bits = k->stripe_bits;
    t->sampler_kind = k->sampler_kind;
    t->remover_kind = k->remover_kind;
    t->sampler_exponent = k->sampler_exponent;
    t->remover_exponent = k->remover_exponent;
    t->events_off = k->events_off;
    memcpy(t->name, k->name, sizeof t->name);
}

static void restore_stripe(sr_stripe *s, const sr_stripe_shape *k) {
    s->slots_off = k->slots_off;
    s->slots_max = k->slots_max;
    s->table = k->table;
    s->number = k->number;
    s->sampler = k->sampler;
    s->remover = k->remover;
    s->n_indexes = k->n_indexes;
    for (uint32_t i = 0; i < 2; i++) {
        s->index[i].kind = k->index[i].kind;
        s->index[i].exponent = k->index[i].exponent;
        memcpy(s->index[i].array_off, k->index[i].array_off, sizeof s->index[i].array_off);
    }
}

void sr_shape_restore(sr_store *st) {
    memcpy(&st->hdr->layout_version, &st->shape.layout_version,
           offsetof(sr_header, seal) + sizeof st->shape.seal - offsetof(sr_header, layout_version));
    for (uint32_t i = 0; i < st->shape.n_tables; i++) {
        sr_table *t = sr_table_at(st, i);
        if (!sr_shape_table_ok(st, t, i)) restore_table(t, &st->tables[i]);
        if (t->events_off != 0) sr_events_place(st, t, i);
    }
    for (uint32_t i = 0; i < st->shape.n_stripes; i++) {
        sr_stripe *s = stripe_number(st, i);
        if (!sr_shape_stripe_ok(st, s)) restore_stripe(s, &st->stripes[i]);
    }
    for (uint32_t i = 0; i < st->shape.n_arenas; i++) {
        sr_arena *a = sr_arena_at(st, i);
        a->start = st->arena_start + i * st->arena_span;
        a->end = a->start + st->arena_span;
    }
}
