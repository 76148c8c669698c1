# The core's contract as Cython sees it: names and types of _core/shmreplay.h. What each function
# promises is said there.

from libc.stdint cimport UINT64_MAX
from libc.stdint cimport int8_t, int16_t, int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc, realloc
from libc.string cimport memcpy, memmove, memset, strlen

cdef extern from "_core/shmreplay.h" nogil:
    enum: SR_OK, SR_WOULD_BLOCK, SR_FULL, SR_NOSPACE, SR_CLOSED, SR_CORRUPT, SR_INVALID
    enum: SR_VERSION, SR_LIMIT, SR_SYS, SR_ELSEWHERE, SR_TOO_LARGE
    enum: SR_PLAIN, SR_LZ4, SR_LZ4_XOR
    enum: SR_SESSION_CLIENT, SR_SESSION_WRITER, SR_SESSION_SAMPLER
    enum: SR_KIND_BLOCK, SR_KIND_TRAJ, SR_KIND_EPISODE
    enum: SR_LAYOUT_VERSION
    enum: SR_NAME_BYTES, SR_COLUMNS_MAX, SR_EVENTS_BATCH, SR_EVENT_RESET
    uint32_t SR_COL_SQUEEZED
    uint32_t SR_NONE
    uint64_t SR_REF(uint64_t off, int kind)

    ctypedef struct sr_detail:
        uint64_t asked, available, expected_signature, found_signature
        int sys_errno
    sr_detail *sr_last_detail()

    ctypedef struct sr_header:
        uint64_t generation, capacity_bytes, config_off, config_bytes, creator_pid
        uint32_t n_participants, n_sessions, n_tables, n_arenas
        uint64_t participants_off, sessions_off
    ctypedef struct sr_participant:
        uint32_t pid
        uint64_t start_ticks, pid_namespace, attached_ns
        char role[32]
    ctypedef struct sr_session:
        uint32_t state, participant, busy, kind, ledger_used
        uint64_t borrowed_ns, inserts, samples, updates, bytes_in
    ctypedef struct sr_store:
        char *base
        uint64_t bytes
        int fd
        sr_header *hdr
        sr_header shape
    ctypedef struct sr_ses:
        sr_store *st
        sr_session *shared
        uint32_t number, room_seq
        int behind
        uint64_t receipt_next
    ctypedef struct sr_table_config:
        char name[64]
        uint32_t sampler_kind, remover_kind
        double sampler_exponent, remover_exponent
        int64_t max_size
        int32_t max_times_sampled
        uint32_t n_stripes
        double samples_per_insert, min_diff, max_diff
        int64_t min_size_to_sample
        uint64_t seed
        uint32_t n_events, slot_bits
        uint64_t slots_min
        int64_t max_bytes
    ctypedef struct sr_store_config:
        uint64_t capacity_bytes, generation, config_bytes
        uint32_t n_arenas, n_participants, n_sessions, n_tables
    ctypedef struct sr_store_stats:
        uint64_t margin, blocks, trajectories, pinned, episodes, ledgers, schemas, fragmented, tail
        uint64_t index_bytes[64]
        uint64_t capacity, committed, fixed, index_committed
        uint64_t arena_committed, arena_used, arena_free, arena_allocs
        uint64_t packed_raw, packed_stored
        uint64_t repairs
        uint32_t participants, sessions, poisoned, closed
        uint64_t inserts, samples, updates, bytes_in

    uint64_t sr_layout_signature()
    uint64_t sr_size_block(uint32_t n_tables, uint32_t n_cols, const uint64_t *row_bytes,
                           uint32_t rows)
    uint64_t sr_size_traj(uint32_t n_cols, uint32_t n_blocks, uint32_t n_segs)
    uint64_t sr_size_episode(uint32_t n_tables)
    uint64_t sr_size_index(const sr_table_config *cfg, uint64_t capacity_bytes, uint64_t slots)
    uint64_t sr_store_bytes(const sr_store_config *cfg, const sr_table_config *tables)
    int sr_store_map(sr_store *st, int fd, uint64_t bytes)
    void sr_store_unmap(sr_store *st)
    int sr_store_format(sr_store *st, const sr_store_config *cfg, const sr_table_config *tables,
                        const char *json)
    int sr_store_attach(sr_store *st)
    void sr_store_close(sr_store *st)
    int sr_store_is_closed(const sr_store *st)
    int sr_store_get_stats(sr_store *st, sr_store_stats *out)
    int sr_committer_step(sr_store *st)
    int sr_participant_set(sr_store *st, uint32_t number, uint32_t pid, uint64_t start_ticks,
                           uint64_t ns, const char *role)
    void sr_participant_clear(sr_store *st, uint32_t number)
    int sr_participant_reclaim(sr_store *st, uint32_t number)
    int sr_participant_in_use(const sr_store *st, uint32_t number)
    void sr_store_set_port(sr_store *st, uint32_t port)
    uint32_t sr_store_port(const sr_store *st)
    int sr_session_open(sr_store *st, uint32_t participant, int kind, sr_ses *out)
    int sr_session_close(sr_ses *ses)
    void sr_session_abandon(sr_ses *ses)

    int sr_schema_find(sr_store *st, const char *json, uint64_t bytes, uint32_t *id)
    int sr_schema_intern(sr_store *st, const char *json, uint64_t bytes, uint32_t *id)
    const char *sr_schema_text(const sr_store *st, uint32_t id, uint64_t *bytes)

    int sr_hold(sr_ses *ses, uint64_t ref, uint32_t *position)
    int sr_ledger_reserve(sr_ses *ses, uint32_t n)
    int sr_release(sr_ses *ses, uint32_t n, const uint32_t *positions)

    int sr_episode_new(sr_ses *ses, uint64_t id, uint64_t *off, uint32_t *position)
    int sr_block_new(sr_ses *ses, uint32_t n_cols, const uint64_t *row_bytes, uint32_t rows_cap,
                     uint64_t *off, uint32_t *position)
    uint32_t sr_block_columns(const sr_store *st, uint64_t block)
    void *sr_block_cell(const sr_store *st, uint64_t block, uint32_t col, uint32_t row,
                        uint32_t count, uint64_t row_bytes)
    int sr_block_publish(sr_ses *ses, uint64_t block, uint32_t n, uint64_t episode)
    int sr_block_append(sr_ses *ses, uint64_t block, uint32_t n_cols, uint64_t n_bytes,
                        const void **src, uint64_t episode)

    ctypedef struct sr_run:
        uint64_t block
        uint32_t col, start, count
        int32_t stride
    int sr_traj_new(sr_ses *ses, uint32_t n_cols, const uint32_t *first_run, const uint32_t *flags,
                    const sr_run *runs, uint64_t *off, uint32_t *position)
    int sr_block_new_apart(sr_ses *ses, uint32_t n_cols, const uint64_t *row_bytes,
                           uint32_t rows_cap, uint64_t *off, uint32_t *position)
    ctypedef struct sr_part:
        const void *data
        uint64_t bytes
    ctypedef struct sr_pack_col:
        uint64_t row_bytes
        const sr_part *parts
        uint32_t encoding, group_rows
    int sr_block_pack(sr_ses *ses, uint64_t block, const sr_pack_col *cols)
    int sr_rows_hold(sr_ses *ses, uint64_t block, uint64_t *rows, uint32_t *position)
    uint64_t sr_block_rows_ref(const sr_store *st, uint64_t block)
    ctypedef struct sr_rows_at:
        const char *base
        const char *stored
        const uint64_t *ends
        uint64_t row_bytes, stored_bytes, serial
        uint32_t rows, group_rows, encoding
    int sr_rows_find(const sr_store *st, uint64_t block, uint64_t rows, uint32_t col,
                     sr_rows_at *out)
    void sr_xor_rows(void *dst, const void *src, uint64_t row_bytes, uint64_t n)
    void sr_unxor_rows(void *rows, uint64_t row_bytes, uint64_t n)
    void sr_copy(void *dst, const void *src, uint64_t n)

    ctypedef struct sr_item:
        uint64_t ref
        uint32_t row_start, row_count
        double priority
        uint32_t schema
    int sr_items_fit(sr_store *st, uint32_t table, uint32_t n, const sr_item *items)
    bint sr_insert_is_brief(const sr_ses *ses, uint32_t table)
    int sr_insert(sr_ses *ses, uint32_t table, uint32_t n, const sr_item *items, uint64_t *keys,
                  uint32_t *done, uint32_t *seq)

    ctypedef struct sr_sampled:
        uint64_t key, ref
        uint32_t row_start, row_count
        double probability, priority
        int64_t table_size
        int32_t times_sampled
        uint32_t schema, position
        uint64_t inserted_ns
    int sr_sample(sr_ses *ses, uint32_t table, uint32_t n, sr_sampled *out, uint32_t *done,
                  uint32_t *seq)
    int sr_pin(sr_ses *ses, uint32_t table, uint32_t n, const uint64_t *keys, sr_sampled *out,
               uint32_t *found)
    ctypedef struct sr_listed:
        pass
    uint64_t SR_LIST_END
    int sr_list(sr_store *st, uint32_t table, uint64_t *cursor, uint32_t n, sr_listed *out,
                uint32_t *got)
    void sr_wait_sample(sr_store *st, uint32_t table, uint32_t seq, uint32_t timeout_ms)
    void sr_wait_insert(sr_store *st, uint32_t table, uint32_t seq, uint32_t timeout_ms)
    int sr_priority_ok(const sr_store *st, uint32_t table, double priority)
    int sr_update(sr_ses *ses, uint32_t table, uint32_t n, const uint64_t *keys,
                  const double *prios, uint32_t *applied)
    int sr_delete(sr_ses *ses, uint32_t table, uint32_t n, const uint64_t *keys, uint32_t *deleted)
    int sr_reset(sr_ses *ses, uint32_t table)
    int sr_replace(sr_ses *ses, uint32_t table, uint64_t key, uint64_t ref, uint32_t schema,
                   uint32_t *found, uint32_t *item_schema)
    int sr_contains(sr_ses *ses, uint32_t table, uint64_t key)

    enum: SR_SET_MAX_SIZE, SR_SET_MAX_TIMES_SAMPLED, SR_SET_LIMITER, SR_SET_MAX_BYTES
    ctypedef struct sr_table_change:
        uint32_t what
        int32_t max_times_sampled
        int64_t max_size
        double samples_per_insert, min_diff, max_diff
        int64_t min_size_to_sample, max_bytes
    int sr_table_configure(sr_ses *ses, uint32_t table, const sr_table_change *change)

    ctypedef struct sr_table_info:
        int64_t size, inserts, samples, deletes, pending
        int64_t num_episodes, num_deleted_episodes, num_unique_samples
        uint64_t missed_updates
        uint32_t sample_waiters, insert_waiters, poisoned
        uint32_t events, events_capacity
        uint64_t events_dropped
        int32_t max_times_sampled
        int64_t max_size, max_size_limit, min_size_to_sample
        int64_t max_bytes, bytes
        double samples_per_insert, min_diff, max_diff, max_priority, mass
        uint64_t updates, inserts_refused, samples_refused, insert_wait_ns, sample_wait_ns
        uint64_t consumed, deleted, evicted
    int sr_table_get_info(sr_store *st, uint32_t table, sr_table_info *out)
    int sr_table_consumes(const sr_store *st, uint32_t table)
    int sr_can_sample(sr_store *st, uint32_t table, int64_t n)
    int sr_can_insert(sr_store *st, uint32_t table, int64_t n)

    int sr_table_has_events(const sr_store *st, uint32_t table)
    const char *sr_table_name(const sr_store *st, uint32_t table)
    int sr_events_take(sr_ses *ses, uint32_t table, uint32_t max, sr_sampled *items,
                       uint32_t *kinds, uint32_t *n_items, uint32_t *n)
    uint32_t sr_events_seq(const sr_store *st)
    void sr_events_wait(sr_store *st, uint32_t seq, uint32_t timeout_ms)
    int sr_events_behind(sr_store *st, uint32_t table)
    int sr_events_unserve(sr_store *st, uint32_t table, uint64_t server)

    uint32_t sr_item_columns(const sr_store *st, const sr_sampled *item)
    int sr_item_column(const sr_store *st, const sr_sampled *item, uint32_t c,
                       uint32_t *length_flags, uint64_t *row_bytes)
    const void *sr_item_view(const sr_store *st, const sr_sampled *item, uint32_t c)
    int sr_gather(const sr_store *st, uint32_t n, const sr_sampled *items, uint32_t n_cols,
                  char **dst, const uint64_t *bytes, uint32_t *bad)
    int sr_gather_to(const sr_store *st, uint32_t n, const sr_sampled *items,
                     const uint32_t *where, uint32_t n_cols, char **dst, const uint64_t *bytes,
                     uint32_t *bad)
    int sr_item_run(const sr_store *st, const sr_sampled *item, uint32_t c, uint32_t number,
                    sr_run *out)

    int sr_check(sr_store *st, uint32_t table, char *why, uint64_t why_bytes)

