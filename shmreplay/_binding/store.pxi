# Mapping a segment, and what concerns a store as a whole.


cdef class Store:
    """One store, mapped into this process. Unmapped only when nothing refers to it any more."""

    cdef sr_store st
    cdef int fork_count
    cdef readonly uint32_t participant
    # Called when an allocation found no room: gives back what the dead held, says if that was any.
    cdef public object on_full
    # Of the thread that calls the extensions of the store's tables; 0: it is not of this process.
    cdef public unsigned long extension_thread
    # Says whether the store's server lives; None: it does.
    cdef public object server_lives
    # Groups of compressed rows that were decoded last (DecodedRows); None: none were.
    cdef object decoded

    def __cinit__(self, int fd, uint64_t nbytes):
        self.fork_count = _fork_count
        if sr_store_map(&self.st, fd, nbytes) != SR_OK:
            raise OSError(
                f"cannot map a store of {nbytes} bytes of address space; there must be as much: "
                "see ulimit -v")

    def __dealloc__(self):
        sr_store_unmap(&self.st)

    cdef inline int usable(self) except -1:
        if self.fork_count != _fork_count:
            raise errors.ForkedHandleError(
                "Got a handle that was made before a fork: this handle belongs to the parent "
                "process; expected one of this process. Make a new Client, writer or "
                "sampler in the child")
        if self.st.hdr == NULL:
            raise errors.StoreNotFoundError(
                "Got a store that is not attached; expected it to be: call attach() or format() "
                "first")
        return 0

    def format(self, uint64_t generation, uint64_t capacity, uint32_t n_arenas,
               uint32_t n_participants, uint32_t n_sessions, bytes config_json, tables, seeds,
               keys=None):
        """Lay a new store out in the mapped segment. The caller created it exclusively.

        `keys`: bits and least number of slots of each table, where they are given.
        """
        cdef sr_store_config cfg
        cfg.generation = generation
        cfg.capacity_bytes = capacity
        cfg.n_arenas = n_arenas
        cfg.n_participants = n_participants
        cfg.n_sessions = n_sessions
        cfg.config_bytes = len(config_json)
        cfg.n_tables = len(tables)
        cdef sr_table_config *list = make_table_configs(tables, seeds, keys)
        cdef int rc = sr_store_format(&self.st, &cfg, list, <const char *>config_json)
        free(list)
        if rc != SR_OK:
            raise_status(rc, "creating the store")

    def attach(self):
        """Check the mapped segment. False while it is not laid out yet."""
        cdef int rc = sr_store_attach(&self.st)
        cdef sr_detail *d = sr_last_detail()
        if rc == SR_WOULD_BLOCK:
            return False
        if rc == SR_VERSION:
            raise errors.VersionMismatchError(
                f"Got a store of layout version {d.asked}, signature {d.found_signature:016x}; "
                "expected what this package has, version "
                f"{d.available}, signature {d.expected_signature:016x}. Use the same package, "
                "Python build and C library "
                "on both sides.")
        if rc != SR_OK:
            raise_status(rc, "attaching to the store")
        return True

    cdef bint swept(self, int rc) except -1:
        """After a status: is it that something has no room, and did the dead give some back?"""
        if (rc != SR_FULL and rc != SR_NOSPACE and rc != SR_LIMIT) or self.on_full is None:
            return False
        return self.on_full()

    def close_server(self):
        """Mark the store closed and wake everybody who waits."""
        self.usable()
        sr_store_close(&self.st)

    @property
    def closed(self):
        self.usable()
        return bool(sr_store_is_closed(&self.st))

    @property
    def port(self):
        self.usable()
        return sr_store_port(&self.st)

    @port.setter
    def port(self, uint32_t value):
        self.usable()
        sr_store_set_port(&self.st, value)

    @property
    def creator_pid(self):
        self.usable()
        return self.st.hdr.creator_pid

    @creator_pid.setter
    def creator_pid(self, uint64_t value):
        self.usable()
        self.st.hdr.creator_pid = value

    @property
    def generation(self):
        self.usable()
        return self.st.shape.generation

    @property
    def n_participants(self):
        self.usable()
        return self.st.shape.n_participants

    @property
    def n_sessions(self):
        self.usable()
        return self.st.shape.n_sessions

    @property
    def config_json(self):
        self.usable()
        return self.st.base[
            self.st.shape.config_off:self.st.shape.config_off + self.st.shape.config_bytes]

    def participant_set(self, uint32_t number, uint32_t pid, uint64_t start_ticks,
                        uint64_t pid_namespace, str role):
        """Record this process; it holds the record lock on that byte.

        False: the entry awaits reclaiming.
        """
        self.usable()
        cdef bytes text = role.encode()
        cdef int rc = sr_participant_set(
            &self.st, number, pid, start_ticks, pid_namespace, <const char *>text)
        if rc == SR_WOULD_BLOCK:
            return False
        if rc != SR_OK:
            raise_status(rc, "recording a participant")
        self.participant = number
        return True

    def participant_clear(self, uint32_t number):
        """Free a participant entry."""
        self.usable()
        sr_participant_clear(&self.st, number)

    def participant_reclaim(self, uint32_t number):
        """Free what a dead participant's idle sessions held. Gives the number of sessions freed."""
        self.usable()
        cdef int rc
        with nogil:
            rc = sr_participant_reclaim(&self.st, number)
        if rc < 0:
            raise_status(rc, "reclaiming a dead participant")
        return rc

    def participants(self):
        """Entries in use: (number, pid, start_ticks, pid_namespace, attached_ns, role)."""
        self.usable()
        cdef sr_participant *p = <sr_participant *>(self.st.base + self.st.shape.participants_off)
        cdef list out = []
        cdef uint32_t i
        for i in range(self.st.shape.n_participants):
            if sr_participant_in_use(&self.st, i):
                out.append((i, p[i].pid, p[i].start_ticks, p[i].pid_namespace, p[i].attached_ns,
                            bytes(p[i].role).split(b"\0")[0].decode(errors="replace")))
        return out

    def stats(self):
        """Bytes by use, of one moment (see sr_store_stats), and who is there."""
        self.usable()
        cdef sr_store_stats s
        cdef int rc = sr_store_get_stats(&self.st, &s)
        if rc != SR_OK:
            raise_status(rc, "reading statistics")
        return {
            "capacity_bytes": s.capacity, "committed_bytes": s.committed, "fixed_bytes": s.fixed,
            "index_bytes": s.index_committed, "arena_committed_bytes": s.arena_committed,
            "arena_used_bytes": s.arena_used, "arena_free_bytes": s.arena_free,
            "arena_allocations": s.arena_allocs, "compressed_raw_bytes": s.packed_raw,
            "compressed_stored_bytes": s.packed_stored, "participants": s.participants,
            "sessions": s.sessions, "repairs": s.repairs, "poisoned_tables": s.poisoned,
            "closed": s.closed, **store_counts(&s),
            "margin_bytes": s.margin, "block_bytes": s.blocks, "trajectory_bytes": s.trajectories,
            "pinned_bytes": s.pinned, "episode_bytes": s.episodes, "ledger_bytes": s.ledgers,
            "schema_bytes": s.schemas, "fragmented_bytes": s.fragmented, "free_bytes": s.tail,
            "table_index_bytes": [s.index_bytes[i] for i in range(self.st.shape.n_tables)],}

    def committer_step(self):
        """Wait at most 0.1 s for an arena to run low, then commit ahead.

        Gives the number of extents added.
        """
        self.usable()
        cdef int rc
        with nogil:
            rc = sr_committer_step(&self.st)
        if rc < 0 and rc != SR_FULL and rc != SR_NOSPACE:
            raise_status(rc, "committing memory ahead")
        return max(rc, 0)

    def receipt_open(self, bytes name, uint64_t lane, uint32_t owner):
        """A receipt for items that the one of this name (16 bytes) numbers; gives its number."""
        self.usable()
        cdef uint64_t words[2]
        cdef uint32_t number = 0
        if len(name) != sizeof(words):
            raise errors.InvalidArgumentError(
                f"Got a name of {len(name)} bytes; expected fewer. Choose a shorter one.")
        memcpy(words, <const char *>name, sizeof(words))
        cdef int rc = sr_receipt_open(&self.st, words, lane, owner, &number)
        if rc != SR_OK:
            raise_status(rc, "opening a receipt", self)
        return number

    def receipt_close(self, uint32_t number):
        """The receipt is needed no more."""
        self.usable()
        sr_receipt_close(&self.st, number)

    def receipt_take(self, uint32_t number, uint32_t owner):
        """The receipt of one who is gone is another's from now on."""
        self.usable()
        sr_receipt_take(&self.st, number, owner)

    def receipt_note(self, uint32_t number, uint64_t done, uint64_t key):
        """Write into a receipt what is no insert."""
        self.usable()
        sr_receipt_note(&self.st, number, done, key)

    def receipt(self, uint32_t number):
        """(name, lane, number of the last item that is in its table, its key, owner), or None."""
        self.usable()
        cdef sr_receipt_info i
        if not sr_receipt_get(&self.st, number, &i):
            return None
        return (<char *>i.name)[:sizeof(i.name)], i.lane, i.done, i.key, i.owner

    def receipts(self):
        """So many receipts there are at most. After a death they are true from here on."""
        self.usable()
        cdef uint32_t n = 0
        cdef int rc
        with nogil:
            rc = sr_receipts(&self.st, &n)
        if rc != SR_OK:
            raise_status(rc, "reading receipts", self)
        return n

    def epoch(self, uint32_t table):
        """How often the table was reset."""
        self.usable()
        return sr_table_epoch(&self.st, table)

    def table_info(self, uint32_t table):
        """Counters and settings of one table at this moment, as a dict."""
        self.usable()
        cdef sr_table_info i
        cdef int rc = sr_table_get_info(&self.st, table, &i)
        if rc != SR_OK:
            raise_status(rc, "reading a table's counters")
        return {
            **table_counts(&i), "events": i.events, "events_capacity": i.events_capacity,
            "events_dropped": i.events_dropped,}

    def list_some(self, uint32_t table, uint64_t cursor, out):
        """Look through as many slots as out (one-dimensional, of ITEM_DTYPE) has room for.

        Gives the next cursor (None at the end) and the number of items found; 0 begins.
        """
        self.usable()
        cdef Py_buffer b
        cdef uint32_t got = 0
        cdef int rc
        PyObject_GetBuffer(out, &b, PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE)
        try:
            if b.itemsize != sizeof(sr_listed):
                raise errors.InvalidArgumentError(
                    f"Got out with {b.itemsize} bytes an item; expected {sizeof(sr_listed)}. Use "
                    "np.empty of that.")
            with nogil:
                rc = sr_list(
                    &self.st, table, &cursor, <uint32_t>(b.len // b.itemsize), <sr_listed *>b.buf,
                    &got)
        finally:
            PyBuffer_Release(&b)
        if rc != SR_OK:
            raise_status(rc, "listing items")
        return None if cursor == SR_LIST_END else cursor, got

    def priority_ok(self, uint32_t table, double priority):
        """Does the table take this priority?"""
        self.usable()
        return bool(sr_priority_ok(&self.st, table, priority))

    def has_events(self, uint32_t table):
        """Does the table have extensions?"""
        self.usable()
        return bool(sr_table_has_events(&self.st, table))

    def consumes(self, uint32_t table):
        """Is what is drawn not drawn again: out of the table, or through a pass?"""
        self.usable()
        return bool(sr_table_consumes(&self.st, table))

    def can_sample(self, uint32_t table, int64_t n):
        """Does the rate limiter allow n samples now?"""
        self.usable()
        cdef int rc = sr_can_sample(&self.st, table, n)
        if rc < 0:
            raise_status(rc, "asking the rate limiter")
        return bool(rc)

    def can_insert(self, uint32_t table, int64_t n):
        """Does the rate limiter allow n inserts now?"""
        self.usable()
        cdef int rc = sr_can_insert(&self.st, table, n)
        if rc < 0:
            raise_status(rc, "asking the rate limiter")
        return bool(rc)

    def check(self, table=None):
        """Walk all invariants of one table (its number), or of the whole store.

        Raises TableCorruptedError.
        """
        self.usable()
        cdef char why[512]
        cdef uint32_t number = SR_NONE if table is None else table
        cdef int rc
        with nogil:
            rc = sr_check(&self.st, number, why, sizeof(why))
        if rc == SR_CORRUPT:
            raise errors.TableCorruptedError(
                f"consistency check failed: {why.decode(errors='replace')}. Expected all to hold "
                "together: `shmreplay dump` reads out what it holds; start its server anew.")
        if rc != SR_OK:
            raise_status(rc, "checking the store")

    def schema_find(self, bytes json):
        """Number of an item structure, None where no item has had it."""
        self.usable()
        cdef uint32_t number
        cdef int rc = sr_schema_find(&self.st, <const char *>json, len(json), &number)
        if rc != SR_OK:
            raise_status(rc, "looking for an item structure", self)
        return None if number == SR_NONE else number

    def schema_intern(self, bytes json):
        """Number of an item structure, adding it if it is new."""
        self.usable()
        cdef uint32_t number
        cdef int rc = sr_schema_intern(&self.st, <const char *>json, len(json), &number)
        if self.swept(rc):
            rc = sr_schema_intern(&self.st, <const char *>json, len(json), &number)
        if rc != SR_OK:
            raise_status(rc, "recording an item structure", self)
        return number

    def schema_text(self, uint32_t number):
        """JSON of an item structure."""
        self.usable()
        cdef uint64_t n
        cdef const char *text = sr_schema_text(&self.st, number, &n)
        if text == NULL:
            raise errors.TableCorruptedError(
                f"Got item structure {number}; expected one that is in the store. Something wrote "
                "over its memory: start its server anew.")
        return text[:n]

    def wait_insert(self, uint32_t table, uint32_t seq, uint32_t timeout_ms):
        """Sleep until inserters of the table should look again, at most timeout_ms (<= 100)."""
        self.usable()
        with nogil:
            sr_wait_insert(&self.st, table, seq, timeout_ms)
        self.look_for_server(table)

    # -------------------------------------------------------------- events, for extensions

    def events_seq(self):
        """The word that changes when a table has events for its extensions."""
        self.usable()
        return sr_events_seq(&self.st)

    def wait_events(self, uint32_t seq, uint32_t timeout_ms):
        """Sleep until a table may have events, at most timeout_ms (<= 100)."""
        self.usable()
        with nogil:
            sr_events_wait(&self.st, seq, timeout_ms)

    def events_behind(self, uint32_t table):
        """Does the table refuse changes, as its extensions are behind?"""
        self.usable()
        cdef int rc
        with nogil:
            rc = sr_events_behind(&self.st, table)
        if rc < 0:
            raise_status(rc, "looking at a table's events")
        return bool(rc)

    def check_extension_thread(self, uint32_t table):
        """Refuse to wait for the extensions in the thread that calls them.

        Raises ExtensionError.
        """
        if self.extension_thread == 0 or self.extension_thread != PyThread_get_thread_ident():
            return
        if self.events_behind(table):
            raise errors.ExtensionError(
                f"Got a change of table {self.table_name(table)!r} from an extension's method, "
                "expected room to tell its extensions of it; the table"
                "which has no room to tell its extensions of it before they return: it would wait "
                "for itself. Make fewer changes in one method, or make them in a thread of your "
                "own.")

    def leave_events(self, uint32_t table):
        """Nobody is told of what happens to the table from now on, and nobody waits for that."""
        self.usable()
        sr_events_unserve(&self.st, table, self.st.hdr.creator_pid)

    cdef int look_for_server(self, uint32_t table) except -1:
        """After a slice of waiting: where no server is left to call the extensions, nobody waits
        for them, and what they miss is counted.
        """
        if not sr_table_has_events(&self.st, table) or self.server_lives is None:
            return 0
        # Before the look: a successor that comes after it goes on serving.
        cdef uint64_t server = self.st.hdr.creator_pid
        if sr_events_behind(&self.st, table) == 1 and not self.server_lives():
            logger.warning(
                "the server of table %r died; its extensions are not told of what happens from now "
                "on", self.table_name(table))
            sr_events_unserve(&self.st, table, server)
        return 0

    cdef str table_name(self, uint32_t table):
        cdef const char *name = sr_table_name(&self.st, table)
        return str(table) if name == NULL else name.decode(errors="replace")
