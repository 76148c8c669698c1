# Appending steps: whole ones, parts, many at once, or written in place.


@cython.no_gc_clear
cdef class StepWriter(RowWriter):
    """Steps over rows: which columns there are, and what a step has of them."""

    cdef AppendPlan plan                 # of the last whole step
    cdef readonly tuple row_columns      # numbers of the columns of the last row; None: no row
    cdef readonly bint in_place          # a step is being written in place
    cdef Group place_group               # of its columns

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
        cdef list leaves
        cdef AppendPlan plan = self.plan
        if sr_store_is_closed(&self.session.store.st):
            raise_status(SR_CLOSED, "append", self.session.store)
        if self.in_place:
            raise errors.WriterStateError(
                "Got a call while a step is being written in place; expected that to be over. "
                "Leave its `with next_step()` block first.")
        self.row_columns = None
        if (plan is not None and plan.flat and type(data) is dict
                and self.append_plain(<dict>data, plan)):
            pass
        else:
            leaves = []
            if plan is not None and flatten_by(data, plan.node, leaves):
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
        cdef PyObject *found[SR_COLUMNS_MAX]
        cdef const void *again
        cdef list columns = plan.columns
        cdef uint32_t i, n = group.n
        if not find_leaves(data, plan.node, n, found):
            return False
        for i in range(n):
            src[i] = plain_leaf(<Column>PyList_GET_ITEM(columns, i), found[i], scratch[i])
            if src[i] == NULL:
                return False
        if self.step_open:
            for i in range(n):
                if (<Column>columns[i]).open_step == self.step:
                    return False
        if self.episode == 0 or group.block == 0 or group.rows == group.rows_cap:
            # May wait for a lock without the GIL: look at the leaves anew after it.
            self.ensure_row(group)
            if not find_leaves(data, plan.node, n, found):
                return False
            for i in range(n):
                again = plain_leaf(<Column>PyList_GET_ITEM(columns, i), found[i], scratch[i])
                if again != src[i]:
                    return False
        cdef int rc = append_row(&self.session.ses, group, src, self.episode)
        if rc != SR_OK:
            raise_status(rc, "writing a step")
        for i in range(n):
            (<Column>PyList_GET_ITEM(columns, i)).push(self.step, group.block, group.rows, i)
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
                f"Got column {path} as one more; a writer has at most {SR_COLUMNS_MAX} columns. "
                "Merge some into one array.")
        keep, _ = self.configured.get(path, (self.keep_alive, None))
        cdef int code = dtype_code(array.dtype, path)
        if is_text(code):
            code = dtype_code(self.text_dtype(path, array.dtype), path)
        return Column(path, code, array.shape, keep, number)

    def text_dtype(self, path, dtype):
        """The dtype of a new column of text, of which the first value has this dtype."""
        return dtype

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
            raise errors.SignatureError(
                f"Got a step of {n} leaves; expected at most {SR_COLUMNS_MAX}. Merge some into "
                "one array.")
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

    # -------------------------------------------------------------- rows of declared columns

    def declare_column(self, tuple path, int code, tuple shape):
        """Make a column known before its first value. Gives its number."""
        cdef Column c
        self.enter()
        try:
            c = self.by_path.get(path)
            if c is None:
                if len(self.columns) >= SR_COLUMNS_MAX:
                    raise errors.SignatureError(
                        f"Got column {path} as one more; a writer has at most {SR_COLUMNS_MAX} "
                        "columns. Merge some into one array.")
                keep, _ = self.configured.get(path, (self.keep_alive, None))
                c = Column(path, code, shape, keep, <uint32_t>len(self.columns))
                self.by_path[path] = c
                self.columns.append(c)
            elif c.code != code or c.shape != shape:
                raise errors.SignatureError(
                    f"column {path} has dtype {dtype_name(dtype_from_code(c.code))} and shape "
                    f"{shape_text(c.shape)}, "
                    f"but was asked for with {dtype_name(dtype_from_code(code))} "
                    f"{shape_text(shape)}; expected what it has. Use another name for others.")
            return c.number
        finally:
            self.leave()

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
                raise errors.WriterStateError(
                    "Got rows while a step is open; expected it to be finished. Finish it by "
                    "append().")
            for k in numbers:
                if not 0 <= k < len(self.columns):
                    raise errors.SignatureError(
                        f"Got column {k}; expected one below {len(self.columns)}. Declare it "
                        "first.")
                if self.step_open and (<Column>self.columns[k]).open_step == self.step:
                    raise errors.SignatureError(
                        f"Field {(<Column>self.columns[k]).path} has already been set in the "
                        "active step by previous (partial) append call; expected once. Leave it "
                        "out.")
            if len(set(numbers)) != len(numbers) or len(arrays) != len(numbers):
                raise errors.SignatureError(
                    f"Got {len(arrays)} arrays for the columns {numbers}; expected one for each. "
                    "Give as many.")
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
                        f"column {group.numbers[c]}: Got {bufs[c].len} bytes; expected {n} rows of "
                        f"{group.row_bytes[c]}. Give as many.")
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

    # -------------------------------------------------------------- writing in place

    def place_open(self, tuple numbers):
        """The next row of the group of these columns, zeroed: a list of writable arrays that lie in
        the store.
        """
        self.enter()
        try:
            if self.in_place or self.step_open:
                raise errors.WriterStateError(step_open_already(self.in_place))
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
            arrays.append(new_array(
                c.shape, c.dtype, make_window(self, p, c.row_bytes, False), p, True))
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
