/* Schemas: what the items look like (structure, types), as JSON text that the core does not
 * read. Append-only. */
#include "arena.h"
#include "lock.h"

static uint64_t hash_text(const char *text, uint64_t bytes) {
    /* FNV-1a, 64 bits (Fowler, Noll, Vo). Equal hashes are compared in full. */
    uint64_t h = 0xcbf29ce484222325ULL;
    for (uint64_t i = 0; i < bytes; i++) h = (h ^ (unsigned char)text[i]) * 0x100000001b3ULL;
    return h;
}

static sr_schema *entries(const sr_store *st) { return sr_known(st, st->shape.schemas_off); }

static uint32_t find(const sr_store *st, uint32_t n, uint64_t hash, const char *json,
                     uint64_t bytes) {
    const sr_schema *list = entries(st);
    for (uint32_t i = 0; i < n; i++) {
        if (list[i].hash != hash || list[i].bytes != bytes) continue;
        const char *text = sr_at(st, list[i].off, bytes);
        SR_ASSERT(text != NULL);
        if (memcmp(text, json, bytes) == 0) return i;
    }
    return SR_NONE;
}

static int append(sr_store *st, uint64_t hash, const char *json, uint64_t bytes, uint32_t *id) {
    sr_header *h = st->hdr;
    int rc = sr_lock(st, &h->schema_lock);
    if (rc != SR_OK) return rc;
    uint32_t n = atomic_load_explicit(&h->n_schemas, memory_order_relaxed);
    SR_ASSERT(n <= SR_SCHEMAS_MAX);
    *id = find(st, n, hash, json, bytes);
    uint64_t off = 0;
    if (*id == SR_NONE && n >= SR_SCHEMAS_MAX) rc = SR_LIMIT;
    if (*id == SR_NONE && rc == SR_OK) rc = sr_alloc(st, 0, SR_KIND_SCHEMA, bytes, NULL, &off);
    if (*id == SR_NONE && rc == SR_OK) {
        memcpy(sr_ptr(st, off), json, bytes);
        entries(st)[n] = (sr_schema){.hash = hash, .off = off, .bytes = bytes};
        *id = n;
        /* SYNC POINT: release: readers see entries below the count whole. A crash before it leaves
         * a text that nobody refers to, and a lock that tells of it. */
        atomic_store_explicit(&h->n_schemas, n + 1, memory_order_release);
    }
    sr_unlock(&h->schema_lock);
    return rc;
}

int sr_schema_find(sr_store *st, const char *json, uint64_t bytes, uint32_t *id) {
    SR_GUARDED(st, SR_CORRUPT)
    uint32_t n = atomic_load_explicit(&st->hdr->n_schemas, memory_order_acquire);
    SR_ASSERT(n <= SR_SCHEMAS_MAX);
    *id = find(st, n, hash_text(json, bytes), json, bytes);
    return SR_OK;
}

int sr_schema_intern(sr_store *st, const char *json, uint64_t bytes, uint32_t *id) {
    SR_GUARDED(st, SR_CORRUPT)
    int rc = sr_schema_find(st, json, bytes, id);
    if (rc != SR_OK || *id != SR_NONE) return rc;
    uint64_t hash = hash_text(json, bytes);
    rc = append(st, hash, json, bytes, id);
    while (rc == SR_DIRTY) {
        rc = sr_repair(st);
        if (rc == SR_OK) rc = append(st, hash, json, bytes, id);
    }
    return rc;
}

const char *sr_schema_text(const sr_store *st, uint32_t id, uint64_t *bytes) {
    if (id >= SR_SCHEMAS_MAX ||
        id >= atomic_load_explicit(&st->hdr->n_schemas, memory_order_acquire)) {
        return NULL;
    }
    const sr_schema *s = &entries(st)[id];
    *bytes = s->bytes;
    const char *text = sr_at(st, s->off, s->bytes);
    return text != NULL && hash_text(text, s->bytes) == s->hash ? text : NULL;
}
