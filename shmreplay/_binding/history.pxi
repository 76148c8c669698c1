# The history of a writer: its columns, indexed like lists of steps.


cdef class ColumnHistory:
    """The recent values of one column, indexed like a list of steps."""

    # Not counted: the writer holds its histories (`history` is kept), and must go when its user
    # drops it, at once and not at the next garbage collection, since its place in the store is one
    # of few. The writer clears it when it goes.
    cdef PyObject *writer
    cdef Column column

    cdef inline RowWriter owner(self):
        if self.writer == NULL:
            raise errors.WriterClosedError(
                "Got a history whose writer is gone; expected an open writer. Keep a reference to "
                "it.")
        return <RowWriter><object>self.writer

    def __len__(self):
        return self.owner().history_length()

    @property
    def path(self):
        """Where the column stands in the data."""
        return self.column.path

    def __iter__(self):
        for i in range(len(self)):
            yield self[i]

    def __getitem__(self, index):
        cdef Py_ssize_t start, stop, n
        if self.writer == NULL:
            self.owner()
        n = (<RowWriter>self.writer).history_length()
        if type(index) is slice:
            if not sr_slice_bounds(index, &start, &stop):
                return self.slice(index)
            # Steps that follow each other, [-1:] mostly.
            if start < -n or start > n:
                bound_of(self.column.path, start, n, n)
            if start < 0:
                start += n
            if stop == PY_SSIZE_T_MAX:
                stop = n
            else:
                stop = bound_of(self.column.path, stop, n, n)
            return self.cells(start, 1, stop - start if stop > start else 0, False, n)
        if isinstance(index, int):
            # Beyond its range: its ends, which no history reaches.
            start = PyNumber_AsSsize_t(index, NULL)
            if start < -n or start >= n:
                raise errors_index(self.column.path, index, n)
            return self.cells(start + n if start < 0 else start, 1, 1, True, n)
        if isinstance(index, list):
            return self.pick(<list>index, n)
        raise errors.ArgumentTypeError(
            f"history of column {self.column.path} must be indexed by int, slice or list of int, "
            f"got {type(index).__name__}. Use for instance history[-1] or history[-3:].")

    cdef TrajectoryColumn slice(self, object index):
        cdef Py_ssize_t start, stop, step, n
        # None becomes 0 or the far end of the integers, in the direction of the step.
        try:
            PySlice_Unpack(index, &start, &stop, &step)
        except TypeError as e:
            raise errors.ArgumentTypeError(
                f"history of column {self.column.path}: Got the index {index!r}: {e}; expected "
                "steps that it has. Use for instance [-1] or [-3:].") from None
        except ValueError as e:
            raise errors.InvalidArgumentError(
                f"history of column {self.column.path}: Got the index {index!r}: {e}; expected "
                "steps that it has. Use for instance [-1] or [-3:].") from None
        # Their __index__ is code like any other, which may have appended, or dropped the writer.
        n = self.owner().history_length()
        # Unlike a list, a bound beyond the history is an error and not cut off: that would be
        # another trajectory than was asked for.
        if step > 0:
            start = bound_of(self.column.path, start, n, n)
            stop = n if stop == PY_SSIZE_T_MAX else bound_of(self.column.path, stop, n, n)
            return self.cells(
                start, step, (stop - start - 1) // step + 1 if stop > start else 0, False, n)
        start = n - 1 if start == PY_SSIZE_T_MAX else bound_of(self.column.path, start, n, n - 1)
        stop = -1 if stop == PY_SSIZE_T_MIN else bound_of(self.column.path, stop, n, n - 1)
        return self.cells(
            start, step, (start - stop - 1) // -step + 1 if start > stop else 0, False, n)

    cdef TrajectoryColumn cells(self, Py_ssize_t start, Py_ssize_t step, Py_ssize_t count,
                                bint squeeze, Py_ssize_t n):
        cdef TrajectoryColumn t
        cdef int64_t base = (<RowWriter>self.writer).base_step + start
        cdef int64_t end = base - start + n
        cdef int64_t first = 0, last = 0, i
        cdef int64_t *values
        if count > 0:
            first = last = self.column.value_of_step(base, end)
            if count > 1:
                last = self.column.value_of_step(base + step * (count - 1), end)
            if first < 0 or last < 0:
                raise errors_none(self.column.path)
        t = TrajectoryColumn.__new__(TrajectoryColumn)
        t.writer = <RowWriter>self.writer
        t.column = self.column
        t.squeeze = squeeze
        t.n = count
        t.first = first
        t.stride = step
        if count <= 1 or last - first == step * (count - 1):
            return t
        # Steps without a value lie in between: name each value.
        values = t.make_values()
        for i in range(count):
            values[i] = self.column.value_of_step(base + step * i, end)
            if values[i] < 0:
                raise errors_none(self.column.path)
        return t

    cdef TrajectoryColumn pick(self, list index, Py_ssize_t n):
        cdef TrajectoryColumn t = TrajectoryColumn.__new__(TrajectoryColumn)
        cdef RowWriter writer = <RowWriter>self.writer
        cdef Py_ssize_t i, k
        cdef int64_t *values
        t.writer = writer
        t.column = self.column
        t.n = len(index)
        if t.n == 0:
            return t
        values = t.make_values()
        for i in range(t.n):
            try:
                k = PyNumber_AsSsize_t(index[i], NULL)
            except TypeError:
                raise errors.ArgumentTypeError(
                    f"history of column {self.column.path} is indexed by list of int, "
                    f"got {index[i]!r} in it; each must be an int. Use int().") from None
            if k < -n or k >= n:
                raise errors_index(self.column.path, index[i], n)
            values[i] = self.column.value_of_step(
                writer.base_step + (k + n if k < 0 else k), writer.base_step + n)
            if values[i] < 0:
                raise errors_none(self.column.path)
        return t


cdef inline Py_ssize_t bound_of(object path, Py_ssize_t bound, Py_ssize_t n,
                                Py_ssize_t most) except? -2:
    if bound < -n or bound > most:
        raise errors.InvalidArgumentError(
            f"slice bound {bound} reaches outside the history of column {path}, which has {n} "
            "steps; "
            "a trajectory column cannot contain any None data references. Use bounds within it.")
    return bound + n if bound < 0 else bound


cdef errors_index(path, index, n):
    return HistoryIndexError(
        f"index {index} is outside the history of column {path}, which has {n} steps; expected "
        "one of those. Append more steps first, or use another.")


cdef errors_none(path):
    return errors.InvalidArgumentError(
        f"column {path}: cannot contain any None data references: a step asked for has no value "
        "of this column, or is older than "
        "num_keep_alive_refs and forgotten. It must be there: leave that step out, or raise "
        "num_keep_alive_refs.")
