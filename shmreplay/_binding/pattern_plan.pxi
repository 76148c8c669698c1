# A pattern in numbers: whether its cells are there, and the item that they make.

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

    cdef bint find_cells(self, RowWriter writer, list columns, int64_t newest) except -1:
        """Are all cells of the pattern there? Notes each column's first value."""
        cdef pattern_node *node
        cdef Column c
        cdef uint32_t i
        cdef int64_t k, first, last
        for i in range(self.n_nodes):
            node = &self.nodes[i]
            c = <Column>columns[node.column] if columns[node.column] is not None else None
            if c is None or newest + node.first < writer.base_step:
                return False
            first = c.value_of_step(newest + node.first, newest + 1)
            if first < 0:
                return False
            self.values[i] = first
            if node.count == 1:
                continue
            k = node.step * (node.count - 1)
            last = c.value_of_step(newest + node.first + k, newest + 1)
            if last < 0:
                return False
            if last - first == k:
                continue   # no step without a value in between
            self.values[i] = -1
            for k in range(1, node.count - 1):
                if c.value_of_step(newest + node.first + node.step * k, newest + 1) < 0:
                    return False
        return True

    cdef bint whole_rows(self, RowWriter writer, list columns, sr_item *item) noexcept:
        """Is it all columns of one block, in order, over the same consecutive rows?"""
        cdef pattern_node *node
        cdef Column c
        cdef cell *x
        cdef cell *y
        cdef cell *top = NULL
        cdef uint32_t i
        for i in range(self.n_nodes):
            node = &self.nodes[i]
            if self.values[i] < 0 or (node.step != 1 and node.count != 1):
                return False
            c = <Column>columns[node.column]
            x = &c.ring[self.values[i] & c.mask]
            y = &c.ring[(self.values[i] + node.count - 1) & c.mask]
            if i == 0:
                top = x
                item.row_count = <uint32_t>node.count | node.squeezed
            if (x.block != top.block or x.row != top.row or x.col != i
                    or y.block != x.block or <int64_t>y.row - <int64_t>x.row != node.count - 1
                    or item.row_count != (<uint32_t>node.count | node.squeezed)):
                return False
        if sr_block_columns(&writer.session.store.st, top.block) != self.n_nodes:
            return False
        item.ref = SR_REF(top.block, SR_KIND_BLOCK)
        item.row_start = top.row
        return True

    cdef list trajectory(self, RowWriter writer, list columns, int64_t newest):
        """The columns of the item."""
        cdef list out = []
        cdef TrajectoryColumn t
        cdef pattern_node *node
        cdef int64_t *numbers
        cdef uint32_t i
        cdef int64_t k
        for i in range(self.n_nodes):
            node = &self.nodes[i]
            t = TrajectoryColumn.__new__(TrajectoryColumn)
            t.writer = writer
            t.column = columns[node.column]
            t.squeeze = node.squeezed != 0
            t.n = node.count
            t.first = self.values[i]
            t.stride = node.step
            if t.first < 0:
                numbers = t.make_values()
                for k in range(node.count):
                    numbers[k] = t.column.value_of_step(
                        newest + node.first + node.step * k, newest + 1)
            out.append(t)
        return out

    cdef double td_priority(self, RowWriter writer, list columns, int64_t newest) except? -1.0:
        """w * max(abs(x)) + (1 - w) * mean(abs(x)) over the item's values of a column."""
        cdef pattern_node *node
        cdef Column c
        cdef cell *x
        cdef uint32_t i
        cdef int64_t k, number, n = 0
        cdef double value, total = 0.0, highest = 0.0, priority
        for i in range(self.n_nodes):
            node = &self.nodes[i]
            if node.column != self.td_column:
                continue
            c = columns[node.column]
            for k in range(node.count):
                number = c.value_of_step(newest + node.first + node.step * k, newest + 1)
                x = &c.ring[number & c.mask]
                value = fabs(number_at(
                    cell_at(writer, x, c.row_bytes), c.code))
                n += 1
                total += value
                if not value <= highest:
                    highest = value   # NaN too
        if n == 0:
            return 0.0
        priority = self.weight * highest + (1.0 - self.weight) * (total / n)
        if not sr_priority_ok(&writer.session.store.st, self.t, priority):
            raise bad_priority(self.table, priority)
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
