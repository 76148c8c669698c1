"""What Reverb tells of a table in binary form, read without its packages."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

import shmreplay as reverb
from shmreplay import errors
from shmreplay.reverb_types import TableInfo

# As dm-reverb 0.14.0 gave them: of a table with a signature of dict, list and tuple, and of one
# whose signature is text.
PRIORITIZED = (
    b'\n\x0b\x1a\t\t\x00\x00\x00\x00\x00\x00\xe0?\x12\x04"\x008\x01\x182 \x04*!\t\x00\x00\x00\x00'
    b"\x00\x00\x00@\x11\x00\x00\x00\x00\x00\x00\x10\xc0\x19\x00\x00\x00\x00\x00\x000@ \x03*\x002"
    b"\x002H\xaa\x03E\n!\n\x01b\x12\x1c\x9a\x03\x19\n\x07\x8a\x02\x04\x12\x00\x18\t\n\x0e\xa2\x03"
    b"\x0b\n\t\x8a\x02\x06\x12\x02\x18\x01\x18\n\n \n\x01a\x12\x1b\x8a\x02\x18\n\x01x\x12\x11\x12"
    b"\x0b\x08\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01\x12\x02\x08\x03\x18\x01B\x03tabb\x02 \x04"
)
TEXT = (
    b"\n\x04\x08\x018\x01\x12\x040\x018\x01\x18\x05*!\t\x00\x00\x00\x00\x00\x00\xf0?\x11\xff\xff"
    b"\xff\xff\xff\xff\xef\xff\x19\xff\xff\xff\xff\xff\xff\xef\x7f \x01*\x002\x002\x0b\x8a\x02\x08"
    b"\x12\x04\x12\x02\x08\x02\x18\x07B\x01qb\x02 \x01"
)


def without_rank() -> bytes:
    """A signature whose shape is not known at all, and so cannot be kept."""
    start = PRIORITIZED.index(b"2H")
    return PRIORITIZED[:start] + b"B\x03tab"


def test_info_has_every_field() -> None:
    # A tensor of unknown rank stands in the signature: it is the one thing that is refused.
    with pytest.raises(errors.InvalidArgumentError, match="of unknown rank"):
        TableInfo.from_serialized_proto(PRIORITIZED)
    info = TableInfo.from_serialized_proto(
        PRIORITIZED.replace(b"\x12\x02\x18\x01\x18\n", b"\x12\x02\x18\x00\x18\n")
    )
    assert (info.name, info.max_size, info.max_times_sampled) == ("tab", 50, 4)
    assert info.sampler_options.WhichOneof("distribution") == "prioritized"
    assert info.sampler_options.prioritized.priority_exponent == 0.5
    assert info.remover_options.WhichOneof("distribution") == "heap"
    assert not info.remover_options.heap.min_heap
    limiter = info.rate_limiter_info
    assert (limiter.samples_per_insert, limiter.min_size_to_sample) == (2.0, 3)
    assert (limiter.min_diff, limiter.max_diff) == (-4.0, 16.0)
    assert info.signature == {
        "a": reverb.TensorSpec((None, 3), np.float32, "x"),
        "b": [reverb.TensorSpec((), np.int64), (reverb.TensorSpec((), np.bool_),)],
    }
    assert info.table_worker_time.sleeping_ms == 4
    assert (info.current_size, info.num_unique_samples) == (0, 0)
    assert "min_size_to_sample=3" in info.sample_blocked_by


def test_info_without_signature() -> None:
    info = TableInfo.from_serialized_proto(without_rank())
    assert info.signature is None and info.name == "tab"


def test_text_cannot_be_kept() -> None:
    with pytest.raises(errors.InvalidArgumentError, match="TensorFlow's type 7"):
        TableInfo.from_serialized_proto(TEXT)


@pytest.mark.parametrize("data", [b"", b"\x00", b"\x0f", b"\n\x05ab", b"\x08" + b"\xff" * 11])
def test_what_is_no_info_is_refused(data: bytes) -> None:
    with pytest.raises(errors.InvalidArgumentError):
        TableInfo.from_serialized_proto(data)


def test_damaged_bytes_are_refused_or_read_and_nothing_else() -> None:
    random_ = random.Random(7)
    for _ in range(3000):
        data = bytearray(random_.choice((PRIORITIZED, TEXT)))
        for _ in range(random_.randint(1, 4)):
            data[random_.randrange(len(data))] = random_.randrange(256)
        cut: Any = slice(None, random_.choice((None, random_.randrange(len(data)))))
        try:
            TableInfo.from_serialized_proto(bytes(data[cut]))
        except errors.ReverbError:
            continue
