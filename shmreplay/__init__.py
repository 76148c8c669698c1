"""Experience replay in shared memory, with Reverb's API: `import shmreplay as reverb`."""

from shmreplay import (
    checkpointers,
    dataset,
    errors,
    extensions,
    item_selectors,
    padding,
    platform,
    pybind,
    rate_limiters,
    replay_sample,
    reverb_types,
    selectors,
    structured,
    structured_writer,
)
from shmreplay import selectors as distributions
from shmreplay.address import RemoteOptions
from shmreplay.client import Client
from shmreplay.errors import DeadlineExceededError, ReverbError
from shmreplay.extensions import TableExtension
from shmreplay.pattern_dataset import PatternDataset
from shmreplay.replay_sample import ReplaySample, SampleInfo
from shmreplay.server import Server
from shmreplay.sharded_client import ShardedClient
from shmreplay.spec import TensorSpec
from shmreplay.structured_writer import StructuredWriter
from shmreplay.table import Table
from shmreplay.tf_client import TFClient
from shmreplay.timestep_dataset import TimestepDataset
from shmreplay.trajectory_dataset import TrajectoryDataset
from shmreplay.trajectory_writer import TrajectoryColumn, TrajectoryWriter
from shmreplay.writer import Writer

__version__ = "0.1.0"

__all__ = [
    "Client",
    "DeadlineExceededError",
    "PatternDataset",
    "RemoteOptions",
    "ReplaySample",
    "ReverbError",
    "SampleInfo",
    "Server",
    "ShardedClient",
    "StructuredWriter",
    "TFClient",
    "Table",
    "TableExtension",
    "TensorSpec",
    "TimestepDataset",
    "TrajectoryColumn",
    "TrajectoryDataset",
    "TrajectoryWriter",
    "Writer",
    "__version__",
    "checkpointers",
    "dataset",
    "distributions",
    "errors",
    "extensions",
    "item_selectors",
    "padding",
    "platform",
    "pybind",
    "rate_limiters",
    "replay_sample",
    "reverb_types",
    "selectors",
    "structured",
    "structured_writer",
]
