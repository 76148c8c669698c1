# Batches of several stores as one, whose rows are mixed: gathered straight to where they belong.

# Beside the key: probability, table_size, priority, inserted_ns, times_sampled.
DEF REST_BYTES = 36
DEF SHARD_KEY_BYTES = 16


cdef class JoinedRows:
    """The arrays of a joined batch while they are filled."""

    cdef uint32_t n
    cdef list arrays
    cdef char *dst[SR_COLUMNS_MAX]
    cdef uint64_t nbytes[SR_COLUMNS_MAX]
    cdef Buffer keys, rest

    cdef int begin(self, Batch like, StackPlan plan, uint32_t n, list out) except -1:
        """New arrays, or those of `out`, for n items that are like those of a batch."""
        cdef uint32_t c, length_flags = 0
        cdef uint64_t row_bytes = 0
        cdef Py_buffer view
        cdef Buffer b
        like.bound(0)
        like.check_columns(0, plan)
        self.n = n
        self.keys = Buffer(<size_t>n * SHARD_KEY_BYTES)
        self.rest = Buffer(<size_t>n * REST_BYTES)
        self.arrays = [] if out is None else out
        for c in range(plan.n):
            like.column_of(0, c, &length_flags, &row_bytes)
            length_flags &= ~SR_COL_SQUEEZED
            self.nbytes[c] = length_flags * row_bytes
            if out is None:
                b = Buffer(self.nbytes[c] * n)
                self.dst[c] = b.base
                self.arrays.append(_ndarray(plan.shape(c, length_flags, n), plan.dtypes[c], b))
                continue
            PyObject_GetBuffer(out[c], &view, PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE)
            self.dst[c] = <char *>view.buf
            row_bytes = <uint64_t>view.len
            # The list keeps the array.
            PyBuffer_Release(&view)
            if row_bytes != self.nbytes[c] * n:
                raise errors.InvalidArgumentError(
                    f"out column {c} has {row_bytes} bytes, expected {self.nbytes[c] * n}. Make "
                    "it with np.empty of that size.")
        return 0

    cdef void put_info(self, Batch b, const uint32_t *where, uint64_t shard, double share,
                       int64_t others) noexcept:
        cdef uint64_t *key = <uint64_t *>self.keys.base
        cdef double *probability = <double *>self.rest.base
        cdef int64_t *table_size = <int64_t *>(probability + self.n)
        cdef double *priority = <double *>(table_size + self.n)
        cdef uint64_t *inserted_ns = <uint64_t *>(priority + self.n)
        cdef int32_t *times_sampled = <int32_t *>(inserted_ns + self.n)
        cdef uint32_t i, row
        for i in range(b.n):
            row = where[i]
            key[2 * row] = shard
            key[2 * row + 1] = b.items[i].key
            probability[row] = b.items[i].probability * share
            table_size[row] = b.items[i].table_size + others
            priority[row] = b.items[i].priority
            times_sampled[row] = b.items[i].times_sampled
            inserted_ns[row] = b.items[i].inserted_ns

    cdef int put(self, Batch b, StackPlan plan, const uint32_t *where) except -1:
        """The rows of a batch. 0 if they are not like those of the arrays."""
        cdef uint32_t bad = 0
        cdef int rc
        if sr_item_columns(&b.session.store.st, &b.items[0]) != plan.n:
            return 0
        with nogil:
            rc = sr_gather_to(
                &b.session.store.st, b.n, b.items, where, plan.n, self.dst, self.nbytes, &bad)
        if rc == SR_ELSEWHERE:
            rc = b.gather_apart(0, b.n, where, plan.n, self.dst, self.nbytes, &bad)
        if rc == SR_CORRUPT:
            raise_status(rc, "reading an item")
        return rc == SR_OK

    cdef tuple info(self, key_dtype):
        cdef uint32_t n = self.n
        cdef Buffer b = self.rest
        return (
            _ndarray(n, key_dtype, self.keys), _ndarray(n, _float64, b),
            _ndarray(n, _int64, b, 8 * n), _ndarray(n, _float64, b, 16 * n),
            _ndarray(n, _int32, b, 32 * n), _ndarray(n, _uint64, b, 24 * n))


def join_batches(list parts, owners, StackPlan plan, key_dtype, list out):
    """Copy the items of several batches into the same arrays: (info arrays, column arrays), or None
    where they are not of one kind.

    Each part is (batch, number of its shard, factor of its probabilities, what its table sizes lack
    of the whole); the plan is that of the first, and of structures like it. Row i is the next item
    of part owners[i] (int64[N], C-contiguous; each part as often as it has items). Keys are of
    key_dtype: the shard's number in the first 8 bytes, then the key. `out` as for Batch.stack.
    """
    cdef JoinedRows rows = JoinedRows.__new__(JoinedRows)
    cdef Py_buffer o
    cdef uint32_t *where
    cdef uint32_t n, i, first = 0, count, p
    cdef Batch b
    PyObject_GetBuffer(owners, &o, PyBUF_C_CONTIGUOUS)
    n = <uint32_t>(o.len // 8)
    where = <uint32_t *>malloc(max(n, 1) * sizeof(uint32_t))
    try:
        if where == NULL:
            raise MemoryError
        rows.begin(<Batch>parts[0][0], plan, n, out)
        for p, (part, shard, share, others) in enumerate(parts):
            b = part
            b.session.usable()
            b.bound(0)
            count = 0
            for i in range(n):
                if (<int64_t *>o.buf)[i] == p:
                    where[count] = i
                    count += 1
            if count != b.n:
                raise errors.InvalidArgumentError(
                    f"Got {count} rows for a batch of {b.n}; expected one for each of its items. "
                    "Give as many.")
            first += count
            rows.put_info(b, where, shard, share, others)
            if not rows.put(b, plan, where):
                return None
        if first != n:
            raise errors.InvalidArgumentError(
                f"Got {n} rows and {first} items; expected as many. Give each row an item.")
    finally:
        free(where)
        PyBuffer_Release(&o)
    return rows.info(key_dtype), rows.arrays