cdef extern from "_core/peek.h" nogil:
    void sr_peek_store(const sr_store *st, sr_store_stats *out)
    int sr_peek_table(const sr_store *st, uint32_t table, sr_table_info *out)
    uint32_t sr_peek_stripes(const sr_store *st, uint32_t table)
    uint64_t sr_peek_slots(const sr_store *st, uint32_t table, uint32_t stripe)
    int sr_peek_slot(const sr_store *st, uint32_t table, uint32_t stripe, uint32_t slot,
                     sr_sampled *out, uint64_t *seq)
    int sr_peek_same(const sr_store *st, uint32_t table, uint32_t stripe, uint32_t slot,
                     const sr_sampled *item)
    int sr_peek_columns(const sr_store *st, const sr_sampled *item)
    int sr_peek_column(const sr_store *st, const sr_sampled *item, uint32_t c,
                       uint32_t *length_flags, uint64_t *nbytes)
    int sr_peek_copy(const sr_store *st, const sr_sampled *item, uint32_t c, char *dst,
                     uint64_t nbytes)
    int sr_peek_run(const sr_store *st, const sr_sampled *item, uint32_t c, uint32_t number,
                    sr_run *out)
    int sr_peek_rows(const sr_store *st, uint64_t block, uint64_t rows, uint32_t col,
                     sr_rows_at *out)

