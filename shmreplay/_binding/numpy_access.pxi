# Reading numpy arrays and scalars where they lie, for the hot path of append.
#
# The buffer protocol costs 60 to 100 ns an array, several times the copy of a small step. numpy's C
# headers cannot be used: their place cannot be named in pyproject.toml, and the limited API hides
# them. So the first fields of an array object, which are part of numpy's stable binary interface
# since 1.0, are declared here; at import they are compared with what numpy itself says, for every
# type that is stored, and where anything differs (another interpreter, another numpy) the buffer
# protocol is used instead.

cdef extern from *:
    """
    #include <Python.h>
    typedef struct {
        PyObject_HEAD
        char *data;
        int nd;
        Py_ssize_t *dimensions, *strides;
        PyObject *base, *descr;
        int flags;
    } sr_array_head;
    #define SR_SCALAR_VALUE(o) ((const char *)(o) + sizeof(PyObject))
    """
    ctypedef struct sr_array_head:
        char *data
        int nd
        Py_ssize_t *dimensions
        Py_ssize_t *strides
        PyObject *descr
        int flags
    const char *SR_SCALAR_VALUE(PyObject *o)

DEF ARRAY_C_CONTIGUOUS = 1

cdef bint arrays_readable = False
cdef uint32_t scalars_readable = 0   # bit: dtype code
cdef type array_type = _ndarray


cdef bint array_reads_right(object array) except -1:
    """Do the declared fields of this array say what numpy says?"""
    cdef sr_array_head *a = <sr_array_head *><PyObject *>array
    cdef int i
    if a.nd != array.ndim or <size_t>a.data != array.__array_interface__["data"][0]:
        return False
    if (a.descr != <PyObject *>array.dtype
            or bool(a.flags & ARRAY_C_CONTIGUOUS) != array.flags.c_contiguous):
        return False
    for i in range(a.nd):
        if a.dimensions[i] != array.shape[i] or a.strides[i] != array.strides[i]:
            return False
    return True


cdef int look_at_numpy() except -1:
    global arrays_readable, scalars_readable
    cdef bint right = True
    cdef object array, scalar
    cdef bytes expected
    for code, dtype in DTYPE_OF_CODE.items():
        array = _arange(24).astype(dtype).reshape(2, 3, 4)
        for view in (array, array[:, ::2], array.T, array[0, 0, 0:0], array[0, 0, 0, ...]):
            right = right and array_reads_right(view)
        scalar = array[1, 2, 3]
        expected = scalar.tobytes()
        if memcmp(SR_SCALAR_VALUE(<PyObject *>scalar), <const char *>expected, len(expected)) == 0:
            scalars_readable |= 1u << <uint32_t>code
    arrays_readable = right
    return 0


look_at_numpy()
