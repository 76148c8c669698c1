"""The files of one checkpoint: writing and reading them, and finding every damage. See FORMAT.md.

Nothing that is read is believed: sizes are compared with the files' before memory is taken, every
byte is covered by a checksum, and ``checkpoint_check`` looks at what the numbers mean.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeGuard

import numpy as np
import numpy.typing as npt

from shmreplay.errors import CheckpointError

__all__ = [
    "BLOCK",
    "COLUMN",
    "DATA_CHUNK",
    "EPISODES",
    "INDEX",
    "MANIFEST",
    "PLACE",
    "RUN",
    "SEGMENT",
    "SLOT",
    "TRAJECTORY",
    "IndexWriter",
    "Reader",
    "read_chunks",
    "sum_of_chunks",
    "write_all",
    "write_manifest",
]

FORMAT: Final = "shmreplay checkpoint"
VERSION: Final = 2
"""What is written. Version 1 is as this one, but has no columns of text."""

_READABLE: Final = (1, VERSION)
MANIFEST: Final = "manifest.json"
INDEX: Final = "index.bin"
EPISODES: Final = np.dtype("<u8")
DATA_CHUNK: Final = 1 << 20
"""Bytes of a data file under one checksum."""

_MANIFEST_BYTES_MAX: Final = 1 << 28
_SUM_KEY: Final = ',\n "manifest_crc32": "'
_READ_CHUNKS: Final = 4

# Records of the index, little-endian and without gaps: as the core has them in memory.
SLOT: Final = np.dtype(
    [
        ("key", "<u8"),
        ("object", "<u8"),
        ("row_start", "<u4"),
        ("row_count", "<u4"),
        ("priority", "<f8"),
        ("sequence", "<u8"),
        ("touch", "<u8"),
        ("inserted_ns", "<u8"),
        ("times_sampled", "<u4"),
        ("schema", "<u4"),
    ]
)
BLOCK: Final = np.dtype(
    [
        ("uid", "<u8"),
        ("bytes", "<u8"),
        ("columns", "<u4"),
        ("rows", "<u4"),
        ("runs", "<u4"),
        ("encoding", "<u4"),
    ]
)
PLACE: Final = np.dtype([("file", "<u4"), ("zero", "<u4"), ("offset", "<u8")])
RUN: Final = np.dtype([("episode", "<u8"), ("rows", "<u4"), ("zero", "<u4")])
TRAJECTORY: Final = np.dtype([("columns", "<u4"), ("blocks", "<u4"), ("segments", "<u4")])
COLUMN: Final = np.dtype([("length", "<u4"), ("first_segment", "<u4")])
SEGMENT: Final = np.dtype(
    [("block", "<u2"), ("column", "<u2"), ("start", "<u4"), ("count", "<u4"), ("stride", "<i4")]
)

Array = npt.NDArray[Any]


def write_all(fd: int, data: memoryview) -> None:
    """Writes all of it, however often that takes."""
    while len(data) > 0:
        data = data[os.write(fd, data) :]


def _bytes_of(array: Array) -> memoryview:
    flat = np.ascontiguousarray(array).reshape(-1)
    return flat.view(np.uint8).data


def sum_of_chunks(data: memoryview) -> list[int]:
    """Returns a checksum for each ``DATA_CHUNK`` bytes."""
    return [zlib.crc32(data[i : i + DATA_CHUNK]) for i in range(0, len(data), DATA_CHUNK)]


class IndexWriter:
    """Writes the sections of an index one after the other, without gaps."""

    def __init__(self, fd: int) -> None:
        """Takes an open, empty file, which stays the caller's."""
        self._fd = fd
        self._at = 0
        self._sections: list[dict[str, Any]] = []

    def add(self, name: str, array: Array) -> None:
        """Writes one section."""
        data = _bytes_of(array)
        write_all(self._fd, data)
        self._sections.append(
            {"name": name, "offset": self._at, "bytes": len(data), "crc32": zlib.crc32(data)}
        )
        self._at += len(data)

    def describe(self) -> dict[str, Any]:
        """Returns what the manifest says of the index."""
        return {"file": INDEX, "bytes": self._at, "sections": self._sections}


def write_manifest(fd: int, content: dict[str, Any]) -> None:
    """Writes the manifest, with a checksum of itself at its end."""
    content = {"format": FORMAT, "version": VERSION, **content}
    text = json.dumps(content, indent=1, allow_nan=False)
    body = text[: text.rindex("\n}")].encode()
    end = f'{_SUM_KEY}{zlib.crc32(body):08x}"\n}}\n'.encode()
    write_all(fd, memoryview(body + end))