cdef extern from "_core/remote.h" nogil:
    ctypedef struct sr_receipt_info:
        uint64_t name[2]
        uint64_t lane, done, key
        uint32_t owner
    int sr_receipt_open(sr_store *st, const uint64_t *name, uint64_t lane, uint32_t owner,
                        uint32_t *number)
    void sr_receipt_close(sr_store *st, uint32_t number)
    void sr_receipt_take(sr_store *st, uint32_t number, uint32_t owner)
    void sr_receipt_note(sr_store *st, uint32_t number, uint64_t done, uint64_t key)
    int sr_receipt_get(sr_store *st, uint32_t number, sr_receipt_info *out)
    int sr_receipts(sr_store *st, uint32_t *n)
    void sr_session_receipt(sr_ses *ses, uint32_t number, uint64_t next)
    uint64_t sr_table_epoch(const sr_store *st, uint32_t table)

cdef extern from "<pthread.h>" nogil:
    ctypedef struct pthread_mutex_t:
        pass
    int pthread_mutex_init(pthread_mutex_t *m, const void *attr)
    int pthread_mutex_destroy(pthread_mutex_t *m)
    int pthread_mutex_trylock(pthread_mutex_t *m)
    int pthread_mutex_lock(pthread_mutex_t *m)
    int pthread_mutex_unlock(pthread_mutex_t *m)
    unsigned long pthread_self()

