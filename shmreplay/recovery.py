"""After a death: taking a store over, looking at one that nobody serves, and clearing away.

Who lives is said by the lease alone, see ``lease.py``. What looks at a store here takes no lock in
it and does not attach, so that it works on one that is damaged and disturbs none that is in use.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Final, NamedTuple

from shmreplay import lease, segment, store, store_file
from shmreplay._native import Store as NativeStore
from shmreplay._native import peek_table
from shmreplay.errors import (
    InvalidArgumentError,
    ReverbError,
    StoreExistsError,
    StoreNotFoundError,
    TableCorruptedError,
    VersionMismatchError,
)
from shmreplay.lease import Lease, Participant
from shmreplay.store import Store
from shmreplay.table import Table, TableConfig

__all__ = [
    "BRIDGE_ROLE",
    "CLIENTS_ONLY",
    "DAMAGED",
    "DEAD",
    "OTHER_VERSION",
    "SERVED",
    "STARTING",
    "STOPPED",
    "Look",
    "Removed",
    "check",
    "clean",
    "left_behind",
    "look",
    "names",
    "port_of",
    "take_over",
    "wait_for_bridge",
]

_log = logging.getLogger(__name__)

SERVED: Final = "served"
CLIENTS_ONLY: Final = "clients only"
DEAD: Final = "dead"
STARTING: Final = "starting"
STOPPED: Final = "stopped"
DAMAGED: Final = "damaged"
OTHER_VERSION: Final = "other version"

BRIDGE_ROLE: Final = "bridge"
"""As what a process that serves remote clients takes part in a store."""

_BRIDGE_WAIT_S = 5.0
_BRIDGE_LOOK_S = 0.02


# --- taking over --------------------------------------------------------------------------------


def take_over(name: str, tables: Sequence[Table] | None, port: int) -> Store | None:
    """Becomes the server of a store whose server died; gives back what the dead held.

    Args:
        name: Of the store.
        tables: The tables as the new server declares them; None takes those that there are.
        port: By which clients find it from now on.

    Returns:
        The store; None if there is nothing to take over.

    Raises:
        InvalidArgumentError: The tables differ from those in the store. Nothing was changed.
        StoreExistsError: Its server lives, or another living server has the port.
        VersionMismatchError: It was made by a build with another layout.
        TableCorruptedError: Its header, or what the dead server held, is damaged.
    """

    def check_tables(there: list[TableConfig]) -> None:
        found = [] if tables is None else _differences(tables, there)
        if found:
            raise InvalidArgumentError(
                f"Got other tables for store {name!r} than it has: {'; '.join(found)}."
                " Declare them as they are, leave tables out to take those that there are, or run"
                " `shmreplay dump` and `shmreplay clean` and begin anew without recover=True."
            )

    taken = Store.take_over(name, check_tables, port=port)
    if taken is None:
        return None
    try:
        taken.reclaim_dead()
    except (ReverbError, OSError) as error:
        # What it held stays out of use; the tables answer for themselves.
        _log.warning("a dead process held what cannot be given back: %s", error)
    _log.warning(
        "took over store %r, whose server died; %s",
        name,
        lease.describe(taken.participants()),
    )
    return taken


def _differences(declared: Sequence[Table], there: Sequence[TableConfig]) -> list[str]:
    """What differs, in words."""
    ours, theirs = {t.name: t for t in declared}, {config.name: config for config in there}
    found = [f"table {name!r} is declared and not in the store" for name in ours.keys() - theirs]
    found += [f"table {name!r} is in the store and not declared" for name in theirs.keys() - ours]
    for name in ours.keys() & theirs:
        config = ours[name].config()
        if (
            ours[name].requested_stripes is None and not config.events
        ):  # the default depends on the machine
            config = dataclasses.replace(config, stripes=theirs[name].stripes)
        if bool(config.events) != bool(theirs[name].events):
            there_is, declared_is = ("", "out") if theirs[name].events else ("out", "")
            found.append(
                f"table {name!r} was made with{there_is} extensions, and is declared"
                f" with{declared_is}"
            )
            continue  # how it is laid out follows from that
        found += [
            f"table {name!r} has {field.name} {getattr(theirs[name], field.name)!r} in the store,"
            f" declared is {getattr(config, field.name)!r}"
            for field in dataclasses.fields(config)
            if getattr(config, field.name) != getattr(theirs[name], field.name)
        ]
    return sorted(found)


def port_of(name: str) -> int | None:
    """Returns the port that a store has, None if there is no such store or it has none.

    Raises:
        InvalidArgumentError: The name cannot be the name of a store.
    """
    segment.check_name(name)
    with look(name) as found:
        return None if found.native is None else found.native.port or None


def wait_for_bridge(name: str) -> None:
    """Waits until the processes that served remote clients for a dead server have died as well.

    They do so by themselves, at once. What they insert and the next server's must not mix.

    Raises:
        StoreExistsError: One still lives.
    """
    segment.check_name(name)
    deadline = time.monotonic() + _BRIDGE_WAIT_S
    while True:
        with look(name) as found:
            if found.state == SERVED:
                return  # nothing to take over
            alive = [p.pid for p in found.participants if p.role == BRIDGE_ROLE and p.alive]
        if not alive:
            return
        if time.monotonic() > deadline:
            raise StoreExistsError(
                f"Got recover=True for store {name!r}, whose server died, but the processes {alive}"
                " of its bridge still run; expected none. Wait, or stop them with `kill`."
            )
        time.sleep(_BRIDGE_LOOK_S)


# --- looking ------------------------------------------------------------------------------------


class Look(NamedTuple):
    """A store as somebody sees it who is not attached."""

    name: str
    state: str
    """``SERVED``, ``CLIENTS_ONLY`` (its server died), ``DEAD`` (all died), ``STARTING`` (not laid
    out yet), ``STOPPED`` (by its server, which did not remove it), ``DAMAGED``, or
    ``OTHER_VERSION`` (made by a build that lays memory out in another way)."""
    problem: str
    """Why it is one of the last two."""
    native: NativeStore | None
    """The store where it can be read; valid while the look lasts."""
    tables: list[TableConfig]
    participants: list[Participant]
    path: str | None = None
    """Of its file, if it is not in /dev/shm and can be read."""


def names() -> list[str]:
    """Returns the names of which this user has a segment or a lease, sorted."""
    prefix = segment.segment_name("")[1:]
    found = (entry for entry in os.listdir(segment.DIRECTORY) if entry.startswith(prefix))
    suffixes = (segment.LEASE_SUFFIX, store_file.POINTER_SUFFIX)
    return sorted({_without(entry[len(prefix) :], suffixes) for entry in found})


def _without(name: str, suffixes: Sequence[str]) -> str:
    for suffix in suffixes:
        name = name.removesuffix(suffix)
    return name


@contextmanager
def look(name: str) -> Iterator[Look]:
    """Opens a store to look at it, whoever uses it and whatever became of it.

    Takes no lock in the store and no byte of its lease. Other work of this process that opens or
    leaves stores waits meanwhile.

    Args:
        name: Of the store; if there is none, the state is ``DEAD`` and there is nothing in it.
    """
    with store.guard(), ExitStack() as undo:
        try:
            ours = store.registered(name)
            held = None if ours is not None else _open_lease(name, undo)
            opened = (0, ours.native) if ours is not None else segment.open_segment(name, undo)
        except VersionMismatchError as error:
            yield Look(name, OTHER_VERSION, str(error), None, [], [])
            return
        except (ReverbError, OSError) as error:
            yield Look(name, DAMAGED, str(error), None, [], [])
            return
        if opened is None:
            busy = held is not None and held.is_anybody_there()
            yield Look(name, STARTING if busy else DEAD, "", None, [], [])
            return
        native = opened[1]
        try:
            tables = segment.tables_of(name, native)
        except TableCorruptedError as error:
            yield Look(name, DAMAGED, str(error), None, [], [])
            return
        if ours is not None:
            participants = ours.participants()
        else:
            participants = [
                Participant._make((*entry, held is not None and held.holder(entry[0]) is not None))
                for entry in native.participants()
            ]
        state, path = (
            _state(native, held, participants),
            segment.file_of(segment.segment_name(name)),
        )
        yield Look(name, state, "", native, tables, participants, path)


def _open_lease(name: str, undo: ExitStack) -> Lease | None:
    try:
        held = Lease.open(name)
    except FileNotFoundError:
        return None
    undo.callback(held.close)
    return held


def _state(native: NativeStore, held: Lease | None, participants: Sequence[Participant]) -> str:
    alive = [each.number for each in participants if each.alive]
    if held is not None and held.is_locked_whole():
        return STARTING
    if native.closed:
        return STOPPED
    if 0 in alive:
        return SERVED
    return CLIENTS_ONLY if alive else DEAD


def check(name: str) -> None:
    """Walks all invariants of a store, under its locks; of a dead one while nobody can join it.

    Raises:
        StoreNotFoundError: There is no such store, or it is not laid out yet.
        ServerClosedError: It was stopped.
        TableCorruptedError: An invariant does not hold, or a table is shut; says which.
    """
    with look(name) as found:
        if found.state == DAMAGED:
            raise TableCorruptedError(found.problem)
        if found.state == OTHER_VERSION:
            raise VersionMismatchError(found.problem)
        if found.native is None:
            raise StoreNotFoundError(
                f"Got the store name {name!r}, but there is no store of it; expected one of"
                f" {', '.join(map(repr, names())) or 'none'}. See `shmreplay ls`."
            )
        shut = [
            t.name for i, t in enumerate(found.tables) if peek_table(found.native, i)["poisoned"]
        ]
    if found.state == DEAD:
        with _hold_dead(name) as native:
            native.check(None)
    else:
        opened = Store.open(name, role="check")
        try:
            opened.native.check(None)
        finally:
            opened.release()
    if shut:
        raise TableCorruptedError(
            f"Got store {name!r} with tables that are shut, as a repair failed: {', '.join(shut)};"
            " expected open ones. `shmreplay dump` reads out what they hold; make it anew then."
        )


@contextmanager
def _hold_dead(name: str) -> Iterator[NativeStore]:
    """A store in which nobody lives; nobody can join, replace or remove it meanwhile."""
    with store.guard(), ExitStack() as undo:
        held = _open_lease(name, undo)
        if held is None or not held.try_lock_all() or not held.is_current():
            raise StoreExistsError(
                f"Got store {name!r}, which somebody began to use just now; expected a dead one."
                " Try again."
            )
        opened = segment.open_segment(name, undo)
        if opened is None:
            raise StoreNotFoundError(
                f"Got the store name {name!r}, but it was removed just now; expected one that is"
                " there. Start its server again."
            )
        yield opened[1]


# --- clearing away ------------------------------------------------------------------------------


def left_behind() -> list[Removed]:
    """Returns this user's stores in which nobody lives, without changing anything."""
    found = []
    for name in names():
        with store.guard(), ExitStack() as undo:
            if store.registered(name) is not None:
                continue
            try:
                held = _open_lease(name, undo)
                status = os.lstat(segment.path_of(segment.segment_name(name)))
            except (ReverbError, OSError):  # gone just now, or not ours to judge
                continue
            if held is not None and not held.is_anybody_there():
                found.append(Removed(name, 512 * status.st_blocks))
    return found


