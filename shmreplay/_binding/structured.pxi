# Patterns over the writer of this machine: what `PatternEvaluator` says in Python, without a Python
# object a step. The rules are there.

DEF LEFT_STEP_INDEX = 0
DEF LEFT_STEPS_SINCE_APPLIED = 1
DEF LEFT_BUFFER_LENGTH = 2
DEF LEFT_IS_END_EPISODE = 3
DEF COMPARE_EQUAL = 0
DEF COMPARE_AT_LEAST = 1

cdef struct pattern_node:
    uint32_t column   # position among the used columns
    int64_t first     # step of the first cell; 0 is the newest
    int64_t step
    int64_t count
    uint32_t squeezed

cdef struct pattern_condition:
    int left
    int compare
    uint32_t column
    int64_t a
    int64_t b
    bint inverse


cdef class PatternPlan:
    """A config in numbers, and when it made its last item."""

    cdef str table
    cdef uint32_t t
    cdef object structure
    cdef uint32_t n_nodes, n_conditions
    cdef pattern_node *nodes
    cdef pattern_condition *conditions
    cdef int64_t *values    # scratch: number of each column's first value
    cdef double weight
    cdef int64_t td_column  # position among the used columns, -1: the priority is `weight`
    cdef int64_t fired      # step of the last item
    cdef int64_t fired_at   # the same in used steps
    cdef bint known         # `schema` and signature are settled
    cdef uint32_t schema

    def __cinit__(self, config, dict place):
        cdef uint32_t i
        self.table = config.table
        self.structure = config.structure
        self.n_nodes = <uint32_t>len(config.nodes)
        self.n_conditions = <uint32_t>len(config.conditions)
        self.nodes = <pattern_node *>calloc(self.n_nodes, sizeof(pattern_node))
        self.values = <int64_t *>calloc(self.n_nodes, sizeof(int64_t))
        self.conditions = <pattern_condition *>calloc(
            max(self.n_conditions, 1), sizeof(pattern_condition))
        if self.nodes == NULL or self.values == NULL or self.conditions == NULL:
            raise MemoryError
        for i, node in enumerate(config.nodes):
            self.nodes[i].column = place[node.column]
            self.nodes[i].first = node.first
            self.nodes[i].step = node.step
            self.nodes[i].count = node.length
            self.nodes[i].squeezed = SR_COL_SQUEEZED if node.squeeze else 0
        for i, condition in enumerate(config.conditions):
            self.conditions[i].left = condition.left
            self.conditions[i].compare = condition.compare
            self.conditions[i].column = place.get(condition.column, 0)
            self.conditions[i].a = condition.a
            self.conditions[i].b = condition.b
            self.conditions[i].inverse = condition.inverse
        self.weight = config.weight
        # A column that no pattern has gives priority 0.
        self.td_column = -1 if config.td_column < 0 else place.get(config.td_column, len(place))
        self.fired = -1

    def __dealloc__(self):
        free(self.nodes)
        free(self.values)
        free(self.conditions)


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
                "a step is being written in place; leave its `with next_step()` block first")
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
                raise errors.WriterStateError(
                    "the step is open already; finish it before next_step()")
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
                    and self.find_cells(plan, newest)):
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

    cdef bint find_cells(self, PatternPlan plan, int64_t newest) except -1:
        """Are all cells of the pattern there? Notes each column's first value."""
        cdef pattern_node *node
        cdef Column c
        cdef uint32_t i
        cdef int64_t k, first, last
        for i in range(plan.n_nodes):
            node = &plan.nodes[i]
            c = <Column>self.columns[node.column] if self.columns[node.column] is not None else None
            if c is None or newest + node.first < self.writer.base_step:
                return False
            first = c.value_of_step(newest + node.first, newest + 1)
            if first < 0:
                return False
            plan.values[i] = first
            if node.count == 1:
                continue
            k = node.step * (node.count - 1)
            last = c.value_of_step(newest + node.first + k, newest + 1)
            if last < 0:
                return False
            if last - first == k:
                continue   # no step without a value in between
            plan.values[i] = -1
            for k in range(1, node.count - 1):
                if c.value_of_step(newest + node.first + node.step * k, newest + 1) < 0:
                    return False
        return True

    # -------------------------------------------------------------- items

    cdef int make_item(self, PatternPlan plan, int64_t newest) except -1:
        cdef WriterCore w = self.writer
        cdef sr_item item
        cdef uint64_t key = 0
        cdef uint32_t position = SR_NONE, done = 0, seq = 0
        cdef int rc
        if not plan.known:
            self.identify(plan)
        item.priority = plan.weight
        if plan.td_column >= 0:
            item.priority = self.td_priority(plan, newest)
        item.schema = plan.schema
        if self.whole_rows(plan, &item):
            rc = sr_items_fit(&w.session.store.st, plan.t, 1, &item)
            if rc == SR_OK and w.pending:
                rc = SR_WOULD_BLOCK
            elif rc == SR_OK:
                with nogil:
                    rc = sr_insert(&w.session.ses, plan.t, 1, &item, &key, &done, &seq)
        else:
            rc = w.refer_and_insert(
                plan.t, self.trajectory(plan, newest), &item, &position, &key, not w.pending)
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

    cdef bint whole_rows(self, PatternPlan plan, sr_item *item) noexcept:
        """Is it all columns of one block, in order, over the same consecutive rows?"""
        cdef pattern_node *node
        cdef Column c
        cdef cell *x
        cdef cell *y
        cdef cell *top = NULL
        cdef uint32_t i
        for i in range(plan.n_nodes):
            node = &plan.nodes[i]
            if plan.values[i] < 0 or (node.step != 1 and node.count != 1):
                return False
            c = <Column>self.columns[node.column]
            x = &c.ring[plan.values[i] & c.mask]
            y = &c.ring[(plan.values[i] + node.count - 1) & c.mask]
            if i == 0:
                top = x
                item.row_count = <uint32_t>node.count | node.squeezed
            if (x.block != top.block or x.row != top.row or x.col != i
                    or y.block != x.block or <int64_t>y.row - <int64_t>x.row != node.count - 1
                    or item.row_count != (<uint32_t>node.count | node.squeezed)):
                return False
        if sr_block_columns(&self.writer.session.store.st, top.block) != plan.n_nodes:
            return False
        item.ref = SR_REF(top.block, SR_KIND_BLOCK)
        item.row_start = top.row
        return True

    cdef list trajectory(self, PatternPlan plan, int64_t newest):
        """The columns of the item."""
        cdef list columns = []
        cdef TrajectoryColumn t
        cdef pattern_node *node
        cdef uint32_t i
        cdef int64_t k
        for i in range(plan.n_nodes):
            node = &plan.nodes[i]
            t = TrajectoryColumn.__new__(TrajectoryColumn)
            t.writer = self.writer
            t.column = self.columns[node.column]
            t.squeeze = node.squeezed != 0
            t.n = node.count
            t.first = plan.values[i]
            t.stride = node.step
            if t.first < 0:
                t.values = <int64_t *>malloc(node.count * sizeof(int64_t))
                if t.values == NULL:
                    raise MemoryError
                for k in range(node.count):
                    t.values[k] = t.column.value_of_step(
                        newest + node.first + node.step * k, newest + 1)
            columns.append(t)
        return columns

    cdef double td_priority(self, PatternPlan plan, int64_t newest) except? -1.0:
        """w * max(abs(x)) + (1 - w) * mean(abs(x)) over the item's values of a column."""
        cdef pattern_node *node
        cdef Column c
        cdef cell *x
        cdef uint32_t i
        cdef int64_t k, number, n = 0
        cdef double value, total = 0.0, highest = 0.0, priority
        for i in range(plan.n_nodes):
            node = &plan.nodes[i]
            if node.column != plan.td_column:
                continue
            c = self.columns[node.column]
            for k in range(node.count):
                number = c.value_of_step(newest + node.first + node.step * k, newest + 1)
                x = &c.ring[number & c.mask]
                value = fabs(number_at(
                    cell_at(self.writer, x, c.row_bytes), c.code))
                n += 1
                total += value
                if not value <= highest:
                    highest = value   # NaN too
        if n == 0:
            return 0.0
        priority = plan.weight * highest + (1.0 - plan.weight) * (total / n)
        if not sr_priority_ok(&self.writer.session.store.st, plan.t, priority):
            raise bad_priority(plan.table, priority)
        return priority


cdef inline double number_at(const void *p, int code) noexcept:
    """A float32, float64, int32 or int64, as `check_new_column` lets in."""
    if code == 4:
        return (<int32_t *>p)[0]
    if code == 5:
        return <double>(<int64_t *>p)[0]
    if code == 11:
        return (<float *>p)[0]
    return (<double *>p)[0]


cdef int flatten_with_gaps(object data, Node node, list out) except -1:
    """`flatten_by` for data whose leaves may be None."""
    cdef Py_ssize_t i
    cdef PyObject *found
    if node.kind == NODE_LEAF:
        if isinstance(data, (dict, list, tuple)):
            return 0
        out.append(data)
        return 1
    if node.kind == NODE_DICT:
        if type(data) is not dict or len(<dict>data) != node.n:
            return 0
        for i in range(node.n):
            found = PyDict_GetItemWithError(data, node.keys[i])
            if found == NULL or not flatten_with_gaps(<object>found, <Node>node.children[i], out):
                return 0
        return 1
    if type(data) is not node.cls or len(data) != node.n:
        return 0
    for i in range(node.n):
        if not flatten_with_gaps(data[i], <Node>node.children[i], out):
            return 0
    return 1