cdef extern from "Python.h":
    ctypedef struct PyThread_type_lock_s:
        pass
    ctypedef void *PyThread_type_lock
    PyThread_type_lock PyThread_allocate_lock()
    unsigned long PyThread_get_thread_ident()
    void PyThread_free_lock(PyThread_type_lock lock)
    int PyThread_acquire_lock(PyThread_type_lock lock, int wait) nogil
    void PyThread_release_lock(PyThread_type_lock lock) nogil
    int PyErr_CheckSignals() except -1
    long long PyLong_AsLongLongAndOverflow(object number, int *overflow)
    Py_ssize_t PyNumber_AsSsize_t(object index, PyObject *overflow) except? -1
    int PySlice_Unpack(object slice, Py_ssize_t *start, Py_ssize_t *stop,
                       Py_ssize_t *step) except -1
    bint PyDict_Next(object d, Py_ssize_t *at, PyObject **key, PyObject **value)
    PyObject *PyTuple_GET_ITEM(object t, Py_ssize_t i)
    PyObject *PyList_GET_ITEM(object l, Py_ssize_t i)
    Py_ssize_t PY_SSIZE_T_MAX, PY_SSIZE_T_MIN

cdef extern from *:
    """
    static inline int sr_bound(PyObject *bound, Py_ssize_t otherwise, Py_ssize_t *out) {
        int overflow = 0;
        if (bound == Py_None) {
            *out = otherwise;
            return 1;
        }
        if (!PyLong_CheckExact(bound)) return 0;
        *out = (Py_ssize_t)PyLong_AsLongAndOverflow(bound, &overflow);
        return !overflow;
    }
    /* PySlice_Unpack of what a slice mostly is: ints or None, and no step. 0: something else. */
    static inline int sr_slice_bounds(PyObject *slice, Py_ssize_t *start, Py_ssize_t *stop) {
        PySliceObject *s = (PySliceObject *)slice;
        return s->step == Py_None && sr_bound(s->start, 0, start) &&
               sr_bound(s->stop, PY_SSIZE_T_MAX, stop);
    }
    """
    bint sr_slice_bounds(object slice, Py_ssize_t *start, Py_ssize_t *stop)