class Removed(NamedTuple):
    """A store in which nobody lives: what ``clean`` removed, or would remove."""

    name: str
    nbytes: int
    """Bytes of memory that it took."""


def clean(only: Sequence[str] | None = None) -> tuple[list[Removed], list[str]]:
    """Removes this user's stores in which nobody lives. Several may do so at once.

    Args:
        only: Names to look at; None: all.

    Returns:
        What was removed, and what could not be and why (not those that are in use).
    """
    removed: list[Removed] = []
    problems: list[str] = []
    for name in names() if only is None else only:
        try:
            found = _remove_if_dead(name)
        except StoreExistsError:
            continue  # in use, or somebody else removes it just now
        except (ReverbError, OSError) as error:
            problems.append(f"{name}: {error}")
            continue
        if found is not None:
            removed.append(found)
    return removed, problems


def _remove_if_dead(name: str) -> Removed | None:
    segment.check_name(name)
    shared = segment.segment_name(name)
    path, of_lease = segment.path_of(shared), segment.path_of(shared + segment.LEASE_SUFFIX)
    with store.guard(), ExitStack() as undo:
        if store.registered(name) is not None:
            return None
        if os.path.lexists(of_lease):
            held = _open_lease(name, undo)
            if held is None or not held.try_lock_all() or not held.is_current():
                return None  # in use, or somebody else has just removed it
        elif os.path.lexists(path) or segment.has_pointer(shared):
            held = lease.lock_new(name, undo)
        else:
            return None
        nbytes = 0
        if os.path.lexists(path):  # else it is a lease alone
            status = os.lstat(path)
            segment.check_owner(shared, status)
            if segment.file_of(shared) is not None and store_file.is_held(path):
                return None  # by a store of another name
            segment.remove(shared)
            nbytes = 512 * status.st_blocks
        segment.forget_file(shared)
        held.remove()
        return Removed(name, nbytes)
