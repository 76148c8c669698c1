# Columns of another writer in an item: held until it is made.


cdef TrajectoryColumn freeze(RowWriter writer, TrajectoryColumn c, number, list held):
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
    if c.writer is writer:
        return c
    if c.writer.session.store is not writer.session.store:
        raise errors.InvalidArgumentError(
            f"Got column {c.column.path}, which belongs to a writer of another store; expected "
            "one of this. Append the values to a writer of this store.")
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
    t.writer = writer
    t.column = copy
    t.squeeze = c.squeeze
    t.n = c.n
    t.stride = 1
    return t


cdef int drop_foreign(list held) except -1:
    cdef RowWriter writer
    for writer, position in held:
        if writer.closed:
            continue  # its session has given everything back
        writer.enter()
        try:
            writer.drop_position(position)
        finally:
            writer.leave()
    return 0
