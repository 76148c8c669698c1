# A session: inserting, sampling, changing by key. And what sampling gives: a batch of pinned items.

# Of an item in a batch's info: key, probability, table_size, priority, inserted_ns, times_sampled.
DEF INFO_BYTES = 44


cdef inline double monotonic() noexcept nogil:
    cdef timespec ts
    clock_gettime(CLOCK_MONOTONIC, &ts)
    return <double>ts.tv_sec + <double>ts.tv_nsec * 1e-9


cdef inline double deadline_of(object timeout) except? -1.0:
    """Seconds from now -> the clock's reading then; None: never."""
    if timeout is None:
        return INFINITY
    return monotonic() + <double>timeout


cdef uint32_t wait_slice_ms(double deadline) noexcept:
    cdef double left = (deadline - monotonic()) * 1000.0
    if left >= 100.0:
        return 100
    return <uint32_t>left + 1 if left > 0 else 0


@cython.final
cdef class WaitLog:
    """Says after five seconds what a call waits for, and then every thirty."""

    cdef double next_at, started
    cdef object describe

    def __cinit__(self, object describe):
        self.started = monotonic()
        self.next_at = self.started + WAIT_LOG_AFTER_S
        self.describe = describe

    cdef int tick(self) except -1:
        cdef double now = monotonic()
        if now >= self.next_at:
            self.next_at = now + WAIT_LOG_EVERY_S
            logger.warning("waiting for %.1f s: %s", now - self.started, self.describe())
        return 0


