# Memory that numpy arrays stand on: aligned buffers of our own, and windows into the store that
# keep their pin alive.

cdef extern from "stdlib.h" nogil:
    int posix_memalign(void **out, size_t alignment, size_t size)

DEF POOL_SLOTS = 64
DEF POOL_BYTES_MAX = 256 << 20
DEF BUFFER_ALIGN = 64

# Buffers that are free, for reuse: a fresh large allocation costs a page fault for every 4 kB at
# its first use, which is more than the copy itself. Bounded in number and bytes; guarded by
# _pool_lock.
cdef struct pooled:
    void *base
    size_t nbytes

cdef pooled _pool[POOL_SLOTS]
cdef size_t _pool_bytes = 0
cdef PyThread_type_lock _pool_lock = PyThread_allocate_lock()


cdef void *pool_take(size_t nbytes) noexcept:
    global _pool_bytes
    cdef void *found = NULL
    cdef int i
    PyThread_acquire_lock(_pool_lock, 1)
    for i in range(POOL_SLOTS):
        if _pool[i].base != NULL and _pool[i].nbytes == nbytes:
            found = _pool[i].base
            _pool[i].base = NULL
            _pool_bytes -= nbytes
            break
    PyThread_release_lock(_pool_lock)
    if found == NULL and posix_memalign(&found, BUFFER_ALIGN, max(nbytes, 1)) != 0:
        return NULL
    return found


cdef void pool_give(void *base, size_t nbytes) noexcept:
    global _pool_bytes
    cdef int i
    PyThread_acquire_lock(_pool_lock, 1)
    if _pool_bytes + nbytes <= POOL_BYTES_MAX:
        for i in range(POOL_SLOTS):
            if _pool[i].base == NULL:
                _pool[i].base = base
                _pool[i].nbytes = nbytes
                _pool_bytes += nbytes
                base = NULL
                break
    PyThread_release_lock(_pool_lock)
    free(base)


@cython.freelist(32)
cdef class Buffer:
    """Writable memory on a 64-byte boundary, returned to a pool when the last array on it is gone.
    """

    cdef char *base
    cdef size_t nbytes

    def __cinit__(self, size_t nbytes):
        self.base = <char *>pool_take(nbytes)
        self.nbytes = nbytes
        if self.base == NULL:
            raise MemoryError(f"no memory for a batch array of {nbytes} bytes")

    def __dealloc__(self):
        if self.base != NULL:
            pool_give(self.base, self.nbytes)

    def __getbuffer__(self, Py_buffer *view, int flags):
        PyBuffer_FillInfo(view, self, self.base, self.nbytes, 0, flags)

    def __releasebuffer__(self, Py_buffer *view):
        pass


@cython.freelist(32)
cdef class Window:
    """A stretch of the store's memory.

    Keeps its owner (a pinned batch, or a writer's row) alive.
    """

    cdef char *base
    cdef size_t nbytes
    cdef bint readonly
    cdef object owner

    def __getbuffer__(self, Py_buffer *view, int flags):
        PyBuffer_FillInfo(view, self, self.base, self.nbytes, self.readonly, flags)

    def __releasebuffer__(self, Py_buffer *view):
        pass


cdef Window make_window(object owner, const void *base, size_t nbytes, bint readonly):
    cdef Window w = Window.__new__(Window)
    w.owner = owner
    w.base = <char *>base
    w.nbytes = nbytes
    w.readonly = readonly
    return w


# ------------------------------------------------------------------ element types

DEF TEXT_BYTES = 15  # lowest byte of the code of text, whose width is above it
DEF TEXT_UCS4 = 16
DEF TEXT_WIDTH_MAX = 1 << 20  # MAX_TEXT_WIDTH


cdef inline bint is_text(int code) noexcept:
    return code > TEXT_UCS4


# The code of text from its format: a width, then s or w.
cdef int text_code_of(const char *f) noexcept:
    cdef int width = 0
    while b"0" <= f[0] <= b"9" and width <= TEXT_WIDTH_MAX:
        width = 10 * width + (f[0] - 48)  # the digit 0
        f += 1
    if width < 1 or width > TEXT_WIDTH_MAX or f[0] == 0 or f[1] != 0:
        return 0
    if f[0] == b"s":
        return width << 8 | TEXT_BYTES
    if f[0] == b"w":
        return width << 8 | TEXT_UCS4
    return 0


# Codes as in shmreplay.spec; 0 means a type that is not stored.
cdef int dtype_code_of(Py_buffer *b) noexcept:
    cdef const char *f = b.format
    cdef char c
    if f == NULL:
        return 6 if b.itemsize == 1 else 0
    if f[0] == b"@" or f[0] == b"=" or f[0] == b"<":
        f += 1
    if f[0] == b"Z":
        if f[1] == b"f" and f[2] == 0:
            return 13
        if f[1] == b"d" and f[2] == 0:
            return 14
        return 0
    if b"0" <= f[0] <= b"9":
        return text_code_of(f)
    if f[0] == 0 or f[1] != 0:
        return 0
    c = f[0]
    if c == b"f":
        return 11
    if c == b"d":
        return 12
    if c == b"?":
        return 1
    if c == b"B":
        return 6
    if c == b"b":
        return 2
    if c == b"e":
        return 10
    if c == b"h":
        return 3
    if c == b"H":
        return 7
    if c == b"i" or c == b"l" or c == b"q":
        return 4 if b.itemsize == 4 else 5
    if c == b"I" or c == b"L" or c == b"Q":
        return 8 if b.itemsize == 4 else 9
    return 0


def dtype_of_code(int code):
    """numpy dtype of a code of shmreplay.spec."""
    return dtype_of(code)


cdef object dtype_from_code(int code):
    return dtype_of(code)