def read_chunks(path: str, size: int, sums: Array) -> Iterator[tuple[int, memoryview]]:
    """Reads a data file, a few chunks at a time, each compared with its checksum.

    Args:
        path: Of the file.
        size: Bytes that it has.
        sums: Checksums of its chunks.

    Yields:
        Where the bytes lie in the file, and the bytes, which are valid until the next.

    Raises:
        CheckpointError: It is shorter or longer, or a chunk is damaged; says where.
    """
    if len(sums) != -(-size // DATA_CHUNK):
        raise CheckpointError(
            f"{path}: Got {len(sums)} checksums for {size} bytes; expected one for each"
            f" {DATA_CHUNK}. Restore another checkpoint."
        )
    buffer = memoryview(bytearray(min(size, _READ_CHUNKS * DATA_CHUNK)))
    with _open(path) as file:
        _check_size(path, file.fileno(), size)
        at = 0
        while at < size:
            part = buffer[: min(len(buffer), size - at)]
            got = file.readinto(part)
            if got != len(part):
                raise _truncated(path, at + (got or 0), size)
            for i, found in enumerate(sum_of_chunks(part)):
                first = at + i * DATA_CHUNK
                _check_sum(path, first, found, int(sums[first // DATA_CHUNK]))
            yield at, part
            at += len(part)


def _open(path: str) -> Any:
    try:
        return open(path, "rb", buffering=0)
    except OSError as error:
        raise CheckpointError(
            f"{path} at offset 0: cannot be read ({error.strerror}); expected a file of a"
            " checkpoint. Restore another checkpoint, or look at its rights."
        ) from error


def _check_size(path: str, fd: int, size: int) -> None:
    there = os.fstat(fd).st_size
    if there < size:
        raise _truncated(path, there, size)
    if there > size:
        raise CheckpointError(
            f"{path} at offset {size}: Got a file of {there} bytes; expected its end here."
            " Something was written to it: restore another checkpoint."
        )


def _truncated(path: str, at: int, size: int) -> CheckpointError:
    return CheckpointError(
        f"{path} at offset {at}: Got the end of the file; expected {size} bytes. It was cut off:"
        " restore another checkpoint."
    )


def _check_sum(path: str, at: int, found: int, expected: int) -> None:
    if found != expected:
        raise CheckpointError(
            f"{path} at offset {at}: Got the checksum {found:08x}; expected {expected:08x}. These"
            " bytes are damaged: restore another checkpoint."
        )


def _whole(value: Any, least: int, most: int) -> TypeGuard[int]:
    return type(value) is int and least <= value <= most


class Reader:
    """One checkpoint, opened to be read. Making one checks its manifest and the sizes of files."""

    def __init__(self, path: str) -> None:
        """Opens a checkpoint.

        Args:
            path: Its directory.

        Raises:
            CheckpointError: Its manifest is damaged, or of a version that this one does not know.
        """
        self.path = path
        self._manifest_path = os.path.join(path, MANIFEST)
        self.manifest: dict[str, Any] = self._parse()
        index = self._get("index", dict)
        self._index_path = os.path.join(path, INDEX)
        self._sections: dict[str, tuple[int, int, int]] = {}
        at = 0
        for section in self._list_in(index, "sections"):
            if not isinstance(section, dict) or not isinstance(section.get("name"), str):
                raise self.bad("a section of the index has no name")
            size, check = section.get("bytes"), section.get("crc32")
            if not (_whole(size, 0, 2**62) and _whole(check, 0, 2**32 - 1)):
                raise self.bad(f"section {section['name']!r} has no size or no checksum")
            if section.get("offset") != at:
                raise self.bad(f"section {section['name']!r} is not where it should be")
            self._sections[section["name"]] = (at, size, check)
            at += size
        if index.get("bytes") != at:
            raise self.bad("the sections do not make up the index")
        with _open(self._index_path) as file:
            _check_size(self._index_path, file.fileno(), at)
        self.files = self._files()

    def _parse(self) -> dict[str, Any]:
        path = self._manifest_path
        with _open(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size > _MANIFEST_BYTES_MAX:
                raise CheckpointError(
                    f"{path} at offset 0: {size} bytes are too many; expected at most"
                    f" {_MANIFEST_BYTES_MAX}. Restore another checkpoint."
                )
            text = file.read(size)
        at = text.rfind(_SUM_KEY.encode())
        end = text[at + len(_SUM_KEY) :]
        if at < 0 or len(end) != 12 or end[8:] != b'"\n}\n':
            raise CheckpointError(
                f"{path} at offset {len(text)}: Got a manifest that does not end as one does. It"
                " was cut off or written over: restore another checkpoint."
            )
        _check_sum(path, 0, zlib.crc32(text[:at]), _hex(end[:8]))
        try:
            content = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise CheckpointError(
                f"{path} at offset 0: is not JSON ({error}); expected a manifest. Restore another"
                " checkpoint."
            ) from error
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise CheckpointError(
                f"{path} at offset 0: is not the manifest of a checkpoint; expected one. Use the"
                " directory of another."
            )
        if content.get("version") not in _READABLE:
            raise CheckpointError(
                f"{path} at offset 0: Got format version {content.get('version')!r}; expected one"
                f" of {list(_READABLE)}. Use the version of shmreplay that wrote it."
            )
        return content

    def _files(self) -> list[tuple[str, int]]:
        files = []
        for entry in self._list_in(self.manifest, "data"):
            name = entry.get("file") if isinstance(entry, dict) else None
            if not isinstance(name, str) or os.path.basename(name) != name or name in (".", ".."):
                raise self.bad(f"{name!r} is not the name of a data file")
            if not _whole(entry.get("bytes"), 0, 2**62):
                raise self.bad(f"data file {name} has no size")
            path = os.path.join(self.path, name)
            with _open(path) as file:
                _check_size(path, file.fileno(), entry["bytes"])
            files.append((name, entry["bytes"]))
        return files

    def bad(self, what: str) -> CheckpointError:
        """The error for a manifest that contradicts itself."""
        return CheckpointError(
            f"{self._manifest_path} at offset 0: {what}. Restore another checkpoint."
        )

    def bad_section(self, name: str, number: int, size: int, what: str) -> CheckpointError:
        """The error for an element, of so many bytes, of a section."""
        at = self._sections[name][0] + number * size
        return CheckpointError(
            f"{self._index_path} at offset {at}: {what} (element {number} of {name})."
            " Restore another checkpoint."
        )

    def _get(self, key: str, kind: type) -> Any:
        value = self.manifest.get(key)
        if not isinstance(value, kind):
            raise self.bad(f"{key!r} is missing")
        return value

    def _list_in(self, where: dict[str, Any], key: str) -> list[Any]:
        value = where.get(key)
        if not isinstance(value, list):
            raise self.bad(f"{key!r} is missing")
        return value

    def tables(self) -> list[dict[str, Any]]:
        """Returns what the manifest says of each table, not looked at."""
        return self._list_in(self.manifest, "tables")

    def schemas(self) -> dict[int, str]:
        """Returns the item structures by number.

        Raises:
            CheckpointError: They are no such.
        """
        out: dict[int, str] = {}
        for entry in self._list_in(self.manifest, "schemas"):
            match entry:
                case {"number": int(number), "text": str(text)}:
                    out[number] = text
                case _:
                    raise self.bad("an item structure is damaged")
        return out

    def section(
        self,
        name: str,
        dtype: npt.DTypeLike,
        make: Callable[[int, npt.DTypeLike], Array] = np.empty,
    ) -> Array:
        """Reads a section, into an array that is made for it.

        Raises:
            CheckpointError: There is none, or it is damaged; says where.
        """
        if name not in self._sections:
            raise self.bad(f"section {name!r} is missing")
        at, size, check = self._sections[name]
        kind = np.dtype(dtype)
        if size % kind.itemsize != 0:
            raise self.bad(f"section {name!r} has {size} bytes")
        array = make(size // kind.itemsize, kind)
        with _open(self._index_path) as file:
            view = _bytes_of(array)
            done = 0
            while done < size:
                got = os.preadv(file.fileno(), [view[done:]], at + done)
                if got == 0:
                    raise _truncated(self._index_path, at + done, at + size)
                done += got
        _check_sum(self._index_path, at, zlib.crc32(_bytes_of(array)), check)
        return array

    def chunks_of(self, file: int) -> Iterator[tuple[int, memoryview]]:
        """Reads a data file, checking it: see ``read_chunks``."""
        name, size = self.files[file]
        sums = self.section(f"data/{file}/crc32", "<u4")
        return read_chunks(os.path.join(self.path, name), size, sums)


def _hex(text: bytes) -> int:
    try:
        return int(text, 16)
    except ValueError:
        return -1
