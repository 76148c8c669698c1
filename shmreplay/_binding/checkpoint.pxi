# Copying a store for a checkpoint, and putting one into a new store.
#
# Arrays come and go as contiguous numpy arrays; what their sizes have to be is looked at here.

cdef extern from "_core/checkpoint.h" nogil:
    ctypedef struct sr_slot:
        pass
    ctypedef struct sr_traj_col:
        pass
    ctypedef struct sr_seg:
        pass
    ctypedef struct sr_stripe_image:
        sr_slot *slots
        uint32_t *order[2]
        uint64_t room, n_slots
        uint64_t n_order[2]
        uint32_t head[2]
        uint32_t free_head
        uint64_t touch_next
    ctypedef struct sr_table_image:
        int64_t inserts, samples, deletes, num_deleted_episodes, num_unique_samples
        uint64_t rng, next_seq, missed_updates, max_priority_bits
        uint32_t slot_bits, poisoned
    ctypedef struct sr_traj_head:
        uint32_t n_cols, n_blocks, n_segs
    ctypedef struct sr_block_head:
        uint64_t uid, bytes
        uint32_t n_cols, rows, n_runs, encoding
    ctypedef struct sr_run_of_rows:
        pass
    ctypedef struct sr_rows_cursor:
        uint64_t block, done

    int sr_slot_bits_fit(uint32_t bits, int64_t max_size, uint64_t capacity)
    int sr_hold_claim(sr_store *st, uint32_t participant)
    int sr_hold_prepare(sr_store *st, uint32_t stripe, uint64_t slots)
    int sr_hold_release(sr_store *st)
    int sr_hold_ask_back(sr_store *st)
    int sr_hold_unwanted(const sr_store *st)
    uint64_t sr_hold_memory(const sr_store *st)
    uint64_t sr_slots_used(const sr_store *st, uint32_t stripe)
    int sr_snapshot(sr_store *st, sr_stripe_image *stripes, sr_table_image *tables,
                    uint64_t *held_ns)
    int sr_image_traj_heads(const sr_store *st, uint64_t n, const uint64_t *offs,
                            sr_traj_head *out)
    int sr_image_trajs(const sr_store *st, uint64_t n, const uint64_t *offs,
                       const sr_traj_head *heads, uint64_t *blocks, sr_traj_col *cols,
                       sr_seg *segs)
    int sr_image_block_heads(sr_ses *ses, uint64_t n, const uint64_t *offs, sr_block_head *out,
                             uint64_t *rows)
    int sr_image_blocks(const sr_store *st, uint64_t n, const uint64_t *offs,
                        const sr_block_head *heads, uint64_t *row_bytes, sr_run_of_rows *runs)
    int sr_image_episodes(const sr_store *st, uint64_t n, const uint64_t *offs, uint64_t *ids)
    int sr_image_rows(const sr_store *st, uint64_t n, const uint64_t *offs, const uint64_t *rows,
                      const sr_block_head *heads, sr_rows_cursor *at, char *dst, uint64_t room,
                      uint64_t *got)
    void sr_restore_begin(sr_store *st)
    int sr_restore_episodes(sr_store *st, uint64_t n, const uint64_t *ids, uint64_t *offs)
    int sr_restore_blocks(sr_store *st, uint64_t n, const sr_block_head *heads,
                          const uint64_t *row_bytes, const sr_run_of_rows *runs,
                          uint64_t n_episodes, const uint64_t *episodes, uint64_t *offs)
    int sr_restore_trajs(sr_store *st, uint64_t n, const sr_traj_head *heads,
                         const uint32_t *blocks, const sr_traj_col *cols, const sr_seg *segs,
                         uint64_t n_blocks, const uint64_t *block_offs, uint64_t *offs)
    int sr_restore_rows(const sr_store *st, uint64_t n, const uint64_t *offs,
                        const sr_block_head *heads, const uint64_t *where, uint64_t *next,
                        const char *src, uint64_t from_, uint64_t nbytes)
    int sr_restore_slots(sr_store *st, uint32_t table, uint32_t stripe, uint64_t n,
                         const sr_slot *slots, uint64_t touch_next)
    int sr_restore_table(sr_store *st, uint32_t table, const sr_table_image *image, int seeded)
    int sr_restore_derive(sr_store *st)
    int sr_restore_order(sr_store *st, uint32_t table, uint32_t stripe, uint32_t k, uint64_t n,
                         const uint32_t *slots, uint32_t head)
    int sr_restore_free(sr_store *st, uint32_t table, uint32_t stripe, uint64_t n,
                        const uint32_t *slots)
    int sr_restore_end(sr_store *st, int reset, uint64_t *evicted)
    uint32_t sr_checkpointer(const sr_store *st)
    void sr_checkpointer_set(sr_store *st, uint32_t schema)

    enum: SLOT_BYTES "sizeof(sr_slot)"
    enum: COL_BYTES "sizeof(sr_traj_col)"
    enum: SEG_BYTES "sizeof(sr_seg)"
    enum: RUN_BYTES "sizeof(sr_run_of_rows)"


