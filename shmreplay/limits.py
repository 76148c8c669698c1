"""Every bound of the package, each with its reason.

A bound is fixed when a store is created, or at the call that would pass it; nothing grows without
one. The C core holds its own copy of those that shape shared memory.
"""

from __future__ import annotations

import math
import numbers
import operator
from typing import Any, Final

import numpy as np

from shmreplay.errors import ArgumentTypeError, InvalidArgumentError

# --- Structure of a store ---------------------------------------------------------------------

MAX_TABLES: Final = 64
"""Tables in one store: their headers lie in a fixed directory that every call scans by name."""

MAX_STRIPES: Final = 64
"""Stripes in one table: a batch takes each stripe's lock once, so more would cost every sampler."""

DEFAULT_MAX_STRIPES: Final = 16
"""Stripes that a table gets by default, at most: beyond that, writers rarely meet on a lock."""

MAX_TABLE_SIZE: Final = 2**31 - 1
"""Items in one table: Reverb's bound, and slot numbers take 31 bits of a key."""

MAX_TIMES_SAMPLED: Final = 2**31 - 1
"""Samples of one item: ``times_sampled`` is an int32, as in Reverb."""

MAX_BYTES: Final = 2**46
"""Bytes of a table: more than any store can have."""

MAX_SEED: Final = 2**64 - 1
"""Seeds are stored as 64 bits without sign."""

MAX_TABLE_NAME_BYTES: Final = 63
"""UTF-8 bytes of a table's name: with its closing zero it fills one 64-byte cache line."""

MAX_STORE_NAME_BYTES: Final = 100
"""UTF-8 bytes of a store's name: leaves room for prefix and suffix under NAME_MAX (255)."""

# --- Checkpoints ------------------------------------------------------------------------------

CHECKPOINT_WAIT_S: Final = 600.0
"""Seconds that writing a checkpoint waits for its turn: one of many gigabytes takes minutes."""

CHECKPOINT_YIELD_S: Final = 10.0
"""Seconds that an allocation in a full store waits for a checkpoint, which holds what is replaced,
to give up: it does between two pieces of a few MiB, so after the slowest write to disk."""

# --- Shape of data ----------------------------------------------------------------------------

MAX_COLUMNS: Final = 256
"""Leaves in one step or trajectory: each costs a fixed descriptor in every block and item."""

MAX_DIMS: Final = 8
"""Dimensions of one step's value in a column: column descriptors hold a fixed number."""

MAX_SPEC_DIMS: Final = MAX_DIMS + 1
"""Dimensions of a signature's leaf: those of a step's value and the leading time dimension."""

MAX_TEXT_WIDTH: Final = 2**20
"""Bytes or characters of text in one element: every element takes the whole width."""

MAX_VALUE_BYTES: Final = 2**47
"""Bytes of one leaf: the user's share of the x86-64 address space, so that no product wraps."""

MAX_NESTING: Final = 32
"""Containers within containers: data that contains itself ends here and not in a crash."""

MAX_SIGNATURE_JSON_BYTES: Final = 2**16
"""Bytes of a signature as JSON: 256 for each of 256 columns; it is stored with the table."""

MAX_CONFIG_JSON_BYTES: Final = 2 * MAX_SIGNATURE_JSON_BYTES + 2**12
"""Bytes of a table's configuration as JSON: a signature, quoted once more, and a few numbers."""

BLOCK_BYTES: Final = 64 * 2**10
"""Bytes of a writer's block, about: it stays whole while one item refers to any of its steps."""

BLOCK_ROWS_MAX: Final = 1024
"""Steps of a writer's block: small steps would otherwise make blocks that live for very long."""

BATCH_BLOCK_BYTES: Final = 256 * 2**10
"""Bytes of a block of ``insert_batch``, about: large copies run at memory speed from here on."""

BATCH_BLOCK_ROWS: Final = 4096
"""Rows of a block of ``insert_batch``, for the same reason as BLOCK_ROWS_MAX."""

COMPRESS_BLOCK_BYTES: Final = 256 * 2**10
"""Bytes of a block that is to be compressed, before that: what describes it is then little."""

COMPRESS_GROUP_BYTES: Final = 64 * 2**10
"""Bytes of a column's steps that are compressed together: a reader of one decodes all of them, and
with fewer of them each would find less to refer to."""

