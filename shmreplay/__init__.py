"""Experience replay in shared memory, with Reverb's API: `import shmreplay as reverb`.

Where what is, from the bottom up: a module uses those of the lines above its own.

    _core  C: memory, locks, tables and their repair, in a store that processes share
    tree selectors rate_limiters spec table  what a user describes, as plain values
    _native  the core in Python (_binding): stores, sessions, batches, writing step by step
    segment checkpoint lease attachment store recovery  files, names, who lives, who died
    connection trajectory_writer drawing inserting structured_writer  work over one store
    client_link client_tables client  what a user calls, by the name of a table
    checkpoint_restore bridge sharded_client  from disk, from other hosts, over several servers
    server dataset integrations  serving it, and what other libraries take it as
    cli  the same for people, in a shell; each command is a command_... module
"""

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
