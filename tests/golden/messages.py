"""Messages as version 4 of the protocol writes them; `frames_v4.json` has their bytes.

Run it to write that file anew, which only a new version of the protocol may ask for.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from shmreplay import errors
from shmreplay.bridge import protocol
from shmreplay.bridge.protocol import CHANGE, ITEM, LISTED, REFERENCE, REPLACE, SQUEEZED, Kind, Op
from shmreplay.bridge.wire import Writer

FILE = Path(__file__).with_name("frames_v4.json")

SCHEMA = '["dict",[["x",["leaf",[11,[3],false]]]]]'


def hello() -> Writer:
    body = Writer()
    body.u16(4)
    body.u16(4)
    body.meta += bytes(range(16))
    body.u64(0)
    body.u64(0)
    body.u8(1)
    for numbers in ((3, 4), (2,)):
        body.u32(len(numbers))
        for number in numbers:
            body.u64(number)
    return body


def insert_batch() -> Writer:
    body = Writer()
    body.u16(0)
    body.u64(1)
    body.timeout(None)
    body.u64(300)
    body.text('["dict",[["x",["leaf",[11,[3],true]]]]]')
    body.array(np.arange(300.0))
    body.array(np.arange(900, dtype=np.float32).reshape(300, 3))
    return body


def write() -> Writer:
    body = Writer()
    body.u32(1)
    body.u64(1)
    body.u64(0)
    body.u32(0)
    body.u8(Op.COLUMN)
    body.u16(0)
    body.text('["x"]')
    body.u8(11)
    body.u8(1)
    body.u64(3)
    body.u8(Op.ROWS)
    body.u16(1)
    body.u16(0)
    body.u64(0)
    body.u32(2)
    body.u8(1)
    body.array(np.arange(6, dtype=np.float32).reshape(2, 3))
    body.u8(Op.CONFIGURE)
    body.text('["x"]')
    body.u32(8)
    body.u32(4)
    body.u8(Op.SCHEMA)
    body.u32(0)
    body.text(SCHEMA)
    body.meta += ITEM.pack(Op.ITEM, 0, 0, 1.5, float("nan"), 1)
    body.meta += REFERENCE.pack(1, 0, 0, 2, 0, 1)
    body.u8(Op.SCHEMA)
    body.u32(1)
    body.text(SCHEMA.replace("false", "true"))
    body.meta += ITEM.pack(Op.ITEM, 0, 1, 2.5, 0.25, 1)
    body.meta += REFERENCE.pack(1, 0, SQUEEZED | LISTED, 1, 0, 0)
    body.i64(1)
    body.u8(Op.EPISODE)
    body.u8(1)
    return body


def write_text() -> Writer:
    """Columns of text, and an item of theirs."""
    body = Writer()
    body.u32(1)
    body.u64(3)
    body.u64(2)
    body.u32(0)
    for number, (path, code) in enumerate((('["b"]', 15), ('["u"]', 16)), start=1):
        body.u8(Op.COLUMN)
        body.u16(number)
        body.text(path)
        body.u8(code)
        body.u8(1)
        body.u32(5)
        body.u64(2)
    body.u8(Op.ROWS)
    body.u16(2)
    for number in (1, 2):
        body.u16(number)
        body.u64(0)
    body.u32(1)
    body.u8(1)
    body.array(np.array([[b"bytes", b"b"]]))
    body.array(np.array([["\u0394text", ""]]))
    body.u8(Op.SCHEMA)
    body.u32(2)
    body.text('["dict",[["b",["leaf",[1295,[2],false]]],["u",["leaf",[1296,[2],false]]]]]')
    body.meta += ITEM.pack(Op.ITEM, 0, 2, 1.0, float("nan"), 2)
    body.meta += REFERENCE.pack(1, 1, 0, 1, 0, 1)
    body.meta += REFERENCE.pack(1, 2, 0, 1, 0, 1)
    return body


def write_replacement() -> Writer:
    body = Writer()
    body.u32(2)
    body.u64(1)
    body.u64(0)
    body.u32(0)
    body.u8(Op.COLUMN)
    body.u16(0)
    body.text('["x"]')
    body.u8(11)
    body.u8(1)
    body.u64(3)
    body.u8(Op.ROWS)
    body.u16(1)
    body.u16(0)
    body.u64(0)
    body.u32(1)
    body.u8(1)
    body.array(np.arange(3, dtype=np.float32).reshape(1, 3))
    body.u8(Op.SCHEMA)
    body.u32(0)
    body.text(SCHEMA)
    body.meta += ITEM.pack(Op.ITEM, 0, 0, float("nan"), float("nan"), 1)
    body.meta += REFERENCE.pack(2, 0, 0, 1, 0, 1)
    body.meta += REPLACE.pack(Op.REPLACE, 0, 0, 2**63, 1)
    body.meta += REFERENCE.pack(2, 0, LISTED, 1, 0, 0)
    body.i64(0)
    return body


def configure() -> Writer:
    body = Writer()
    body.meta += CHANGE.pack(0, 7, 500, 3, 1.5, 1, -2.0, 1e6)
    return body


def sample() -> Writer:
    body = Writer()
    body.u16(0)
    body.u32(4)
    body.timeout(0.0)
    return body


def keyed(priorities: bool) -> Writer:
    body = Writer()
    body.u16(0)
    body.array(np.array([1, 2**63], np.uint64))
    if priorities:
        body.array(np.array([0.5, 2.0]))
    return body


def numbers(*fields: tuple[str, Any]) -> Writer:
    body = Writer()
    for name, value in fields:
        getattr(body, name)(value)
    return body


def failure() -> Writer:
    body = Writer()
    error = errors.TableNotFoundError("no such table")
    error.add_note("inserted into: ['a']")
    protocol.encode_error(body, error)
    return body


def compressed() -> Writer:
    body = Writer(compress=True)
    body.u16(0)
    body.u64(2)
    body.timeout(1.0)
    body.u64(2)
    body.text('["leaf",[12,[1000],true]]')
    body.array(np.ones(2))
    body.array(np.zeros((2, 1000)))
    return body


def messages() -> dict[str, list[bytes]]:
    """Name -> frames, in the order in which a session could say them."""
    bodies: dict[str, tuple[Kind, Writer, int]] = {
        "hello": (Kind.HELLO, hello(), 0),
        "writer_open": (Kind.WRITER_OPEN, numbers(("u32", 1), ("u32", 8), ("u8", 1)), 1),
        "write": (Kind.WRITE, write(), 2),
        "flush": (
            Kind.FLUSH,
            numbers(("u32", 1), ("u32", 0), ("timeout", None), ("text", "flush")),
            3,
        ),
        "insert_batch": (Kind.INSERT_BATCH, insert_batch(), 4),
        "insert_batch_compressed": (Kind.INSERT_BATCH, compressed(), 5),
        "sample": (Kind.SAMPLE, sample(), 6),
        "update": (Kind.UPDATE, keyed(True), 7),
        "delete": (Kind.DELETE, keyed(False), 8),
        "info": (Kind.INFO, numbers(("u16", 0)), 9),
        "stats": (Kind.STATS, Writer(), 10),
        "check": (Kind.CHECK, numbers(("u16", 0xFFFF)), 11),
        "write_text": (Kind.WRITE, write_text(), 12),
        "writer_close": (Kind.WRITER_CLOSE, numbers(("u32", 1)), 13),
        "reset": (Kind.RESET, numbers(("u16", 0), ("u64", 3)), 14),
        "list": (Kind.LIST, numbers(("u16", 0), ("u64", 0)), 15),
        "fetch": (Kind.FETCH, keyed(False), 16),
        "configure": (Kind.CONFIGURE, configure(), 17),
        "writer_open_again": (Kind.WRITER_OPEN, numbers(("u32", 2), ("u32", 8), ("u8", 1)), 18),
        "write_replacement": (Kind.WRITE, write_replacement(), 19),
        "ping": (Kind.PING, numbers(("u32", 1), ("u64", 9), ("u8", 1)), 0),
        "release": (Kind.RELEASE, numbers(("u64", 6)), 0),
        "cancel": (Kind.CANCEL, numbers(("u64", 6)), 0),
        "room": (Kind.ROOM, numbers(("u64", 2**23)), 0),
        "go": (Kind.GO, Writer(), 0),
        "failure": (Kind.FAILURE, failure(), 4),
        "bye": (Kind.BYE, Writer(), 0),
    }
    return {
        name: [
            bytes(frame) for frame in protocol.encode(kind, body, sequence, max(sequence - 1, 0))
        ]
        for name, (kind, body, sequence) in bodies.items()
    }


def golden() -> dict[str, list[bytes]]:
    """What the file holds."""
    text = json.loads(FILE.read_text())
    return {name: [bytes.fromhex(frame) for frame in frames] for name, frames in text.items()}


if __name__ == "__main__":
    made = {name: [frame.hex() for frame in frames] for name, frames in messages().items()}
    FILE.write_text(json.dumps(made, indent=1) + "\n")
