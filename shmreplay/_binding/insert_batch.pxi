# Rows of arrays as items: into blocks, then into the table as the limiter lets them.


cdef int insert_rows(Session session, uint32_t table, Py_buffer *bufs, uint32_t n_cols, uint64_t n,
                     uint32_t schema, object timeout, object describe,
                     uint64_t episode, bint compress) except -1:
    cdef uint64_t row_bytes[SR_COLUMNS_MAX]
    cdef uint64_t total = 0, at = 0
    cdef uint32_t c, rows, rows_max
    cdef double deadline = deadline_of(timeout)
    for c in range(n_cols):
        row_bytes[c] = <uint64_t>bufs[c].len // n
        total += row_bytes[c]
    # A block stays as long as any row of it is referred to: not too many rows a block.
    rows_max = <uint32_t>min(max(BATCH_BLOCK_BYTES // max(total, 1), 1), BATCH_BLOCK_ROWS)
    while at < n:
        rows = <uint32_t>min(n - at, <uint64_t>rows_max)
        insert_block(
            session, table, bufs, n_cols, row_bytes, at, rows, schema, timeout, deadline, describe,
            episode, compress and worth_packing(total, rows))
        at += rows
    return 0


cdef int insert_block(Session session, uint32_t table, Py_buffer *bufs, uint32_t n_cols,
                      uint64_t *row_bytes, uint64_t at, uint32_t rows, uint32_t schema,
                      object timeout, double deadline, object describe,
                      uint64_t episode, bint compress) except -1:
    cdef uint64_t block = 0
    cdef uint32_t position = 0, i
    cdef int rc
    cdef bint pinned
    cdef void *cells
    cdef sr_item *items = <sr_item *>malloc(rows * sizeof(sr_item))
    cdef double *prio = <double *>bufs[n_cols].buf + at
    cdef uint64_t *keys = <uint64_t *>bufs[n_cols + 1].buf + at
    if items == NULL:
        raise MemoryError
    try:
        with nogil:
            rc = any_block(&session.ses, compress, n_cols, row_bytes, rows, &block, &position)
        if session.store.swept(rc):
            rc = any_block(&session.ses, compress, n_cols, row_bytes, rows, &block, &position)
        pinned = rc == SR_OK
        with nogil:
            if rc == SR_OK:
                for i in range(n_cols):
                    cells = sr_block_cell(&session.store.st, block, i, 0, rows, row_bytes[i])
                    if cells == NULL:
                        rc = SR_CORRUPT
                        break
                    sr_copy(
                        cells, <char *>bufs[i].buf + at * row_bytes[i], rows * row_bytes[i])
            if rc == SR_OK:
                rc = sr_block_publish(&session.ses, block, rows, episode)
                for i in range(rows):
                    items[i].ref = SR_REF(block, SR_KIND_BLOCK)
                    items[i].row_start = i
                    items[i].row_count = 1 | SR_COL_SQUEEZED
                    items[i].priority = prio[i]
                    items[i].schema = schema
            if rc == SR_OK:
                rc = sr_items_fit(&session.store.st, table, 1, items)
        if rc != SR_OK:
            if pinned:  # no item refers to it
                sr_release(&session.ses, 1, &position)
            raise_status(
                rc, f"insert_batch (after {at} rows)" if at else "insert_batch", session.store)
        try:
            try:
                insert_items(session, table, items, rows, keys, at, timeout, deadline, describe)
            finally:
                # Not before an item refers to it: a try that ends at once may be one of many.
                if compress and keys[0] != 0:
                    rc = pack_block(&session.ses, block, n_cols, row_bytes, rows)
        finally:
            sr_release(&session.ses, 1, &position)
        if rc != SR_OK and rc != SR_FULL and rc != SR_NOSPACE:
            raise_status(rc, "insert_batch", session.store)
    finally:
        free(items)
    return 0


cdef int insert_items(Session session, uint32_t table, sr_item *items, uint32_t n, uint64_t *keys,
                      uint64_t before, object timeout, double deadline,
                      object describe) except -1:
    cdef uint32_t total = 0, done = 0, seq = 0, slice_ms
    cdef int rc
    cdef bint swept = False
    cdef WaitLog log = None
    while True:
        with nogil:
            rc = sr_insert(
                &session.ses, table, n - total, items + total, keys + total, &done, &seq)
        total += done
        if rc == SR_OK:
            return 0
        if rc != SR_WOULD_BLOCK:
            if not swept and session.store.swept(rc):
                swept = True
                continue
            raise_status(
                rc,
                f"inserting (after {before + total} items)" if before + total else "inserting",
                session.store)
        if session.ses.behind:
            session.store.check_extension_thread(table)
        slice_ms = wait_slice_ms(deadline)
        if slice_ms == 0:
            raise errors.DeadlineExceededError(
                f"{before + total} items inserted within {timeout} s, the next was held back: "
                f"{describe()}")
        if log is None:
            log = WaitLog(describe)
        with nogil:
            sr_wait_insert(&session.store.st, table, seq, slice_ms)
        PyErr_CheckSignals()
        session.store.look_for_server(table)
        log.tick()
