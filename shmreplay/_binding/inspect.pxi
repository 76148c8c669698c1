# Looking at a store without its locks, also at one that is damaged or that nobody serves.


cdef dict store_counts(const sr_store_stats *s):
    return {
        "inserts": s.inserts, "samples": s.samples, "updates": s.updates,
        "written_bytes": s.bytes_in,}


cdef dict table_counts(const sr_table_info *i):
    return {
        "size": i.size, "inserts": i.inserts, "samples": i.samples, "updates": i.updates,
        "missed_updates": i.missed_updates, "deletes": i.deletes, "deleted": i.deleted,
        "evicted": i.evicted, "consumed": i.consumed, "pending": i.pending,
        "num_episodes": i.num_episodes, "num_deleted_episodes": i.num_deleted_episodes,
        "num_unique_samples": i.num_unique_samples, "sample_waiters": i.sample_waiters,
        "insert_waiters": i.insert_waiters, "samples_refused": i.samples_refused,
        "inserts_refused": i.inserts_refused, "sample_wait_s": i.sample_wait_ns / 1e9,
        "insert_wait_s": i.insert_wait_ns / 1e9, "poisoned": i.poisoned,
        "max_size": i.max_size, "max_size_limit": i.max_size_limit,
        "max_times_sampled": i.max_times_sampled, "samples_per_insert": i.samples_per_insert,
        "min_size_to_sample": i.min_size_to_sample, "min_diff": i.min_diff,
        "max_diff": i.max_diff, "max_priority": i.max_priority,
        "mass": i.mass, "max_bytes": i.max_bytes, "data_bytes": i.bytes,}


def peek_store(Store store):
    """Bytes by use, as `Store.stats`, of no single moment and without locks."""
    store.usable()
    cdef sr_store_stats s
    sr_peek_store(&store.st, &s)
    return {
        "capacity_bytes": s.capacity, "committed_bytes": s.committed, "fixed_bytes": s.fixed,
        "arena_committed_bytes": s.arena_committed, "arena_used_bytes": s.arena_used,
        "arena_free_bytes": s.arena_free, "arena_allocations": s.arena_allocs,
        "compressed_raw_bytes": s.packed_raw, "compressed_stored_bytes": s.packed_stored,
        "repairs": s.repairs, "poisoned_tables": s.poisoned, "closed": s.closed,
        **store_counts(&s),}


def peek_table(Store store, uint32_t table):
    """Counters and settings of a table, as `Store.table_info`, without locks."""
    store.usable()
    cdef sr_table_info i
    if sr_peek_table(&store.st, table, &i) != SR_OK:
        raise errors.TableCorruptedError(
            f"Got the number {table}; expected that of a table in the store. Something wrote over "
            "its memory: start its server anew.")
    return table_counts(&i)


def peek_items(Store store, uint32_t table):
    """Where a table's items lie, without locks: (insertion number, stripe, slot) of each."""
    store.usable()
    cdef list out = []
    cdef sr_sampled item
    cdef uint64_t seq = 0
    cdef uint32_t k, i
    for k in range(sr_peek_stripes(&store.st, table)):
        for i in range(<uint32_t>sr_peek_slots(&store.st, table, k)):
            if sr_peek_slot(&store.st, table, k, i, &item, &seq):
                out.append((seq, k, i))
    return out


cdef bint peek_rows(Store store, const sr_sampled *item, uint32_t c, char *to,
                    uint64_t nbytes) except -1:
    """Copy a column without locks; False where it cannot be read."""
    cdef int rc = sr_peek_copy(&store.st, item, c, to, nbytes)
    cdef RowReader reader
    if rc != SR_ELSEWHERE:
        return rc == SR_OK
    # Rows are packed once: who sees them move sees them stay the second time.
    for _ in range(2):
        reader = RowReader(store)
        reader.peek = True
        try:
            rc = reader.column(item, c, to, nbytes)
        except errors.ReverbError:
            rc = 0
        if reader.unchanged():
            return rc == 1
    return False


def peek_item(Store store, uint32_t table, uint32_t stripe, uint32_t slot):
    """What a slot holds, without locks: None if there is no item, or it went meanwhile.

    Else (insertion number, key, priority, times_sampled, inserted_ns, schema, columns), where
    columns is a list of (length, squeezed, rows as bytes), or None where they cannot be read.
    """
    store.usable()
    cdef sr_sampled item
    cdef uint64_t seq = 0, nbytes = 0
    cdef uint32_t length_flags = 0
    cdef int c, n
    cdef bint whole = True
    cdef bytes rows
    cdef list columns = []
    if not sr_peek_slot(&store.st, table, stripe, slot, &item, &seq):
        return None
    n = sr_peek_columns(&store.st, &item)
    for c in range(n):
        if sr_peek_column(&store.st, &item, c, &length_flags, &nbytes) != SR_OK:
            whole = False
            break
        rows = PyBytes_FromStringAndSize(NULL, <Py_ssize_t>nbytes)
        if not peek_rows(store, &item, c, PyBytes_AS_STRING(rows), nbytes):
            whole = False
            break
        columns.append(
            (length_flags & ~SR_COL_SQUEEZED, bool(length_flags & SR_COL_SQUEEZED), rows))
    if not sr_peek_same(&store.st, table, stripe, slot, &item):
        return None
    return (
        seq, item.key, item.priority, item.times_sampled, item.inserted_ns, item.schema,
        columns if whole and n > 0 else None)


cdef sr_session *session_entry(Store store, uint32_t i):
    return <sr_session *>(store.st.base + store.st.shape.sessions_off) + i


def sessions(Store store):
    """Places in use: (participant, kind, busy, references held, lent since in ns or 0)."""
    store.usable()
    cdef list out = []
    cdef sr_session *s
    cdef uint32_t i
    for i in range(store.st.shape.n_sessions):
        s = session_entry(store, i)
        if s.state != 0:
            out.append((s.participant, s.kind, s.busy, s.ledger_used, s.borrowed_ns))
    return out


def session_counts(Store store):
    """What each place was used for so far, by all who had it.

    (number, participant, kind, inserts, samples, updates, bytes written) of those in use.
    """
    store.usable()
    cdef list out = []
    cdef sr_session *s
    cdef uint32_t i
    for i in range(store.st.shape.n_sessions):
        s = session_entry(store, i)
        if s.state != 0:
            out.append((i, s.participant, s.kind, s.inserts, s.samples, s.updates, s.bytes_in))
    return out


def borrowers(Store store):
    """Batches that are lent: (process id, role, items, since in ns) each, the oldest first."""
    cdef dict who = {entry[0]: (entry[1], entry[5]) for entry in store.participants()}
    cdef list out = []
    for participant, _, _, items, since in sessions(store):
        if since != 0:
            pid, role = who.get(participant, (0, "unknown"))
            out.append((pid, role, items, since))
    out.sort(key=lambda entry: entry[3])
    return out
