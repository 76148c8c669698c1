# Writing step by step: columns, history, blocks, items. The hot path of an actor.
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
    cdef object dtype, scalar_type  # what numpy gives for values of this type

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
        self.scalar_type = self.dtype.type if scalars_readable >> <uint32_t>code & 1 else None
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


cdef const void *cell_at(WriterCore writer, const cell *c, uint64_t row_bytes) except NULL:
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


# ---------------------------------------- plans: how a structure is taken apart

DEF NODE_LEAF = 0
DEF NODE_DICT = 1
DEF NODE_SEQUENCE = 2

cdef class Node:
    """A compiled structure: flattening by it costs a lookup a leaf."""

    cdef int kind
    cdef tuple keys
    cdef list children
    cdef type cls
    cdef Py_ssize_t n


cdef Node compile_node(object structure):
    cdef Node node = Node.__new__(Node)
    if type(structure) is dict:
        node.kind = NODE_DICT
        node.keys = tuple(sorted(structure))
        node.children = [compile_node(structure[k]) for k in node.keys]
    elif isinstance(structure, (list, tuple)):
        node.kind = NODE_SEQUENCE
        node.cls = type(structure)
        node.children = [compile_node(x) for x in structure]
    elif is_nested(structure):
        return None
    else:
        node.kind = NODE_LEAF
        return node
    for child in node.children:
        if child is None:
            return None
    node.n = len(node.children)
    return node


cdef int flatten_by(object data, Node node, list out) except -1:
    """Append the leaves to out. 0 if the structure is another one."""
    cdef Py_ssize_t i
    cdef object child
    cdef PyObject *found
    if node.kind == NODE_LEAF:
        if data is None or isinstance(data, (dict, list, tuple)):
            return 0
        out.append(data)
        return 1
    if node.kind == NODE_DICT:
        if type(data) is not dict:
            return 0
        if len(<dict>data) != node.n:
            return 0
        for i in range(node.n):
            found = PyDict_GetItemWithError(data, node.keys[i])
            if found == NULL:
                return 0
            child = <object>found
            if ((<Node>node.children[i]).kind == NODE_LEAF and child is not None
                    and not isinstance(child, (dict, list, tuple))):
                out.append(child)
            elif not flatten_by(child, <Node>node.children[i], out):
                return 0
        return 1
    if type(data) is not node.cls or len(data) != node.n:
        return 0
    for i in range(node.n):
        if not flatten_by(data[i], <Node>node.children[i], out):
            return 0
    return 1


cdef bint is_flat(Node node):
    """A dict of leaves?"""
    if node.kind != NODE_DICT:
        return False
    for child in node.children:
        if (<Node>child).kind != NODE_LEAF:
            return False
    return True


cdef class AppendPlan:
    cdef Node node
    cdef bint flat        # a dict of leaves, small enough to be copied with the GIL held
    cdef list columns     # Column a leaf
    cdef Group group


cdef class ItemPlan:
    """What a trajectory of this structure looked like last time: its schema, and what was checked.
    """

    cdef Node node
    cdef uint32_t n
    cdef uint64_t *signature_key   # column number << 1 | squeezed, a leaf
    cdef uint32_t schema
    cdef bint known, flat
    cdef int32_t table             # table whose signature it was checked against, -1: none
    cdef list lengths              # leading dimensions that the signature demands, None: any

    def __dealloc__(self):
        free(self.signature_key)


# ------------------------------------------------------------------ history