cdef class Flat:
    """The memory of an array, which has at least so many elements of so many bytes."""

    cdef Py_buffer view
    cdef bint held
    cdef void *at
    cdef uint64_t n

    def __cinit__(self, array, size_t size, count=None, bint written=False):
        cdef int flags = PyBUF_C_CONTIGUOUS | (PyBUF_WRITABLE if written else 0)
        PyObject_GetBuffer(array, &self.view, flags)
        self.held = True
        self.at = self.view.buf
        self.n = <uint64_t>self.view.len // size
        if count is not None and count > self.n:
            raise errors.InvalidArgumentError(
                f"Got an array of {self.n} elements of {size} bytes; expected at least {count}. "
                "Give a longer one.")

    def __dealloc__(self):
        if self.held:
            PyBuffer_Release(&self.view)


cdef checkpoint_status(int rc, str what, Store store):
    if rc == SR_CORRUPT or rc == SR_INVALID:
        raise errors.CheckpointError(
            f"{what}: Got a checkpoint that does not hold together; expected one as it was "
            "written. Restore another checkpoint.")
    if rc != SR_OK:
        raise_status(rc, what, store)


def slot_bits_fit(uint32_t bits, int64_t max_size, uint64_t capacity):
    """Do keys with so many bits for the number of a slot do for such a table?"""
    return bool(sr_slot_bits_fit(bits, max_size, capacity))


def hold_claim(Store store):
    """Take the right to write a checkpoint of the store; False: somebody has it."""
    store.usable()
    return sr_hold_claim(&store.st, store.participant) == SR_OK


def hold_release(Store store):
    """Let go of all that the checkpoint held, and give the right back."""
    store.usable()
    cdef int rc
    with nogil:
        rc = sr_hold_release(&store.st)
    if rc != SR_OK:
        raise_status(rc, "ending a checkpoint")


def hold_ask_back(Store store):
    """Ask who writes a checkpoint to give up; False: nobody does."""
    store.usable()
    return bool(sr_hold_ask_back(&store.st))


def hold_unwanted(Store store):
    """Is who writes a checkpoint to give up?"""
    store.usable()
    return bool(sr_hold_unwanted(&store.st))


def slots_used(Store store, uint32_t n_stripes):
    """Slots that each stripe has used so far, over all tables."""
    store.usable()
    return [sr_slots_used(&store.st, i) for i in range(n_stripes)]


cdef tuple image_of_stripe(sr_stripe_image *s):
    return (s.n_slots, s.n_order[0], s.n_order[1], s.head[0], s.head[1], s.free_head,
            s.touch_next)


cdef dict image_of_table(sr_table_image *t):
    return {
        "inserts": t.inserts, "samples": t.samples, "deletes": t.deletes,
        "num_deleted_episodes": t.num_deleted_episodes,
        "num_unique_samples": t.num_unique_samples, "rng": t.rng, "next_seq": t.next_seq,
        "missed_updates": t.missed_updates, "max_priority_bits": t.max_priority_bits,
        "slot_bits": t.slot_bits,}


