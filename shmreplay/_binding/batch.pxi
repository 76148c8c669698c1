# What sampling gives: a batch of pinned items, and how their columns become arrays.

# Of an item in a batch's info: key, probability, table_size, priority, inserted_ns, times_sampled.
DEF INFO_BYTES = 44


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
        cdef uint32_t i, n
        cdef const sr_sampled *item
        cdef int rc = SR_OK
        if self.n == 0 or self.session.store.fork_count != _fork_count:
            self.released = True
            return SR_OK
        positions = <uint32_t *>malloc(self.n * sizeof(uint32_t))
        if positions == NULL:
            return SR_SYS
        self.released = True
        item = self.items
        n = self.n
        for i in range(n):
            positions[i] = item.position
            item += 1
        with nogil:
            rc = sr_release(&self.session.ses, n, positions)
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
            raise errors.InvalidArgumentError(
                f"Got {k} items to take of {self.n}; expected at most those. Give a smaller "
                "number.")
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
            raise IndexError(
                f"Got the index {i}; expected one below {self.n}, the items of the batch. Use "
                "another.")
        if self.released:
            raise errors.ReverbError(
                "Got a batch that was released, so that its data may be gone; expected use within "
                "its `with` block. Copy what is needed longer.")
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
        cdef const sr_sampled *item = self.items
        for i in range(n):
            key[i] = item.key
            probability[i] = item.probability
            table_size[i] = item.table_size
            priority[i] = item.priority
            times_sampled[i] = item.times_sampled
            inserted_ns[i] = item.inserted_ns
            item += 1
        cdef tuple shape = (n,)
        return (
            new_array(shape, _uint64, b, key, True),
            new_array(shape, _float64, b, probability, True),
            new_array(shape, _int64, b, table_size, True),
            new_array(shape, _float64, b, priority, True),
            new_array(shape, _int32, b, times_sampled, True),
            new_array(shape, _uint64, b, inserted_ns, True))

    cdef int check_columns(self, uint32_t i, StackPlan plan) except -1:
        if sr_item_columns(&self.session.store.st, &self.items[i]) != plan.n:
            raise errors.TableCorruptedError(
                "Got an item with another number of columns than its structure says; expected as "
                "many. Something wrote over the store: start its server anew.")
        return 0

    cdef int column_of(self, uint32_t i, uint32_t c, uint32_t *length_flags,
                       uint64_t *row_bytes) except -1:
        cdef int rc = sr_item_column(
            &self.session.store.st, &self.items[i], c, length_flags, row_bytes)
        if rc != SR_OK:
            raise_status(rc, "reading an item")
        return 0

    def stack(self, StackPlan plan, list out):
        """Copy all items into stacked arrays: (info arrays, column arrays), or the number of an
        item that does not fit.

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
        self.check_columns(0, plan)
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
                        new_array(
                            plan.shape(c, length_flags & ~SR_COL_SQUEEZED, self.n), plan.dtypes[c],
                            b, b.base, True))
                else:
                    PyObject_GetBuffer(out[c], &bufs[c], PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE)
                    got += 1
                    dst[c] = <char *>bufs[c].buf
                    if <uint64_t>bufs[c].len != nbytes[c] * self.n:
                        raise errors.InvalidArgumentError(
                            f"out column {c} has {bufs[c].len} bytes, expected "
                            f"{nbytes[c] * self.n}. Make it with np.empty of that size.")
            with nogil:
                rc = sr_gather(
                    &self.session.store.st, self.n, self.items, plan.n, dst, nbytes, &bad)
            if rc == SR_ELSEWHERE:
                rc = self.gather_apart(0, self.n, NULL, plan.n, dst, nbytes, &bad)
        finally:
            for c in range(got):
                PyBuffer_Release(&bufs[c])
        if rc == SR_CORRUPT:
            raise_status(rc, "reading an item")
        if rc != SR_OK:
            return bad
        return self.info_arrays(), arrays

    cdef int gather_apart(self, uint32_t first, uint32_t count, const uint32_t *where,
                          uint32_t n_cols, char **dst, const uint64_t *nbytes,
                          uint32_t *bad) except? -100:
        """As sr_gather_to (where NULL: as sr_gather), of items some of whose rows lie apart from
        their blocks.
        """
        cdef RowReader reader = RowReader(self.session.store)
        cdef sr_sampled *item
        cdef uint32_t i, c, row
        reader.ses = &self.session.ses
        try:
            for i in range(count):
                item = self.items + first + i
                bad[0] = i
                if sr_item_columns(&self.session.store.st, item) != n_cols:
                    return SR_INVALID
                for c in range(n_cols):
                    row = i if where == NULL else where[i]
                    if not reader.column(item, c, dst[c] + nbytes[c] * row, nbytes[c]):
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
        self.check_columns(i, plan)
        for c in range(plan.n):
            p = sr_item_view(&self.session.store.st, &self.items[i], c)
            if p == NULL:
                out.append(None)
                continue
            self.column_of(i, c, &length_flags, &row_bytes)
            length_flags &= ~SR_COL_SQUEEZED
            shape = plan.shape_of_one(c, length_flags)
            out.append(new_array(shape, plan.dtypes[c], self, <void *>p, False))
        return out

    def copies(self, uint32_t i, StackPlan plan):
        """New arrays, each on memory of its own, with the columns of item i."""
        cdef char *dst[SR_COLUMNS_MAX]
        cdef uint64_t nbytes[SR_COLUMNS_MAX]
        cdef uint32_t c, length_flags = 0, bad = 0
        cdef uint64_t row_bytes = 0, total = 0
        cdef list arrays = []
        cdef Buffer b
        cdef int rc
        self.bound(i)
        self.check_columns(i, plan)
        for c in range(plan.n):
            self.column_of(i, c, &length_flags, &row_bytes)
            length_flags &= ~SR_COL_SQUEEZED
            nbytes[c] = length_flags * row_bytes
            total += nbytes[c]
            b = Buffer(nbytes[c])
            dst[c] = b.base
            arrays.append(
                new_array(plan.shape_of_one(c, length_flags), plan.dtypes[c], b, b.base, True))
        if total < NOGIL_BYTES:
            rc = sr_gather(
                &self.session.store.st, 1, self.items + i, plan.n, dst, nbytes, &bad)
        else:
            with nogil:
                rc = sr_gather(
                    &self.session.store.st, 1, self.items + i, plan.n, dst, nbytes, &bad)
        if rc == SR_ELSEWHERE:
            rc = self.gather_apart(i, 1, NULL, plan.n, dst, nbytes, &bad)
        if rc != SR_OK:
            raise_status(SR_CORRUPT, "reading an item")
        return arrays

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

        Gives the index of an item whose lengths differ from the arrays' share of an item, or
        -1.
        """
        cdef uint32_t n_cols = <uint32_t>len(arrays)
        cdef Py_buffer bufs[SR_COLUMNS_MAX]
        cdef char *dst[SR_COLUMNS_MAX]
        cdef uint64_t nbytes[SR_COLUMNS_MAX]
        cdef uint32_t got = 0, bad = 0, c
        cdef int rc
        if n_cols > SR_COLUMNS_MAX or count == 0:
            raise errors.InvalidArgumentError(
                f"Got {n_cols} columns and {count} items; expected at least one of each and "
                "no more than there are. Give fewer.")
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
                rc = self.gather_apart(first, count, NULL, n_cols, dst, nbytes, &bad)
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
            raise errors.TableCorruptedError(
                f"Got an item structure of {self.n} columns; expected fewer. Something wrote over "
                "the store: start its server anew.")

    cdef tuple shape_of_one(self, uint32_t c, uint32_t length):
        """Of the column of an item by itself."""
        if self.squeezed[c]:
            return self.shapes_of_value[c]
        return (length, *self.shapes_of_value[c])

    cdef tuple shape(self, uint32_t c, uint32_t length, uint32_t n):
        cdef tuple known = <tuple>self.last[c]
        if known[0] == n and known[1] == length:
            return <tuple>known[2]
        shape = (n, *self.shapes_of_value[c]) if self.squeezed[c] else (
            n, length, *self.shapes_of_value[c])
        self.last[c] = (n, length, shape)
        return shape
