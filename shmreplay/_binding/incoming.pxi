# Items of a remote writer's messages that are like one before: read and inserted many at a time.

DEF ITEMS_AT_ONCE = 64
DEF STATE_INSERTED = 1  # as in bridge/protocol.py

cdef packed struct state_record:
    uint8_t state
    uint64_t key


cdef class Incoming:
    """What was checked when an item of a remote writer was last created, for those like it.

    Of the records that come, nothing is trusted: one that is not exactly like that is left to who
    creates items one by one, as is one that does not get in at once.
    """

    cdef uint32_t number     # of the remote writer
    cdef uint32_t table, schema
    cdef ItemPlan plan       # None: no item yet

    def __init__(self, uint32_t number):
        self.number = number

    def learn(self, ItemWriter writer, uint32_t table, uint32_t schema, trajectory):
        """An item of this structure, as its client numbers it, was created in this table.

        Args:
            writer: That created it.
            table: Number of the table.
            schema: Number of the structure.
            trajectory: Of the item.
        """
        if self.plan is not None and self.table == table and self.schema == schema:
            return
        self.plan = writer.match_plan(trajectory, [])
        self.table = table
        self.schema = schema

    def take(self, ItemWriter writer, meta, Py_ssize_t at, uint32_t receipt, uint64_t first):
        """Insert items as long as they are like the one before and get in at once.

        Args:
            writer: That has their steps.
            meta: Bytes of the message.
            at: Where the record of the first item begins.
            receipt: Where they are written down.
            first: Number of the first item.

        Returns:
            What became of each item that is in its table, as an answer says it, and where the
            records of those end.
        """
        cdef Py_buffer buf
        cdef sr_item items[ITEMS_AT_ONCE]
        cdef uint64_t keys[ITEMS_AT_ONCE]
        cdef uint32_t n = 0, done = 0, seq = 0, i
        cdef Py_ssize_t nbytes
        cdef int rc
        cdef state_record *states
        if self.plan is None or writer.pending:
            return b"", at
        nbytes = sizeof(item_record) + self.plan.n * sizeof(reference_record)
        PyObject_GetBuffer(meta, &buf, PyBUF_SIMPLE)
        try:
            writer.enter()
            try:
                while (n < ITEMS_AT_ONCE and at >= 0 and buf.len - at >= (n + 1) * nbytes
                        and self.is_alike(writer, <char *>buf.buf + at + n * nbytes, &items[n])):
                    n += 1
                if n > 0:
                    sr_session_receipt(&writer.session.ses, receipt, first)
                    with nogil:
                        rc = sr_items_fit(&writer.session.store.st, self.table, n, items)
                        if rc == SR_OK:
                            # What stopped it, who tries the next item alone is told.
                            sr_insert(
                                &writer.session.ses, self.table, n, items, keys, &done, &seq)
            finally:
                writer.leave()
        finally:
            PyBuffer_Release(&buf)
        cdef bytes out = PyBytes_FromStringAndSize(NULL, done * sizeof(state_record))
        states = <state_record *>PyBytes_AS_STRING(out)
        for i in range(done):
            states[i].state = STATE_INSERTED
            states[i].key = keys[i]
        return out, at + done * nbytes

    cdef bint is_alike(self, ItemWriter writer, const char *record, sr_item *item) except -1:
        """Is it such an item, of whole rows of one block? So many bytes are there."""
        cdef item_record head
        cdef reference_record r
        cdef ItemPlan plan = self.plan
        cdef uint32_t i
        cdef Column c
        cdef cell *x
        cdef cell *y
        cdef uint64_t block = 0
        cdef uint32_t count
        memcpy(&head, record, sizeof(head))
        if (head.op != OP_ITEM or head.table != self.table or head.schema != self.schema
                or head.n_columns != plan.n or plan.n == 0 or not isnan(head.timeout)
                or not plan.known or plan.table != <int32_t>self.table):
            return False
        if not isnan(head.priority) and not sr_priority_ok(
                &writer.session.store.st, self.table, head.priority):
            return False
        for i in range(plan.n):
            memcpy(&r, record + sizeof(head) + i * sizeof(r), sizeof(r))
            if (r.writer != self.number or r.flags > REFERENCE_SQUEEZED
                    or (<uint64_t>r.column << 1 | r.flags) != plan.signature_key[i]
                    or r.column >= len(writer.columns) or r.length == 0
                    or (r.stride != 1 and r.length != 1) or (r.flags and r.length != 1)):
                return False
            c = <Column>writer.columns[r.column]
            if not c.alive(r.first) or not c.alive(r.first + r.length - 1):
                return False
            if (plan.lengths is not None and plan.lengths[i] is not None and not r.flags
                    and plan.lengths[i] != r.length):
                return False
            x = &c.ring[r.first & c.mask]
            y = &c.ring[(r.first + r.length - 1) & c.mask]
            count = r.length | (SR_COL_SQUEEZED if r.flags else 0)
            if i == 0:
                block = x.block
                item.row_start = x.row
                item.row_count = count
            if (x.block != block or x.row != item.row_start or x.col != i
                    or y.block != block or y.col != i
                    or <int64_t>y.row - <int64_t>x.row != <int64_t>r.length - 1
                    or item.row_count != count):
                return False
        if sr_block_columns(&writer.session.store.st, block) != plan.n:
            return False
        item.ref = SR_REF(block, SR_KIND_BLOCK)
        item.priority = head.priority
        item.schema = plan.schema
        return True
