"""What requests other than a writer's do at the store. Each is a generator; see `scheduler`."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from shmreplay import _native, errors, item_schema, limits, live_table
from shmreplay.binding_support import bad_priority
from shmreplay.bridge import protocol
from shmreplay.bridge.batch import write_samples
from shmreplay.bridge.protocol import Kind
from shmreplay.bridge.receipts import Receipt, of_token
from shmreplay.bridge.scheduler import Task, Work
from shmreplay.bridge.wire import Reader, Writer
from shmreplay.client import Client
from shmreplay.connection import Connection
from shmreplay.errors import ProtocolError
from shmreplay.rate_limiters import RateLimiter
from shmreplay.spec import dtype_code
from shmreplay.table import Changeable

if TYPE_CHECKING:
    from shmreplay.bridge.sessions import Session

__all__ = ["Operations"]

EVERYTHING = 0xFFFF
"""Number of a table that stands for the whole store."""

Array = npt.NDArray[Any]

_MOST_STRUCTURES = 1024
_SHORT_TEXT = 4096


class Operations:
    """The requests that are not a writer's, done by one client of the store."""

    def __init__(self, address: str) -> None:
        """Attaches to the store at `'shm://NAME'`."""
        self._client = Client(address)
        self.connection: Connection = self._client._connected()
        self._drawing = self._client._drawing_over(self.connection)
        self._native = self.connection.native
        # Structures of batches for a table that were checked, by their text: most come again.
        self._structures: dict[tuple[int, bytes], tuple[item_schema.ItemSchema, int]] = {}
        # What takes long: walking all invariants of a store, writing it to disk, emptying a large
        # table.
        self._slow = ThreadPoolExecutor(max_workers=3, thread_name_prefix="shmreplay-slow")
        self.kinds: dict[Kind, Callable[[Session, Reader, Task], Work]] = {
            Kind.INSERT_BATCH: self._insert_batch,
            Kind.SAMPLE: self._sample,
            Kind.UPDATE: self._update,
            Kind.DELETE: self._delete,
            Kind.RESET: self._reset,
            Kind.INFO: self._info,
            Kind.STATS: self._stats,
            Kind.CHECK: self._check,
            Kind.LIST: self._list,
            Kind.FETCH: self._fetch,
            Kind.CONFIGURE: self._configure,
            Kind.CHECKPOINT: self._checkpoint,
        }

    def close(self) -> None:
        """Detaches from the store."""
        self._slow.shutdown(wait=True)
        self._client.close()

    def may_help(self, waits_for: Hashable) -> bool:
        """Whether trying again may help those who wait for this."""
        try:
            match waits_for:
                case (int(number), "sample"):
                    return self._native.can_sample(number, 1)
                case (int(number), "insert"):
                    return self._native.can_insert(number, 1)
                case (int(number), "events"):
                    return not self._native.events_behind(number)
                case ("thread", Future() as result):
                    return result.done()
        except errors.ReverbError:
            return True  # whoever tries is told what is wrong with the table
        return True

    def put_back(self, number: int, batch: _native.Batch) -> None:
        """Items that were drawn and that nobody got: the next to sample gets them, in order."""
        self._drawing.keep(number, batch)

    def delivered(self, batch: _native.Batch) -> None:
        """Items that their client has."""
        self._drawing.finish(batch)

    def consumes(self, number: int) -> bool:
        """Whether what is sampled is not sampled again."""
        return self._native.consumes(number)

    def _table(self, reader: Reader) -> tuple[int, str]:
        number = reader.u16()
        if number >= len(self.connection.configs):
            raise ProtocolError(f"table {number}, which is not there")
        return number, self.connection.configs[number].name

    # ------------------------------------------------------------------ sampling

    def _sample(self, session: Session, reader: Reader, task: Task) -> Work:
        number, _ = self._table(reader)
        n, timeout = reader.count(limits.MAX_BATCH, "items"), reader.timeout()
        reader.finish()
        if n == 0:
            raise ProtocolError("a request for 0 items")
        task.deadline = math.inf if timeout is None else time.monotonic() + timeout
        batch: _native.Batch | None = None
        try:
            while session.full:
                if time.monotonic() >= task.deadline or task.cancelled:
                    raise errors.DeadlineExceededError(
                        f"no sample within {timeout} s: earlier answers were not taken, and must be"
                        " first. Take what was asked for before."
                    )
                yield "room", session
            while batch is None or len(batch) < n:
                # What an attempt that fails had drawn is put back by the attempt.
                drawn, batch = batch, None
                try:
                    batch = self._drawing.draw(number, n, 0.0, drawn)
                except errors.DeadlineExceededError:
                    pass
                if batch is not None and len(batch) == n:
                    break
                if time.monotonic() >= task.deadline or task.cancelled:
                    break
                yield number, "sample"
            if batch is None:
                describe = self.connection.describe_wait(number, "sampling")
                raise errors.DeadlineExceededError(f"no sample within {timeout} s: {describe()}")
            consumes = self.consumes(number)
            body = self._samples(session, batch, consumes)
        except BaseException:
            if batch is not None:
                self.put_back(number, batch)
            raise
        if consumes:
            session.lent[task.sequence] = (number, batch)
        else:
            self.delivered(batch)
        return body

    def _samples(self, session: Session, batch: _native.Batch, pinned: bool) -> Writer:
        body = session.body()
        self._write_samples(body, batch, pinned)
        body.check_size("a sample")
        return body

    def _write_samples(self, body: Writer, batch: _native.Batch, pinned: bool) -> None:
        schemas = {batch.schema_of(i) for i in range(len(batch))}
        write_samples(
            body,
            batch,
            {schema: self.connection.schema(schema) for schema in schemas},
            {schema: self._native.schema_text(schema) for schema in schemas},
            pinned,
        )

    # ------------------------------------------------------------------ inserting

    def _insert_batch(self, session: Session, reader: Reader, task: Task) -> Work:
        number, name = self._table(reader)
        token, timeout, n, text = reader.u64(), reader.timeout(), reader.u64(), reader.blob()
        priorities = _typed(reader.array(), np.float64, (n,))
        schema, columns = self._rows(number, text, n, reader)
        self._check_priorities(number, name, priorities[~np.isnan(priorities)])
        task.deadline = math.inf if timeout is None else time.monotonic() + timeout
        receipt = yield from self._receipt(session, token, task)
        # Of rows that a process before this one inserted, the key of the last is known.
        keys, done = np.zeros(n, np.uint64), receipt.done
        if done > n:
            raise ProtocolError(f"a batch of {n} rows, of which {done} are in")
        keys[done - 1 : done] = receipt.key
        describe = self.connection.describe_wait(number, "insert_batch")
        episode = self.connection.next_episode()
        native = self.connection.take_session()
        try:
            while done < n:
                native.use_receipt(receipt.number, done + 1)
                rest = [column[done:] for column in columns]
                try:
                    native.insert_batch(
                        number,
                        rest,
                        n - done,
                        priorities[done:],
                        schema,
                        0.0,
                        describe,
                        episode,
                        keys[done:],
                        True,
                        self.connection.configs[number].compress == "lz4",
                    )
                    break
                except errors.DeadlineExceededError:
                    done += int(np.count_nonzero(keys[done:]))
                if time.monotonic() >= task.deadline or task.cancelled:
                    raise errors.DeadlineExceededError(
                        f"{done} items inserted within {timeout} s, the next was held back:"
                        f" {describe()}"
                    )
                yield number, "insert"
        finally:
            native.use_receipt(None, 0)
            native.end_batch()
            self.connection.give_session(native)
        body = session.body()
        body.array(keys)
        return body

    def _receipt(self, session: Session, token: int, task: Task) -> Work:
        """The receipt of a request that must not be done twice. Waits while there are too many."""
        if token >= 1 << 63:
            raise ProtocolError(f"the token {token:#x}")
        lane = of_token(token)
        # What was begun already must not wait: it would be forgotten, and done again.
        while session.receipts.full and not session.receipts.was_left(lane):
            if task.cancelled:
                raise errors.DeadlineExceededError(
                    "earlier answers were not taken, and must be first. Take what was asked for"
                    " before."
                )
            yield "room", session
        receipt: Receipt = session.receipts.take(lane)
        session.receipts.keep(task.sequence, receipt)
        return receipt

    def _rows(self, number: int, text: bytes, n: int, reader: Reader) -> tuple[int, list[Array]]:
        """Checks rows against what they say they are, and against the table's signature."""
        known = self._structures.get((number, text))
        schema = self._decoded(text) if known is None else known[0]
        if not 1 <= n <= limits.BRIDGE_MESSAGE_BYTES or not schema.columns:
            raise ProtocolError(f"a batch of {n} rows of {len(schema.columns)} columns")
        columns = [_typed(reader.array(), c.dtype, (n, *c.shape)) for c in schema.columns]
        reader.finish()
        if known is None:
            leaves = [(dtype_code(c.dtype), c.shape, True) for c in schema.columns]
            self.connection.check_signature(number, leaves)
            known = schema, self.connection.intern(schema.structure, leaves)
            if len(self._structures) < _MOST_STRUCTURES and len(text) <= _SHORT_TEXT:
                self._structures[number, text] = known
        return known[1], columns

    def _decoded(self, text: bytes) -> item_schema.ItemSchema:
        try:
            schema = item_schema.decode(text)
        except errors.TableCorruptedError as error:
            raise ProtocolError(str(error)) from None
        if not all(column.squeezed for column in schema.columns):
            raise ProtocolError("a row of a batch has no time dimension")
        return schema

    def _check_priorities(self, number: int, name: str, priorities: Array) -> None:
        native = self.connection.take_session()
        bad = native.first_bad_priority(number, priorities)
        self.connection.give_session(native)
        if bad >= 0:
            raise bad_priority(name, float(priorities[bad]))

    # ------------------------------------------------------------------ by key

    def _update(self, session: Session, reader: Reader, task: Task) -> Work:
        number, name = self._table(reader)
        keys = _typed(reader.array(), np.uint64, None)
        priorities = _typed(reader.array(), np.float64, keys.shape)
        reader.finish()
        self._check_priorities(number, name, priorities)

        def update(native: _native.Session, part: slice) -> int:
            return native.update(number, keys[part], priorities[part], 0.0)

        return (yield from self._by_keys(number, task, len(keys), update))

    def _delete(self, session: Session, reader: Reader, task: Task) -> Work:
        number, _ = self._table(reader)
        keys = _typed(reader.array(), np.uint64, None)
        reader.finish()

        def delete(native: _native.Session, part: slice) -> int:
            return native.delete(number, keys[part], 0.0)

        return (yield from self._by_keys(number, task, len(keys), delete))

    def _by_keys(
        self, number: int, task: Task, n: int, change: Callable[[_native.Session, slice], int]
    ) -> Work:
        """Changes items by key, so many at a time as the table's extensions have room for."""
        native = self.connection.take_session()
        try:
            step, found = max(native.keys_at_once(number, n), 1), 0
            for at in range(0, n, step):
                attempt = _at_once(partial(change, native, slice(at, at + step)))
                done = f" ({at} of {n} keys are done)"
                found += yield from self._once_told(number, task, attempt, done)
        finally:
            self.connection.give_session(native)
        return _count(found)

    def _away(self, attempt: Callable[[], Any]) -> Work:
        """Has something done by another thread. Its result is the attempt's."""
        result = self._slow.submit(attempt)
        while not result.done():
            yield "thread", result
        return result.result()

    def _once_told(
        self, number: int, task: Task, attempt: Callable[[], Work], done: str = ""
    ) -> Work:
        """Tries again while the table's extensions are behind. Its result is the attempt's."""
        while True:
            try:
                return (yield from attempt())
            except errors.DeadlineExceededError:
                if task.cancelled:
                    name = self.connection.configs[number].name
                    raise errors.DeadlineExceededError(
                        f"a change of table {name!r} was not done in time{done}: its extensions"
                        " are behind, and must catch up. Give a longer timeout, or make them faster"
                    ) from None
            yield number, "events"

    def _reset(self, session: Session, reader: Reader, task: Task) -> Work:
        number, _ = self._table(reader)
        token = reader.u64()
        reader.finish()
        receipt: Receipt = yield from self._receipt(session, token, task)
        epoch = self._native.epoch(number)
        if receipt.done and receipt.key != epoch:
            # A process before this one was asked, and since then the table was reset: by it, or
            # by another, which is as good.
            return Writer()
        session.receipts.note(receipt, 1, epoch)
        yield from self._once_told(number, task, lambda: self._away(partial(self._empty, number)))
        return Writer()

    def _empty(self, number: int) -> None:
        native = self.connection.take_session()
        try:
            native.reset(number, 0.0)
        finally:
            self.connection.give_session(native)
        self._drawing.forget(number)

    def _configure(self, session: Session, reader: Reader, task: Task) -> Work:
        number, _ = self._table(reader)
        what, size, times, *limiter = reader.unpack(protocol.CHANGE_BODY)
        max_bytes = reader.u64() if what & protocol.SET_MAX_BYTES else None
        reader.finish()
        if what >= 2 * protocol.SET_MAX_BYTES:
            raise ProtocolError(f"unknown settings {what:#x} of a table")
        change = live_table.checked_change(
            size if what & protocol.SET_MAX_SIZE else None,
            times if what & protocol.SET_MAX_TIMES_SAMPLED else None,
            RateLimiter(*limiter) if what & protocol.SET_LIMITER else None,
            max_bytes,
        )
        attempt = partial(self.connection.configure, number, *change, 0.0)
        yield from self._once_told(number, task, lambda: self._away(attempt))
        return Writer()

    # ------------------------------------------------------------------ looking

    def _info(self, session: Session, reader: Reader, task: Task) -> Work:
        number, _ = self._table(reader)
        reader.finish()
        info = self._native.table_info(number)
        body = Writer()
        body.meta += protocol.INFO.pack(*(info[field] for field in _INFO))
        return body
        yield

    def _list(self, session: Session, reader: Reader, task: Task) -> Work:
        number, _ = self._table(reader)
        cursor: int | None = reader.u64()
        reader.finish()
        yield from self._room_for(session, task)
        parts: list[Array] = []
        while cursor is not None and len(parts) < limits.BRIDGE_LIST_PARTS:
            cursor, part = self.connection.list_some(number, cursor)
            parts.append(part)
        listed = np.concatenate(parts)
        body = session.body()
        body.u8(0 if cursor is None else 1)
        body.u64(cursor or 0)
        for name in protocol.LISTED_FIELDS:
            body.array(np.ascontiguousarray(listed[name]))
        return body

    def _room_for(self, session: Session, task: Task) -> Work:
        """Waits while the client has not taken earlier answers."""
        while session.full:
            if task.cancelled:
                raise errors.DeadlineExceededError(
                    "earlier answers were not taken, and must be first. Take what was asked for"
                    " before."
                )
            yield "room", session

    def _fetch(self, session: Session, reader: Reader, task: Task) -> Work:
        number, _ = self._table(reader)
        keys = _typed(reader.array(), np.uint64, None)
        reader.finish()
        if not 1 <= len(keys) <= live_table.PINS_AT_ONCE:
            raise ProtocolError(f"{len(keys)} keys to fetch; 1 to {live_table.PINS_AT_ONCE}")
        yield from self._room_for(session, task)
        native = self.connection.take_session()
        try:
            while True:
                body = self._fetched(session, native, number, keys)
                if body is not None:
                    return body
                keys = keys[: len(keys) // 2]
        finally:
            self.connection.give_session(native)

    def _fetched(
        self, session: Session, native: _native.Session, number: int, keys: Array
    ) -> Writer | None:
        """An answer with the items of these keys; None where fewer of them are to be tried."""
        batch = native.pin(number, keys)
        try:
            nbytes = sum(
                length * row_bytes
                for i in range(len(batch))
                for length, _, row_bytes in batch.columns(i)
            )
            if nbytes > limits.BRIDGE_FETCH_BYTES and len(keys) > 1:
                return None
            body = session.body()
            body.u32(len(keys))
            self._write_samples(body, batch, False)
        finally:
            batch.release()
        try:
            body.check_size("an item")
        except errors.InvalidArgumentError:
            if len(keys) == 1:
                raise
            return None
        return body

    def _stats(self, session: Session, reader: Reader, task: Task) -> Work:
        what = 0 if reader.at_end else reader.u8()
        if what not in (0, protocol.WITH_PROCESSES):
            raise ProtocolError(f"what to tell is {what}; expected 0 or {protocol.WITH_PROCESSES}")
        reader.finish()
        body = Writer()
        if what:  # longer than a text may be where there are many sessions
            text = json.dumps(self.connection.overview()).encode()
            body.array(np.frombuffer(text, np.uint8))
        else:
            body.text(json.dumps(self.connection.stats()))
        return body
        yield

    def _check(self, session: Session, reader: Reader, task: Task) -> Work:
        number = reader.u16()
        reader.finish()
        if number != EVERYTHING and number >= len(self.connection.configs):
            raise ProtocolError(f"table {number}, which is not there")
        what = None if number == EVERYTHING else number
        yield from self._away(partial(self._native.check, what))
        return Writer()

    def _checkpoint(self, session: Session, reader: Reader, task: Task) -> Work:
        reader.finish()
        path = yield from self._away(self.connection.checkpoint)
        body = Writer()
        body.text(path)
        return body


_INFO = (
    *("inserts", "samples", "size", "num_episodes", "num_deleted_episodes", "num_unique_samples"),
    *Changeable._fields,
    "max_priority",
    "mass",
    "data_bytes",
)


def _at_once(attempt: Callable[[], Any]) -> Callable[[], Work]:
    """As work, what never waits."""

    def work() -> Work:
        return attempt()
        yield

    return work


def _count(n: int) -> Writer:
    body = Writer()
    body.u32(n)
    return body


def _typed(array: Array, dtype: Any, shape: tuple[int, ...] | None) -> Array:
    """The array, which must be of this dtype and shape; one dimension where no shape is given."""
    if array.dtype != dtype or (array.ndim != 1 if shape is None else array.shape != shape):
        raise ProtocolError(
            f"an array {array.dtype}{list(array.shape)}; expected {np.dtype(dtype)}"
            f"{'[N]' if shape is None else list(shape)}"
        )
    return array
