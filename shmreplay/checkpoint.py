"""Writing checkpoints of a store: all tables as of one instant, while everybody goes on.

The index (which items there are) is copied under all locks of the store, which takes milliseconds.
From then on what these items refer to is held, and read and written without a lock. Blocks that
the last checkpoint has are not written again: the files are shared. See FORMAT.md, and
``_core/checkpoint.h`` for what is held how.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any, Final, Generic, NamedTuple, TypeVar

import numpy as np

from shmreplay import _native, checkpoint_files
from shmreplay.checkpoint_data import DataFiles, Pace, create, read_last, verify
from shmreplay.checkpoint_format import INDEX, MANIFEST, IndexWriter, write_manifest
from shmreplay.checkpoint_image import Image, Objects
from shmreplay.checkpoint_scratch import Scratch
from shmreplay.checkpointers import CheckpointSettings
from shmreplay.errors import CheckpointError, InvalidArgumentError
from shmreplay.limits import CHECKPOINT_WAIT_S, WAIT_SLICE_MS
from shmreplay.table import TableConfig

__all__ = ["Saved", "save"]

_NICE: Final = 19

_T = TypeVar("_T")

_log = logging.getLogger(__name__)


class Saved(NamedTuple):
    """What a checkpoint took."""

    path: str
    items: int
    data_bytes: int
    """Bytes of steps that its items need, as they are stored."""
    new_bytes: int
    """Of these, those that were written now."""
    held_s: float
    """Seconds for which all calls on the store were held up."""
    seconds: float


class _Work(threading.Thread, Generic[_T]):
    """Something done in a thread of its own, with a result.

    Ctrl-C meets the main thread, between any two of its instructions: there, nothing that has to
    be given back could be claimed. So all of a checkpoint is written in such a thread.
    """

    def __init__(self, do: Callable[[], _T], nice: int | None = None) -> None:
        super().__init__(name="shmreplay-checkpoint", daemon=True)
        self._do = do
        self._nice = nice
        self._result: _T
        self._failure: BaseException | None = None

    def run(self) -> None:
        try:
            if self._nice is not None:
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), self._nice)
            self._result = self._do()
        except BaseException as error:  # for whoever waits for the result
            self._failure = error

    def result(self) -> _T:
        """Does it, and waits for the end."""
        self.start()
        self.join()
        if self._failure is not None:
            raise self._failure
        return self._result


def _nicely(do: Callable[[], _T]) -> _T:
    """Does what needs no lock of the store with less claim to the processors than the rest of us.

    Not what takes locks: who waited for them would wait for the processor, too.
    """
    return _Work(do, _NICE).result()


def save(
    native: _native.Store,
    configs: Sequence[TableConfig],
    settings: CheckpointSettings,
    reclaim: Callable[[], int],
    hold: object,
) -> Saved:
    """Writes a checkpoint of all tables, as of one instant.

    Args:
        native: The store.
        configs: Its tables, as they were declared.
        settings: Where to, and how many to keep.
        reclaim: Gives back what dead processes held.
        hold: What keeps this process attached to the store, until the last of it is done.

    Raises:
        CheckpointError: It could not be written; the last one stays as it was.
        InvalidArgumentError: A group is to own it.
    """
    if settings.group:
        raise InvalidArgumentError(
            f"Got the group {settings.group!r} for checkpoints; expected none: they belong to the"
            " user who runs the server. Give the directory to the group (chgrp, chmod g+s)."
        )
    job = _Job(native, configs, settings, reclaim, hold)
    work = _Work(job.run)
    try:
        return work.result()
    except BaseException:
        # Ctrl-C: it gives up soon and by itself. It is waited for only so that all is as it was.
        job.unwanted = True
        while work.is_alive():
            work.join(WAIT_SLICE_MS / 1000)
        raise


class _Job:
    """One checkpoint. All of it is done by one thread, which nothing interrupts."""

    def __init__(
        self,
        native: _native.Store,
        configs: Sequence[TableConfig],
        settings: CheckpointSettings,
        reclaim: Callable[[], int],
        hold: object,
    ) -> None:
        self.unwanted = False
        self._native = native
        self._configs = configs
        self._settings = settings
        self._reclaim = reclaim
        self._hold = hold
        self._claimed = False
        self._pace = Pace(settings.bandwidth, self._look)

    def _look(self) -> None:
        """Whether to go on."""
        if self.unwanted:
            raise CheckpointError(
                "The checkpoint was given up, as whoever asked for it was interrupted. The last"
                " checkpoint stays. Ask again for another."
            )
        if self._claimed and _native.hold_unwanted(self._native):
            raise CheckpointError(
                "The checkpoint was given up, as somebody needed memory that it held in a store"
                " that is full. The last checkpoint stays. Give the server a larger capacity, or a"
                " smaller max_size, so that what is replaced while a checkpoint is written has"
                " room beside what replaces it."
            )

    def run(self) -> Saved:
        """Writes it, and removes those that are one too many."""
        began, settings = time.monotonic(), self._settings
        root = settings.path or checkpoint_files.temporary_root(self._native.generation)
        root = os.path.abspath(root)
        try:
            with checkpoint_files.locked(root, self._look) as root_fd:
                directory = checkpoint_files.new_directory(root)
                try:
                    with closing(Scratch(directory)) as scratch:
                        saved = self._save(root, directory, scratch)
                    self._look()
                    path = checkpoint_files.publish(root, root_fd, directory)
                except BaseException:  # what was written would fill the disk until the next one
                    checkpoint_files.discard(directory)
                    raise
                checkpoint_files.clear_away(root, settings.keep)
        except OSError as error:
            raise CheckpointError(
                f"Got an error while a checkpoint was written to {root!r}: {error}. The last one"
                " stays as it was. Look at the space and the rights there."
            ) from error
        saved = saved._replace(path=path, seconds=time.monotonic() - began)
        _log.info(
            "saved %d items, %d bytes of steps of which %d are new, to %s in %.2f s; calls were"
            " held up for %.1f ms",
            *(saved.items, saved.data_bytes, saved.new_bytes, path, saved.seconds),
            1e3 * saved.held_s,
        )
        return saved

    def _save(self, root: str, directory: str, scratch: Scratch) -> Saved:
        last = read_last(root, scratch)
        if last is not None and self._settings.verify:
            # Before anything is held: it takes as long as reading all of it does.
            _nicely(lambda: verify(last, self._pace))
        native, configs = self._native, self._configs
        settings = [_settings_now(native, i, config) for i, config in enumerate(configs)]
        with self._claim(), closing(_native.Session(native, _native.SESSION_CLIENT)) as session:
            image = Image(native, configs, scratch)

            def copy() -> tuple[Objects, DataFiles]:
                # It holds no lock of the store from here on, so nobody waits for it.
                objects = Objects(image, session, scratch)
                data = DataFiles(directory, objects, scratch, self._pace)
                if last is not None:
                    data.share(last)
                data.write(native)
                return objects, data

            objects, data = _nicely(copy)

        def write() -> None:
            objects.name_objects(image)
            _write_index(native, settings, image, objects, data, directory)

        _nicely(write)
        total = int(objects.blocks["bytes"].sum(dtype=np.uint64))
        return Saved("", image.items, total, data.new_bytes, image.held_s, 0.0)

    @contextmanager
    def _claim(self) -> Iterator[None]:
        """The right to hold what is in the store."""
        native, end = self._native, time.monotonic() + CHECKPOINT_WAIT_S
        while not _native.hold_claim(native):
            self._reclaim()  # whoever has it may have died
            if _native.hold_claim(native):
                break
            if time.monotonic() >= end:
                raise CheckpointError(
                    f"Got no turn within {CHECKPOINT_WAIT_S} s: another process writes a"
                    " checkpoint of this store. Try again later, or see `shmreplay info` for who"
                    " that may be."
                )
            self._look()
            time.sleep(0.05)
        self._claimed = True
        try:
            yield
        finally:
            _native.hold_release(native)
            self._claimed = False


def _settings_now(native: _native.Store, number: int, config: TableConfig) -> TableConfig:
    info = native.table_info(number)
    changed = {name: info[name] for name in config.changeable()._fields}
    return dataclasses.replace(config, **changed)


def _write_index(
    native: _native.Store,
    settings: Sequence[TableConfig],
    image: Image,
    objects: Objects,
    data: DataFiles,
    directory: str,
) -> None:
    fd = create(os.path.join(directory, INDEX))
    try:
        index = IndexWriter(fd)
        index.add("episodes", objects.episodes)
        index.add("blocks", objects.blocks)
        index.add("block_places", data.places)
        index.add("block_columns", objects.row_bytes)
        index.add("block_runs", objects.runs)
        index.add("trajectories", objects.trajs)
        index.add("trajectory_blocks", objects.traj_blocks)
        index.add("trajectory_columns", objects.cols)
        index.add("trajectory_segments", objects.segs)
        for i, sums in enumerate(data.sums):
            index.add(f"data/{i}/crc32", sums)
        tables = _write_tables(index, settings, image)
        os.fsync(fd)
    finally:
        os.close(fd)
    numbers = set[int]().union(*(stripe.schemas() for stripe in image.stripes))
    content = {
        "created_ns": time.time_ns(),
        "layout_version": _native.LAYOUT_VERSION,
        "tables": tables,
        "schemas": [{"number": n, "text": native.schema_text(n).decode()} for n in sorted(numbers)],
        "data": [{"file": name, "bytes": size} for name, size in data.files],
        "index": index.describe(),
    }
    fd = create(os.path.join(directory, MANIFEST))
    try:
        write_manifest(fd, content)
        os.fsync(fd)
    finally:
        os.close(fd)


def _write_tables(
    index: IndexWriter, settings: Sequence[TableConfig], image: Image
) -> list[dict[str, Any]]:
    tables, first = [], 0
    for i, config in enumerate(settings):
        stripes: list[dict[str, Any]] = []
        for k, stripe in enumerate(image.stripes[first : first + config.stripes]):
            where = f"tables/{i}/stripes/{k}"
            index.add(f"{where}/slots", stripe.slots)
            for each, order in enumerate(stripe.orders):
                index.add(f"{where}/order_{each}", order)
            stripes.append(
                {
                    "items": stripe.items,
                    "touch_next": stripe.touch_next,
                    "free_head": stripe.free_head,
                    "heads": stripe.heads,
                }
            )
        first += config.stripes
        tables.append(
            {
                "name": config.name,
                "settings": json.loads(config.to_json()),
                "counts": image.counts[i],
                "stripes": stripes,
            }
        )
    return tables
