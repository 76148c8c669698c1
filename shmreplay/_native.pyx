# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
# cython: auto_pickle=False
"""The binding of the core: parse, check sizes, one core call without the GIL, raise.

The contract is in _core/shmreplay.h, the types of what is public here in _native.pyi.
"""

cimport cython
from cpython.buffer cimport (
    PyBUF_C_CONTIGUOUS,
    PyBUF_FORMAT,
    PyBUF_ND,
    PyBUF_SIMPLE,
    PyBUF_WRITABLE,
    PyBuffer_FillInfo,
    PyBuffer_Release,
    PyObject_CheckBuffer,
    PyObject_GetBuffer,
)
from cpython.bytearray cimport (
    PyByteArray_AS_STRING,
    PyByteArray_GET_SIZE,
    PyByteArray_Resize,
)
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from cpython.dict cimport PyDict_GetItemWithError, PyDict_Size
from cpython.object cimport PyObject
from libc.math cimport INFINITY, NAN, fabs, isnan
from libc.string cimport memcmp
from posix.time cimport CLOCK_MONOTONIC, clock_gettime, timespec

import logging
from collections import OrderedDict, deque
from time import time_ns

from numpy import arange as _arange
from numpy import dtype as _dtype
from numpy import ndarray as _ndarray

from shmreplay import errors, limits
from shmreplay.binding_support import (
    SELECTOR_CODES,
    as_array,
    bad_priority,
    check_new_structure,
    describe_borrowers,
    step_open_already,
    table_not_found,
)
from shmreplay.errors import ExpiredReferenceError, HistoryIndexError
from shmreplay.pattern_plan import (
    check_new_column,
    check_step,
    relabelled,
    set_twice,
    step_unknown,
    told_unusable,
    used_columns,
    without_values,
)
from shmreplay.spec import (
    DTYPE_OF_CODE,
    conversion_hint,
    dtype_code,
    dtype_name,
    dtype_of,
    fit_text,
    shape_text,
)
from shmreplay.tree import flatten, flatten_with_path, is_nested

__all__ = [
    "LAYOUT_VERSION",
    "SESSION_CLIENT",
    "SESSION_SAMPLER",
    "SESSION_WRITER",
    "Batch",
    "Buffer",
    "Column",
    "ColumnHistory",
    "Incoming",
    "Session",
    "StackPlan",
    "Store",
    "StructuredCore",
    "TrajectoryColumn",
    "Window",
    "WriterCore",
    "append_elsewhere",
    "borrowers",
    "checkpointer",
    "dtype_of_code",
    "hold_ask_back",
    "hold_claim",
    "hold_release",
    "hold_unwanted",
    "image_block_heads",
    "image_blocks",
    "image_episodes",
    "image_rows",
    "image_traj_heads",
    "image_trajs",
    "join_batches",
    "layout_signature",
    "logger",
    "note_fork",
    "peek_item",
    "peek_items",
    "peek_store",
    "peek_table",
    "restore_begin",
    "restore_blocks",
    "restore_derive",
    "restore_end",
    "restore_episodes",
    "restore_free",
    "restore_order",
    "restore_rows",
    "restore_slots",
    "restore_table",
    "restore_trajs",
    "session_counts",
    "sessions",
    "set_checkpointer",
    "size_of_block",
    "size_of_episode",
    "size_of_index",
    "size_of_trajectory",
    "slot_bits_fit",
    "slots_used",
    "snapshot",
    "stage_item",
    "stage_step",
    "step_bytes",
    "store_bytes",
]

logger = logging.getLogger("shmreplay")

include "_binding/core.pxi"

cdef object _uint64 = _dtype("uint64")
cdef object _int64 = _dtype("int64")
cdef object _int32 = _dtype("int32")
cdef object _float64 = _dtype("float64")
cdef double WAIT_LOG_AFTER_S = limits.WAIT_LOG_AFTER_S
cdef double WAIT_LOG_EVERY_S = limits.WAIT_LOG_EVERY_S
cdef uint64_t BLOCK_BYTES = limits.BLOCK_BYTES
cdef int64_t BLOCK_ROWS_MAX = limits.BLOCK_ROWS_MAX
cdef uint64_t BATCH_BLOCK_BYTES = limits.BATCH_BLOCK_BYTES
cdef uint64_t BATCH_BLOCK_ROWS = limits.BATCH_BLOCK_ROWS
cdef uint64_t COMPRESS_BLOCK_BYTES = limits.COMPRESS_BLOCK_BYTES
cdef uint64_t COMPRESS_GROUP_BYTES = limits.COMPRESS_GROUP_BYTES
cdef uint64_t COMPRESS_LEAST_BYTES = limits.COMPRESS_LEAST_BYTES
cdef uint64_t COMPRESS_SHARE = limits.COMPRESS_SHARE
cdef uint64_t COMPRESS_BLOCK_SHARE = limits.COMPRESS_BLOCK_SHARE
cdef Py_ssize_t DECODED_BYTES = limits.DECODED_BYTES
cdef uint64_t LZ4_BYTES_MAX = limits.LZ4_BYTES_MAX
cdef uint64_t LZ4_RATIO_MAX = limits.LZ4_RATIO_MAX
cdef uint64_t NOGIL_BYTES = limits.NOGIL_BYTES
cdef int64_t MAX_KEEP_ALIVE = limits.MAX_KEEP_ALIVE_REFS

LAYOUT_VERSION = SR_LAYOUT_VERSION
SESSION_CLIENT = SR_SESSION_CLIENT
SESSION_WRITER = SR_SESSION_WRITER
SESSION_SAMPLER = SR_SESSION_SAMPLER

include "_binding/status.pxi"
include "_binding/table_config.pxi"
include "_binding/store.pxi"
include "_binding/inspect.pxi"
include "_binding/memory.pxi"
include "_binding/numpy_access.pxi"
include "_binding/new_array.pxi"
include "_binding/packed.pxi"
include "_binding/waiting.pxi"
include "_binding/session.pxi"
include "_binding/insert_batch.pxi"
include "_binding/batch.pxi"
include "_binding/joined.pxi"
include "_binding/columns.pxi"
include "_binding/leaves.pxi"
include "_binding/plans.pxi"
include "_binding/history.pxi"
include "_binding/trajectory_column.pxi"
include "_binding/references.pxi"
include "_binding/foreign.pxi"
include "_binding/row_writer.pxi"
include "_binding/step_writer.pxi"
include "_binding/item_writer.pxi"
include "_binding/writer.pxi"
include "_binding/outgoing.pxi"
include "_binding/incoming.pxi"
include "_binding/pattern_plan.pxi"
include "_binding/structured.pxi"
include "_binding/checkpoint.pxi"
