# Columns of an item to be.


@cython.freelist(64)
@cython.no_gc  # made and dropped by the million; nothing that it refers to refers back to it
cdef class TrajectoryColumn:
    """One column of an item to be: references to values that a writer holds.

    Made by indexing `writer.history`.

    Args:
        data_references: Columns of one value each (what iterating a column gives), of one column of
            one writer.
        squeeze: Take the single reference without a time dimension.
        path: Accepted for Reverb's sake; the references know theirs.

    Raises:
        InvalidArgumentError: squeeze with other than one reference; None, or references of several
            columns.
    """

    cdef RowWriter writer
    cdef Column column
    cdef bint squeeze
    cdef Py_ssize_t n
    cdef int64_t first, stride
    # None: first, first + stride, ...; else their numbers, each an int64. An object, so that a
    # column without them needs no __dealloc__.
    cdef bytes numbers

    def __init__(self, data_references, *, bint squeeze=False, path=None):
        cdef list references = list(data_references)
        cdef TrajectoryColumn r
        cdef int64_t *values
        cdef Py_ssize_t i
        for x in references:
            if x is None:
                raise errors.InvalidArgumentError(
                    f"a trajectory column cannot contain any None data references: the column at "
                    f"path {path} got {references!r:.80}; each must be there. Leave them out.")
            if type(x) is not TrajectoryColumn or (<TrajectoryColumn>x).n != 1:
                raise errors.ArgumentTypeError(
                    f"a data reference must be a TrajectoryColumn of one value, got {x!r}. "
                    "Take it from writer.history, as in history[-1].")
        if not references:
            raise errors.InvalidArgumentError(
                "a trajectory column must not be empty: got 0 data references. Give at least one.")
        if squeeze and len(references) != 1:
            raise errors.InvalidArgumentError(
                f"a squeezed column must have exactly one data reference, got {len(references)}; "
                "use squeeze=False")
        r = references[0]
        self.writer = r.writer
        self.column = r.column
        self.squeeze = squeeze
        self.n = len(references)
        values = self.make_values()
        for i in range(self.n):
            r = references[i]
            if r.column is not self.column:
                raise errors.InvalidArgumentError(
                    f"Got references of columns {self.column.path} and {r.column.path} in one "
                    "column; expected all to be of the same. Make a column of each.")
            values[i] = r.value(0)

    cdef int64_t *make_values(self) except NULL:
        """Room for the numbers of n values, to be filled."""
        self.numbers = PyBytes_FromStringAndSize(NULL, self.n * sizeof(int64_t))
        return self.values()

    cdef inline int64_t *values(self) noexcept:
        return <int64_t *>PyBytes_AS_STRING(self.numbers)

    cdef inline int64_t value(self, Py_ssize_t i) noexcept:
        return self.first + self.stride * i if self.numbers is None else self.values()[i]

    def __len__(self):
        return self.n

    @property
    def is_squeezed(self):
        """True for a single value without a time dimension."""
        return self.squeeze

    @property
    def path(self):
        """Where the column stands in the data."""
        return self.column.path

    @property
    def dtype(self):
        """numpy dtype of the values."""
        return dtype_from_code(self.column.code)

    @property
    def shape(self):
        """Shape of the column: (length, ...), or without the length if squeezed."""
        return self.column.shape if self.squeeze else (self.n, *self.column.shape)

    def __getitem__(self, index):
        cdef TrajectoryColumn t
        cdef int64_t *values
        cdef Py_ssize_t i
        if not isinstance(index, (int, slice, list)):
            raise errors.ArgumentTypeError(
                "a trajectory column must be indexed by int, slice or list of int, got "
                f"{type(index).__name__}. Use for instance column[-1] or column[-3:].")
        try:
            if isinstance(index, slice):
                chosen = list(range(self.n)[index])
            else:
                chosen = [range(self.n)[k] for k in (index if isinstance(index, list) else [index])]
        except IndexError:
            raise HistoryIndexError(
                f"index {index} is outside a column {self.column.path} of {self.n} "
                "references; expected one of those. Use a smaller one.") from None
        except ValueError as e:
            raise errors.InvalidArgumentError(
                f"column {self.column.path}: Got the index {index!r}: {e}; expected values that it "
                "has. Use for instance [-1] or [-3:].") from None
        except TypeError as e:
            raise errors.ArgumentTypeError(
                f"column {self.column.path} must be indexed by int, slice or list of int, got "
                f"{index!r}: {e}. Use for instance column[-1] or column[-3:].") from None
        t = TrajectoryColumn.__new__(TrajectoryColumn)
        t.writer = self.writer
        t.column = self.column
        t.squeeze = isinstance(index, int)
        t.n = len(chosen)
        values = t.make_values()
        for i in range(t.n):
            values[i] = self.value(<Py_ssize_t>chosen[i])
        return t

    def __iter__(self):
        for i in range(self.n):
            yield self[i]

    def numpy(self):
        """A copy of the values. Raises RuntimeError where a value is not reachable any more."""
        cdef uint64_t nbytes = self.column.row_bytes
        cdef Buffer out = Buffer(max(nbytes * <uint64_t>self.n, 1))
        cdef Py_ssize_t i
        cdef cell *c
        self.writer.enter()
        try:
            for i in range(self.n):
                if not self.column.alive(self.value(i)):
                    raise errors_expired(self.column.path)
                c = &self.column.ring[self.value(i) & self.column.mask]
                memcpy(
                    out.base + <uint64_t>i * nbytes,
                    cell_at(self.writer, c, nbytes), nbytes)
        finally:
            self.writer.leave()
        return new_array(self.shape, self.dtype, out, out.base, True)


cdef inline uint64_t signature_key(TrajectoryColumn c) noexcept:
    """Column and squeeze in a word."""
    return <uint64_t>c.column.number << 1 | <uint64_t>c.squeeze


cdef inline uint32_t row_count(TrajectoryColumn c) noexcept:
    """Length and squeeze as the core writes them."""
    return <uint32_t>c.n | (SR_COL_SQUEEZED if c.squeeze else 0)


cdef list leaf_types(list leaves, bint with_length):
    """(dtype code, shape of a value or of the whole column, squeezed) for each column."""
    cdef TrajectoryColumn c
    cdef list types = []
    for c in leaves:
        types.append((c.column.code, c.shape if with_length else c.column.shape, c.squeeze))
    return types


cdef errors_expired(path, number=None):
    where = "" if number is None else f"Error in column {number}: "
    return ExpiredReferenceError(
        f"{where}column {path}: Got a data reference that must not be used any more; the "
        "data reference has expired: the value is older than "
        "num_keep_alive_refs or its episode's buffers were "
        "cleared; create the item sooner or raise num_keep_alive_refs")