COMPRESS_LEAST_BYTES: Final = 4 * 2**10
"""Bytes of a block below which it stays as it is: describing it would take what that saves."""

COMPRESS_SHARE: Final = 8
"""A column is compressed if that saves an eighth of it: each reader pays for it."""

COMPRESS_BLOCK_SHARE: Final = 64
"""And if it saves a 64th of the block: small columns beside large ones stay as they are."""

DECODED_BYTES: Final = 16 * 2**20
"""Bytes of decoded steps that a process keeps of a store, in case that they are read again."""

LZ4_BYTES_MAX: Final = 0x7E000000
"""Bytes that LZ4 compresses at once."""

LZ4_RATIO_MAX: Final = 256
"""What LZ4 makes of a byte at most is 255 of them: more is damage, and takes no memory."""

NOGIL_BYTES: Final = 16 * 2**10
"""Bytes of a step from which on it is copied without the GIL: below, letting go costs more."""

MAX_KEEP_ALIVE_REFS: Final = 2**24
"""Steps that a writer keeps within reach: its history has an entry of 40 bytes for each."""

MAX_BATCH: Final = 2**20
"""Items in one batch: more is better drawn in several."""

MAX_PREFETCH: Final = 64
"""Batches gathered ahead by a sampler: each takes the memory of a whole batch."""

INSERT_WRITERS_MAX: Final = 8
"""Writers that a client keeps for ``insert``: one for each type of data and thread at work."""

SWEEP_EVERY_S: Final = 1.0
"""Seconds between two looks of the server for participants that died."""

EXTENSION_EVENTS: Final = 1024
"""Changes of a table that its extensions may be behind: each keeps its item's steps in memory."""

EXTENSION_EVENTS_MIN: Final = 512
"""Fewest of them: a batch of 256 inserts may evict as many, and needs room for both."""

EXTENSION_EVENTS_MAX: Final = 2**16
"""Most of them: more memory than that would be committed for nothing."""

EXTENSION_BATCH: Final = 64
"""Changes that the extensions' thread takes at once: those are lost if the server is killed."""

EXTENSION_STOP_S: Final = 5.0
"""Seconds that a server which is stopped gives its extensions for what they were not told yet."""

EXTENSION_LOG_EVERY_S: Final = 1.0
"""Seconds between two tracebacks of one table's extensions in the log; all are counted."""

# --- Waiting ----------------------------------------------------------------------------------

WRITER_WINDOW_ITEMS: Final = 128
"""Items that one writer holds back for the rate limiter before ``create_item`` itself waits."""

WAIT_SLICE_MS: Final = 100
"""Milliseconds of one slice of waiting: after it signals, deadline and dead owners are checked."""

SERVER_WAIT_S: Final = 300.0
"""Seconds that a client waits for a server which is not up yet: longer than one takes to start."""

REMOTE_WAIT_S: Final = 10.0
"""Seconds that a server on another host may be out of reach, unless the client says otherwise."""

WAIT_LOG_AFTER_S: Final = 5.0
"""Seconds of waiting for a rate limiter after which the log says for what."""

WAIT_LOG_EVERY_S: Final = 30.0
"""Seconds between two such lines of one wait."""

# --- Several servers as one -------------------------------------------------------------------

SHARD_LOST_S: Final = 3.0
"""Seconds that a shard may be out of reach before calls on it fail, unless the client says
otherwise: shorter than for a single server, as others can take its place."""

SHARD_LOOK_S: Final = 0.25
"""Seconds between two looks at the masses of a shard's tables: one small request each."""

SHARD_STALE_S: Final = 1.0
"""Seconds after which masses are asked for by the call that needs them, and waited for as long."""

SHARD_POLL_S: Final = 0.02
"""Seconds between two such looks by a call that waits, as the table is empty everywhere."""

SHARD_RETRY_S: Final = 0.5
"""Seconds between two attempts to reach a shard that is down."""

SHARD_THREADS: Final = 64
"""Requests of one sharded client that are with its shards at once."""


# --- The bridge -------------------------------------------------------------------------------

