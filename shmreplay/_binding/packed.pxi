# Rows that lie apart from their block: packing them when a block takes no more, reading them
# wherever they are. The core stores what is encoded here; see _core/layout_blocks.h.

cdef object _lz4_block = None


cdef object lz4_block():
    """The codec, imported when it is first needed."""
    global _lz4_block
    if _lz4_block is None:
        from lz4 import block
        _lz4_block = block
    return _lz4_block


# ------------------------------------------------------------------ packing

cdef inline Window stretch(const void *base, uint64_t nbytes):
    return make_window(None, base, nbytes, True)


cdef inline bytes compressed(const void *src, uint64_t nbytes):
    return <bytes>lz4_block().compress(stretch(src, nbytes), store_size=False)


cdef list encode(const char *src, uint64_t row_bytes, uint32_t rows, uint32_t group_rows,
                 uint32_t *encoding):
    """The groups of a column's rows compressed, with or without the difference of each row from
    the one before it; None where it does not pay. The first group decides.
    """
    cdef uint64_t first = 0, n = min(group_rows, rows), nbytes
    cdef Buffer differences = Buffer(n * row_bytes)
    cdef bytes best = compressed(src, n * row_bytes)
    cdef bytes other
    cdef list groups
    encoding[0] = SR_LZ4
    if n > 1:
        sr_xor_rows(differences.base, src, row_bytes, n)
        other = compressed(differences.base, n * row_bytes)
        if len(other) < len(best):
            best = other
            encoding[0] = SR_LZ4_XOR
    if <uint64_t>len(best) > n * row_bytes - n * row_bytes // COMPRESS_SHARE:
        return None
    groups = [best]
    for first in range(group_rows, rows, group_rows):
        n = min(group_rows, rows - first)
        nbytes = n * row_bytes
        if encoding[0] == SR_LZ4_XOR:
            sr_xor_rows(differences.base, src + first * row_bytes, row_bytes, n)
            groups.append(compressed(differences.base, nbytes))
        else:
            groups.append(compressed(src + first * row_bytes, nbytes))
    return groups


