# Writing step by step: where values of columns lie. The hot path of an actor.
#
# Words: a *column* is one leaf of the data; its values are numbered from 0 as they come. A *group*
# is a set of columns that are given together in one append; its rows go into blocks of their own,
# so that a column that is left out costs nothing. A *cell* is where a value lies: block, row,
# column of the group.


cdef struct cell:
    uint64_t block
    uint32_t row
    uint32_t col

cdef struct step_mark:
    int64_t step
    int64_t value   # number of the column's value in that step

DEF SCRATCH = 16  # bytes for a scalar
DEF FOREIGN = 0x3fffffff  # number of a column that belongs to another writer
DEF RUNS_MAX = 65535
DEF MAX_VALUES = 1 << 56   # number of a value, of which a year of appends does not come near


cdef class Column:
    """One leaf of the data: type, shape, and where its latest values lie."""

    cdef readonly tuple path
    cdef readonly int code
    cdef readonly tuple shape
    cdef readonly uint64_t row_bytes
    cdef readonly int64_t keep      # values (and steps) that stay reachable
    cdef readonly int64_t count     # values so far
    cdef readonly uint32_t number
    cdef int64_t cleared            # values below this are gone (end_episode(clear_buffers=True))
    cdef int64_t open_step          # step in which the latest value came
    cdef int ndim
    cdef Py_ssize_t *dims
    # Of the rings, whose length is a power of two and at least `keep`.
    cdef int64_t mask
    cdef cell *ring
    cdef step_mark *marks
    cdef readonly object dtype      # what numpy gives for values of this type
    cdef object scalar_type

    def __cinit__(self, tuple path, int code, tuple shape, int64_t keep, uint32_t number):
        cdef Py_ssize_t items = 1
        self.path = path
        self.code = code
        self.shape = shape
        self.number = number
        self.ndim = <int>len(shape)
        self.dims = <Py_ssize_t *>malloc(max(self.ndim, 1) * sizeof(Py_ssize_t))
        for i in range(self.ndim):
            self.dims[i] = shape[i]
            items *= shape[i]
        self.dtype = dtype_from_code(code)
        self.scalar_type = None
        if not is_text(code) and scalars_readable >> <uint32_t>code & 1:
            self.scalar_type = self.dtype.type
        self.row_bytes = <uint64_t>items * <uint64_t>self.dtype.itemsize
        self.open_step = -1
        self.resize(keep)

    cdef int resize(self, int64_t keep) except -1:
        """Set the number of values that stay reachable. Of those there, the newest stay."""
        cdef int64_t size = 1, i, oldest = self.count
        while size < keep:
            size *= 2
        cdef cell *ring = <cell *>calloc(size, sizeof(cell))
        cdef step_mark *marks = <step_mark *>calloc(size, sizeof(step_mark))
        cdef step_mark *m
        if ring == NULL or marks == NULL:
            free(ring)
            free(marks)
            raise MemoryError(f"no memory for a history of {keep} steps")
        for i in range(size):
            marks[i].step = -1
        if self.ring != NULL:
            oldest = max(self.cleared, self.count - min(keep, self.keep))
            for i in range(oldest, self.count):
                ring[i & (size - 1)] = self.ring[i & self.mask]
            for i in range(self.mask + 1):
                m = &self.marks[i]
                if m.step >= 0 and m.value >= oldest and m.step > marks[m.step & (size - 1)].step:
                    marks[m.step & (size - 1)] = m[0]
        free(self.ring)
        free(self.marks)
        self.ring = ring
        self.marks = marks
        self.mask = size - 1
        self.keep = keep
        self.cleared = oldest
        return 0

    def __dealloc__(self):
        free(self.dims)
        free(self.ring)
        free(self.marks)

    cdef inline bint alive(self, int64_t value) noexcept:
        return value >= self.cleared and value < self.count and self.count - value <= self.keep

    cdef inline int64_t value_of_step(self, int64_t step, int64_t end) noexcept:
        """Number of the value that came in this step, or -1: none, or not reachable any more.

        Steps before `end` exist.
        """
        cdef step_mark *m = &self.marks[step & self.mask]
        if m.step != step or end - step > self.keep or not self.alive(m.value):
            return -1
        return m.value

    cdef inline const cell *rows_from(self, int64_t first, Py_ssize_t n, uint32_t col) noexcept:
        """Where value `first` lies, if it and the n - 1 after it are reachable and lie in rows that
        follow each other, as column `col` of one block; else NULL.
        """
        cdef const cell *x = &self.ring[first & self.mask]
        cdef const cell *y
        if not self.alive(first) or n > self.count - first or x.col != col:
            return NULL
        if n > 1:
            y = &self.ring[(first + n - 1) & self.mask]
            if y.block != x.block or y.col != col or <int64_t>y.row - <int64_t>x.row != n - 1:
                return NULL
        return x

    cdef inline void push(self, int64_t step, uint64_t block, uint32_t row, uint32_t col) noexcept:
        cdef cell *c = &self.ring[self.count & self.mask]
        cdef step_mark *m = &self.marks[step & self.mask]
        c.block = block
        c.row = row
        c.col = col
        m.step = step
        m.value = self.count
        self.open_step = step
        self.count += 1


cdef class Held:
    """A block that the writer holds: open, or full with values that are still reachable."""

    cdef uint64_t block
    cdef uint32_t position
    cdef bint apart  # it is packed when it takes no more rows
    cdef list last   # for each column of the group: number of its last value here


cdef const void *cell_at(RowWriter writer, const cell *c, uint64_t row_bytes) except NULL:
    """Where a step's value lies: for the next look at another one to be gone."""
    cdef const void *p = sr_block_cell(
        &writer.session.store.st, c.block, c.col, c.row, 1, row_bytes)
    cdef RowReader reader
    cdef sr_run run
    cdef Buffer value
    if p == NULL:
        # Packed: the writer alone changes that, and holds the block.
        reader = RowReader(writer.session.store)
        run.block = c.block
        run.col = c.col
        run.start = c.row
        run.count = 1
        run.stride = 1
        value = Buffer(row_bytes)
        if reader.copy_run(&run, value.base, row_bytes) != row_bytes:
            raise_status(SR_CORRUPT, "reading a step")
        writer.read_value = value
        p = value.base
    return p


cdef inline int append_row(sr_ses *ses, Group group, const void **src,
                           uint64_t episode) noexcept nogil:
    return sr_block_append(ses, group.block, group.n, group.total, src, episode)


cdef class Group:
    """Columns that come together, and the blocks of their rows."""

    cdef list columns
    cdef tuple numbers
    cdef uint32_t n
    cdef uint64_t *row_bytes
    cdef uint64_t total
    cdef uint32_t rows_cap, rows
    cdef uint64_t block
    cdef list held
    cdef Held current

    def __cinit__(self, list columns):
        cdef Column c
        self.columns = columns
        self.numbers = tuple([(<Column>c).number for c in columns])
        self.n = <uint32_t>len(columns)
        self.row_bytes = <uint64_t *>malloc(self.n * sizeof(uint64_t))
        if self.row_bytes == NULL:
            raise MemoryError
        for i, c in enumerate(columns):
            self.row_bytes[i] = c.row_bytes
            self.total += c.row_bytes
        self.held = []

    def __dealloc__(self):
        free(self.row_bytes)