cdef class ColumnHistory:
    """The recent values of one column, indexed like a list of steps."""

    # Not counted: the writer holds its histories (`history` is kept), and must go when its user
    # drops it, at once and not at the next garbage collection, since its place in the store is one
    # of few. The writer clears it when it goes.
    cdef PyObject *writer
    cdef Column column

    cdef inline WriterCore owner(self):
        if self.writer == NULL:
            raise errors.WriterClosedError(
                "the writer of this history is gone; keep a reference to it")
        return <WriterCore><object>self.writer

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
        cdef Py_ssize_t n = self.owner().history_length()
        cdef Py_ssize_t start, stop, step, count
        if type(index) is slice:
            return self.slice(index, n)
        if isinstance(index, int):
            # Beyond its range: its ends, which no history reaches.
            start = PyNumber_AsSsize_t(index, NULL)
            if start < -n or start >= n:
                raise errors_index(self.column.path, index, n)
            return self.cells(start + n if start < 0 else start, 1, 1, True)
        if isinstance(index, list):
            return self.pick(<list>index, n)
        raise errors.ArgumentTypeError(
            f"history of column {self.column.path} is indexed by int, slice or list of int, got "
            f"{type(index).__name__}")

    cdef TrajectoryColumn slice(self, object index, Py_ssize_t n):
        cdef Py_ssize_t start, stop, step
        # None becomes 0 or the far end of the integers, in the direction of the step.
        try:
            PySlice_Unpack(index, &start, &stop, &step)
        except TypeError as e:
            raise errors.ArgumentTypeError(
                f"history of column {self.column.path}: {index!r}: {e}") from None
        except ValueError as e:
            raise errors.InvalidArgumentError(
                f"history of column {self.column.path}: {index!r}: {e}") from None
        # Unlike a list, a bound beyond the history is an error and not cut off: that would be
        # another trajectory than was asked for.
        if step > 0:
            start = bound_of(self.column.path, start, n, n)
            stop = n if stop == PY_SSIZE_T_MAX else bound_of(self.column.path, stop, n, n)
            return self.cells(
                start, step, (stop - start - 1) // step + 1 if stop > start else 0, False)
        start = n - 1 if start == PY_SSIZE_T_MAX else bound_of(self.column.path, start, n, n - 1)
        stop = -1 if stop == PY_SSIZE_T_MIN else bound_of(self.column.path, stop, n, n - 1)
        return self.cells(
            start, step, (start - stop - 1) // -step + 1 if start > stop else 0, False)

    cdef TrajectoryColumn cells(self, Py_ssize_t start, Py_ssize_t step, Py_ssize_t count,
                                bint squeeze):
        cdef TrajectoryColumn t = TrajectoryColumn.__new__(TrajectoryColumn)
        cdef WriterCore writer = self.owner()
        cdef int64_t base = writer.base_step + start
        cdef int64_t end = writer.base_step + writer.history_length()
        cdef int64_t first, last, i
        t.writer = writer
        t.column = self.column
        t.squeeze = squeeze
        t.n = count
        if count == 0:
            return t
        first = self.column.value_of_step(base, end)
        last = self.column.value_of_step(base + step * (count - 1), end) if count > 1 else first
        if first < 0 or last < 0:
            raise errors_none(self.column.path)
        t.first = first
        t.stride = step
        if last - first == step * (count - 1):
            return t
        # Steps without a value lie in between: name each value.
        t.values = <int64_t *>malloc(count * sizeof(int64_t))
        if t.values == NULL:
            raise MemoryError
        for i in range(count):
            t.values[i] = self.column.value_of_step(base + step * i, end)
            if t.values[i] < 0:
                raise errors_none(self.column.path)
        return t

    cdef TrajectoryColumn pick(self, list index, Py_ssize_t n):
        cdef TrajectoryColumn t = TrajectoryColumn.__new__(TrajectoryColumn)
        cdef WriterCore writer = self.owner()
        cdef Py_ssize_t i, k
        t.writer = writer
        t.column = self.column
        t.n = len(index)
        if t.n == 0:
            return t
        t.values = <int64_t *>malloc(t.n * sizeof(int64_t))
        if t.values == NULL:
            raise MemoryError
        for i in range(t.n):
            try:
                k = PyNumber_AsSsize_t(index[i], NULL)
            except TypeError:
                raise errors.ArgumentTypeError(
                    f"history of column {self.column.path} is indexed by list of int, "
                    f"got {index[i]!r} in it") from None
            if k < -n or k >= n:
                raise errors_index(self.column.path, index[i], n)
            t.values[i] = self.column.value_of_step(
                writer.base_step + (k + n if k < 0 else k), writer.base_step + n)
            if t.values[i] < 0:
                raise errors_none(self.column.path)
        return t


cdef inline Py_ssize_t bound_of(object path, Py_ssize_t bound, Py_ssize_t n,
                                Py_ssize_t most) except? -2:
    if bound < -n or bound > most:
        raise errors.InvalidArgumentError(
            f"slice bound {bound} reaches outside the history of column {path}, which has {n} "
            "steps; "
            "a trajectory column cannot contain any None data references")
    return bound + n if bound < 0 else bound


cdef errors_index(path, index, n):
    return HistoryIndexError(
        f"index {index} is outside the history of column {path}, which has {n} steps")


cdef errors_none(path):
    return errors.InvalidArgumentError(
        f"column {path}: cannot contain any None data references: a step asked for has no value "
        "of this column, or is older than "
        "num_keep_alive_refs and forgotten")


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

    cdef WriterCore writer
    cdef Column column
    cdef bint squeeze
    cdef Py_ssize_t n
    cdef int64_t first, stride
    cdef int64_t *values   # NULL: first, first + stride, ...

    def __init__(self, data_references, *, bint squeeze=False, path=None):
        cdef list references = list(data_references)
        cdef TrajectoryColumn r
        cdef Py_ssize_t i
        for x in references:
            if x is None:
                raise errors.InvalidArgumentError(
                    f"a trajectory column cannot contain any None data references: the column at "
                    f"path {path} got {references!r:.80}")
            if type(x) is not TrajectoryColumn or (<TrajectoryColumn>x).n != 1:
                raise errors.ArgumentTypeError(
                    f"a data reference is a TrajectoryColumn of one value, got {x!r}")
        if not references:
            raise errors.InvalidArgumentError(
                "a trajectory column must not be empty: 0 data references given")
        if squeeze and len(references) != 1:
            raise errors.InvalidArgumentError(
                f"a squeezed column has exactly one data reference, got {len(references)}; use "
                "squeeze=False")
        r = references[0]
        self.writer = r.writer
        self.column = r.column
        self.squeeze = squeeze
        self.n = len(references)
        free(self.values)
        self.values = <int64_t *>malloc(self.n * sizeof(int64_t))
        if self.values == NULL:
            raise MemoryError
        for i in range(self.n):
            r = references[i]
            if r.column is not self.column:
                raise errors.InvalidArgumentError(
                    f"references of columns {self.column.path} and {r.column.path} in one column")
            self.values[i] = r.value(0)

    def __dealloc__(self):
        free(self.values)

    cdef inline int64_t value(self, Py_ssize_t i) noexcept:
        return self.values[i] if self.values != NULL else self.first + self.stride * i

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
        cdef Py_ssize_t i
        if not isinstance(index, (int, slice, list)):
            raise errors.ArgumentTypeError(
                "a trajectory column is indexed by int, slice or list of int, got "
                f"{type(index).__name__}")
        try:
            if isinstance(index, slice):
                chosen = list(range(self.n)[index])
            else:
                chosen = [range(self.n)[k] for k in (index if isinstance(index, list) else [index])]
        except IndexError:
            raise HistoryIndexError(
                f"index {index} is outside a column {self.column.path} of {self.n} "
                "references") from None
        except ValueError as e:
            raise errors.InvalidArgumentError(
                f"column {self.column.path}: {index!r}: {e}") from None
        except TypeError as e:
            raise errors.ArgumentTypeError(
                f"column {self.column.path} is indexed by int, slice or list of int, got "
                f"{index!r}: {e}") from None
        t = TrajectoryColumn.__new__(TrajectoryColumn)
        t.writer = self.writer
        t.column = self.column
        t.squeeze = isinstance(index, int)
        t.n = len(chosen)
        t.values = <int64_t *>malloc(max(t.n, 1) * sizeof(int64_t))
        if t.values == NULL:
            raise MemoryError
        for i in range(t.n):
            t.values[i] = self.value(<Py_ssize_t>chosen[i])
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
        return _ndarray(self.shape, self.dtype, out)


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
        f"{where}column {path}: a data reference has expired: the value is older than "
        "num_keep_alive_refs or its episode's buffers were "
        "cleared; create the item sooner or raise num_keep_alive_refs")


# ------------------------------------------------------------------ the writer

cdef class Pending:
    """An item that the limiter holds back: complete, and held in the session's ledger."""

    cdef uint32_t table
    cdef sr_item item
    cdef uint32_t position
    # Of the item, where there is a receipt.
    cdef uint64_t number


@cython.no_gc_clear  # __dealloc__ needs `histories`
cdef class WriterCore:
    """State of one writer.

    Methods lock it, so that threads may share it; waiting is done by the caller without the lock.
    """

    # May native code append and create items without calling `append` and `create_item`? Not where
    # a subclass does more in them.
    in_native_code = True

    cdef readonly Session session
    cdef PyThread_type_lock lock
    cdef unsigned long owner             # thread that holds the lock, 0: none
    cdef readonly bint closed
    cdef readonly int64_t keep_alive
    cdef readonly dict tables            # name -> number
    cdef readonly list columns           # Column, in order of first sight
    cdef dict by_path                    # path -> Column
    cdef dict groups                     # tuple of column numbers -> Group
    cdef AppendPlan plan
    cdef list item_plans
    cdef dict configured                 # path -> (keep, max_chunk_length)
    cdef object block_rows_max           # max_chunk_length for all columns, None: by bytes
    # First step of the history; the step that is open or comes next.
    cdef int64_t base_step, step
    cdef readonly bint step_open
    cdef readonly int64_t episode_steps
    cdef uint64_t episode_base
    cdef uint64_t episodes
    cdef uint64_t episode
    cdef uint32_t episode_position
    cdef readonly object pending         # deque of Pending
    cdef readonly bint in_place          # a step is being written in place
    cdef readonly tuple row_columns      # numbers of the columns of the last row; None: no row
    cdef list histories                  # ColumnHistory, which do not count this writer
    cdef public object history_cache     # what `history` gives, None: to be made
    cdef Group place_group
    cdef uint32_t place_row
    cdef readonly bint compress          # full blocks are compressed
    cdef Buffer read_value               # of cell_at

    def __cinit__(self, *args, **kwargs):
        self.lock = PyThread_allocate_lock()
        if self.lock == NULL:
            raise MemoryError
        self.columns = []
        self.by_path = {}
        self.groups = {}
        self.item_plans = []
        self.configured = {}
        self.pending = deque()
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
        if self.lock != NULL:
            PyThread_free_lock(self.lock)

    cdef inline int enter(self) except -1:
        if self.session.store.fork_count != _fork_count:
            # Before the lock: a thread of the parent may have held it at the fork, and nobody gives
            # it back here.
            self.session.store.usable()
        if not PyThread_acquire_lock(self.lock, 0):
            if self.owner == PyThread_get_thread_ident():
                # By a leaf's __array__, or a signal handler, that calls the writer it is given to.
                raise errors.WriterStateError(
                    "the writer was called from within a call of its own, on the same thread")
            with nogil:
                PyThread_acquire_lock(self.lock, 1)
        self.owner = PyThread_get_thread_ident()
        if self.closed:
            self.owner = 0
            PyThread_release_lock(self.lock)
            raise errors.WriterClosedError(
                "Got a call on a closed writer: Close has been called on this writer; expected an "
                "open one; make a new one to go on writing")
        return 0

    cdef inline void leave(self) noexcept:
        self.owner = 0
        PyThread_release_lock(self.lock)

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

    # -------------------------------------------------------------- append

    def append(self, data, *, bint partial_step=False):
        """Append one step, or with partial_step=True a part of it: the next append goes into the
        same step.

        Args:
            data: Nested dict, list, tuple or namedtuple of arrays and scalars. A leaf that is None
                is left out of this step. The first value of a column fixes its dtype and shape.
            partial_step: Keep the step open.

        Raises:
            SignatureError: A leaf's dtype or shape is not its column's, or it was set in this step
                already. Nothing is changed.
            ArenaFullError: No memory. Nothing is changed.
        """
        self.enter()
        try:
            self.append_locked(data, partial_step)
        finally:
            self.leave()

    cdef int append_locked(self, object data, bint partial_step) except -1:
        cdef list leaves = []
        cdef AppendPlan plan = self.plan
        cdef Group group
        if sr_store_is_closed(&self.session.store.st):
            raise_status(SR_CLOSED, "append", self.session.store)
        if self.in_place:
            raise errors.WriterStateError(
                "a step is being written in place; leave its `with next_step()` block first")
        self.row_columns = None
        if (plan is not None and plan.flat and type(data) is dict
                and self.append_plain(<dict>data, plan)):
            pass
        elif plan is not None and flatten_by(data, plan.node, leaves):
            self.write_row(plan.group, plan.columns, leaves)
        else:
            self.append_slowly(data)
        self.step_open = True
        if not partial_step:
            self.close_step()
        return 0

    def append_again(self, data):
        """Append one step if it is just like the last one: the same containers and keys, each leaf
        what its column holds, without conversion. False where it is not: nothing was done.

        Raises:
            ArenaFullError: No memory. Nothing is changed.
        """
        cdef list leaves = []
        cdef AppendPlan plan
        cdef char scratch[SCRATCH]
        cdef Py_ssize_t i
        self.enter()
        try:
            plan = self.plan
            if sr_store_is_closed(&self.session.store.st):
                raise_status(SR_CLOSED, "append", self.session.store)
            if plan is None or self.in_place:
                return False
            if plan.flat:
                if type(data) is not dict or not self.append_plain(<dict>data, plan):
                    return False
            else:
                if not flatten_by(data, plan.node, leaves):
                    return False
                for i in range(len(leaves)):
                    if plain_leaf(
                            <Column>plan.columns[i], <PyObject *>leaves[i], scratch) == NULL:
                        return False
                self.write_row(plan.group, plan.columns, leaves)
            self.close_step()
            return True
        finally:
            self.leave()

    cdef bint append_plain(self, dict data, AppendPlan plan) except -1:
        """The common step: a flat dict of the same keys, each leaf just what its column holds.

        False: not so, nothing done. The dict may have keys that have no column here.

        No Python code runs and the GIL is kept from the first look at a leaf to the end of its
        copy, so the dict's references suffice.
        """
        cdef const void *src[SR_COLUMNS_MAX]
        cdef char scratch[SR_COLUMNS_MAX][SCRATCH]
        cdef Group group = plan.group
        cdef Node node = plan.node
        cdef uint32_t i, n = group.n
        cdef PyObject *found
        cdef Column c
        if PyDict_Size(data) != node.n:
            return False
        for i in range(n):
            found = PyDict_GetItemWithError(data, node.keys[i])
            if found == NULL:
                return False
            c = <Column>plan.columns[i]
            src[i] = plain_leaf(c, found, scratch[i])
            if src[i] == NULL or (self.step_open and c.open_step == self.step):
                return False
        if self.episode == 0 or group.block == 0 or group.rows == group.rows_cap:
            # May wait for a lock without the GIL: look at the leaves anew after it.
            self.ensure_row(group)
            for i in range(n):
                found = PyDict_GetItemWithError(data, node.keys[i])
                if (found == NULL
                        or plain_leaf(<Column>plan.columns[i], found, scratch[i]) != src[i]):
                    return False
        cdef int rc = append_row(&self.session.ses, group, src, self.episode)
        if rc != SR_OK:
            raise_status(rc, "writing a step")
        for i in range(n):
            (<Column>plan.columns[i]).push(self.step, group.block, group.rows, i)
        group.rows += 1
        self.row_columns = group.numbers
        return True

    cdef void close_step(self) noexcept:
        self.step_open = False
        self.step += 1
        self.episode_steps += 1

    cdef int append_slowly(self, object data) except -1:
        """A structure other than the last one, or one with gaps."""
        cdef list flat = flatten_with_path(data)
        cdef list given = [(path, leaf) for path, leaf in flat if leaf is not None]
        cdef list fresh = []
        cdef list columns = []
        cdef Column c
        cdef AppendPlan plan
        self.check_structure(data)
        for path, leaf in given:
            c = self.by_path.get(path)
            if c is None:
                c = self.new_column(path, leaf, <uint32_t>(len(self.columns) + len(fresh)))
                fresh.append(c)
            columns.append(c)
        if not columns:
            return 0
        key = tuple([(<Column>c).number for c in columns])
        group = self.groups.get(key)
        if group is None:
            group = Group(columns)
        self.write_row(group, columns, [leaf for _, leaf in given])
        # All of it has worked: keep what is new.
        for c in fresh:
            self.by_path[c.path] = c
            self.columns.append(c)
        self.groups[key] = group
        if fresh:
            self.structure_grew(data)
        if len(given) == len(flat):
            plan = AppendPlan.__new__(AppendPlan)
            plan.node = compile_node(data)
            plan.columns = columns
            plan.group = group
            if plan.node is not None:
                plan.flat = is_flat(plan.node) and (<Group>group).total < NOGIL_BYTES
            self.plan = plan if plan.node is not None else None
        return 0

    def check_structure(self, data):
        """Refuse data whose structure does not go together with that of the history.

        Nothing was changed yet.
        """
        check_new_structure(data, self.columns)

    def structure_grew(self, data):
        """New columns were seen: the structure of the history is now the union with that of `data`.
        """

    cdef Column new_column(self, tuple path, object leaf, uint32_t number):
        array = as_array(leaf, path)
        if number >= SR_COLUMNS_MAX:
            raise errors.SignatureError(
                f"column {path}: a writer has at most {SR_COLUMNS_MAX} columns")
        keep, _ = self.configured.get(path, (self.keep_alive, None))
        return Column(path, dtype_code(array.dtype, path), array.shape, keep, number)

    cdef int write_row(self, Group group, list columns, list leaves) except -1:
        """Check all leaves, then copy them into the next row of the group and publish it.

        All or nothing.
        """
        cdef Py_buffer bufs[SR_COLUMNS_MAX]
        cdef const void *src[SR_COLUMNS_MAX]
        cdef char scratch[SR_COLUMNS_MAX][SCRATCH]
        cdef uint32_t n = <uint32_t>len(leaves), i, got = 0
        cdef Column c
        cdef object leaf
        if n > SR_COLUMNS_MAX:
            raise errors.SignatureError(f"a step has {n} leaves; at most {SR_COLUMNS_MAX}")
        memset(bufs, 0, n * sizeof(Py_buffer))
        try:
            for i in range(n):
                c = <Column>columns[i]
                if self.step_open and c.open_step == self.step:
                    raise errors.SignatureError(
                        f"Field {c.path} has already been set in the active step by previous "
                        "(partial) append call and thus must be "
                        f"omitted or set to None but got: {leaves[i]!r}")
                got = i + 1
                src[i] = take_leaf(c, leaves[i], &bufs[i], scratch[i])
            self.ensure_row(group)
            self.copy_row(group, src)
            for i in range(n):
                (<Column>columns[i]).push(self.step, group.block, group.rows, i)
            group.rows += 1
            self.row_columns = group.numbers
        finally:
            for i in range(got):
                if <void *>bufs[i].obj != NULL:
                    PyBuffer_Release(&bufs[i])
        return 0

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

    def append_rows(self, tuple numbers, list arrays, Py_ssize_t n, bint close):
        """Append n rows of declared columns: row i of each array [n, ...] is one.

        Arrays are C-contiguous and of exactly the columns' dtypes and shapes; without columns,
        steps are only counted.

        Args:
            numbers: Of the columns.
            arrays: One for each.
            n: Rows; 1 unless each closes its step.
            close: Each row closes its step, else the step stays open.

        Raises:
            SignatureError: A column is not known, or has a value in this step already.
            InvalidArgumentError: An array has not exactly the bytes of n rows.
            ArenaFullError: No memory. The rows before are appended.
        """
        cdef Group group
        cdef Py_ssize_t i
        self.enter()
        try:
            if self.in_place or (n != 1 and not close):
                raise errors.WriterStateError("rows cannot be appended to an open step")
            for k in numbers:
                if not 0 <= k < len(self.columns):
                    raise errors.SignatureError(f"column {k} of {len(self.columns)}")
                if self.step_open and (<Column>self.columns[k]).open_step == self.step:
                    raise errors.SignatureError(
                        f"Field {(<Column>self.columns[k]).path} has already been set in the "
                        "active step by previous (partial) append call")
            if len(set(numbers)) != len(numbers) or len(arrays) != len(numbers):
                raise errors.SignatureError(f"{len(arrays)} arrays for the columns {numbers}")
            group = self.groups.get(numbers) if numbers else None
            if group is None and numbers:
                group = Group([self.columns[k] for k in numbers])
                self.groups[numbers] = group
            if group is not None:
                self.append_arrays(group, arrays, n, close)
            else:
                for i in range(n):
                    self.step_open = True
                    if close:
                        self.close_step()
        finally:
            self.leave()

    def stage_row(self, list buffers):
        """Append the bytes of the last row to bytearrays, one for each of `row_columns`."""
        cdef Py_ssize_t i = 0, at
        cdef Column c
        cdef cell *x
        self.enter()
        try:
            for number in self.row_columns:
                c = self.columns[number]
                x = &c.ring[(c.count - 1) & c.mask]
                at = PyByteArray_GET_SIZE(buffers[i])
                PyByteArray_Resize(buffers[i], at + <Py_ssize_t>c.row_bytes)
                memcpy(
                    PyByteArray_AS_STRING(buffers[i]) + at,
                    cell_at(self, x, c.row_bytes), c.row_bytes)
                i += 1
        finally:
            self.leave()

    def row_views(self):
        """The bytes of the last row, each of `row_columns`, where they are: up to the next row."""
        cdef Column c
        cdef list out = []
        self.enter()
        try:
            for number in self.row_columns:
                c = self.columns[number]
                out.append(memoryview(make_window(
                    self, cell_at(self, &c.ring[(c.count - 1) & c.mask], c.row_bytes),
                    c.row_bytes, True)))
        finally:
            self.leave()
        return out

    cdef int append_arrays(self, Group group, list arrays, Py_ssize_t n, bint close) except -1:
        cdef Py_buffer bufs[SR_COLUMNS_MAX]
        cdef const void *src[SR_COLUMNS_MAX]
        cdef uint32_t c, got = 0
        cdef Py_ssize_t i
        try:
            for c in range(group.n):
                PyObject_GetBuffer(arrays[c], &bufs[c], PyBUF_C_CONTIGUOUS)
                got += 1
                if <uint64_t>bufs[c].len != <uint64_t>n * group.row_bytes[c]:
                    raise errors.InvalidArgumentError(
                        f"column {group.numbers[c]}: {bufs[c].len} bytes for {n} rows of "
                        f"{group.row_bytes[c]}")
            for i in range(n):
                for c in range(group.n):
                    src[c] = <char *>bufs[c].buf + <uint64_t>i * group.row_bytes[c]
                self.ensure_row(group)
                self.copy_row(group, src)
                for c in range(group.n):
                    (<Column>group.columns[c]).push(self.step, group.block, group.rows, c)
                group.rows += 1
                self.step_open = True
                if close:
                    self.close_step()
        finally:
            for c in range(got):
                PyBuffer_Release(&bufs[c])
        return 0

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

    # -------------------------------------------------------------- writing in place

    def place_open(self, tuple numbers):
        """The next row of the group of these columns, zeroed: a list of writable arrays that lie in
        the store.
        """
        self.enter()
        try:
            if self.in_place or self.step_open:
                raise errors.WriterStateError(
                    "the step is open already; finish it before next_step()")
            return self.place_arrays(self.group_of([self.columns[k] for k in numbers]))
        finally:
            self.leave()

    cdef Group group_of(self, list columns):
        """The group of these columns, a new one if there is none."""
        key = tuple([(<Column>c).number for c in columns])
        group = self.groups.get(key)
        if group is None:
            group = Group(columns)
            self.groups[key] = group
        return group

    cdef list place_arrays(self, Group group):
        cdef list arrays = []
        cdef Column c
        cdef void *p
        cdef uint32_t i = 0
        self.ensure_row(group)
        for c in group.columns:
            p = sr_block_cell(
                &self.session.store.st, group.block, i, group.rows, 1, c.row_bytes)
            if p == NULL:
                raise_status(SR_CORRUPT, "writing a step")
            memset(p, 0, c.row_bytes)
            arrays.append(_ndarray(c.shape, c.dtype, make_window(self, p, c.row_bytes, False)))
            i += 1
        self.in_place = True
        self.place_group = group
        return arrays

    def place_close(self, bint keep):
        """Publish the row that was written in place, or drop it."""
        self.enter()
        try:
            self.place_end(keep)
        finally:
            self.leave()

    cdef bint place_end(self, bint keep) except -1:
        """Gives whether there is a new step."""
        cdef int rc
        if not self.in_place:
            return False
        self.in_place = False
        if keep:
            rc = sr_block_publish(&self.session.ses, self.place_group.block, 1, self.episode)
            if rc != SR_OK:
                raise_status(rc, "writing a step")
            for i, c in enumerate(self.place_group.columns):
                (<Column>c).push(
                    self.step, self.place_group.block, self.place_group.rows, <uint32_t>i)
            self.place_group.rows += 1
            self.row_columns = self.place_group.numbers
            self.close_step()
        self.place_group = None
        return keep

    def declare_column(self, tuple path, int code, tuple shape):
        """Make a column known before its first value. Gives its number."""
        cdef Column c
        self.enter()
        try:
            c = self.by_path.get(path)
            if c is None:
                if len(self.columns) >= SR_COLUMNS_MAX:
                    raise errors.SignatureError(
                        f"column {path}: a writer has at most {SR_COLUMNS_MAX} columns")
                keep, _ = self.configured.get(path, (self.keep_alive, None))
                c = Column(path, code, shape, keep, <uint32_t>len(self.columns))
                self.by_path[path] = c
                self.columns.append(c)
            elif c.code != code or c.shape != shape:
                raise errors.SignatureError(
                    f"column {path} has dtype {dtype_name(dtype_from_code(c.code))} and shape "
                    f"{shape_text(c.shape)}, "
                    f"but was asked for with {dtype_name(dtype_from_code(code))} "
                    f"{shape_text(shape)}")
            return c.number
        finally:
            self.leave()

    # -------------------------------------------------------------- items

    def create_item(self, table, priority, trajectory, timeout=None):
        """Make an item of references into the history and insert it; never blocks on the rate
        limiter.

        Args:
            table: Name of the table.
            priority: Its priority; see Table for what a table takes. None: the largest that the
                table has seen, see Client.max_priority, at the moment when the item gets in.
            trajectory: Nested structure of `TrajectoryColumn` (slices of `history`).
            timeout: Seconds to wait where the writer's window is full; None: for ever.

        Returns:
            The item's key, or None where the limiter holds it back: it then waits, in order, in the
            writer's window.

        Raises:
            TableNotFoundError, PriorityError, SignatureError, InvalidArgumentError,
                ArgumentTypeError: Nothing is changed.
            ArenaFullError: No memory for the item. Nothing is changed.
            DeadlineExceededError: The window is full still. Nothing is changed.
        """
        cdef sr_item item
        cdef uint32_t position = SR_NONE
        cdef uint64_t key = 0
        cdef int rc
        number = self.tables.get(table) if isinstance(table, str) else None
        if number is None:
            raise table_not_found(table, self.tables, for_item=True)
        cdef uint32_t t = number
        cdef double p = self.checked_priority(t, table, priority)
        if timeout is not None:
            timeout = limits.checked_timeout(timeout)
        if sr_store_is_closed(&self.session.store.st):
            raise_status(SR_CLOSED, "create_item", self.session.store)
        if self.pending:
            self.make_room("create_item", timeout)
        cdef list leaves = []
        cdef list foreign = None
        cdef ItemPlan plan
        if self.item_plans and type(trajectory) is dict and not self.pending:
            rc = self.insert_plain(<ItemPlan>self.item_plans[0], t, <dict>trajectory, p, &key)
            if rc == SR_OK:
                return key
        plan = self.match_plan(trajectory, leaves)
        if self.check_columns(leaves):
            foreign = []
        try:
            if foreign is not None:
                leaves = [
                    self.freeze(<TrajectoryColumn>x, i, foreign) for i, x in enumerate(leaves)]
            self.enter()
            try:
                self.identify(plan, t, table, trajectory, leaves)
                item.schema = plan.schema
                item.priority = p
                rc = self.refer_and_insert(t, leaves, &item, &position, &key, not self.pending)
                if self.session.store.swept(rc):
                    rc = self.refer_and_insert(t, leaves, &item, &position, &key, not self.pending)
                if rc == SR_OK:
                    return key
                if rc != SR_WOULD_BLOCK:
                    raise_status(rc, "create_item", self.session.store)
                self.hold_back(t, &item, position)
            finally:
                self.leave()
        finally:
            if foreign is not None:
                drop_foreign(foreign)
        self.window_grew()
        return None

    def replace_data(self, uint32_t t, str table, uint64_t key, trajectory, timeout=None):
        """Give the item of this key other data: True, False where it is gone, or the number of its
        structure where that is another one. Nothing is changed then.

        Waits where the table's extensions are behind, so many seconds (None: for ever); then
        DeadlineExceededError.
        """
        cdef list leaves = []
        cdef list foreign = []
        self.match_plan(trajectory, leaves)
        self.check_columns(leaves)
        try:
            leaves = [self.freeze(<TrajectoryColumn>x, i, foreign) for i, x in enumerate(leaves)]
            self.enter()
            try:
                check_alive(leaves)
                self.check_signature(t, table, trajectory, leaf_types(leaves, True))
                # Only looked for: what is refused leaves nothing in the store.
                schema = self.find_schema(trajectory, leaf_types(leaves, False))
                return self.refer_and_replace(
                    t, key, leaves, SR_NONE if schema is None else schema, timeout)
            finally:
                self.leave()
        finally:
            drop_foreign(foreign)

    cdef object refer_and_replace(self, uint32_t t, uint64_t key, list leaves, uint32_t schema,
                                  object timeout):
        """A trajectory record even where whole rows of one block would do: see sr_replace."""
        cdef uint32_t first_run[SR_COLUMNS_MAX + 1]
        cdef uint32_t flags[SR_COLUMNS_MAX]
        cdef uint32_t n = <uint32_t>len(leaves), n_runs = 0, i, position = 0, found = 0, other = 0
        cdef uint64_t off = 0
        cdef Py_ssize_t total = 0
        cdef int rc
        cdef sr_item item
        cdef sr_ses *ses = &self.session.ses
        cdef WaitLog log = None
        cdef double deadline = deadline_of(timeout)
        for i in range(n):
            total += (<TrajectoryColumn>leaves[i]).n
        cdef sr_run *runs = <sr_run *>malloc(<size_t>total * sizeof(sr_run))
        if runs == NULL:
            raise MemoryError
        try:
            for i in range(n):
                first_run[i] = n_runs
                flags[i] = SR_COL_SQUEEZED if (<TrajectoryColumn>leaves[i]).squeeze else 0
                n_runs += find_runs(<TrajectoryColumn>leaves[i], i, runs + n_runs)
            first_run[n] = n_runs
            check_runs(n_runs)
            with nogil:
                rc = sr_traj_new(ses, n, first_run, flags, runs, &off, &position)
            if self.session.store.swept(rc):
                rc = sr_traj_new(ses, n, first_run, flags, runs, &off, &position)
            if rc == SR_OK:
                memset(&item, 0, sizeof(item))
                item.ref = SR_REF(off, SR_KIND_TRAJ)
                try:
                    while True:
                        with nogil:
                            rc = sr_items_fit(ses.st, t, 1, &item)
                            if rc == SR_OK:
                                rc = sr_replace(
                                    ses, t, key, item.ref, schema, &found, &other)
                        if rc != SR_WOULD_BLOCK:
                            break
                        log = self.session.wait_for_room(
                            t, log, "replace_item", timeout, deadline)
                finally:
                    sr_release(ses, 1, &position)
        finally:
            free(runs)
        if rc == SR_INVALID and found:
            return other
        if rc != SR_OK:
            raise_status(rc, "replace_item", self.session.store)
        return bool(found)

    def check_target(self, table, priority):
        """Raise what create_item would say of this table and this priority."""
        number = self.tables.get(table) if isinstance(table, str) else None
        if number is None:
            raise table_not_found(table, self.tables, for_item=True)
        self.checked_priority(number, table, priority)

    cdef double checked_priority(self, uint32_t t, str table, object priority) except? -1.0:
        cdef double p
        if priority is None:
            return NAN  # which the core takes for the largest seen
        try:
            p = priority
        except TypeError:
            raise errors.ArgumentTypeError(
                f"priority must be a number, got {type(priority).__name__}: {priority!r}") from None
        except OverflowError:
            raise errors.PriorityError(
                f"Priority must fit a float64. Table {table!r} was given an int beyond "
                "that.") from None
        if not sr_priority_ok(&self.session.store.st, t, p):
            raise bad_priority(table, p)
        return p

    cdef int insert_plain(self, ItemPlan plan, uint32_t t, dict trajectory, double priority,
                          uint64_t *key) except -100:
        """The common item: a flat dict as last time, the same whole rows of one block in every
        column.

        SR_OK if it is in the table; SR_WOULD_BLOCK if it is not such an item, or the limiter holds
        it back: nothing was done.
        """
        cdef Node node = plan.node
        cdef uint32_t i, n = plan.n, done = 0, seq = 0
        cdef PyObject *found
        cdef TrajectoryColumn c
        cdef cell *first = NULL
        cdef cell *x
        cdef cell *y
        cdef sr_item item
        cdef int rc
        if (not plan.flat or not plan.known or plan.table != <int32_t>t
                or PyDict_Size(trajectory) != <Py_ssize_t>n):
            return SR_WOULD_BLOCK
        self.enter()
        try:
            for i in range(n):
                found = PyDict_GetItemWithError(trajectory, node.keys[i])
                if found == NULL or type(<object>found) is not TrajectoryColumn:
                    return SR_WOULD_BLOCK
                c = <TrajectoryColumn><object>found
                if (c.writer is not self or c.n == 0 or c.values != NULL
                        or (c.stride != 1 and c.n != 1)
                        or plan.signature_key[i] != signature_key(c)
                        or not c.column.alive(c.first) or not c.column.alive(c.first + c.n - 1)):
                    return SR_WOULD_BLOCK
                if (plan.lengths is not None and plan.lengths[i] is not None and not c.squeeze
                        and plan.lengths[i] != c.n):
                    return SR_WOULD_BLOCK
                x = &c.column.ring[c.first & c.column.mask]
                y = &c.column.ring[(c.first + c.n - 1) & c.column.mask]
                if i == 0:
                    first = x
                    item.row_count = row_count(c)
                if (x.block != first.block or x.row != first.row or x.col != i
                        or y.block != x.block or y.col != i
                        or <int64_t>y.row - <int64_t>x.row != c.n - 1
                        or item.row_count != row_count(c)):
                    return SR_WOULD_BLOCK
            if n == 0 or sr_block_columns(&self.session.store.st, first.block) != n:
                return SR_WOULD_BLOCK
            item.ref = SR_REF(first.block, SR_KIND_BLOCK)
            item.row_start = first.row
            item.priority = priority
            item.schema = plan.schema
            with nogil:
                rc = sr_items_fit(&self.session.store.st, t, 1, &item)
                if rc == SR_OK:
                    rc = sr_insert(&self.session.ses, t, 1, &item, key, &done, &seq)
            if rc == SR_FULL or rc == SR_NOSPACE:
                return SR_WOULD_BLOCK  # nothing was done: the long way looks for room
            if rc != SR_OK and rc != SR_WOULD_BLOCK:
                raise_status(rc, "create_item")
            return rc
        finally:
            self.leave()

    def accepts(self, data):
        """Would `append(data)` find its columns as they are? (Types and shapes, not values.)"""
        cdef Column c
        for path, leaf in flatten_with_path(data):
            c = self.by_path.get(path)
            if c is None:
                return not self.columns
            array = as_array(leaf, path)
            if dtype_code(array.dtype, path) != c.code or array.shape != c.shape:
                return False
        try:
            self.check_structure(data)
        except errors.SignatureError:
            return False  # the same paths in other containers
        return True

    def check_item(self, uint32_t t, str table, trajectory):
        """Raise what create_item would raise for this trajectory, signature included."""
        cdef list leaves = []
        cdef ItemPlan plan = self.match_plan(trajectory, leaves)
        self.check_columns(leaves)
        self.identify(plan, t, table, trajectory, leaves)

    def insert_newest(self, uint32_t t, uint32_t schema, double priority, timeout, describe):
        """Insert the step of the last `append_again` as an item of this structure, all its columns
        with a time dimension of 1. Waits as the limiter demands.

        The writer is the caller's alone. Gives the key.
        """
        cdef Group group = self.plan.group
        cdef sr_item item
        cdef uint64_t key = 0
        self.enter()
        try:
            item.ref = SR_REF(group.block, SR_KIND_BLOCK)
            item.row_start = <uint32_t>group.rows - 1
            item.row_count = 1
            item.schema = schema
            item.priority = priority
            insert_items(
                self.session, t, &item, 1, &key, 0, timeout, deadline_of(timeout), describe)
            return key
        finally:
            self.leave()

    def insert_now(self, uint32_t t, str table, double priority, trajectory, timeout, describe):
        """Insert an item, waiting as the limiter demands.

        The writer is the caller's alone. Gives the key.
        """
        cdef list leaves = []
        cdef ItemPlan plan = self.match_plan(trajectory, leaves)
        cdef sr_item item
        cdef uint32_t position = SR_NONE
        cdef uint64_t key = 0
        cdef int rc
        self.check_columns(leaves)
        self.enter()
        try:
            self.identify(plan, t, table, trajectory, leaves)
            item.schema = plan.schema
            item.priority = priority
            rc = self.refer_and_insert(t, leaves, &item, &position, &key, True)
            if self.session.store.swept(rc):
                rc = self.refer_and_insert(t, leaves, &item, &position, &key, True)
            if rc == SR_WOULD_BLOCK:
                try:
                    insert_items(
                        self.session, t, &item, 1, &key, 0, timeout, deadline_of(timeout), describe)
                finally:
                    self.drop_position(position)
            elif rc != SR_OK:
                raise_status(rc, "insert", self.session.store)
            return key
        finally:
            self.leave()

    def make_room(self, what, timeout):
        """Called before an item joins a window that is not empty: waits while it is full, at most
        so many seconds."""

    def window_grew(self):
        """Called after an item was held back by the limiter."""

    cdef int drop_position(self, uint32_t position) except -1:
        cdef int rc
        if position != SR_NONE:
            rc = sr_release(&self.session.ses, 1, &position)
            if rc != SR_OK:
                raise_status(rc, "releasing an item")
        return 0

    cdef int hold_back(self, uint32_t table, sr_item *item, uint32_t position) except -1:
        cdef Pending w = Pending.__new__(Pending)
        cdef int rc
        if position == SR_NONE:
            # Whole rows of a block: the item needs a hold of its own, since the window of the
            # history moves on.
            rc = sr_ledger_reserve(&self.session.ses, 1)
            if rc == SR_OK:
                rc = sr_hold(&self.session.ses, item.ref, &position)
            if rc != SR_OK:
                raise_status(rc, "create_item")
        w.table = table
        w.item = item[0]
        w.position = position
        w.number = self.session.ses.receipt_next
        self.pending.append(w)
        return 0

    def insert_pending(self):
        """Insert what the limiter lets in now, in order.

        None if nothing waits any more, else (table, futex sequence).
        """
        cdef Pending w
        cdef uint64_t key = 0
        cdef uint32_t done = 0, seq = 0
        cdef int rc
        self.enter()
        try:
            while self.pending:
                w = self.pending[0]
                self.session.ses.receipt_next = w.number
                with nogil:
                    rc = sr_insert(&self.session.ses, w.table, 1, &w.item, &key, &done, &seq)
                if rc == SR_WOULD_BLOCK:
                    return w.table, seq
                if self.session.store.swept(rc):
                    continue
                if rc != SR_OK:
                    raise_status(rc, "inserting a held-back item", self.session.store)
                self.pending.popleft()
                self.drop_position(w.position)
            return None
        finally:
            self.leave()

    def pending_table(self):
        """Number of the table that the first held-back item waits for, or None."""
        try:
            return (<Pending>self.pending[0]).table
        except IndexError:  # the thread was faster
            return None

    def pending_number(self):
        """Number of the first held-back item, as its receipt has it, or None."""
        try:
            return (<Pending>self.pending[0]).number
        except IndexError:
            return None

    cdef ItemPlan match_plan(self, object trajectory, list leaves):
        cdef ItemPlan candidate
        for candidate in self.item_plans:
            if flatten_by(trajectory, candidate.node, leaves):
                return candidate
            leaves.clear()
        return self.new_item_plan(trajectory, leaves)

    cdef ItemPlan new_item_plan(self, object trajectory, list leaves):
        cdef ItemPlan plan = ItemPlan.__new__(ItemPlan)
        leaves.extend(flatten(trajectory))
        if len(leaves) > SR_COLUMNS_MAX:
            raise errors.InvalidArgumentError(
                f"a trajectory of {len(leaves)} columns; at most {SR_COLUMNS_MAX}")
        plan.n = <uint32_t>len(leaves)
        plan.node = compile_node(trajectory)
        plan.table = -1
        plan.signature_key = <uint64_t *>calloc(max(plan.n, 1), sizeof(uint64_t))
        if plan.signature_key == NULL:
            raise MemoryError
        if plan.node is not None and plan.n > 0:
            plan.flat = is_flat(plan.node)
            # Replaced, not changed: another thread may be walking the old list.
            self.item_plans = [plan, *self.item_plans[:7]]
        return plan

    cdef bint check_columns(self, list leaves) except -1:
        """Refuse what is no item. True if columns of another writer are among them."""
        cdef TrajectoryColumn c
        cdef Py_ssize_t n_empty = 0
        cdef bint foreign = False
        for i, leaf in enumerate(leaves):
            if type(leaf) is not TrajectoryColumn:
                raise errors.ArgumentTypeError(
                    f"leaf {i} of the trajectory is a {type(leaf).__name__}; every leaf must be a "
                    "TrajectoryColumn, "
                    "that is a slice of writer.history")
            c = <TrajectoryColumn>leaf
            if c.n == 0:
                n_empty += 1
            if c.writer is not self:
                foreign = True
        if n_empty == len(leaves):
            raise errors.InvalidArgumentError("trajectory must not be empty.")
        if n_empty:
            bad = [(<TrajectoryColumn>x).column.path for x in leaves if len(x) == 0]
            raise errors.InvalidArgumentError(
                f"columns {bad} of the trajectory are empty; each must refer to a step at least")
        return foreign

    cdef int identify(self, ItemPlan plan, uint32_t t, str table, object trajectory,
                      list leaves) except -1:
        """Schema and signature check, both remembered for the next item of the same make."""
        cdef TrajectoryColumn c
        cdef uint32_t i
        cdef uint64_t key
        cdef bint same = plan.known
        for i in range(plan.n):
            c = <TrajectoryColumn>leaves[i]
            key = signature_key(c)
            if (key != plan.signature_key[i] or c.column.number == FOREIGN
                    or c.writer is not self):
                same = False
                plan.signature_key[i] = key
        if not same:
            # Known again only when the new structure has its number: the call may fail.
            plan.known = False
            plan.table = -1
            check_alive(leaves)
        if plan.table != <int32_t>t:
            plan.lengths = self.check_signature(t, table, trajectory, leaf_types(leaves, True))
            plan.table = <int32_t>t
        if plan.lengths is not None:
            for i in range(plan.n):
                c = <TrajectoryColumn>leaves[i]
                if plan.lengths[i] is not None and not c.squeeze and plan.lengths[i] != c.n:
                    plan.table = -1
                    self.check_signature(t, table, trajectory, leaf_types(leaves, True))
        if not plan.known:
            # Last: what is refused leaves nothing in the store.
            plan.schema = self.schema_for(trajectory, leaf_types(leaves, False))
            plan.known = True
        return 0

    def schema_for(self, trajectory, leaves):
        """Number of the structure in the store.

        Leaves are (dtype code, shape of a value, squeezed).
        """
        raise errors.ReverbError("a writer needs schema_for")

    def find_schema(self, trajectory, leaves):
        """Number of the structure in the store, None where no item has had it."""
        raise errors.ReverbError("a writer needs find_schema")

    def check_signature(self, table_number, table, trajectory, leaves):
        """Check against the table's signature; gives the leading dimensions it demands, or None."""
        return None

    cdef int refer_and_insert(self, uint32_t t, list leaves, sr_item *item, uint32_t *position,
                              uint64_t *key, bint now) except? -100:
        """Describe the rows: as whole rows of one block if they are that, else as a trajectory
        record of its own; then insert.

        Gives the core's status. On SR_WOULD_BLOCK (or with now=False) the record is held at
        `position` (SR_NONE: none).
        """
        cdef uint32_t first_run[SR_COLUMNS_MAX + 1]
        cdef uint32_t flags[SR_COLUMNS_MAX]
        cdef sr_run small[64]
        cdef sr_run *runs = small
        cdef uint32_t n = <uint32_t>len(leaves), n_runs = 0, i, done = 0, seq = 0
        cdef Py_ssize_t total = 0
        cdef uint64_t off = 0
        cdef int rc = SR_OK
        cdef sr_ses *ses = &self.session.ses
        for i in range(n):
            total += (<TrajectoryColumn>leaves[i]).n
        if total > 64:
            runs = <sr_run *>malloc(<size_t>total * sizeof(sr_run))
            if runs == NULL:
                raise MemoryError
        try:
            for i in range(n):
                first_run[i] = n_runs
                flags[i] = SR_COL_SQUEEZED if (<TrajectoryColumn>leaves[i]).squeeze else 0
                n_runs += find_runs(<TrajectoryColumn>leaves[i], i, runs + n_runs)
            first_run[n] = n_runs
            position[0] = SR_NONE
            item.row_start = item.row_count = 0
            check_runs(n_runs)
            if whole_rows(n, n_runs, flags, runs, &self.session.store.st):
                item.ref = SR_REF(runs[0].block, SR_KIND_BLOCK)
                item.row_start = runs[0].start
                item.row_count = runs[0].count | flags[0]
                with nogil:
                    rc = sr_items_fit(ses.st, t, 1, item)
                    if rc == SR_OK:
                        rc = sr_insert(ses, t, 1, item, key, &done, &seq) if now else SR_WOULD_BLOCK
                return rc
            with nogil:
                rc = sr_traj_new(ses, n, first_run, flags, runs, &off, position)
                if rc == SR_OK:
                    item.ref = SR_REF(off, SR_KIND_TRAJ)
                    rc = sr_items_fit(ses.st, t, 1, item)
                    if rc == SR_OK:
                        rc = sr_insert(ses, t, 1, item, key, &done, &seq) if now else SR_WOULD_BLOCK
                    if rc != SR_WOULD_BLOCK:
                        sr_release(ses, 1, position)
            return rc
        finally:
            if runs != small:
                free(runs)

    # -------------------------------------------------------------- references from another writer

    cdef TrajectoryColumn freeze(self, TrajectoryColumn c, number, list held):
        """A column of another writer as a copy of its references, whose blocks that writer's
        session holds until drop_foreign.
        """
        cdef TrajectoryColumn t
        cdef Column copy
        cdef Py_ssize_t i
        cdef uint32_t position = 0
        cdef uint64_t last = 0
        cdef cell *x
        cdef int rc
        if c.writer is self:
            return c
        if c.writer.session.store is not self.session.store:
            raise errors.InvalidArgumentError(
                f"column {c.column.path} belongs to a writer of another store")
        copy = Column(c.column.path, c.column.code, c.column.shape, c.n, FOREIGN)
        c.writer.enter()
        try:
            for i in range(c.n):
                if not c.column.alive(c.value(i)):
                    raise errors_expired(c.column.path, number)
                x = &c.column.ring[c.value(i) & c.column.mask]
                copy.push(i, x.block, x.row, x.col)
                if x.block == last:
                    continue
                last = x.block
                rc = sr_ledger_reserve(&c.writer.session.ses, 1)
                if rc == SR_OK:
                    rc = sr_hold(&c.writer.session.ses, SR_REF(last, SR_KIND_BLOCK), &position)
                if rc != SR_OK:
                    raise_status(rc, "create_item")
                held.append((c.writer, position))
        finally:
            c.writer.leave()
        t = TrajectoryColumn.__new__(TrajectoryColumn)
        t.writer = self
        t.column = copy
        t.squeeze = c.squeeze
        t.n = c.n
        t.stride = 1
        return t

    def last_of(self, path):
        """The newest value of the column at this path, as a column of length one."""
        cdef TrajectoryColumn t = TrajectoryColumn.__new__(TrajectoryColumn)
        t.writer = self
        t.column = self.by_path[path]
        t.n = 1
        t.first = t.column.count - 1
        return t

    def column_at(self, uint32_t number, bint squeeze, int64_t first, int64_t stride,
                  Py_ssize_t n, list values=None):
        """A trajectory column of values by their numbers: `values`, or first, first + stride, ...

        Whether they are within reach is for the item to check.
        """
        cdef TrajectoryColumn t = TrajectoryColumn.__new__(TrajectoryColumn)
        cdef Py_ssize_t i
        if number >= len(self.columns):
            raise errors.InvalidArgumentError(f"column {number} of {len(self.columns)}")
        if n < 1 or n > MAX_KEEP_ALIVE or (squeeze and n != 1):
            raise errors.InvalidArgumentError(f"a trajectory column of {n} values")
        t.writer = self
        t.column = self.columns[number]
        t.squeeze = squeeze
        t.n = n
        if values is None:
            if first < 0 or first >= MAX_VALUES or stride < -MAX_KEEP_ALIVE or (
                    stride > MAX_KEEP_ALIVE):
                raise errors.InvalidArgumentError(f"values from {first} in steps of {stride}")
            t.first = first
            t.stride = stride
            return t
        if len(values) != n:
            raise errors.InvalidArgumentError(f"{len(values)} values, expected {n}")
        t.values = <int64_t *>malloc(n * sizeof(int64_t))
        if t.values == NULL:
            raise MemoryError
        for i in range(n):
            t.values[i] = values[i]
        return t

    def item_references(self, uint32_t t, str table, priority, trajectory):
        """What create_item would insert: (priority, schema number, reference of each column).

        A reference is (writer, column number, squeezed, first value, stride, length, values), where
        values is None or a list of their numbers. Raises what create_item would raise.
        """
        cdef list leaves = []
        cdef list out = []
        cdef TrajectoryColumn c
        cdef double p = self.checked_priority(t, table, priority)
        cdef ItemPlan plan = self.match_plan(trajectory, leaves)
        self.check_columns(leaves)
        self.enter()
        try:
            self.identify(plan, t, table, trajectory, leaves)
            check_alive(leaves)
        finally:
            self.leave()
        for c in leaves:
            if c.writer.session.store is not self.session.store:
                raise errors.InvalidArgumentError(
                    f"column {c.column.path} belongs to a writer of another store")
            out.append((
                c.writer, c.column.number, c.squeeze, c.first, c.stride, c.n,
                None if c.values == NULL else [c.values[i] for i in range(c.n)]))
        return p, plan.schema, out

    # -------------------------------------------------------------- episodes and configuration

    def finish_episode(self, bint clear_buffers):
        """New episode, step 0; with clear_buffers all references into the history expire."""
        cdef Column c
        cdef Group g
        self.enter()
        try:
            if self.in_place:
                raise errors.WriterStateError(
                    "a step is being written in place; leave its `with next_step()` block first")
            if self.step_open:
                # The step is left as it is: what was given of it counts as a step.
                self.close_step()
            self.episode_steps = 0
            if self.episode != 0:
                self.drop_position(self.episode_position)
                self.episode = 0
                self.episodes += 1
            if clear_buffers:
                self.base_step = self.step
                for c in self.columns:
                    c.cleared = c.count
                for g in self.groups.values():
                    self.trim(g, True)
        finally:
            self.leave()

    def configure_column(self, tuple path, int64_t keep, max_rows):
        """Set a column's window and the longest block, before or after its first value."""
        cdef Column c
        cdef Group g
        self.enter()
        try:
            if self.in_place:
                raise errors.WriterStateError(
                    "a step is being written in place; leave its `with next_step()` block first")
            c = self.by_path.get(path)
            if c is not None:
                for g in self.groups.values():
                    if c in g.columns and g.block != 0 and g.rows > 0 and self.step_open:
                        raise errors.WriterStateError("Flush must be called before ApplyConfig.")
                self.regroup(c, keep)
            self.configured[path] = (keep, max_rows)
        finally:
            self.leave()

    cdef int regroup(self, Column c, int64_t keep) except -1:
        """Close the column's open blocks, so that the next row starts a block by the new rules."""
        cdef Group g
        for g in self.groups.values():
            if c in g.columns and g.block != 0:
                self.seal(g)
        if keep != c.keep:
            c.resize(keep)
        return 0

    def shut(self):
        """Drop everything and close. Gives the number of items that were held back and are lost."""
        cdef int lost
        if self.session.store.fork_count != _fork_count:
            # Gives up what this process has of it, without the lock: see enter().
            self.session.close()
            return 0
        if not PyThread_acquire_lock(self.lock, 0):
            if self.owner == PyThread_get_thread_ident():
                raise errors.WriterStateError(
                    "the writer was closed from within a call of its own, on the same thread")
            with nogil:
                PyThread_acquire_lock(self.lock, 1)
        if self.closed:
            PyThread_release_lock(self.lock)
            return 0
        if self.in_place:
            # Its arrays lie in memory that would go to others.
            PyThread_release_lock(self.lock)
            raise errors.WriterStateError(
                "a step is being written in place; leave its `with next_step()` block first")
        lost = len(self.pending)
        self.pending.clear()
        self.closed = True
        PyThread_release_lock(self.lock)
        try:
            for g in self.groups.values():
                if (<Group>g).block != 0 and not sr_store_is_closed(&self.session.store.st):
                    self.pack(<Group>g)
        finally:
            self.session.close()
        return lost


cdef int drop_foreign(list held) except -1:
    cdef WriterCore writer
    for writer, position in held:
        if writer.closed:
            continue  # its session has given everything back
        writer.enter()
        try:
            writer.drop_position(position)
        finally:
            writer.leave()
    return 0


# ------------------------------------------------------------------ leaves

cdef inline const void *plain_leaf(Column c, PyObject *leaf, char *scratch) noexcept:
    """Where the leaf's bytes are, if it is exactly what the column holds and needs no conversion;
    else NULL.
    """
    cdef type kind = type(<object>leaf)
    cdef sr_array_head *a
    cdef int i, overflow = 0
    if kind is array_type:
        a = <sr_array_head *>leaf
        if (not arrays_readable or a.descr != <PyObject *>c.dtype or a.nd != c.ndim
                or not a.flags & ARRAY_C_CONTIGUOUS):
            return NULL
        for i in range(c.ndim):
            if a.dimensions[i] != c.dims[i]:
                return NULL
        return a.data
    if c.ndim != 0:
        return NULL
    if kind is c.scalar_type:
        return SR_SCALAR_VALUE(leaf)
    if kind is float and c.code == 12:
        (<double *>scratch)[0] = <double><object>leaf
        return scratch
    if kind is bool and c.code == 1:
        scratch[0] = <object>leaf is True
        return scratch
    if kind is int and c.code == 5:
        (<int64_t *>scratch)[0] = PyLong_AsLongLongAndOverflow(<object>leaf, &overflow)
        return NULL if overflow else scratch
    return NULL


cdef const void *take_leaf(Column c, object leaf, Py_buffer *buf, char *scratch) except NULL:
    """Where the leaf's bytes are, checked against the column.

    May fill buf, which the caller releases, or scratch.
    """
    cdef type kind = type(leaf)
    cdef const void *plain = plain_leaf(c, <PyObject *>leaf, scratch)
    if plain != NULL:
        return plain
    if kind is int and c.code == 5 and c.ndim == 0:
        raise errors.SignatureError(
            f"Tensor of wrong dtype provided for column {c.path}. Got {leaf} which does not fit "
            "int64.")
    if not PyObject_CheckBuffer(leaf) or kind is bytes or kind is bytearray:
        leaf = as_array(leaf, c.path)
    try:
        PyObject_GetBuffer(leaf, buf, PyBUF_FORMAT | PyBUF_C_CONTIGUOUS)
    except (ValueError, BufferError):
        # Not contiguous, or a type that has no buffer form: as_array copies the one and refuses the
        # other.
        leaf = as_array(leaf, c.path)
        PyObject_GetBuffer(leaf, buf, PyBUF_FORMAT | PyBUF_C_CONTIGUOUS)
    if dtype_code_of(buf) == 0:
        # Another byte order, for example.
        PyBuffer_Release(buf)
        leaf = as_array(leaf, c.path)
        PyObject_GetBuffer(leaf, buf, PyBUF_FORMAT | PyBUF_C_CONTIGUOUS)
    return check_leaf(c, leaf, buf)


cdef const void *check_leaf(Column c, object leaf, Py_buffer *buf) except NULL:
    cdef int i
    cdef bint fits = buf.ndim == c.ndim
    if dtype_code_of(buf) != c.code:
        array = as_array(leaf, c.path)
        raise errors.SignatureError(
            f"Tensor of wrong dtype provided for column {c.path}. Got {dtype_name(array.dtype)} "
            "but expected "
            f"{dtype_name(dtype_from_code(c.code))}.")
    if fits:
        for i in range(c.ndim):
            if buf.shape[i] != c.dims[i]:
                fits = False
    if not fits:
        given = tuple([buf.shape[i] for i in range(buf.ndim)])
        raise errors.SignatureError(
            f"Tensor of incompatible shape provided for column {c.path}. Got {shape_text(given)} "
            "which is incompatible with "
            f"{shape_text(c.shape)}.")
    return buf.buf if buf.buf != NULL else <const void *>c.dims


# ------------------------------------------------------------------ runs

cdef int check_alive(list leaves) except -1:
    """Refuse columns with values that are not reachable any more."""
    cdef TrajectoryColumn c
    cdef Py_ssize_t i
    for number, x in enumerate(leaves):
        c = <TrajectoryColumn>x
        for i in range(c.n):
            if not c.column.alive(c.value(i)):
                raise errors_expired(c.column.path, number)
    return 0


cdef uint32_t find_runs(TrajectoryColumn c, uint32_t number, sr_run *runs) except? 0xffffffff:
    """Rows of a column as runs of equal stride within a block. Gives their number."""
    cdef uint32_t n = 0
    cdef Py_ssize_t i
    cdef int64_t value, mask = c.column.mask
    cdef cell *x
    cdef sr_run *r = NULL
    cdef int64_t next_row
    for i in range(c.n):
        value = c.value(i)
        if not c.column.alive(value):
            raise errors_expired(c.column.path, number)
        x = &c.column.ring[value & mask]
        if r != NULL and r.block == x.block and r.col == x.col:
            if r.count == 1:
                r.stride = <int32_t>(<int64_t>x.row - <int64_t>r.start)
                r.count = 2
                continue
            next_row = <int64_t>r.start + <int64_t>r.stride * r.count
            if next_row == <int64_t>x.row:
                r.count += 1
                continue
        r = &runs[n]
        n += 1
        r.block = x.block
        r.col = x.col
        r.start = x.row
        r.count = 1
        r.stride = 1
    return n


cdef inline int check_runs(uint32_t n) except -1:
    if n > RUNS_MAX:
        raise errors.InvalidArgumentError(
            f"the trajectory falls into {n} separate runs of steps; at most {RUNS_MAX} fit one "
            "item")
    return 0


cdef bint whole_rows(uint32_t n, uint32_t n_runs, uint32_t *flags, sr_run *runs,
                     sr_store *st) noexcept:
    """Are these columns exactly all the columns of one block, in order, over the same consecutive
    rows?
    """
    cdef uint32_t i
    if n_runs != n:
        return False
    for i in range(n):
        if (runs[i].block != runs[0].block or runs[i].start != runs[0].start
                or runs[i].count != runs[0].count or runs[i].stride != 1 or runs[i].col != i
                or flags[i] != flags[0]):
            return False
    return sr_block_columns(st, runs[0].block) == n
