# What an item refers to: checked, described as runs of rows, and handed to the core.


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
            "item. Take fewer steps, or steps that follow each other.")
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


cdef bint check_columns(RowWriter writer, list leaves) except -1:
    """Refuse what is no item. True if columns of another writer are among them."""
    cdef TrajectoryColumn c
    cdef Py_ssize_t n_empty = 0
    cdef bint foreign = False
    for i, leaf in enumerate(leaves):
        if type(leaf) is not TrajectoryColumn:
            raise errors.ArgumentTypeError(
                f"leaf {i} of the trajectory is a {type(leaf).__name__}; every leaf must be a "
                "TrajectoryColumn, "
                "that is a slice of writer.history. Use for instance writer.history['x'][-1].")
        c = <TrajectoryColumn>leaf
        if c.n == 0:
            n_empty += 1
        if c.writer is not writer:
            foreign = True
    if n_empty == len(leaves):
        raise errors.InvalidArgumentError("trajectory must not be empty. " + (
            f"Got {len(leaves)} columns of 0 steps each; expected a step at least: slice the "
            "history where there are steps, as in writer.history['x'][-1:]." if leaves else
            "Got no columns; expected one at least: give slices of writer.history."))
    if n_empty:
        bad = [(<TrajectoryColumn>x).column.path for x in leaves if len(x) == 0]
        raise errors.InvalidArgumentError(
            f"columns {bad} of the trajectory are empty; each must refer to a step at least. "
            "Leave them out, or append more steps first.")
    return foreign


cdef int refer_and_insert(Session session, uint32_t t, list leaves, sr_item *item,
                          uint32_t *position, uint64_t *key, bint now) except? -100:
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
    cdef sr_ses *ses = &session.ses
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
        if whole_rows(n, n_runs, flags, runs, &session.store.st):
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


cdef int sweep_and_insert(Session session, uint32_t t, list leaves, sr_item *item,
                          uint32_t *position, uint64_t *key, bint now) except? -100:
    """As refer_and_insert, but tries again where there was no room and the dead held some."""
    cdef int rc = refer_and_insert(session, t, leaves, item, position, key, now)
    if session.store.swept(rc):
        rc = refer_and_insert(session, t, leaves, item, position, key, now)
    return rc


cdef object refer_and_replace(Session session, uint32_t t, uint64_t key, list leaves,
                              uint32_t schema, object timeout):
    """A trajectory record even where whole rows of one block would do: see sr_replace."""
    cdef uint32_t first_run[SR_COLUMNS_MAX + 1]
    cdef uint32_t flags[SR_COLUMNS_MAX]
    cdef uint32_t n = <uint32_t>len(leaves), n_runs = 0, i, position = 0, found = 0, other = 0
    cdef uint64_t off = 0
    cdef Py_ssize_t total = 0
    cdef int rc
    cdef sr_item item
    cdef sr_ses *ses = &session.ses
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
        if session.store.swept(rc):
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
                    log = session.wait_for_room(
                        t, log, "replace_item", timeout, deadline)
            finally:
                sr_release(ses, 1, &position)
    finally:
        free(runs)
    if rc == SR_INVALID and found:
        return other
    if rc != SR_OK:
        raise_status(rc, "replace_item", session.store)
    return bool(found)
