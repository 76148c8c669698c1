# Items that refer to the history: checked, described, inserted, or held back by the limiter.


cdef class Pending:
    """An item that the limiter holds back: complete, and held in the session's ledger."""

    cdef uint32_t table
    cdef sr_item item
    cdef uint32_t position
    # Of the item, where there is a receipt.
    cdef uint64_t number

cdef double checked_priority(Store store, uint32_t t, str table, object priority) except? -1.0:
    cdef double p
    if type(priority) is float:
        p = priority
        if not sr_priority_ok(&store.st, t, p):
            raise bad_priority(table, p)
        return p
    if priority is None:
        return NAN  # which the core takes for the largest seen
    try:
        p = priority
    except TypeError:
        raise errors.ArgumentTypeError(
            f"priority must be a number, got {type(priority).__name__}: {priority!r}. Give a "
            "float.") from None
    except OverflowError:
        raise errors.PriorityError(
            f"Priority must fit a float64. Table {table!r} was given an int beyond "
            "that. Give a smaller one.") from None
    if not sr_priority_ok(&store.st, t, p):
        raise bad_priority(table, p)
    return p


cdef inline const cell *plain_rows(RowWriter writer, ItemPlan plan, TrajectoryColumn c,
                                   uint32_t i) noexcept:
    if (c.writer is not writer or c.n == 0 or c.numbers is not None
            or (c.stride != 1 and c.n != 1) or plan.signature_key[i] != signature_key(c)):
        return NULL
    if (plan.lengths is not None and plan.lengths[i] is not None and not c.squeeze
            and plan.lengths[i] != c.n):
        return NULL
    return c.column.rows_from(c.first, c.n, i)


cdef inline int insert_one(sr_ses *ses, uint32_t t, const sr_item *item,
                           uint64_t *key) noexcept:
    """sr_insert of one item. Keeps the GIL where it takes less time than to let go of it."""
    cdef uint32_t done = 0, seq = 0
    cdef int rc
    if sr_insert_is_brief(ses, t):
        return sr_insert(ses, t, 1, item, key, &done, &seq)
    with nogil:
        rc = sr_insert(ses, t, 1, item, key, &done, &seq)
    return rc


