# Rows of steps in blocks: the lowest layer of a writer, and its state.


@cython.no_gc_clear  # __dealloc__ needs `histories`
cdef class RowWriter:
    """State of one writer, and the blocks that it fills.

    Methods lock it, so that threads may share it; waiting is done by the caller without the lock.
    """

    cdef readonly Session session
    # Not Python's, which reads the clock each time that it is taken.
    cdef pthread_mutex_t lock
    cdef bint lock_made
    cdef unsigned long owner             # thread that holds the lock, 0: none
    cdef readonly bint closed
    cdef readonly int64_t keep_alive
    cdef readonly dict tables            # name -> number
    cdef readonly list columns           # Column, in order of first sight
    cdef dict by_path                    # path -> Column
    cdef dict groups                     # tuple of column numbers -> Group
    cdef dict configured                 # path -> (keep, max_chunk_length)
    # First step of the history; the step that is open or comes next.
    cdef int64_t base_step, step
    cdef readonly bint step_open
    cdef readonly int64_t episode_steps
    cdef uint64_t episode_base
    cdef uint64_t episodes
    cdef uint64_t episode
    cdef uint32_t episode_position
    cdef list histories                  # ColumnHistory, which do not count this writer
    cdef public object history_cache     # what `history` gives, None: to be made
    cdef readonly bint compress          # full blocks are compressed
    cdef Buffer read_value               # of cell_at

    def __cinit__(self, *args, **kwargs):
        if pthread_mutex_init(&self.lock, NULL) != 0:
            raise MemoryError
        self.lock_made = True
        self.columns = []
        self.by_path = {}
        self.groups = {}
        self.configured = {}
        self.histories = []

    def __init__(self, Session session, tables, int64_t keep_alive, uint64_t episode_base,
                 bint compress=False):
        self.session = session
        self.compress = compress
        self.tables = tables
        self.keep_alive = keep_alive
        self.episode_base = episode_base

    def __dealloc__(self):
        cdef ColumnHistory h
        for h in self.histories:
            h.writer = NULL
        if self.lock_made:
            pthread_mutex_destroy(&self.lock)

    cdef inline int enter(self) except -1:
        if self.session.store.fork_count != _fork_count:
            # Before the lock: a thread of the parent may have held it at the fork, and nobody gives
            # it back here.
            self.session.store.usable()
        if pthread_mutex_trylock(&self.lock) != 0:
            if self.owner == pthread_self():
                # By a leaf's __array__, or a signal handler, that calls the writer it is given to.
                raise errors.WriterStateError(
                    "Got a call of the writer from within a call of its own, on the same thread; "
                    "expected that call to end first. Make it after that.")
            with nogil:
                pthread_mutex_lock(&self.lock)
        self.owner = pthread_self()
        if self.closed:
            self.leave()
            raise errors.WriterClosedError(
                "Got a call on a closed writer: Close has been called on this writer; expected an "
                "open one; make a new one to go on writing")
        return 0

    cdef inline void leave(self) noexcept:
        self.owner = 0
        pthread_mutex_unlock(&self.lock)

    cdef inline Py_ssize_t history_length(self) noexcept:
        return self.step - self.base_step + (1 if self.step_open else 0)

    @property
    def history(self):
        """References to what was appended, in the structure of all data seen, leaves like lists.

        Index a leaf by int (one value, no time dimension), slice, or list of int; step -1 is the
        newest. Reaching beyond what is kept (num_keep_alive_refs) is an error.

        Raises:
            WriterStateError: Nothing was appended yet.
        """
        if self.history_cache is None:
            self.history_cache = self.make_history()
        return self.history_cache

    def make_history(self):
        """The structure of column histories."""
        return None

    def column_history(self, uint32_t number):
        """History of one column."""
        cdef ColumnHistory h = ColumnHistory.__new__(ColumnHistory)
        h.writer = <PyObject *>self
        h.column = self.columns[number]
        self.histories.append(h)
        return h

    # -------------------------------------------------------------- blocks

    cdef int ensure_row(self, Group group) except -1:
        """A block with a free row, and an episode to count the row at."""
        cdef int rc
        if self.episode == 0:
            rc = sr_episode_new(
                &self.session.ses, self.episode_base + self.episodes, &self.episode,
                &self.episode_position)
            if self.session.store.swept(rc):
                rc = sr_episode_new(
                    &self.session.ses, self.episode_base + self.episodes, &self.episode,
                    &self.episode_position)
            if rc != SR_OK:
                self.episode = 0
                raise_status(rc, "append", self.session.store)
        if group.block != 0 and group.rows < group.rows_cap:
            return 0
        if group.block != 0:
            self.seal(group)
        # A writer that does not learn of it elsewhere, as it makes no items.
        if sr_store_is_closed(&self.session.store.st):
            raise_status(SR_CLOSED, "append")
        cdef uint32_t rows = self.rows_for(group)
        cdef uint64_t block = 0
        cdef uint32_t position = 0
        rc = self.new_block(group, &rows, &block, &position)
        if self.session.store.swept(rc):
            rows = self.rows_for(group)
            rc = self.new_block(group, &rows, &block, &position)
        if rc != SR_OK:
            raise_status(rc, "append", self.session.store)
        cdef Held held = Held.__new__(Held)
        held.block = block
        held.apart = self.compress and worth_packing(group.total, rows)
        held.position = position
        group.block = block
        group.current = held
        group.rows = 0
        group.rows_cap = rows
        return 0

    cdef int new_block(self, Group group, uint32_t *rows, uint64_t *block,
                       uint32_t *position) noexcept:
        cdef sr_ses *ses = &self.session.ses
        cdef uint32_t n = group.n
        cdef uint64_t *row_bytes = group.row_bytes
        cdef int rc
        cdef bint apart = self.compress and worth_packing(group.total, rows[0])
        cdef bint apart_alone = self.compress and worth_packing(group.total, 1)
        with nogil:
            rc = any_block(ses, apart, n, row_bytes, rows[0], block, position)
            if rows[0] > 1 and (rc == SR_FULL or rc == SR_NOSPACE):
                # Short of memory: a block for this one row may still fit.
                rows[0] = 1
                rc = any_block(ses, apart_alone, n, row_bytes, 1, block, position)
        return rc

    cdef uint32_t rows_for(self, Group group):
        cdef Column c
        cdef uint64_t nbytes = COMPRESS_BLOCK_BYTES if self.compress else BLOCK_BYTES
        cdef int64_t rows = <int64_t>(nbytes // max(group.total, 1))
        rows = min(max(rows, 1), BLOCK_ROWS_MAX)
        for c in group.columns:
            limit = self.configured.get(c.path, (0, None))[1]
            if limit is not None:
                rows = min(rows, <int64_t>limit)
        return <uint32_t>rows

    cdef int copy_row(self, Group group, const void **src) except -1:
        cdef int rc
        if group.total < NOGIL_BYTES:
            rc = append_row(&self.session.ses, group, src, self.episode)
        else:
            with nogil:
                rc = append_row(&self.session.ses, group, src, self.episode)
        if rc != SR_OK:
            raise_status(rc, "writing a step")
        return 0

    cdef int seal(self, Group group) except -1:
        """The open block takes no more rows; let go of those whose values are all out of reach."""
        cdef Held held = group.current
        cdef Column c
        self.pack(group)
        held.last = [c.count - 1 for c in group.columns]
        group.held.append(held)
        group.block = 0
        group.current = None
        self.trim(group, False)
        return 0

    cdef int pack(self, Group group) except -1:
        """Compress the rows of the open block, which takes no more of them. Where there is no room
        for that they stay as they are.
        """
        cdef int rc
        if not group.current.apart or group.rows == 0:
            return 0
        rc = pack_block(
            &self.session.ses, group.block, group.n, group.row_bytes, group.rows)
        if rc != SR_OK and rc != SR_FULL and rc != SR_NOSPACE:
            raise_status(rc, "compressing steps", self.session.store)
        group.current.apart = False
        return 0

    cdef int trim(self, Group group, bint everything) except -1:
        cdef Held held
        cdef Column c
        cdef int rc
        while group.held:
            held = group.held[0]
            if not everything:
                for i, c in enumerate(group.columns):
                    if c.alive(<int64_t>held.last[i]):
                        return 0
            del group.held[0]
            rc = sr_release(&self.session.ses, 1, &held.position)
            if rc != SR_OK:
                raise_status(rc, "releasing steps")
        return 0

    cdef int drop_position(self, uint32_t position) except -1:
        cdef int rc
        if position != SR_NONE:
            rc = sr_release(&self.session.ses, 1, &position)
            if rc != SR_OK:
                raise_status(rc, "releasing an item")
        return 0
