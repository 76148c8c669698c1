# What the core says as the exception that it stands for.

cdef int _fork_count = 0


def note_fork():
    """Called in the child after a fork: handles made before it raise `ForkedHandleError` from now
    on.
    """
    global _fork_count
    _fork_count += 1


cdef raise_status(int rc, str what, Store store=None):
    """Turn a status of the core into the exception it stands for.

    Given the store, an error for want of memory says who pins some.
    """
    pins = ""
    if store is not None and (rc == SR_FULL or rc == SR_NOSPACE):
        pins = describe_borrowers(borrowers(store))
    cdef sr_detail *d = sr_last_detail()
    if rc == SR_FULL:
        raise errors.ArenaFullError(
            f"{what}: the store is full: {d.asked} bytes asked for, {d.available} available "
            "within its capacity. "
            f"Give the server a larger capacity=, a smaller table max_size, or delete items.{pins}")
    if rc == SR_NOSPACE:
        raise errors.ArenaFullError(
            f"{what}: the file system of the store (/dev/shm, or that of its path=) is full: "
            f"{d.asked} bytes asked for. "
            "Free space there or enlarge it (Docker: --shm-size), or give the server a smaller "
            f"capacity=.{pins}")
    if rc == SR_TOO_LARGE:
        raise errors.InvalidArgumentError(
            f"{what}: got an item that keeps {d.asked} bytes in memory by itself; expected at most "
            f"the max_bytes of its table, {d.available}. An item keeps whole blocks of steps: give "
            "the table a larger max_bytes, or the writer a smaller max_chunk_length (insert_batch: "
            "fewer rows at once).")
    if rc == SR_CLOSED:
        raise errors.ServerClosedError(
            f"{what}: the server has closed this store: its memory and its items are gone; "
            "expected a running one. Once it runs again, a Client goes on with its next call; "
            "make new writers and samplers of it.")
    if rc == SR_CORRUPT:
        raise errors.TableCorruptedError(
            f"{what}: what the table holds contradicts itself, and repairing it did not help; it "
            "is shut, to prevent wrong answers. `shmreplay dump` still reads its data; restart the "
            "server to start anew.")
    if rc == SR_LIMIT:
        raise errors.StoreLimitError(
            f"{what}: no free entry left in the store (its bounds on attached processes, open "
            "writers and samplers, or "
            "different item structures). Close what is not needed or give the server a larger "
            "capacity=.")
    if rc == SR_SYS:
        raise OSError(d.sys_errno, f"{what}: a system call failed. `shmreplay doctor` may say more")
    raise errors.InvalidArgumentError(
        f"{what}: Got what the core refuses as out of range (status {rc}); expected less. Give "
        "smaller numbers.")