BRIDGE_MESSAGE_BYTES: Final = 256 * 2**20
"""Bytes of one message, and so of one of its frames: more is better sent in several."""

BRIDGE_META_BYTES: Final = 16 * 2**20
"""Bytes of a message's meta part: descriptions, and arrays that are too small for a part."""

BRIDGE_PARTS: Final = 4096
"""Parts of a message: sixteen runs of steps of 256 columns."""

BRIDGE_INLINE_BYTES: Final = 1024
"""Bytes up to which an array stands in the meta part: a part of its own costs more than a copy."""

BRIDGE_COMPRESS_BYTES: Final = 4096
"""Bytes from which on an array may be compressed: below, it fits a few packets anyway."""

BRIDGE_PROBE_BYTES: Final = 16 * 2**10
"""Bytes of an array that are compressed first, to see whether the rest is worth it."""

BRIDGE_TEXT_BYTES: Final = MAX_CONFIG_JSON_BYTES
"""Bytes of a text in a message: the longest is a table's configuration."""

BRIDGE_PROCESSES: Final = 64
"""Processes of a bridge: more than a machine has use for."""

BRIDGE_SESSIONS: Final = 4096
"""Remote clients at once: as many as a store has sessions for writers."""

BRIDGE_STRANGERS: Final = 1024
"""Peers whose messages are dropped unread after they broke the protocol; the oldest go first."""

BRIDGE_REQUESTS: Final = 1024
"""Requests of one remote client that are not answered or whose answers are not confirmed."""

BRIDGE_RECEIPTS: Final = 256
"""Inserts of batches and resets among them: each takes one of the store's 65,536 receipts."""

BRIDGE_ALL_RECEIPTS: Final = 65536
"""Receipts of a store: its remote clients, their writers, and what of theirs is not confirmed."""

BRIDGE_OWN_RECEIPTS: Final = 8
"""Receipts that a remote client gets however many others have: half of all, over all clients."""

BRIDGE_SESSION_BYTES: Final = 2 * BRIDGE_MESSAGE_BYTES
"""Bytes of such requests and answers of one remote client: one large message each way."""

BRIDGE_TOTAL_BYTES: Final = 4 * 2**30
"""The same of all remote clients together: beyond it, requests that carry data are refused."""

BRIDGE_ASK_BYTES: Final = 4 * 2**20
"""Bytes of a message beyond which a client asks for room first: that takes less time than to send
as much."""

BRIDGE_ARRIVING_BYTES: Final = 2 * 2**30
"""Bytes of such messages that may be on their way to a process of the bridge: libzmq takes memory
for all of a frame as soon as it begins to come."""

BRIDGE_PROCESS_BYTES: Final = 2 * BRIDGE_TOTAL_BYTES
"""Memory of its own that a process of the bridge may have: what of an endless message libzmq has
gathered is known to nobody else, and ends the process, not the machine."""

BRIDGE_CLIENT_BYTES: Final = 16 * 2**20
"""Bytes of requests that a client sends ahead of their answers, unless a single one has more."""

BRIDGE_WRITERS: Final = 256
"""Writers of one remote client: each takes one of the store's sessions."""

BRIDGE_KEEP_ALIVE: Final = 2**20
"""Steps within reach, over all columns of a remote writer: the server keeps 40 bytes for each."""

BRIDGE_VALUES: Final = 2**62
"""Values of one column of a writer: their numbers must fit 64 bits with a sign."""

BRIDGE_RUN_STEPS: Final = 64
"""Steps of a remote writer that may wait to be sent together."""

BRIDGE_RUN_BYTES: Final = 256 * 2**10
"""Bytes of such steps: from there on, sending one by one is as fast."""

BRIDGE_KEPT_BYTES: Final = 2 * BRIDGE_CLIENT_BYTES
"""Bytes of messages that are gone, for which a process keeps its memory: all that come again."""

BRIDGE_GATHER_BYTES: Final = 2 * 2**20
"""Bytes of a remote writer's steps and items that are sent in one message while others of it are on
their way: several large steps."""

BRIDGE_GATHER_ITEMS: Final = 4 * BRIDGE_RUN_STEPS
"""Items of a remote writer that are a message of their own: one costs both sides as much work as
some hundred items in it."""

