# Waiting: deadlines, slices of sleep between which signals are looked at, and what the log says.

cdef inline double monotonic() noexcept nogil:
    cdef timespec ts
    clock_gettime(CLOCK_MONOTONIC, &ts)
    return <double>ts.tv_sec + <double>ts.tv_nsec * 1e-9


cdef inline double deadline_of(object timeout) except? -1.0:
    """Seconds from now -> the clock's reading then; None: never."""
    if timeout is None:
        return INFINITY
    return monotonic() + <double>timeout


cdef uint32_t wait_slice_ms(double deadline) noexcept:
    cdef double left = (deadline - monotonic()) * 1000.0
    if left >= 100.0:
        return 100
    return <uint32_t>left + 1 if left > 0 else 0


@cython.final
cdef class WaitLog:
    """Says after five seconds what a call waits for, and then every thirty."""

    cdef double next_at, started
    cdef object describe

    def __cinit__(self, object describe):
        self.started = monotonic()
        self.next_at = self.started + WAIT_LOG_AFTER_S
        self.describe = describe

    cdef int tick(self) except -1:
        cdef double now = monotonic()
        if now >= self.next_at:
            self.next_at = now + WAIT_LOG_EVERY_S
            logger.warning("waiting for %.1f s: %s", now - self.started, self.describe())
        return 0