@cython.no_gc_clear  # __dealloc__ needs `store`, and the memory that this keeps mapped
cdef class Session:
    """One place in the store. Used by one thread at a time: its owner sees to that."""

    cdef Store store
    cdef sr_ses ses
    cdef bint open
    # Of a batch whose insertion is to be continued, 0: none.
    cdef uint64_t batch_episode
    cdef uint32_t batch_position
    # What keeps the process attached to the store, until the session is closed.
    cdef public object hold

    def __cinit__(self, Store store, int kind):
        store.usable()
        self.store = store
        cdef int rc
        with nogil:
            rc = sr_session_open(&store.st, store.participant, kind, &self.ses)
        if store.swept(rc):
            with nogil:
                rc = sr_session_open(&store.st, store.participant, kind, &self.ses)
        if rc != SR_OK:
            raise_status(rc, "opening a session", store)
        self.open = True

    def __dealloc__(self):
        if not self.open:
            return
        self.open = False
        if self.store.fork_count != _fork_count:
            sr_session_abandon(&self.ses)
        else:
            sr_session_close(&self.ses)

    cdef inline int usable(self) except -1:
        if not self.open:
            raise errors.WriterClosedError(
                "this writer, sampler or client is closed; make a new one")
        return self.store.usable()

    def close(self):
        """Give back everything that the session holds. Idempotent."""
        cdef int rc = SR_OK
        if not self.open:
            return
        self.open = False
        if self.store.fork_count != _fork_count:
            sr_session_abandon(&self.ses)
            return
        with nogil:
            rc = sr_session_close(&self.ses)
        self.hold = None
        if rc != SR_OK:
            raise_status(rc, "closing a session")

    def use_receipt(self, number, uint64_t next):
        """Items that are inserted from now on are numbers next, next + 1, ... of this receipt.

        None: of none.
        """
        self.usable()
        sr_session_receipt(&self.ses, SR_NONE if number is None else number, next)

    # -------------------------------------------------------------- by key

    cpdef uint32_t keys_at_once(self, uint32_t table, uint32_t n) noexcept:
        """So many of n keys go at once: each needs room for its event, if there are extensions."""
        return min(n, <uint32_t>SR_EVENTS_BATCH) if sr_table_has_events(
            &self.store.st, table) else n

    cdef WaitLog wait_for_room(
            self, uint32_t table, WaitLog log, str what, object timeout, double deadline):
        """After a refusal for want of room for events: sleep until there may be some."""
        cdef uint32_t slice_ms = wait_slice_ms(deadline)
        self.store.check_extension_thread(table)
        if slice_ms == 0:
            raise errors.DeadlineExceededError(
                f"{what} in table {self.store.table_name(table)!r} was not done within {timeout} "
                "s: its extensions are behind")
        if log is None:
            log = WaitLog(lambda: f"{what} in table {self.store.table_name(table)!r}: its "
                          "extensions are behind")
        with nogil:
            sr_wait_insert(&self.store.st, table, self.ses.room_seq, slice_ms)
        PyErr_CheckSignals()
        self.store.look_for_server(table)
        log.tick()
        return log

    def update(self, uint32_t table, keys, priorities, timeout=None):
        """Set priorities by key (uint64[N] and float64[N], C-contiguous).

        Gives the number of keys found. Waits where the table's extensions are behind, so many
        seconds (None: for ever); then DeadlineExceededError, which says how many keys are done. Of
        at most `keys_at_once` keys all are done or none.
        """
        self.usable()
        cdef double deadline = deadline_of(timeout)
        cdef Py_buffer k, p
        cdef uint32_t applied = 0, done = 0, at = 0, n, step
        cdef int rc = SR_OK
        cdef WaitLog log = None
        PyObject_GetBuffer(keys, &k, PyBUF_SIMPLE)
        try:
            PyObject_GetBuffer(priorities, &p, PyBUF_SIMPLE)
            try:
                if k.len != p.len or k.len % 8 != 0:
                    raise errors.InvalidArgumentError(
                        f"{k.len // 8} keys but {p.len // 8} priorities")
                n = <uint32_t>(k.len // 8)
                step = self.keys_at_once(table, n)
                while True:
                    with nogil:
                        rc = sr_update(
                            &self.ses, table, min(step, n - at), <uint64_t *>k.buf + at,
                            <double *>p.buf + at, &done)
                    applied += done
                    if rc == SR_WOULD_BLOCK:
                        log = self.wait_for_room(
                            table, log, f"updating priorities ({at} of {n} keys are done)",
                            timeout, deadline)
                        continue
                    at += step
                    if rc != SR_OK or at >= n:
                        break
            finally:
                PyBuffer_Release(&p)
        finally:
            PyBuffer_Release(&k)
        if rc != SR_OK:
            raise_status(rc, "updating priorities")
        return applied

    def delete(self, uint32_t table, keys, timeout=None):
        """Delete by key (uint64[N], C-contiguous). Gives the number of items deleted.

        Waits where the table's extensions are behind; see `update` for `timeout`.
        """
        self.usable()
        cdef double deadline = deadline_of(timeout)
        cdef Py_buffer k
        cdef uint32_t deleted = 0, done = 0, at = 0, n, step
        cdef int rc = SR_OK
        cdef WaitLog log = None
        PyObject_GetBuffer(keys, &k, PyBUF_SIMPLE)
        try:
            n = <uint32_t>(k.len // 8)
            step = self.keys_at_once(table, n)
            while True:
                with nogil:
                    rc = sr_delete(
                        &self.ses, table, min(step, n - at), <uint64_t *>k.buf + at, &done)
                deleted += done
                if rc == SR_WOULD_BLOCK:
                    log = self.wait_for_room(
                        table, log, f"deleting items ({at} of {n} keys are done)", timeout,
                        deadline)
                    continue
                at += step
                if rc != SR_OK or at >= n:
                    break
        finally:
            PyBuffer_Release(&k)
        if rc != SR_OK:
            raise_status(rc, "deleting items")
        return deleted

    def pin(self, uint32_t table, keys):
        """Those of the items of these keys (uint64[N], C-contiguous) that are there, as a batch."""
        self.usable()
        cdef Py_buffer k
        cdef Batch batch
        cdef uint32_t n
        cdef int rc
        PyObject_GetBuffer(keys, &k, PyBUF_SIMPLE)
        try:
            n = <uint32_t>(k.len // 8)
            batch = make_batch(self, table, n)
            with nogil:
                rc = sr_pin(&self.ses, table, n, <uint64_t *>k.buf, batch.items, &batch.n)
            if batch.n == 0 and self.store.swept(rc):
                rc = sr_pin(&self.ses, table, n, <uint64_t *>k.buf, batch.items, &batch.n)
        finally:
            PyBuffer_Release(&k)
        if rc != SR_OK:
            batch.drop()
            raise_status(rc, "fetching items", self.store)
        return batch

    def configure(self, uint32_t table, max_size, max_times_sampled, limiter, max_bytes=None,
                  timeout=None):
        """Change what is not None; limiter: (samples_per_insert, min_size_to_sample, min_diff,
        max_diff).

        Waits where the table's extensions are behind, so many seconds (None: for ever); then
        DeadlineExceededError: no setting has changed.
        """
        self.usable()
        cdef double deadline = deadline_of(timeout)
        cdef sr_table_change c
        cdef int rc
        memset(&c, 0, sizeof(c))
        if max_size is not None:
            c.what |= SR_SET_MAX_SIZE
            c.max_size = max_size
        if max_times_sampled is not None:
            c.what |= SR_SET_MAX_TIMES_SAMPLED
            c.max_times_sampled = max_times_sampled
        if limiter is not None:
            c.what |= SR_SET_LIMITER
            c.samples_per_insert, c.min_size_to_sample, c.min_diff, c.max_diff = limiter
        if max_bytes is not None:
            c.what |= SR_SET_MAX_BYTES
            c.max_bytes = max_bytes
        cdef WaitLog log = None
        while True:
            with nogil:
                rc = sr_table_configure(&self.ses, table, &c)
            if rc != SR_WOULD_BLOCK:
                break
            log = self.wait_for_room(
                table, log, "changing a table's settings", timeout, deadline)
        if rc != SR_OK:
            raise_status(rc, "changing a table's settings")

    def reset(self, uint32_t table, timeout=None):
        """Empty the table and zero its counters.

        Waits where its extensions are behind, so many seconds (None: for ever); then
        DeadlineExceededError.
        """
        self.usable()
        cdef double deadline = deadline_of(timeout)
        cdef int rc = SR_WOULD_BLOCK
        cdef WaitLog log = None
        while True:
            with nogil:
                rc = sr_reset(&self.ses, table)
            if rc != SR_WOULD_BLOCK:
                break
            log = self.wait_for_room(table, log, "resetting", timeout, deadline)
        if rc != SR_OK:
            raise_status(rc, "resetting a table")

    def first_bad_priority(self, uint32_t table, priorities):
        """Index of the first of float64[N] that the table does not take, or -1."""
        self.usable()
        cdef Py_buffer p
        cdef Py_ssize_t i, n, bad = -1
        PyObject_GetBuffer(priorities, &p, PyBUF_SIMPLE)
        n = p.len // 8
        for i in range(n):
            if not sr_priority_ok(&self.store.st, table, (<double *>p.buf)[i]):
                bad = i
                break
        PyBuffer_Release(&p)
        return bad

    # -------------------------------------------------------------- sampling

    def sample(self, uint32_t table, uint32_t n, timeout, describe, Batch partial=None):
        """Draw n items, waiting as the limiter demands.

        A Batch, which may be short if the deadline passed after the first draw.

        `partial` continues a batch that an interrupted call left. Raises DeadlineExceededError with
        nothing drawn.
        """
        self.usable()
        cdef Batch b = partial if partial is not None else make_batch(self, table, n)
        if partial is not None:
            b.extend_to(n)
        cdef double deadline = deadline_of(timeout)
        cdef uint32_t done = 0, seq = 0, slice_ms
        cdef int rc
        cdef bint swept = False
        cdef WaitLog log = None
        while True:
            with nogil:
                rc = sr_sample(&self.ses, table, n - b.n, b.items + b.n, &done, &seq)
            b.n += done
            if rc == SR_OK:
                return b
            if rc != SR_WOULD_BLOCK:
                self.interrupted = b
                if not swept and self.store.swept(rc):
                    swept = True
                    self.interrupted = None
                    continue
                raise_status(rc, "sampling", self.store)
            if self.ses.behind:
                self.check_own_thread(table, b)
            slice_ms = wait_slice_ms(deadline)
            if slice_ms == 0:
                if b.n > 0:
                    return b
                b.release()
                raise errors.DeadlineExceededError(f"no sample within {timeout} s: {describe()}")
            if log is None:
                log = WaitLog(describe)
            try:
                with nogil:
                    sr_wait_sample(&self.store.st, table, seq, slice_ms)
                PyErr_CheckSignals()
                self.store.look_for_server(table)
                log.tick()
            except BaseException:
                self.interrupted = b
                raise

    cdef int check_own_thread(self, uint32_t table, Batch begun) except -1:
        try:
            self.store.check_extension_thread(table)
        except BaseException:
            self.interrupted = begun
            raise
        return 0

    # Batch that an interrupted call had begun: its items are not lost.
    cdef public object interrupted

    # -------------------------------------------------------------- batch insert

    def insert_batch(self, uint32_t table, list columns, uint64_t n, priorities, uint32_t schema,
                     timeout, describe, uint64_t episode_id, keys, bint resumable=False,
                     bint compress=False):
        """One item a row of C-contiguous arrays with leading axis n.

        Fills keys (uint64[n]); all are in when this returns.

        Raises DeadlineExceededError where only some are in: those whose key is not 0. With
        `resumable` the next call on this session then continues the batch, in the same episode, or
        `end_batch` gives it up. With `compress` the rows are stored compressed.
        """
        self.usable()
        cdef uint32_t n_cols = <uint32_t>len(columns)
        cdef Py_buffer *bufs = <Py_buffer *>calloc(n_cols + 2, sizeof(Py_buffer))
        cdef uint32_t got = 0, i
        cdef bint keep = False
        cdef int rc
        if bufs == NULL:
            raise MemoryError
        try:
            for i in range(n_cols):
                PyObject_GetBuffer(columns[i], &bufs[i], PyBUF_C_CONTIGUOUS | PyBUF_FORMAT)
                got += 1
            PyObject_GetBuffer(priorities, &bufs[n_cols], PyBUF_SIMPLE)
            got += 1
            PyObject_GetBuffer(keys, &bufs[n_cols + 1], PyBUF_WRITABLE)
            got += 1
            if self.batch_episode == 0:
                with nogil:
                    rc = sr_episode_new(
                        &self.ses, episode_id, &self.batch_episode, &self.batch_position)
                if self.store.swept(rc):
                    rc = sr_episode_new(
                        &self.ses, episode_id, &self.batch_episode, &self.batch_position)
                if rc != SR_OK:
                    self.batch_episode = 0
                    raise_status(rc, "insert_batch", self.store)
            try:
                self.insert_rows(
                    table, bufs, n_cols, n, schema, timeout, describe, self.batch_episode,
                    compress)
            except errors.DeadlineExceededError:
                keep = resumable
                raise
            finally:
                if not keep:
                    self.end_batch()
        finally:
            for i in range(got):
                PyBuffer_Release(&bufs[i])
            free(bufs)

    def end_batch(self):
        """A batch that was to be continued is not. Nothing if there is none."""
        if self.batch_episode != 0:
            self.batch_episode = 0
            sr_release(&self.ses, 1, &self.batch_position)

    cdef int insert_rows(self, uint32_t table, Py_buffer *bufs, uint32_t n_cols, uint64_t n,
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
            self.insert_block(
                table, bufs, n_cols, row_bytes, at, rows, schema, timeout, deadline, describe,
                episode, compress and worth_packing(total, rows))
            at += rows
        return 0

    cdef int insert_block(self, uint32_t table, Py_buffer *bufs, uint32_t n_cols,
                          uint64_t *row_bytes, uint64_t at, uint32_t rows, uint32_t schema,
                          object timeout, double deadline, object describe,
                          uint64_t episode, bint compress) except -1:
        cdef uint64_t block = 0
        cdef uint32_t position = 0, i
        cdef int rc
        cdef void *cells
        cdef sr_item *items = <sr_item *>malloc(rows * sizeof(sr_item))
        cdef double *prio = <double *>bufs[n_cols].buf + at
        cdef uint64_t *keys = <uint64_t *>bufs[n_cols + 1].buf + at
        if items == NULL:
            raise MemoryError
        try:
            with nogil:
                rc = any_block(&self.ses, compress, n_cols, row_bytes, rows, &block, &position)
            if self.store.swept(rc):
                rc = any_block(&self.ses, compress, n_cols, row_bytes, rows, &block, &position)
            with nogil:
                if rc == SR_OK:
                    for i in range(n_cols):
                        cells = sr_block_cell(&self.store.st, block, i, 0, rows, row_bytes[i])
                        if cells == NULL:
                            rc = SR_CORRUPT
                            break
                        sr_copy(
                            cells, <char *>bufs[i].buf + at * row_bytes[i], rows * row_bytes[i])
                if rc == SR_OK:
                    rc = sr_block_publish(&self.ses, block, rows, episode)
                    for i in range(rows):
                        items[i].ref = SR_REF(block, SR_KIND_BLOCK)
                        items[i].row_start = i
                        items[i].row_count = 1 | SR_COL_SQUEEZED
                        items[i].priority = prio[i]
                        items[i].schema = schema
                if rc == SR_OK:
                    rc = sr_items_fit(&self.store.st, table, 1, items)
            if rc != SR_OK:
                if rc == SR_TOO_LARGE:
                    sr_release(&self.ses, 1, &position)
                raise_status(
                    rc, f"insert_batch (after {at} rows)" if at else "insert_batch", self.store)
            try:
                try:
                    self.insert_items(table, items, rows, keys, at, timeout, deadline, describe)
                finally:
                    # Not before an item refers to it: a try that ends at once may be one of many.
                    if compress and keys[0] != 0:
                        rc = pack_block(&self.ses, block, n_cols, row_bytes, rows)
            finally:
                sr_release(&self.ses, 1, &position)
            if rc != SR_OK and rc != SR_FULL and rc != SR_NOSPACE:
                raise_status(rc, "insert_batch", self.store)
        finally:
            free(items)
        return 0

    cdef int insert_items(self, uint32_t table, sr_item *items, uint32_t n, uint64_t *keys,
                          uint64_t before, object timeout, double deadline,
                          object describe) except -1:
        cdef uint32_t total = 0, done = 0, seq = 0, slice_ms
        cdef int rc
        cdef bint swept = False
        cdef WaitLog log = None
        while True:
            with nogil:
                rc = sr_insert(
                    &self.ses, table, n - total, items + total, keys + total, &done, &seq)
            total += done
            if rc == SR_OK:
                return 0
            if rc != SR_WOULD_BLOCK:
                if not swept and self.store.swept(rc):
                    swept = True
                    continue
                raise_status(
                    rc,
                    f"inserting (after {before + total} items)" if before + total else "inserting",
                    self.store)
            if self.ses.behind:
                self.store.check_extension_thread(table)
            slice_ms = wait_slice_ms(deadline)
            if slice_ms == 0:
                raise errors.DeadlineExceededError(
                    f"{before + total} items inserted within {timeout} s, the next was held back: "
                    f"{describe()}")
            if log is None:
                log = WaitLog(describe)
            with nogil:
                sr_wait_insert(&self.store.st, table, seq, slice_ms)
            PyErr_CheckSignals()
            self.store.look_for_server(table)
            log.tick()

    # -------------------------------------------------------------- events, for extensions

    def take_events(self, uint32_t table, uint32_t most):
        """Take the table's oldest events: (the items, pinned, and a list of what happened).

        Each entry is (kind as SR_EVENT_..., index of its item in the batch or -1, key, priority,
        times_sampled, inserted_ns).
        """
        self.usable()
        cdef Batch b = make_batch(self, table, most)
        cdef uint32_t *kinds = <uint32_t *>malloc(max(most, 1) * sizeof(uint32_t))
        cdef uint32_t n = 0, i, k = 0
        cdef sr_sampled *s
        cdef int rc
        cdef list happened = []
        if kinds == NULL:
            raise MemoryError
        with nogil:
            rc = sr_events_take(&self.ses, table, most, b.items, kinds, &b.n, &n)
        for i in range(n):
            if kinds[i] == SR_EVENT_RESET:
                happened.append((kinds[i], -1, 0, 0.0, 0, 0))
                continue
            s = &b.items[k]
            happened.append((kinds[i], k, s.key, s.priority, s.times_sampled, s.inserted_ns))
            k += 1
        free(kinds)
        if rc != SR_OK:
            raise_status(rc, "taking a table's events")
        return b, happened

    def insert_again(self, Batch batch, uint32_t i, uint32_t table, double priority, timeout,
                     describe):
        """Insert item i of a batch that this session pins into a table, steps shared.

        Waits as the limiter demands. Gives the key.
        """
        cdef sr_item item
        cdef uint64_t key = 0
        self.usable()
        batch.bound(i)
        if batch.session is not self:
            raise errors.InvalidArgumentError("the batch belongs to another session")
        item.ref = batch.items[i].ref
        item.row_start = batch.items[i].row_start
        item.row_count = batch.items[i].row_count
        item.priority = priority
        item.schema = batch.items[i].schema
        self.insert_items(table, &item, 1, &key, 0, timeout, deadline_of(timeout), describe)
        return key


cdef Batch make_batch(Session session, uint32_t table, uint32_t n):
    cdef Batch b = Batch.__new__(Batch)
    b.session = session
    b.table = table
    b.items = <sr_sampled *>malloc(max(n, 1) * sizeof(sr_sampled))
    if b.items == NULL:
        raise MemoryError(f"no memory for a batch of {n}")
    return b


@cython.freelist(16)
@cython.no_gc_clear  # __dealloc__ needs `session`
cdef class Batch:
    """Items that were drawn and are pinned: their data cannot change or be reused until release."""

    cdef Session session
    cdef readonly uint32_t table
    cdef sr_sampled *items
    cdef uint32_t n
    cdef bint released
    cdef object on_release

    def __dealloc__(self):
        if not self.released and self.session is not None and self.session.open:
            self.drop()
            if self.on_release is not None:
                self.on_release.append(self.session)
        free(self.items)

    def lend(self, on_release):
        """From now on the pins go when the last window on this batch does; the session is then
        appended to the list.
        """
        self.on_release = on_release
        self.session.ses.shared.borrowed_ns = <uint64_t>time_ns()

    cdef int extend_to(self, uint32_t n) except -1:
        cdef sr_sampled *items = <sr_sampled *>realloc(self.items, max(n, 1) * sizeof(sr_sampled))
        if items == NULL:
            raise MemoryError(f"no memory for a batch of {n}")
        self.items = items
        return 0

    cdef int drop(self):
        """Give the pins back. The session is the batch's own until then."""
        cdef uint32_t *positions
        cdef uint32_t i
        cdef int rc = SR_OK
        if self.n == 0 or self.session.store.fork_count != _fork_count:
            self.released = True
            return SR_OK
        positions = <uint32_t *>malloc(self.n * sizeof(uint32_t))
        if positions == NULL:
            return SR_SYS
        self.released = True
        for i in range(self.n):
            positions[i] = self.items[i].position
        with nogil:
            rc = sr_release(&self.session.ses, self.n, positions)
        free(positions)
        self.session.ses.shared.borrowed_ns = 0
        return rc

    def release(self):
        """Give the pins back. Idempotent."""
        cdef int rc
        if self.released:
            return
        self.session.usable()
        rc = self.drop()
        if rc != SR_OK:
            raise_status(rc, "releasing a batch")

    def split(self, uint32_t k, Session other):
        """The first k items as a batch of another session; the rest stays.

        Pins are never given up in between.
        """
        cdef Batch first
        cdef uint32_t *positions
        cdef uint32_t i
        cdef int rc
        if k == 0 or k >= self.n:
            raise errors.InvalidArgumentError(f"{k} of {self.n} items")
        self.bound(k)
        self.session.usable()
        other.usable()
        first = make_batch(other, self.table, k)
        rc = sr_ledger_reserve(&other.ses, k)
        if rc == SR_OK:
            positions = <uint32_t *>malloc(k * sizeof(uint32_t))
            if positions == NULL:
                raise MemoryError
            memcpy(first.items, self.items, k * sizeof(sr_sampled))
            for i in range(k):
                rc = sr_hold(&other.ses, first.items[i].ref, &first.items[i].position)
                if rc != SR_OK:
                    break
                first.n += 1
                positions[i] = self.items[i].position
            if rc == SR_OK:
                rc = sr_release(&self.session.ses, k, positions)
                memmove(self.items, self.items + k, (self.n - k) * sizeof(sr_sampled))
                self.n -= k
            free(positions)
        if rc != SR_OK:
            raise_status(rc, "dividing a batch")
        return first

    def absorb(self, Batch other):
        """Take all items of another batch behind one's own; it is then empty.

        Pins are never given up in between.
        """
        cdef uint32_t i, held = 0
        cdef int rc
        if other.n == 0:
            return
        other.bound(0)
        self.session.usable()
        self.extend_to(self.n + other.n)
        rc = sr_ledger_reserve(&self.session.ses, other.n)
        if rc == SR_OK:
            memcpy(self.items + self.n, other.items, other.n * sizeof(sr_sampled))
            for i in range(other.n):
                rc = sr_hold(&self.session.ses, other.items[i].ref, &self.items[self.n].position)
                if rc != SR_OK:
                    break
                self.n += 1
                held += 1
        if rc != SR_OK:
            # The other keeps all of its items: give back what is held twice.
            for i in range(held):
                self.n -= 1
                sr_release(&self.session.ses, 1, &self.items[self.n].position)
            raise_status(rc, "joining batches")
        rc = other.drop()
        if rc != SR_OK:
            raise_status(rc, "joining batches")
        other.n = 0

    def __len__(self):
        return self.n

    @property
    def owner(self):
        """The session that holds the pins."""
        return self.session

    @property
    def schema(self):
        """Number of the items' structure; -1 where they differ."""
        cdef uint32_t i
        for i in range(1, self.n):
            if self.items[i].schema != self.items[0].schema:
                return -1
        return self.items[0].schema if self.n else -1

    def schema_of(self, uint32_t i):
        """Number of one item's structure."""
        self.bound(i)
        return self.items[i].schema

    cdef int bound(self, uint32_t i) except -1:
        if i >= self.n:
            raise IndexError(f"item {i} of a batch of {self.n}")
        if self.released:
            raise errors.ReverbError("this batch was released; its data may be gone")
        return 0

    def info_of(self, uint32_t i):
        """(key, probability, table_size, priority, times_sampled, inserted_ns) of one item."""
        self.bound(i)
        cdef sr_sampled *s = &self.items[i]
        return (
            s.key, s.probability, s.table_size, s.priority, s.times_sampled, s.inserted_ns)

    cdef object info_arrays(self):
        """Arrays on one buffer, in the order of info_of."""
        cdef Buffer b = Buffer(<size_t>self.n * INFO_BYTES)
        cdef uint64_t *key = <uint64_t *>b.base
        cdef double *probability = <double *>(key + self.n)
        cdef int64_t *table_size = <int64_t *>(probability + self.n)
        cdef double *priority = <double *>(table_size + self.n)
        cdef uint64_t *inserted_ns = <uint64_t *>(priority + self.n)
        cdef int32_t *times_sampled = <int32_t *>(inserted_ns + self.n)
        cdef uint32_t i, n = self.n
        for i in range(n):
            key[i] = self.items[i].key
            probability[i] = self.items[i].probability
            table_size[i] = self.items[i].table_size
            priority[i] = self.items[i].priority
            times_sampled[i] = self.items[i].times_sampled
            inserted_ns[i] = self.items[i].inserted_ns
        return (
            _ndarray(n, _uint64, b), _ndarray(n, _float64, b, 8 * n),
            _ndarray(n, _int64, b, 16 * n), _ndarray(n, _float64, b, 24 * n),
            _ndarray(n, _int32, b, 40 * n), _ndarray(n, _uint64, b, 32 * n))

    cdef int column_of(self, uint32_t i, uint32_t c, uint32_t *length_flags,
                       uint64_t *row_bytes) except -1:
        cdef int rc = sr_item_column(
            &self.session.store.st, &self.items[i], c, length_flags, row_bytes)
        if rc != SR_OK:
            raise_status(rc, "reading an item")
        return 0

    def stack(self, StackPlan plan, list out):
        """Copy all items into stacked arrays: (info arrays, column arrays), or the number of the
        first item that does not fit.

        `out` has an array for each column (writable, C-contiguous, exactly the right size), or is
        None: new ones are made.
        """
        cdef char *dst[SR_COLUMNS_MAX]
        cdef uint64_t nbytes[SR_COLUMNS_MAX]
        cdef Py_buffer bufs[SR_COLUMNS_MAX]
        cdef uint32_t got = 0, bad = 0, c, length_flags = 0
        cdef uint64_t row_bytes = 0
        cdef list arrays = out
        cdef Buffer b
        cdef int rc
        self.bound(0)
        if sr_item_columns(&self.session.store.st, &self.items[0]) != plan.n:
            raise errors.TableCorruptedError(
                "an item has another number of columns than its structure says")
        if arrays is None:
            arrays = []
        try:
            for c in range(plan.n):
                self.column_of(0, c, &length_flags, &row_bytes)
                nbytes[c] = (length_flags & ~SR_COL_SQUEEZED) * row_bytes
                if out is None:
                    b = Buffer(nbytes[c] * self.n)
                    dst[c] = b.base
                    arrays.append(
                        _ndarray(
                            plan.shape(c, length_flags & ~SR_COL_SQUEEZED, self.n), plan.dtypes[c],
                            b))
                else:
                    PyObject_GetBuffer(out[c], &bufs[c], PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE)
                    got += 1
                    dst[c] = <char *>bufs[c].buf
                    if <uint64_t>bufs[c].len != nbytes[c] * self.n:
                        raise errors.InvalidArgumentError(
                            f"out column {c} has {bufs[c].len} bytes, expected "
                            f"{nbytes[c] * self.n}")
            with nogil:
                rc = sr_gather(
                    &self.session.store.st, self.n, self.items, plan.n, dst, nbytes, &bad)
            if rc == SR_ELSEWHERE:
                rc = self.gather_apart(0, self.n, plan.n, dst, nbytes, &bad)
        finally:
            for c in range(got):
                PyBuffer_Release(&bufs[c])
        if rc == SR_CORRUPT:
            raise_status(rc, "reading an item")
        if rc != SR_OK:
            return bad
        return self.info_arrays(), arrays

    cdef int gather_apart(self, uint32_t first, uint32_t count, uint32_t n_cols, char **dst,
                          const uint64_t *nbytes, uint32_t *bad) except? -100:
        """As sr_gather, of items some of whose rows lie apart from their blocks."""
        cdef RowReader reader = RowReader(self.session.store)
        cdef sr_sampled *item
        cdef uint32_t i, c
        reader.ses = &self.session.ses
        try:
            for i in range(count):
                item = self.items + first + i
                bad[0] = i
                if sr_item_columns(&self.session.store.st, item) != n_cols:
                    return SR_INVALID
                for c in range(n_cols):
                    if not reader.column(item, c, dst[c] + nbytes[c] * i, nbytes[c]):
                        return SR_INVALID
        finally:
            reader.close()
        return SR_OK

    def shapes(self, StackPlan plan):
        """Shapes of the arrays that stack() fills."""
        cdef uint32_t c, length_flags = 0
        cdef uint64_t row_bytes = 0
        cdef list shapes = []
        self.bound(0)
        for c in range(plan.n):
            self.column_of(0, c, &length_flags, &row_bytes)
            shapes.append(plan.shape(c, length_flags & ~SR_COL_SQUEEZED, self.n))
        return shapes

    def views(self, uint32_t i, StackPlan plan):
        """Read-only arrays on column after column of item i; None for one whose rows do not lie
        together.
        """
        cdef uint32_t c, length_flags = 0
        cdef uint64_t row_bytes = 0
        cdef const void *p
        cdef list out = []
        self.bound(i)
        if sr_item_columns(&self.session.store.st, &self.items[i]) != plan.n:
            raise errors.TableCorruptedError(
                "an item has another number of columns than its structure says")
        for c in range(plan.n):
            p = sr_item_view(&self.session.store.st, &self.items[i], c)
            if p == NULL:
                out.append(None)
                continue
            self.column_of(i, c, &length_flags, &row_bytes)
            length_flags &= ~SR_COL_SQUEEZED
            shape = plan.shapes_of_value[c] if plan.squeezed[c] else (
                length_flags, *plan.shapes_of_value[c])
            out.append(
                _ndarray(
                    shape, plan.dtypes[c], make_window(self, p, length_flags * row_bytes, True)))
        return out

    def columns(self, uint32_t i):
        """For each column of item i: (length, squeezed, bytes of a row)."""
        self.bound(i)
        cdef uint32_t length_flags = 0, c
        cdef uint64_t row_bytes = 0
        cdef list out = []
        cdef uint32_t n = sr_item_columns(&self.session.store.st, &self.items[i])
        if n == 0:
            raise_status(SR_CORRUPT, "reading an item")
        for c in range(n):
            self.column_of(i, c, &length_flags, &row_bytes)
            out.append(
                (length_flags & ~SR_COL_SQUEEZED, bool(length_flags & SR_COL_SQUEEZED), row_bytes))
        return out

    def gather(self, list arrays, uint32_t first, uint32_t count):
        """Copy columns of items [first, first + count) into arrays (C-contiguous, count items
        each).

        Gives the index of the first item whose lengths differ from the arrays' share of an item, or
        -1.
        """
        cdef uint32_t n_cols = <uint32_t>len(arrays)
        cdef Py_buffer bufs[SR_COLUMNS_MAX]
        cdef char *dst[SR_COLUMNS_MAX]
        cdef uint64_t nbytes[SR_COLUMNS_MAX]
        cdef uint32_t got = 0, bad = 0, c
        cdef int rc
        if n_cols > SR_COLUMNS_MAX or count == 0:
            raise errors.InvalidArgumentError(f"{n_cols} columns, {count} items")
        self.bound(first + count - 1)
        try:
            for c in range(n_cols):
                PyObject_GetBuffer(arrays[c], &bufs[c], PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE)
                got += 1
                dst[c] = <char *>bufs[c].buf
                nbytes[c] = <uint64_t>bufs[c].len // count
            with nogil:
                rc = sr_gather(
                    &self.session.store.st, count, self.items + first, n_cols, dst, nbytes, &bad)
            if rc == SR_ELSEWHERE:
                rc = self.gather_apart(first, count, n_cols, dst, nbytes, &bad)
        finally:
            for c in range(got):
                PyBuffer_Release(&bufs[c])
        return -1 if rc == SR_OK else <int64_t>(first + bad)


cdef class StackPlan:
    """How items of one structure become arrays: each column's dtype, shape of a value, and whether
    it is squeezed.
    """

    cdef uint32_t n
    cdef list dtypes, shapes_of_value, squeezed
    # For each column: (n, length, shape) of the last batch, so that equal ones share the tuple.
    cdef list last

    def __init__(self, columns):
        self.dtypes = [c.dtype for c in columns]
        self.shapes_of_value = [c.shape for c in columns]
        self.squeezed = [bool(c.squeezed) for c in columns]
        self.n = <uint32_t>len(self.dtypes)
        self.last = [(0, 0, ())] * self.n
        if self.n > SR_COLUMNS_MAX:
            raise errors.TableCorruptedError(f"an item structure of {self.n} columns")

    cdef tuple shape(self, uint32_t c, uint32_t length, uint32_t n):
        cdef tuple known = <tuple>self.last[c]
        if known[0] == n and known[1] == length:
            return <tuple>known[2]
        shape = (n, *self.shapes_of_value[c]) if self.squeezed[c] else (
            n, length, *self.shapes_of_value[c])
        self.last[c] = (n, length, shape)
        return shape