def snapshot(Store store, uint32_t n_tables, list slots, list orders):
    """Copy all slots, under all locks, into arrays that have room for some of each stripe, and
    begin to hold what they refer to.

    Gives nanoseconds held up, stripes, tables; None: a stripe has outgrown its room.
    """
    store.usable()
    cdef uint32_t n = <uint32_t>len(slots), i
    cdef int rc = SR_OK
    cdef uint64_t held = 0
    cdef sr_stripe_image *images = <sr_stripe_image *>calloc(n + 1, sizeof(sr_stripe_image))
    cdef sr_table_image *tables = <sr_table_image *>calloc(n_tables + 1, sizeof(sr_table_image))
    cdef Flat flat
    cdef list kept = []
    try:
        if images == NULL or tables == NULL:
            raise MemoryError
        for i in range(n):
            flat = Flat(slots[i], SLOT_BYTES, None, True)
            kept.append(flat)
            images[i].slots = <sr_slot *>flat.at
            images[i].room = flat.n
            for k in range(2):
                flat = Flat(orders[i][k], sizeof(uint32_t), images[i].room, True)
                kept.append(flat)
                images[i].order[k] = <uint32_t *>flat.at
            with nogil:
                rc = sr_hold_prepare(&store.st, i, images[i].room)
            if rc != SR_OK:
                raise_status(rc, "making room for a checkpoint", store)
        with nogil:
            rc = sr_snapshot(&store.st, images, tables, &held)
        if rc == SR_WOULD_BLOCK:
            return None
        if rc != SR_OK:
            raise_status(rc, "copying the index of a store", store)
        return (held, [image_of_stripe(&images[i]) for i in range(n)],
                [image_of_table(&tables[i]) for i in range(n_tables)])
    finally:
        free(images)
        free(tables)


def image_traj_heads(Store store, offs, out):
    """Fill `out` with what trajectories at these offsets say of themselves."""
    store.usable()
    cdef Flat o = Flat(offs, sizeof(uint64_t))
    cdef Flat h = Flat(out, sizeof(sr_traj_head), o.n, True)
    cdef int rc
    with nogil:
        rc = sr_image_traj_heads(&store.st, o.n, <uint64_t *>o.at, <sr_traj_head *>h.at)
    checkpoint_status(rc, "reading the store for a checkpoint", store)


def image_block_heads(Session session, offs, out, rows):
    """The same of blocks. `rows` says where their rows are, which stay there until the session is
    closed.
    """
    session.usable()
    cdef Flat o = Flat(offs, sizeof(uint64_t))
    cdef Flat h = Flat(out, sizeof(sr_block_head), o.n, True)
    cdef Flat r = Flat(rows, sizeof(uint64_t), o.n, True)
    cdef int rc
    with nogil:
        rc = sr_image_block_heads(&session.ses, o.n, <uint64_t *>o.at, <sr_block_head *>h.at,
                                  <uint64_t *>r.at)
    checkpoint_status(rc, "reading the store for a checkpoint", session.store)


def image_trajs(Store store, offs, heads, blocks, cols, segs):
    """Copy the trajectories, whose heads say how long the arrays have to be."""
    store.usable()
    cdef Flat o = Flat(offs, sizeof(uint64_t))
    cdef Flat h = Flat(heads, sizeof(sr_traj_head), o.n)
    cdef Flat b = Flat(blocks, sizeof(uint64_t), heads["blocks"].sum(dtype=_uint64), True)
    cdef Flat c = Flat(cols, COL_BYTES, heads["columns"].sum(dtype=_uint64) + o.n, True)
    cdef Flat s = Flat(segs, SEG_BYTES, heads["segments"].sum(dtype=_uint64), True)
    cdef int rc
    with nogil:
        rc = sr_image_trajs(&store.st, o.n, <uint64_t *>o.at, <sr_traj_head *>h.at,
                            <uint64_t *>b.at, <sr_traj_col *>c.at, <sr_seg *>s.at)
    checkpoint_status(rc, "reading the store for a checkpoint", store)


def image_blocks(Store store, offs, heads, row_bytes, runs):
    """Copy what the blocks say of their columns and episodes."""
    store.usable()
    cdef Flat o = Flat(offs, sizeof(uint64_t))
    cdef Flat h = Flat(heads, sizeof(sr_block_head), o.n)
    cdef Flat b = Flat(row_bytes, sizeof(uint64_t), heads["columns"].sum(dtype=_uint64), True)
    cdef Flat r = Flat(runs, RUN_BYTES, heads["runs"].sum(dtype=_uint64), True)
    cdef int rc
    with nogil:
        rc = sr_image_blocks(&store.st, o.n, <uint64_t *>o.at, <sr_block_head *>h.at,
                             <uint64_t *>b.at, <sr_run_of_rows *>r.at)
    checkpoint_status(rc, "reading the store for a checkpoint", store)


