# Leaves of a step: where their bytes are, if they are what their columns hold.


cdef inline const void *plain_leaf(Column c, PyObject *leaf, char *scratch) noexcept:
    """Where the leaf's bytes are, if it is exactly what the column holds and needs no conversion;
    else NULL.
    """
    cdef type kind = type(<object>leaf)
    cdef sr_array_head *a
    cdef int i, overflow = 0
    if kind is array_type:
        a = <sr_array_head *>leaf
        if (not arrays_readable or a.descr != <PyObject *>c.dtype or a.nd != c.ndim
                or not a.flags & ARRAY_C_CONTIGUOUS):
            return NULL
        for i in range(c.ndim):
            if a.dimensions[i] != c.dims[i]:
                return NULL
        return a.data
    if c.ndim != 0:
        return NULL
    if kind is c.scalar_type:
        return SR_SCALAR_VALUE(leaf)
    if kind is float and c.code == 12:
        (<double *>scratch)[0] = <double><object>leaf
        return scratch
    if kind is bool and c.code == 1:
        scratch[0] = <object>leaf is True
        return scratch
    if kind is int and c.code == 5:
        (<int64_t *>scratch)[0] = PyLong_AsLongLongAndOverflow(<object>leaf, &overflow)
        return NULL if overflow else scratch
    return NULL


cdef const void *take_leaf(Column c, object leaf, Py_buffer *buf, char *scratch) except NULL:
    """Where the leaf's bytes are, checked against the column.

    May fill buf, which the caller releases, or scratch.
    """
    cdef type kind = type(leaf)
    cdef const void *plain = plain_leaf(c, <PyObject *>leaf, scratch)
    if plain != NULL:
        return plain
    if kind is int and c.code == 5 and c.ndim == 0:
        raise errors.SignatureError(
            f"Tensor of wrong dtype provided for column {c.path}. Got {leaf} which does not fit "
            "int64; expected less than 2**63. Use np.uint64 or a float from the first step on.")
    if (not PyObject_CheckBuffer(leaf) or isinstance(leaf, (bytes, bytearray, str))
            or (kind is not array_type and isinstance(leaf, array_type))):
        leaf = as_array(leaf, c.path)  # which refuses masked arrays: the buffer has no mask
    try:
        PyObject_GetBuffer(leaf, buf, PyBUF_FORMAT | PyBUF_C_CONTIGUOUS)
    except (ValueError, BufferError):
        # Not contiguous, or a type that has no buffer form: as_array copies the one and refuses the
        # other.
        leaf = as_array(leaf, c.path)
        PyObject_GetBuffer(leaf, buf, PyBUF_FORMAT | PyBUF_C_CONTIGUOUS)
    if dtype_code_of(buf) == 0:
        # Another byte order, for example.
        PyBuffer_Release(buf)
        leaf = as_array(leaf, c.path)
        PyObject_GetBuffer(leaf, buf, PyBUF_FORMAT | PyBUF_C_CONTIGUOUS)
    if is_text(c.code) and dtype_code_of(buf) != c.code:
        # The buffer keeps the array that it stands on.
        PyBuffer_Release(buf)
        leaf = fit_text(as_array(leaf, c.path), c.dtype, c.path)
        PyObject_GetBuffer(leaf, buf, PyBUF_FORMAT | PyBUF_C_CONTIGUOUS)
    return check_leaf(c, leaf, buf)


cdef const void *check_leaf(Column c, object leaf, Py_buffer *buf) except NULL:
    cdef int i
    cdef bint fits = buf.ndim == c.ndim
    if dtype_code_of(buf) != c.code:
        array = as_array(leaf, c.path)
        dtype = dtype_from_code(c.code)
        raise errors.SignatureError(
            f"Tensor of wrong dtype provided for column {c.path}. Got {dtype_name(array.dtype)} "
            f"but expected {dtype_name(dtype)}. {conversion_hint(array.dtype, dtype)}")
    if fits:
        for i in range(c.ndim):
            if buf.shape[i] != c.dims[i]:
                fits = False
    if not fits:
        given = tuple([buf.shape[i] for i in range(buf.ndim)])
        raise errors.SignatureError(
            f"Tensor of incompatible shape provided for column {c.path}. Got {shape_text(given)} "
            "which is incompatible with "
            f"{shape_text(c.shape)}. Expected is the shape of the first value: reshape it, or use "
            "another name for it.")
    return buf.buf if buf.buf != NULL else <const void *>c.dims
