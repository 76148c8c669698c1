# Patterns over the writer of this machine: what `PatternEvaluator` says in Python, without a Python
# object a step. The rules are there.

DEF LEFT_STEP_INDEX = 0
DEF LEFT_STEPS_SINCE_APPLIED = 1
DEF LEFT_BUFFER_LENGTH = 2
DEF LEFT_IS_END_EPISODE = 3
DEF COMPARE_EQUAL = 0
DEF COMPARE_AT_LEAST = 1


cdef class StructuredCore:
    """Appends steps and makes the items of the patterns.

    Args:
        writer: An unused writer: the native one, or any that an evaluator works over.
        configs: What `compile_config` gives.
        evaluator: Applies the patterns where the writer is not the native one.
    """

    cdef WriterCore writer     # None: `evaluator` does it
    cdef readonly object evaluator
    cdef object configs
    cdef list used             # flat indices of the leaves that patterns or conditions look at
    cdef list columns          # Column of each of them, None: not seen yet
    cdef list plans
    cdef list paths            # of the leaves of a step, None: no step seen yet
    cdef Node node             # structure of the steps
    cdef readonly object step_structure  # the same; leaves do not matter
    cdef Group group           # of all used columns, once a whole step of it was seen
    cdef AppendPlan plain      # how to write a flat dict that has all used columns
    cdef int64_t used_steps    # steps with a value of a used column
    cdef int64_t newest_used   # the last of them
    cdef bint held             # an item was held back by the limiter
    cdef set told              # columns whose conditions are known to be unusable

    def __init__(self, writer, configs, evaluator):
        cdef PatternPlan plan
        self.configs = configs
        self.newest_used = -1
        if evaluator is not None:
            self.evaluator = evaluator
            return
        self.writer = writer
        self.told = set()
        self.used = used_columns(configs)
        self.columns = [None] * len(self.used)
        place = {index: i for i, index in enumerate(self.used)}
        self.plans = [PatternPlan(config, place) for config in configs]
        for plan in self.plans:
            plan.t = self.writer.tables[plan.table]

    @property
    def step_is_open(self):
        """True after a partial append whose step was not finished yet."""
        return self.evaluator.step_is_open if self.writer is None else self.writer.step_open

    def append(self, data, *, bint partial_step=False, timeout=None):
        """Append one step, or with partial_step=True a part of it, then make the items that it
        completes. Waits while the window of items that the limiter holds back is full.

        Args:
            data: Nested structure of arrays and scalars, of the same number of leaves in each step.
                A leaf that is None is left out. Leaves that no pattern and no condition names are
                not written.
            partial_step: Keep the step open: the next append goes into the same step.
            timeout: Seconds to wait where the window is full; None: for ever.

        Raises:
            SignatureError: The number of leaves, or a leaf's dtype or shape, is not that of the
                steps before. Nothing is changed.
            WriterStateError: A leaf was set in this step already. Nothing is changed.
            ArenaFullError: No memory. Nothing is changed, or the step is appended and lacks items.
            PriorityError: A priority made of TD errors is none. The step is appended and lacks the
                item.
            DeadlineExceededError: The window is full still. Nothing is changed.
        """
        cdef WriterCore w = self.writer
        if timeout is not None:
            timeout = limits.checked_timeout(timeout)
        if w is None:
            self.evaluator.append(data, partial_step, timeout)
            return
        if w.pending:
            w.make_room("append", timeout)
        w.enter()
        try:
            self.append_locked(data, partial_step)
        finally:
            w.leave()
            if self.held:
                self.held = False
                w.window_grew()

    cdef int append_locked(self, object data, bint partial_step) except -1:
        cdef WriterCore w = self.writer
        if sr_store_is_closed(&w.session.store.st):
            raise_status(SR_CLOSED, "append", w.session.store)
        if w.in_place:
            raise errors.WriterStateError(
                "Got a call while a step is being written in place; expected that to be over. "
                "Leave its `with next_step()` block first.")
        if ((self.plain is not None and type(data) is dict
                and w.append_plain(<dict>data, self.plain)) or self.append_slowly(data)):
            if self.newest_used != w.step:
                self.newest_used = w.step
                self.used_steps += 1
        w.step_open = True
        try:
            self.apply(w.step, w.episode_steps, False)
        finally:
            if not partial_step:
                w.close_step()
        return 0

    def place_open(self):
        """The next step: its leaves as writable arrays of zeros that lie in the store, None for
        those that no pattern looks at.
        """
        cdef WriterCore w = self.writer
        cdef list arrays
        if w.pending:
            w.make_room("next_step", None)
        w.enter()
        try:
            if sr_store_is_closed(&w.session.store.st):
                raise_status(SR_CLOSED, "next_step", w.session.store)
            if self.paths is None or None in self.columns:
                raise step_unknown()
            if w.in_place or w.step_open:
                raise errors.WriterStateError(step_open_already(w.in_place))
            group = w.group_of(self.columns) if self.group is None else self.group
            arrays = [None] * len(self.paths)
            for i, array in zip(self.used, w.place_arrays(group)):
                arrays[i] = array
        finally:
            w.leave()
        return arrays

    def place_close(self, bint keep):
        """Publish the step that was written in place and make the items that it completes, or drop
        it.
        """
        cdef WriterCore w = self.writer
        w.enter()
        try:
            if w.place_end(keep):
                self.newest_used = w.step - 1
                self.used_steps += 1
                self.apply(w.step - 1, w.episode_steps - 1, False)
        finally:
            w.leave()
            if self.held:
                self.held = False
                w.window_grew()

    def apply_at_end(self):
        """Make the items of patterns that fire where the episode ends."""
        cdef WriterCore w = self.writer
        if w is None:
            self.evaluator.apply_at_end()
            return
        w.enter()
        try:
            if w.step_open:
                self.apply(w.step, w.episode_steps, True)
            elif w.episode_steps > 0:
                self.apply(w.step - 1, w.episode_steps - 1, True)
        finally:
            w.leave()
            if self.held:
                self.held = False
                w.window_grew()

    # -------------------------------------------------------------- append

    cdef bint append_slowly(self, object data) except -1:
        """Anything but a flat dict of plain leaves. True if a used column got a value."""
        cdef list leaves = []
        cdef list given
        if self.node is None or not flatten_with_gaps(data, self.node, leaves):
            return self.append_new(data)
        given = self.given_of(leaves)
        if given is None:
            return self.append_new(data)
        cdef bint whole = len(given) == len(self.used)
        if given:
            try:
                if whole and self.group is not None:
                    self.writer.write_row(
                        self.group, self.columns, [leaves[i] for i in self.used])
                else:
                    self.write_some(leaves, given)
            except errors.ReverbError as e:
                raise relabelled(e, flatten_with_path(data)) from None
        if whole and self.group is None:
            self.learn(data, True)
        return len(given) > 0

    cdef list given_of(self, list leaves):
        """Used columns (their positions) that have a value; None if one of them is new, or has a
        value of this step already.
        """
        cdef list given = []
        cdef Py_ssize_t i
        for i in range(len(self.used)):
            if leaves[self.used[i]] is None:
                continue
            if self.columns[i] is None:
                return None
            if self.writer.step_open and (<Column>self.columns[i]).open_step == self.writer.step:
                return None
            given.append(i)
        return given

    cdef bint append_new(self, object data) except -1:
        """A structure other than the last one, or new columns, or something wrong."""
        flat = flatten_with_path(data)
        check_step(flat, self.paths, self.used, self.configs)
        cdef list given = []   # positions among the used columns
        cdef Py_ssize_t i
        for i in range(len(self.used)):
            index = self.used[i]
            path, leaf = flat[index]
            if leaf is None:
                continue
            given.append(i)
            if self.columns[i] is None:
                check_new_column(self.configs, index, path, leaf)
            elif self.writer.step_open and (<Column>self.columns[i]).open_step == self.writer.step:
                raise set_twice(index, path)
        if given:
            try:
                self.write_some([leaf for _, leaf in flat], given)
            except errors.ReverbError as e:
                raise relabelled(e, flat) from None
        self.paths = [path for path, _ in flat]
        self.learn(data, len(given) == len(self.used))
        return len(given) > 0

    cdef int write_some(self, list leaves, list given) except -1:
        """Write these of the used columns."""
        cdef WriterCore w = self.writer
        cdef list columns = [self.columns[i] for i in given]
        cdef Group group = None
        if None not in columns:
            group = w.groups.get(tuple([(<Column>c).number for c in columns]))
        if group is not None:
            w.write_row(group, columns, [leaves[self.used[i]] for i in given])
            return 0
        w.append_slowly({self.used[i]: leaves[self.used[i]] for i in given})
        for i in given:
            self.columns[i] = w.by_path[(self.used[i],)]
        return 0

    cdef int learn(self, object data, bint whole) except -1:
        """Remember the structure of a step; of a whole one also how to write it at once."""
        cdef Node keys
        self.node = compile_node(data)
        self.step_structure = without_values(data)
        self.group = None
        self.plain = None
        if not whole:
            return 0
        self.group = self.writer.groups.get(tuple([(<Column>c).number for c in self.columns]))
        if self.node is None or not is_flat(self.node) or self.group.total >= NOGIL_BYTES:
            return 0
        keys = Node.__new__(Node)
        keys.kind = NODE_DICT
        keys.keys = tuple([self.node.keys[i] for i in self.used])
        keys.n = self.node.n
        self.plain = AppendPlan.__new__(AppendPlan)
        self.plain.node = keys
        self.plain.flat = True
        self.plain.columns = self.columns
        self.plain.group = self.group
        return 0

    # -------------------------------------------------------------- patterns

    cdef int apply(self, int64_t newest, int64_t step_index, bint at_end) except -1:
        cdef PatternPlan plan
        if self.newest_used != newest:
            return 0
        for plan in self.plans:
            if (plan.fired != newest and self.holds(plan, newest, step_index, at_end)
                    and plan.find_cells(self.writer, self.columns, newest)):
                self.make_item(plan, newest)
                plan.fired = newest
                plan.fired_at = self.used_steps
        return 0

    cdef bint holds(self, PatternPlan plan, int64_t newest, int64_t step_index,
                    bint at_end) except -1:
        cdef pattern_condition *c
        cdef uint32_t i
        cdef int64_t value = 0
        cdef bint beyond, met
        for i in range(plan.n_conditions):
            c = &plan.conditions[i]
            beyond = False
            if c.left == LEFT_STEP_INDEX:
                value = step_index
            elif c.left == LEFT_STEPS_SINCE_APPLIED:
                value = self.used_steps - plan.fired_at
            elif c.left == LEFT_BUFFER_LENGTH:
                value = newest + 1 - self.writer.base_step
            elif c.left == LEFT_IS_END_EPISODE:
                value = at_end
            elif not self.read_scalar(c.column, newest, &value, &beyond):
                return False
            if c.compare == COMPARE_EQUAL:
                met = value == c.a and not beyond
            elif c.compare == COMPARE_AT_LEAST:
                met = value >= c.a or beyond
            elif beyond:
                met = <int64_t>(<uint64_t>value % <uint64_t>c.a) == c.b
            else:
                met = value % c.a == c.b
            if met == c.inverse:
                return False
        return True

    cdef bint read_scalar(self, uint32_t i, int64_t newest, int64_t *value,
                          bint *beyond) except -1:
        """The integer that the newest step has in a column, if it has one.

        beyond: it is past int64, and the bits are those of a uint64.
        """
        cdef Column c = self.columns[i]
        cdef int64_t number
        cdef cell *x
        cdef const void *p
        if c is None:
            return False
        number = c.value_of_step(newest, newest + 1)
        if number < 0:
            return False
        x = &c.ring[number & c.mask]
        p = cell_at(self.writer, x, c.row_bytes)
        if c.code > 9 or c.row_bytes != <uint64_t>c.dtype.itemsize:
            if i not in self.told:
                self.told.add(i)
                told_unusable(self.used[i], c.dtype, c.shape)
            return False
        if c.code == 1 or c.code == 6:
            value[0] = (<uint8_t *>p)[0]
        elif c.code == 2:
            value[0] = (<int8_t *>p)[0]
        elif c.code == 3:
            value[0] = (<int16_t *>p)[0]
        elif c.code == 4:
            value[0] = (<int32_t *>p)[0]
        elif c.code == 7:
            value[0] = (<uint16_t *>p)[0]
        elif c.code == 8:
            value[0] = (<uint32_t *>p)[0]
        else:
            value[0] = (<int64_t *>p)[0]
            beyond[0] = c.code == 9 and value[0] < 0
        return True

    # -------------------------------------------------------------- items

    cdef int make_item(self, PatternPlan plan, int64_t newest) except -1:
        cdef WriterCore w = self.writer
        cdef sr_item item
        cdef uint64_t key = 0
        cdef uint32_t position = SR_NONE
        cdef int rc
        if not plan.known:
            self.identify(plan)
        item.priority = plan.weight
        if plan.td_column >= 0:
            item.priority = plan.td_priority(w, self.columns, newest)
        item.schema = plan.schema
        if plan.whole_rows(w, self.columns, &item):
            rc = sr_items_fit(&w.session.store.st, plan.t, 1, &item)
            if rc == SR_OK and w.pending:
                rc = SR_WOULD_BLOCK
            elif rc == SR_OK:
                rc = insert_one(&w.session.ses, plan.t, &item, &key)
        else:
            rc = refer_and_insert(
                w.session, plan.t, plan.trajectory(w, self.columns, newest), &item, &position, &key,
                not w.pending)
        if rc == SR_WOULD_BLOCK:
            w.hold_back(plan.t, &item, position)
            self.held = True
        elif rc != SR_OK:
            raise_status(rc, "append")
        return 0

    cdef int identify(self, PatternPlan plan) except -1:
        """Check the table's signature, and number the structure. Once is enough: columns keep their
        type and patterns their length."""
        cdef Column c
        cdef uint32_t i
        cdef list whole = []
        cdef list values = []
        for i in range(plan.n_nodes):
            c = self.columns[plan.nodes[i].column]
            squeeze = plan.nodes[i].squeezed != 0
            values.append((c.code, c.shape, squeeze))
            whole.append(
                (c.code, c.shape if squeeze else (plan.nodes[i].count, *c.shape), squeeze))
        self.writer.check_signature(plan.t, plan.table, plan.structure, whole)
        plan.schema = self.writer.schema_for(plan.structure, values)
        plan.known = True
        return 0