def image_episodes(Store store, offs, ids):
    """Copy the numbers of the episodes at these offsets."""
    store.usable()
    cdef Flat o = Flat(offs, sizeof(uint64_t))
    cdef Flat i = Flat(ids, sizeof(uint64_t), o.n, True)
    cdef int rc
    with nogil:
        rc = sr_image_episodes(&store.st, o.n, <uint64_t *>o.at, <uint64_t *>i.at)
    checkpoint_status(rc, "reading the store for a checkpoint", store)


def image_rows(Store store, offs, rows, heads, at, out):
    """Copy the next rows of the blocks into `out`; `at` (block, bytes of it) goes on, an array.

    Gives the number of bytes.
    """
    store.usable()
    cdef Flat o = Flat(offs, sizeof(uint64_t))
    cdef Flat h = Flat(heads, sizeof(sr_block_head), o.n)
    cdef Flat r = Flat(rows, sizeof(uint64_t), o.n)
    cdef Flat cursor = Flat(at, sizeof(sr_rows_cursor), 1, True)
    cdef Flat dst = Flat(out, 1, None, True)
    cdef uint64_t got = 0
    cdef int rc
    with nogil:
        rc = sr_image_rows(&store.st, o.n, <uint64_t *>o.at, <uint64_t *>r.at,
                           <sr_block_head *>h.at, <sr_rows_cursor *>cursor.at, <char *>dst.at,
                           dst.n, &got)
    checkpoint_status(rc, "reading the store for a checkpoint", store)
    return got


def restore_begin(Store store):
    """The store, just made, is closed to all until `restore_end`."""
    store.usable()
    sr_restore_begin(&store.st)


def restore_episodes(Store store, ids, offs):
    """Make episodes of these numbers; `offs` gets where they are."""
    store.usable()
    cdef Flat i = Flat(ids, sizeof(uint64_t))
    cdef Flat o = Flat(offs, sizeof(uint64_t), i.n, True)
    cdef int rc
    with nogil:
        rc = sr_restore_episodes(&store.st, i.n, <uint64_t *>i.at, <uint64_t *>o.at)
    checkpoint_status(rc, "restoring episodes", store)


def restore_blocks(Store store, heads, row_bytes, runs, episodes, offs):
    """Make blocks without content; `offs` gets where they are."""
    store.usable()
    cdef Flat h = Flat(heads, sizeof(sr_block_head))
    cdef Flat b = Flat(row_bytes, sizeof(uint64_t), heads["columns"].sum(dtype=_uint64))
    cdef Flat r = Flat(runs, RUN_BYTES, heads["runs"].sum(dtype=_uint64))
    cdef Flat e = Flat(episodes, sizeof(uint64_t))
    cdef Flat o = Flat(offs, sizeof(uint64_t), h.n, True)
    cdef int rc
    with nogil:
        rc = sr_restore_blocks(&store.st, h.n, <sr_block_head *>h.at, <uint64_t *>b.at,
                               <sr_run_of_rows *>r.at, e.n, <uint64_t *>e.at, <uint64_t *>o.at)
    checkpoint_status(rc, "restoring blocks", store)


def restore_trajs(Store store, heads, blocks, cols, segs, block_offs, offs):
    """Make trajectories; `offs` gets where they are."""
    store.usable()
    cdef Flat h = Flat(heads, sizeof(sr_traj_head))
    cdef Flat b = Flat(blocks, sizeof(uint32_t), heads["blocks"].sum(dtype=_uint64))
    cdef Flat c = Flat(cols, COL_BYTES, heads["columns"].sum(dtype=_uint64) + h.n)
    cdef Flat s = Flat(segs, SEG_BYTES, heads["segments"].sum(dtype=_uint64))
    cdef Flat bo = Flat(block_offs, sizeof(uint64_t))
    cdef Flat o = Flat(offs, sizeof(uint64_t), h.n, True)
    cdef int rc
    with nogil:
        rc = sr_restore_trajs(&store.st, h.n, <sr_traj_head *>h.at, <uint32_t *>b.at,
                              <sr_traj_col *>c.at, <sr_seg *>s.at, bo.n, <uint64_t *>bo.at,
                              <uint64_t *>o.at)
    checkpoint_status(rc, "restoring trajectories", store)