@cython.no_gc_clear
cdef class ItemWriter(StepWriter):
    """Items over steps: what they refer to, and the window of those that the limiter holds back."""

    cdef list item_plans                 # the latest first
    cdef readonly object pending         # deque of Pending

    def __cinit__(self, *args, **kwargs):
        self.item_plans = []
        self.pending = deque()

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
        cdef list plans = self.item_plans
        cdef ItemPlan latest = <ItemPlan>plans[0] if plans else None
        cdef uint64_t key = 0
        cdef uint32_t t
        if latest is not None and latest.table_name is table and latest.table >= 0:
            t = <uint32_t>latest.table
        else:
            number = self.tables.get(table) if isinstance(table, str) else None
            if number is None:
                raise table_not_found(table, self.tables, for_item=True)
            t = number
        cdef double p = checked_priority(self.session.store, t, table, priority)
        if timeout is not None:
            timeout = limits.checked_timeout(timeout)
        if sr_store_is_closed(&self.session.store.st):
            raise_status(SR_CLOSED, "create_item", self.session.store)
        cdef bint waiting = bool(self.pending)
        if waiting:
            self.make_room("create_item", timeout)
            waiting = bool(self.pending)
        if (latest is not None and not waiting and type(trajectory) is dict
                and self.insert_plain(latest, t, <dict>trajectory, p, &key) == SR_OK):
            return key
        return self.create_slowly(t, table, p, trajectory)

    cdef object create_slowly(self, uint32_t t, str table, double priority, object trajectory):
        """Any item but the common one: its key, or None where the limiter holds it back."""
        cdef sr_item item
        cdef uint32_t position = SR_NONE
        cdef uint64_t key = 0
        cdef int rc
        cdef list leaves = []
        cdef list foreign = None
        cdef ItemPlan plan = self.match_plan(trajectory, leaves)
        if check_columns(self, leaves):
            foreign = []
        try:
            if foreign is not None:
                leaves = [
                    freeze(self, <TrajectoryColumn>x, i, foreign) for i, x in enumerate(leaves)]
            self.enter()
            try:
                self.identify(plan, t, table, trajectory, leaves)
                item.schema = plan.schema
                item.priority = priority
                rc = sweep_and_insert(
                    self.session, t, leaves, &item, &position, &key, not self.pending)
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
        check_columns(self, leaves)
        try:
            leaves = [freeze(self, <TrajectoryColumn>x, i, foreign) for i, x in enumerate(leaves)]
            self.enter()
            try:
                check_alive(leaves)
                self.check_signature(t, table, trajectory, leaf_types(leaves, True))
                # Only looked for: what is refused leaves nothing in the store.
                schema = self.find_schema(trajectory, leaf_types(leaves, False))
                return refer_and_replace(
                    self.session, t, key, leaves, SR_NONE if schema is None else schema, timeout)
            finally:
                self.leave()
        finally:
            drop_foreign(foreign)

    def check_target(self, table, priority):
        """Raise what create_item would say of this table and this priority."""
        number = self.tables.get(table) if isinstance(table, str) else None
        if number is None:
            raise table_not_found(table, self.tables, for_item=True)
        checked_priority(self.session.store, number, table, priority)

    cdef inline const cell *plain_cell(self, ItemPlan plan, PyObject *leaf, uint32_t i) noexcept:
        """Where leaf i of a trajectory begins if it is as last time, and rows of one block that
        follow each other; else NULL.
        """
        if type(<object>leaf) is not TrajectoryColumn:
            return NULL
        return plain_rows(self, plan, <TrajectoryColumn>leaf, i)

    cdef int insert_plain(self, ItemPlan plan, uint32_t t, dict trajectory, double priority,
                          uint64_t *key) except -100:
        """The common item: a flat dict as last time, the same whole rows of one block in every
        column.

        SR_OK if it is in the table; SR_WOULD_BLOCK if it is not such an item, or the limiter holds
        it back: nothing was done.
        """
        cdef uint32_t i, n = plan.n, done = 0, seq = 0
        cdef PyObject *found[SR_COLUMNS_MAX]
        cdef const cell *first
        cdef sr_item item
        cdef int rc
        if not plan.flat or not plan.known or plan.table != <int32_t>t or n == 0:
            return SR_WOULD_BLOCK
        self.enter()
        try:
            if not find_leaves(trajectory, plan.node, n, found):
                return SR_WOULD_BLOCK
            first = self.plain_cell(plan, found[0], 0)
            if first == NULL:
                return SR_WOULD_BLOCK
            item.row_count = row_count(<TrajectoryColumn>found[0])
            for i in range(1, n):
                x = self.plain_cell(plan, found[i], i)
                if (x == NULL or x.block != first.block or x.row != first.row
                        or item.row_count != row_count(<TrajectoryColumn>found[i])):
                    return SR_WOULD_BLOCK
            if sr_block_columns(&self.session.store.st, first.block) != n:
                return SR_WOULD_BLOCK
            item.ref = SR_REF(first.block, SR_KIND_BLOCK)
            item.row_start = first.row
            item.priority = priority
            item.schema = plan.schema
            rc = sr_items_fit(&self.session.store.st, t, 1, &item)
            if rc == SR_OK:
                rc = insert_one(&self.session.ses, t, &item, key)
            if rc == SR_FULL or rc == SR_NOSPACE:
                return SR_WOULD_BLOCK  # nothing was done: the long way looks for room
            if rc != SR_OK and rc != SR_WOULD_BLOCK:
                raise_status(rc, "create_item")
            return rc
        finally:
            self.leave()

    def check_item(self, uint32_t t, str table, trajectory):
        """Raise what create_item would raise for this trajectory, signature included."""
        cdef list leaves = []
        cdef ItemPlan plan = self.match_plan(trajectory, leaves)
        check_columns(self, leaves)
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
        check_columns(self, leaves)
        self.enter()
        try:
            self.identify(plan, t, table, trajectory, leaves)
            item.schema = plan.schema
            item.priority = priority
            rc = sweep_and_insert(self.session, t, leaves, &item, &position, &key, True)
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

    # -------------------------------------------------------------- what a trajectory looks like

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
                f"Got a trajectory of {len(leaves)} columns; expected at most {SR_COLUMNS_MAX}. "
                "Merge some, or leave some out.")
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
            plan.table_name = table
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
        raise errors.ReverbError(
            "Got a writer of the base class, which needs schema_for. Derive one that has it.")

    def find_schema(self, trajectory, leaves):
        """Number of the structure in the store, None where no item has had it."""
        raise errors.ReverbError(
            "Got a writer of the base class, which needs find_schema. Derive one that has it.")

    def check_signature(self, table_number, table, trajectory, leaves):
        """Check against the table's signature; gives the leading dimensions it demands, or None."""
        return None

    # -------------------------------------------------------------- what the limiter holds back

    def make_room(self, what, timeout):
        """Called before an item joins a window that is not empty: waits while it is full, at most
        so many seconds."""

    def window_grew(self):
        """Called after an item was held back by the limiter."""

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
