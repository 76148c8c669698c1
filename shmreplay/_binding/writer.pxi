# A writer as Python sees it: episodes, configuration, closing, and references by number.


@cython.no_gc_clear
cdef class WriterCore(ItemWriter):
    """All that a writer of this machine does but for waiting, which its subclass in Python does."""

    # May native code append and create items without calling `append` and `create_item`? Not where
    # a subclass does more in them.
    in_native_code = True

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
        cdef int64_t *numbers
        cdef Py_ssize_t i
        if number >= len(self.columns):
            raise errors.InvalidArgumentError(
                f"Got column {number}; expected one below {len(self.columns)}. Declare it first.")
        if n < 1 or n > MAX_KEEP_ALIVE or (squeeze and n != 1):
            raise errors.InvalidArgumentError(
                f"Got a trajectory column of {n} values; expected 1 to {MAX_KEEP_ALIVE}. Split it.")
        t.writer = self
        t.column = self.columns[number]
        t.squeeze = squeeze
        t.n = n
        if values is None:
            if first < 0 or first >= MAX_VALUES or stride < -MAX_KEEP_ALIVE or (
                    stride > MAX_KEEP_ALIVE):
                raise errors.InvalidArgumentError(
                    f"Got values from {first} in steps of {stride}; expected a smaller stretch. "
                    "Split it.")
            t.first = first
            t.stride = stride
            return t
        if len(values) != n:
            raise errors.InvalidArgumentError(
                f"Got {len(values)} values; expected {n}. Give as many.")
        numbers = t.make_values()
        for i in range(n):
            numbers[i] = values[i]
        return t

    def item_references(self, uint32_t t, str table, priority, trajectory):
        """What create_item would insert: (priority, schema number, reference of each column).

        A reference is (writer, column number, squeezed, first value, stride, length, values), where
        values is None or a list of their numbers. Raises what create_item would raise.
        """
        cdef list leaves = []
        cdef list out = []
        cdef TrajectoryColumn c
        cdef double p = checked_priority(self.session.store, t, table, priority)
        cdef ItemPlan plan = self.match_plan(trajectory, leaves)
        check_columns(self, leaves)
        self.enter()
        try:
            self.identify(plan, t, table, trajectory, leaves)
            check_alive(leaves)
        finally:
            self.leave()
        for c in leaves:
            if c.writer.session.store is not self.session.store:
                raise errors.InvalidArgumentError(
                    f"Got column {c.column.path}, which belongs to a writer of another store; "
                    "expected one of this. Append the values to a writer of this store.")
            out.append((
                c.writer, c.column.number, c.squeeze, c.first, c.stride, c.n,
                None if c.numbers is None else [c.value(i) for i in range(c.n)]))
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
                    "Got a call while a step is being written in place; expected that to be over. "
                    "Leave its `with next_step()` block first.")
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
                    "Got a call while a step is being written in place; expected that to be over. "
                    "Leave its `with next_step()` block first.")
            c = self.by_path.get(path)
            if c is not None:
                for g in self.groups.values():
                    if c in g.columns and g.block != 0 and g.rows > 0 and self.step_open:
                        raise errors.WriterStateError(
                            "Flush must be called before ApplyConfig. Got configure() in the "
                            "middle of a step: call flush() first, or finish the step.")
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
        if pthread_mutex_trylock(&self.lock) != 0:
            if self.owner == pthread_self():
                raise errors.WriterStateError(
                    "Got close() of the writer from within a call of its own, on the same thread; "
                    "expected that call to end first. Close it after that.")
            with nogil:
                pthread_mutex_lock(&self.lock)
        if self.closed:
            pthread_mutex_unlock(&self.lock)
            return 0
        if self.in_place:
            # Its arrays lie in memory that would go to others.
            pthread_mutex_unlock(&self.lock)
            raise errors.WriterStateError(
                "Got a call while a step is being written in place; expected that to be over. "
                "Leave its `with next_step()` block first.")
        lost = len(self.pending)
        self.pending.clear()
        self.closed = True
        pthread_mutex_unlock(&self.lock)
        try:
            for g in self.groups.values():
                if (<Group>g).block != 0 and not sr_store_is_closed(&self.session.store.st):
                    self.pack(<Group>g)
        finally:
            self.session.close()
        return lost