BRIDGE_WINDOW_BYTES: Final = 64 * 2**30
"""Address space for the steps that a client's remote writers keep within reach; memory is taken as
they come."""

BRIDGE_PIPELINE: Final = 2
"""Messages of one writer that are on their way at once; what comes meanwhile shares the next."""

BRIDGE_LIST_PARTS: Final = 16
"""Pieces of 4,096 slots that one answer lists: 2.5 MB, a millisecond of the bridge's time."""

BRIDGE_FETCH_BYTES: Final = 32 * 2**20
"""Bytes of items beyond which an answer to a fetch has fewer of them, but for a single one."""

BRIDGE_POLL_S: Final = 0.002
"""Seconds between two tries for requests that wait for a rate limiter: local processes, which do
not tell the bridge, may have changed something."""

BRIDGE_EXPIRE_S: Final = 30.0
"""Seconds after which a remote client that is not heard of any more is taken to be dead."""

BRIDGE_HEARTBEAT_S: Final = 1.0
"""Seconds between two signs of life."""

BRIDGE_LOST_S: Final = 5.0
"""Seconds without a sign of life after which a connection is made anew."""

BRIDGE_START_S: Final = 60.0
"""Seconds that a process of the bridge may take to start: it imports the package first."""

BRIDGE_CLOSE_S: Final = 5.0
"""Seconds that closing a remote writer or client waits for the server at most."""


def checked_timeout(timeout: Any) -> float | None:
    """Returns a timeout in seconds; None, 0 and infinity are fine.

    Raises:
        ArgumentTypeError: It is not a number.
        InvalidArgumentError: It is NaN.
    """
    if timeout is None or (type(timeout) is float and timeout == timeout):
        return timeout
    if isinstance(timeout, bool) or not isinstance(timeout, numbers.Real):
        raise ArgumentTypeError(
            f"Got timeout {timeout!r} of type {type(timeout).__name__}; expected seconds as a"
            " number, or None to wait for ever."
        )
    try:
        seconds = float(timeout)
    except OverflowError:  # an int beyond all floats is as good as for ever
        seconds = math.inf if timeout > 0 else 0.0  # type: ignore[operator]
    if seconds != seconds:
        raise InvalidArgumentError(
            f"Got timeout {timeout!r}; expected seconds, or None to wait for ever."
        )
    return seconds


def checked_timeout_ms(timeout_ms: Any) -> float | None:
    """Returns a timeout in milliseconds as seconds.

    Raises:
        ArgumentTypeError: It is not a number.
        InvalidArgumentError: It is NaN.
    """
    seconds = checked_timeout(timeout_ms)
    return None if seconds is None else seconds / 1000


def checked_int(name: str, value: Any) -> int:
    """Returns ``value`` as an int; numpy integers are fine, bools and floats are not.

    Args:
        name: Of the argument, for the message.
        value: Anything.

    Raises:
        ArgumentTypeError: It is not an integer.
    """
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ArgumentTypeError(
            f"Got {name} {value!r} of type {type(value).__name__}; expected an int. Use int(...) "
            "where it stands for one."
        )
    try:
        return operator.index(value)
    except TypeError as error:  # an array of several numbers, or of floats
        raise ArgumentTypeError(
            f"Got {name} {value!r} of type {type(value).__name__}; expected a single int. Use "
            "int(...) where it stands for one."
        ) from error


def checked_number(name: str, value: Any) -> float:
    """Returns ``value`` as a float, infinite where it is an int beyond all floats; NaN is fine.

    Args:
        name: Of the argument, for the message.
        value: Anything.

    Raises:
        ArgumentTypeError: It is not a number.
    """
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        raise ArgumentTypeError(
            f"Got {name} {value!r} of type {type(value).__name__}; expected a number. Use "
            "float(...) where it stands for one."
        )
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def checked_key(key: Any) -> int:
    """Returns the key of an item as an int.

    Raises:
        ArgumentTypeError: It is not an integer of 64 bits without sign.
    """
    if not isinstance(key, int | np.integer) or isinstance(key, bool) or not 0 <= key < 1 << 64:
        raise ArgumentTypeError(
            f"a key must be an integer in [0, 2**64); got {type(key).__name__}: {key!r}. Take it "
            "from info.key."
        )
    return int(key)
