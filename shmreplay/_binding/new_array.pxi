# Making numpy arrays on memory of our own.
#
# np.ndarray(shape, dtype, buffer) takes 300 ns, mostly to read its arguments and to ask the buffer
# what it is; a batch has a dozen arrays. numpy's C functions take a third of it. They are found
# through the table of them that numpy keeps, in which each has its place for good: extensions that
# were compiled against an older numpy call them by it. At import they are tried on every type that
# is stored, and where anything differs np.ndarray is used instead.

from cpython.pycapsule cimport PyCapsule_GetPointer
from cpython.ref cimport Py_INCREF

# PyArray_NewFromDescr takes a reference to `descr`, PyArray_SetBaseObject one to `base`.
ctypedef object (*array_maker)(
    PyObject *type, PyObject *descr, int nd, Py_ssize_t *dims, Py_ssize_t *strides, void *data,
    int flags, PyObject *obj)
ctypedef int (*base_setter)(PyObject *array, PyObject *base) except -1

DEF PLACE_OF_NEW_FROM_DESCR = 94
DEF PLACE_OF_SET_BASE = 282
DEF ARRAY_ALIGNED = 0x100
DEF ARRAY_WRITEABLE = 0x400
DEF NEW_DIMS_MAX = 32

cdef bint arrays_makeable = False
cdef array_maker new_from_descr = NULL
cdef base_setter set_base = NULL


cdef object new_array(tuple shape, object dtype, object owner, void *data, bint writable):
    """A C-contiguous array on `data`, which is aligned for the dtype and lives as `owner` does."""
    cdef Py_ssize_t dims[NEW_DIMS_MAX]
    cdef int i, nd = <int>len(shape)
    cdef object array
    if not arrays_makeable or nd > NEW_DIMS_MAX:
        return old_array(shape, dtype, owner, data, writable)
    for i in range(nd):
        dims[i] = shape[i]
    Py_INCREF(dtype)
    array = new_from_descr(
        <PyObject *>_ndarray, <PyObject *>dtype, nd, dims, NULL, data,
        ARRAY_C_CONTIGUOUS | ARRAY_ALIGNED | (ARRAY_WRITEABLE if writable else 0), NULL)
    Py_INCREF(owner)
    set_base(<PyObject *>array, <PyObject *>owner)
    return array


cdef object old_array(tuple shape, object dtype, object owner, void *data, bint writable):
    """The same, through the buffer protocol."""
    cdef size_t nbytes = dtype.itemsize
    for length in shape:
        nbytes *= <size_t>length
    return _ndarray(shape, dtype, make_window(owner, data, nbytes, not writable))


cdef bint array_is_made_right(object dtype) except -1:
    """Does an array of this dtype say what it should, and hold its memory while it lives?"""
    cdef Buffer b = Buffer(1024)
    cdef object array, expected
    for writable in (False, True):
        for shape in ((2, 3), (4,), (), (0, 2)):
            array = new_array(shape, dtype, b, b.base, writable)
            expected = old_array(shape, dtype, b, b.base, writable)
            if (type(array) is not _ndarray or array.base is not b or array.dtype is not dtype
                    or array.__array_interface__ != expected.__array_interface__
                    or array.strides != expected.strides
                    or array.flags.num != expected.flags.num):
                return False
    return True


cdef int look_for_numpy_functions() except -1:
    global arrays_makeable, new_from_descr, set_base
    cdef void **functions
    try:
        from numpy._core._multiarray_umath import _ARRAY_API as table  # numpy 2
    except ImportError:
        try:
            from numpy.core._multiarray_umath import _ARRAY_API as table
        except ImportError:
            return 0
    functions = <void **>PyCapsule_GetPointer(table, NULL)
    new_from_descr = <array_maker>functions[PLACE_OF_NEW_FROM_DESCR]
    set_base = <base_setter>functions[PLACE_OF_SET_BASE]
    arrays_makeable = True
    for dtype in DTYPE_OF_CODE.values():
        arrays_makeable = arrays_makeable and array_is_made_right(dtype)
    return 0


look_for_numpy_functions()