def restore_rows(Store store, str path, offs, heads, where, uint64_t next_block, data,
                 uint64_t first):
    """Put the bytes of a file, from `first` on, into the blocks whose rows lie at `where` in it.

    Blocks before `next_block` have theirs; gives the new value of that.
    """
    store.usable()
    cdef Flat o = Flat(offs, sizeof(uint64_t))
    cdef Flat h = Flat(heads, sizeof(sr_block_head), o.n)
    cdef Flat w = Flat(where, sizeof(uint64_t), o.n)
    cdef Flat d = Flat(data, 1)
    cdef int rc
    with nogil:
        rc = sr_restore_rows(&store.st, o.n, <uint64_t *>o.at, <sr_block_head *>h.at,
                             <uint64_t *>w.at, &next_block, <char *>d.at, first, d.n)
    if rc == SR_INVALID and next_block < o.n:
        raise errors.CheckpointError(
            f"{path} at offset {(<uint64_t *>w.at)[next_block]}: Got other rows than expected of "
            "their block. Restore another checkpoint.")
    checkpoint_status(rc, "restoring steps", store)
    return next_block


def restore_slots(Store store, uint32_t table, uint32_t stripe, slots, uint64_t touch_next):
    """Put the slots of a stripe in place."""
    store.usable()
    cdef Flat s = Flat(slots, SLOT_BYTES)
    cdef int rc
    with nogil:
        rc = sr_restore_slots(&store.st, table, stripe, s.n, <sr_slot *>s.at, touch_next)
    checkpoint_status(rc, "restoring items", store)


def restore_table(Store store, uint32_t table, dict counts, bint seeded):
    """Put the counters of a table in place."""
    store.usable()
    cdef sr_table_image t
    memset(&t, 0, sizeof(t))
    t.inserts, t.samples, t.deletes = counts["inserts"], counts["samples"], counts["deletes"]
    t.num_deleted_episodes = counts["num_deleted_episodes"]
    t.num_unique_samples = counts["num_unique_samples"]
    t.rng, t.next_seq = counts["rng"], counts["next_seq"]
    t.missed_updates = counts["missed_updates"]
    t.max_priority_bits = counts["max_priority_bits"]
    checkpoint_status(sr_restore_table(&store.st, table, &t, seeded), "restoring a table", store)


def restore_derive(Store store):
    """Make all that follows from slots and counters."""
    store.usable()
    cdef int rc
    with nogil:
        rc = sr_restore_derive(&store.st)
    checkpoint_status(rc, "restoring selectors", store)


def restore_order(Store store, uint32_t table, uint32_t stripe, uint32_t selector, slots,
                  uint32_t head):
    """Number the slots for the draws of a uniform selector as they were."""
    store.usable()
    cdef Flat s = Flat(slots, sizeof(uint32_t))
    checkpoint_status(
        sr_restore_order(&store.st, table, stripe, selector, s.n, <uint32_t *>s.at, head),
        "restoring the order of draws", store)


def restore_free(Store store, uint32_t table, uint32_t stripe, slots):
    """Put the list of free slots in its order."""
    store.usable()
    cdef Flat s = Flat(slots, sizeof(uint32_t))
    checkpoint_status(
        sr_restore_free(&store.st, table, stripe, s.n, <uint32_t *>s.at),
        "restoring free places", store)


def restore_end(Store store, bint reset_limiter):
    """Evict what is too much, and open the store. Gives the number of items evicted."""
    store.usable()
    cdef uint64_t evicted = 0
    cdef int rc
    with nogil:
        rc = sr_restore_end(&store.st, reset_limiter, &evicted)
    checkpoint_status(rc, "restoring a store", store)
    return evicted


def checkpointer(Store store):
    """JSON that says where checkpoints of the store go; None: nowhere."""
    store.usable()
    cdef uint32_t schema = sr_checkpointer(&store.st)
    return None if schema == 0 else store.schema_text(schema - 1)


def set_checkpointer(Store store, text):
    """Say where checkpoints of the store go; None: nowhere."""
    store.usable()
    sr_checkpointer_set(&store.st, 0 if text is None else store.schema_intern(text) + 1)
