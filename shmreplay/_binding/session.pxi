# A session: inserting, sampling, changing by key.

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
                "Got a call on a closed writer, sampler or client; expected an open one. Make a "
                "new one.")
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
                "s: its extensions are behind and must catch up. Give a longer timeout, or make "
                "them faster.")
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
                        f"Got {p.len // 8} priorities for {k.len // 8} keys; expected as many. "
                        "Give one for each key.")
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
                insert_rows(
                    self, table, bufs, n_cols, n, schema, timeout, describe, self.batch_episode,
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
            raise errors.InvalidArgumentError(
                "Got a batch of another session; expected one of this. Sample it here.")
        item.ref = batch.items[i].ref
        item.row_start = batch.items[i].row_start
        item.row_count = batch.items[i].row_count
        item.priority = priority
        item.schema = batch.items[i].schema
        insert_items(self, table, &item, 1, &key, 0, timeout, deadline_of(timeout), describe)
        return key