cdef int pack_column(sr_pack_col *col, const char *src, uint32_t rows, uint64_t least,
                     list kept) except -1:
    """Describe how a column is to be stored: compressed if that saves at least so many bytes."""
    cdef uint64_t raw = col.row_bytes * rows, stored = 0
    cdef uint32_t encoding = SR_PLAIN
    cdef list groups = None
    cdef Buffer parts
    cdef sr_part *part
    col.group_rows = <uint32_t>min(max(COMPRESS_GROUP_BYTES // max(col.row_bytes, 1), 1), rows)
    least = max(least, raw // COMPRESS_SHARE)
    if raw > least and col.group_rows * col.row_bytes <= LZ4_BYTES_MAX:
        groups = encode(src, col.row_bytes, rows, col.group_rows, &encoding)
    if groups is not None:
        for group in groups:
            stored += <uint64_t>len(<bytes>group) + sizeof(uint64_t)
        if stored > raw - least:
            groups = None
    parts = Buffer(sizeof(sr_part) * <size_t>(1 if groups is None else len(groups)))
    part = <sr_part *><void *>parts.base
    if groups is None:
        col.encoding = SR_PLAIN
        part.data = src
        part.bytes = raw
    else:
        col.encoding = encoding
        for i, group in enumerate(groups):
            part[i].data = PyBytes_AS_STRING(group)
            part[i].bytes = <uint64_t>len(<bytes>group)
    col.parts = part
    kept.append((parts, groups))
    return 0


cdef int pack_block(sr_ses *ses, uint64_t block, uint32_t n, const uint64_t *row_bytes,
                    uint32_t rows) except? -100:
    """Compress the rows of a block that takes no more of them. Gives the core's status.

    What the session's owner holds is all that is needed: nobody else writes the block.
    """
    cdef sr_pack_col cols[SR_COLUMNS_MAX]
    cdef uint64_t total = 0
    cdef uint32_t c
    cdef int rc
    cdef void *src
    cdef list kept = []
    for c in range(n):
        total += row_bytes[c] * rows
    for c in range(n):
        src = sr_block_cell(ses.st, block, c, 0, rows, row_bytes[c])
        if src == NULL:
            return SR_CORRUPT
        cols[c].row_bytes = row_bytes[c]
        pack_column(&cols[c], <const char *>src, rows, total // COMPRESS_BLOCK_SHARE, kept)
    with nogil:
        rc = sr_block_pack(ses, block, cols)
    return rc


cdef inline int any_block(sr_ses *ses, bint apart, uint32_t n, const uint64_t *row_bytes,
                          uint32_t rows, uint64_t *block, uint32_t *position) noexcept nogil:
    """A new block whose rows lie in it, or apart."""
    if apart:
        return sr_block_new_apart(ses, n, row_bytes, rows, block, position)
    return sr_block_new(ses, n, row_bytes, rows, block, position)


cdef inline bint worth_packing(uint64_t row_bytes, uint64_t rows) noexcept:
    """Is a block of so many bytes more than what packing adds to it?"""
    return row_bytes * rows >= COMPRESS_LEAST_BYTES


# ------------------------------------------------------------------ reading

cdef class DecodedRows:
    """Groups of rows that were decoded last, for whoever reads them again: by the number of the
    packed rows, which never comes again in a store, column and group.
    """

    cdef object groups
    cdef Py_ssize_t nbytes

    def __cinit__(self):
        self.groups = OrderedDict()

    cdef bytes get(self, tuple key):
        found = self.groups.get(key)
        if found is not None:
            try:
                self.groups.move_to_end(key)
            except KeyError:
                pass  # dropped meanwhile by another thread
        return <bytes>found

    cdef int put(self, tuple key, bytes rows) except -1:
        if key in self.groups or len(rows) > DECODED_BYTES:
            return 0
        self.groups[key] = rows
        self.nbytes += len(rows)
        while self.nbytes > DECODED_BYTES:
            _, oldest = self.groups.popitem(last=False)
            self.nbytes -= len(<bytes>oldest)
        return 0


cdef errors_damaged_rows(str why):
    return errors.TableCorruptedError(
        f"Got compressed steps that are damaged ({why}); expected them as they were written. "
        "`shmreplay check` says more of the store, and `shmreplay dump` reads out what is whole")


cdef bytes decode_group(const sr_rows_at *at, uint64_t group):
    """A group of rows as they were."""
    cdef uint64_t first = group * at.group_rows, n, begin, end, raw
    cdef bytes stored, rows
    if at.group_rows == 0 or first >= at.rows:
        raise errors_damaged_rows("no such group")
    n = min(at.group_rows, at.rows - first)
    raw = n * at.row_bytes
    begin = at.ends[group - 1] if group > 0 else 0
    end = at.ends[group]
    if begin > end or end > at.stored_bytes or raw > (end - begin) * LZ4_RATIO_MAX:
        raise errors_damaged_rows("its sizes contradict each other")
    # A copy: what is decoded cannot change meanwhile, whoever else writes there.
    stored = PyBytes_FromStringAndSize(at.stored + begin, <Py_ssize_t>(end - begin))
    try:
        rows = <bytes>lz4_block().decompress(stored, uncompressed_size=raw)
    except lz4_block().LZ4BlockError as e:
        raise errors_damaged_rows(str(e)) from None
    if <uint64_t>len(rows) != raw:
        raise errors_damaged_rows(f"{len(rows)} bytes instead of {raw}")
    if at.encoding == SR_LZ4_XOR:
        # Nobody else has seen these bytes yet.
        sr_unxor_rows(PyBytes_AS_STRING(rows), at.row_bytes, n)
    return rows


@cython.final
cdef class RowReader:
    """Reads rows wherever they are, for one call on one thread; `close` gives back what it holds.
    """

    cdef Store store
    cdef sr_ses *ses       # NULL: holds nothing
    cdef bint peek         # believe nothing that is read: see sr_peek_rows
    cdef dict where        # block -> reference to its rows
    cdef list positions

    def __cinit__(self, Store store):
        self.store = store
        self.where = {}
        self.positions = []

    cdef int close(self) except -1:
        cdef uint32_t position
        cdef int rc, result = SR_OK
        for held in self.positions:
            position = held
            rc = sr_release(self.ses, 1, &position)
            if rc != SR_OK:
                result = rc
        self.positions.clear()
        if result != SR_OK:
            raise_status(result, "reading an item")
        return 0

    cdef uint64_t hold(self, uint64_t block) except? 1:
        """Find out where the rows of a block are, and that they stay there until the end."""
        cdef uint64_t rows = 0
        cdef uint32_t position = SR_NONE
        cdef int rc
        if self.ses == NULL:
            rows = sr_block_rows_ref(&self.store.st, block)
        else:
            with nogil:
                rc = sr_rows_hold(self.ses, block, &rows, &position)
            if self.store.swept(rc):
                rc = sr_rows_hold(self.ses, block, &rows, &position)
            if rc != SR_OK:
                raise_status(rc, "reading an item", self.store)
            if position != SR_NONE:
                self.positions.append(position)
        self.where[block] = rows
        return rows

    cdef int locate(self, uint64_t block, uint32_t col, sr_rows_at *at) except -1:
        cdef int rc
        found = self.where.get(block)
        cdef uint64_t rows = self.hold(block) if found is None else <uint64_t>found
        if self.peek:
            rc = sr_peek_rows(&self.store.st, block, rows, col, at)
        else:
            rc = sr_rows_find(&self.store.st, block, rows, col, at)
        if rc != SR_OK:
            raise_status(rc, "reading an item")
        return 0

    cdef bytes group(self, const sr_rows_at *at, uint32_t col, uint64_t number):
        cdef DecodedRows cache = <DecodedRows>self.store.decoded
        cdef tuple key
        cdef bytes rows
        if self.peek:
            return decode_group(at, number)
        if cache is None:
            cache = DecodedRows()
            self.store.decoded = cache
        key = (at.serial, col, number)
        rows = cache.get(key)
        if rows is None:
            rows = decode_group(at, number)
            cache.put(key, rows)
        return rows

    cdef uint64_t copy_run(self, const sr_run *run, char *to, uint64_t room) except? 1:
        """Copy a run of rows, if so many bytes have room. Gives how many that takes."""
        cdef sr_rows_at at
        cdef int64_t row = run.start, last
        cdef uint64_t nbytes, k, number, current = UINT64_MAX
        cdef bytes rows = None
        cdef const char *base
        self.locate(run.block, run.col, &at)
        last = row + <int64_t>run.stride * (<int64_t>run.count - 1)
        if run.count == 0 or not 0 <= row < at.rows or not 0 <= last < at.rows:
            raise_status(SR_CORRUPT, "reading an item")
        if at.row_bytes > room // run.count:
            return at.row_bytes * run.count
        nbytes = at.row_bytes * run.count
        base = at.base
        if base != NULL and run.stride == 1:
            sr_copy(to, base + at.row_bytes * <uint64_t>row, nbytes)
            return nbytes
        for k in range(run.count):
            if at.base == NULL:
                number = <uint64_t>row // at.group_rows
                if number != current:
                    rows = self.group(&at, run.col, number)
                    base = PyBytes_AS_STRING(rows) - number * at.group_rows * at.row_bytes
                    current = number
            memcpy(to, base + at.row_bytes * <uint64_t>row, at.row_bytes)
            to += at.row_bytes
            row += run.stride
        return nbytes

    cdef bint column(self, const sr_sampled *item, uint32_t c, char *to,
                     uint64_t nbytes) except -1:
        """Copy a column of an item; False where it has not just so many bytes."""
        cdef sr_run run
        cdef uint64_t done = 0, n
        cdef uint32_t number = 0
        cdef int rc
        while True:
            if self.peek:
                rc = sr_peek_run(&self.store.st, item, c, number, &run)
            else:
                rc = sr_item_run(&self.store.st, item, c, number, &run)
            if rc < 0:
                raise_status(rc, "reading an item")
            if rc == 0:
                return done == nbytes
            n = self.copy_run(&run, to + done, nbytes - done)
            if n > nbytes - done:
                return False
            done += n
            number += 1

    cdef bint unchanged(self):
        """Of who holds nothing: are the rows still where they were?"""
        for block, rows in self.where.items():
            if sr_block_rows_ref(&self.store.st, block) != <uint64_t>rows:
                return False
        return True
