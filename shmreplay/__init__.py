"""Experience replay in shared memory, with Reverb's API: `import shmreplay as reverb`."""

from shmreplay import (
    errors,
    item_selectors,
    rate_limiters,
    reverb_types,
    selectors,
    structured,
    structured_writer,
)
from shmreplay.client import Client
from shmreplay.errors import DeadlineExceededError, ReverbError
from shmreplay.replay_sample import ReplaySample, SampleInfo
from shmreplay.server import Server
from shmreplay.spec import TensorSpec
from shmreplay.structured_writer import StructuredWriter
from shmreplay.table import Table
from shmreplay.trajectory_writer import TrajectoryColumn, TrajectoryWriter
from shmreplay.writer import Writer

__version__ = "0.1.0"

__all__ = [
    "Client",
    "DeadlineExceededError",
    "ReplaySample",
    "ReverbError",
    "SampleInfo",
    "Server",
    "StructuredWriter",
    "Table",
    "TensorSpec",
    "TrajectoryColumn",
    "TrajectoryWriter",
    "Writer",
    "__version__",
    "errors",
    "item_selectors",
    "rate_limiters",
    "reverb_types",
    "selectors",
    "structured",
    "structured_writer",
]
