# What a remote writer sends of steps and items that are like the ones before. Both are checked as
# those of any writer; of anything that is new, Python does what is to be done.

cdef packed struct item_record:
    uint8_t op
    uint16_t table
    uint32_t schema
    double priority
    double timeout
    uint16_t n_columns

cdef packed struct reference_record:
    uint32_t writer
    uint16_t column
    uint8_t flags
    uint32_t length
    int64_t first, stride

# As in bridge/protocol.py.
DEF OP_ITEM = 4
DEF REFERENCE_SQUEEZED = 1
DEF REFERENCE_LISTED = 2


cdef AppendPlan plan_again(StepWriter writer, tuple numbers, object data):
    """The plan of a whole step of these columns in a flat dict, if the last one was that; or None.
    """
    cdef AppendPlan plan = writer.plan
    if (plan is None or plan.group.numbers is not numbers or type(data) is not dict
            or writer.in_place or writer.step_open
            or sr_store_is_closed(&writer.session.store.st)):
        return None
    return plan


def stage_step(StepWriter writer, tuple numbers, list buffers, data):
    """Append one step that is just like the last, and its bytes to bytearrays, one for each column.

    Args:
        writer: Of a private store.
        numbers: Its `row_columns` at the last step.
        buffers: The bytearrays.
        data: The step.

    Returns:
        False where it is not like that: nothing was done.

    Raises:
        ArenaFullError: No memory. Nothing is changed.
    """
    cdef AppendPlan plan
    writer.enter()
    try:
        plan = plan_again(writer, numbers, data)
        if plan is None or not plan.flat or not writer.append_plain(<dict>data, plan):
            return False
        writer.close_step()
    finally:
        writer.leave()
    writer.stage_row(buffers)
    return True


def step_bytes(StepWriter writer, tuple numbers, data):
    """The bytes of each leaf of a step that is just like the last, where they are; None where it is
    not. Nothing is appended: see `append_elsewhere`.
    """
    cdef AppendPlan plan
    cdef char scratch[SCRATCH]
    cdef const void *src
    cdef PyObject *found
    cdef Column c
    cdef Py_ssize_t i = 0
    cdef list out = []
    writer.enter()
    try:
        plan = plan_again(writer, numbers, data)
        if plan is None or not is_flat(plan.node) or PyDict_Size(<dict>data) != plan.node.n:
            return None
        for c in plan.columns:
            found = PyDict_GetItemWithError(<dict>data, plan.node.keys[i])
            if found == NULL:
                return None
            src = plain_leaf(c, found, scratch)
            if src == NULL:
                return None
            if c.ndim == 0:
                out.append(PyBytes_FromStringAndSize(<const char *>src, c.row_bytes))
            else:
                out.append(memoryview(make_window(<object>found, src, c.row_bytes, True)))
            i += 1
        return out
    finally:
        writer.leave()


def append_elsewhere(StepWriter writer, tuple numbers):
    """Append one step like the last, whose bytes are kept elsewhere: items refer to it by number
    alone, and nothing of it is read here. False where the last one is not of these columns, as a
    signal handler appended another since its bytes were asked for: nothing was done.
    """
    cdef AppendPlan plan
    cdef Column c
    writer.enter()
    try:
        plan = plan_again(writer, numbers, {})
        if plan is None:
            return False
        for c in plan.columns:
            c.push(writer.step, 0, 0, 0)
        writer.close_step()
        return True
    finally:
        writer.leave()


cdef bint refers_alike(ItemWriter writer, ItemPlan plan, dict trajectory, uint32_t number,
                       reference_record *out) except -1:
    """The references of an item, if all are of this writer and as the plan's last ones."""
    cdef uint32_t i
    cdef PyObject *found
    cdef TrajectoryColumn c
    for i in range(plan.n):
        found = PyDict_GetItemWithError(trajectory, plan.node.keys[i])
        if found == NULL or type(<object>found) is not TrajectoryColumn:
            return False
        c = <TrajectoryColumn><object>found
        if (c.writer is not writer or c.n == 0 or c.numbers is not None
                or plan.signature_key[i] != signature_key(c)
                or not c.column.alive(c.first)
                or not c.column.alive(c.first + c.stride * (c.n - 1))):
            return False
        if (plan.lengths is not None and plan.lengths[i] is not None and not c.squeeze
                and plan.lengths[i] != c.n):
            return False
        out[i].writer = number
        out[i].column = <uint16_t>c.column.number
        out[i].flags = REFERENCE_SQUEEZED if c.squeeze else 0
        out[i].length = <uint32_t>c.n
        out[i].first = c.first
        out[i].stride = c.stride
    return True


def stage_item(ItemWriter writer, bytearray records, uint32_t number, dict schemas, table, priority,
               trajectory):
    """Append the record of an item that is like one before, and that waits for nobody.

    Args:
        writer: Of a private store.
        records: What it is appended to.
        number: By which the server knows the writer.
        schemas: Number of a structure in the private store -> at the server.
        table: Name of the table.
        priority: As for `create_item`.
        trajectory: As for `create_item`.

    Returns:
        False where it is not like that: nothing was done.

    Raises:
        PriorityError, ArgumentTypeError: As `create_item`. Nothing is changed.
    """
    cdef reference_record references[SR_COLUMNS_MAX]
    cdef item_record head
    cdef ItemPlan plan
    cdef Py_ssize_t at, nbytes
    cdef char *to
    t = writer.tables.get(table) if isinstance(table, str) else None
    if t is None or type(trajectory) is not dict:
        return False
    head.op = OP_ITEM
    head.table = t
    head.priority = checked_priority(writer.session.store, t, table, priority)
    head.timeout = NAN
    writer.enter()
    try:
        for plan in writer.item_plans:
            if (plan.flat and plan.known and plan.table == <int32_t>head.table
                    and PyDict_Size(<dict>trajectory) == <Py_ssize_t>plan.n
                    and refers_alike(writer, plan, <dict>trajectory, number, references)):
                break
        else:
            return False
        known = schemas.get(plan.schema)
        if known is None:
            return False
        head.schema = known
        head.n_columns = <uint16_t>plan.n
        at, nbytes = PyByteArray_GET_SIZE(records), plan.n * sizeof(reference_record)
        PyByteArray_Resize(records, at + <Py_ssize_t>sizeof(head) + nbytes)
        to = PyByteArray_AS_STRING(records) + at
        memcpy(to, &head, sizeof(head))
        memcpy(to + sizeof(head), references, nbytes)
        return True
    finally:
        writer.leave()
