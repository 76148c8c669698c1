"""The names that programs import from Reverb's extension module, for what stands for them here."""

from __future__ import annotations

from shmreplay._native import TrajectoryColumn as WeakCellRef
from shmreplay.checkpointers import CheckpointSettings as Checkpointer
from shmreplay.client import Client
from shmreplay.extensions import TableExtension
from shmreplay.rate_limiters import RateLimiter
from shmreplay.reverb_types import selector_from_proto
from shmreplay.sampler import Sampler
from shmreplay.selectors import Fifo as FifoSelector
from shmreplay.selectors import Heap as HeapSelector
from shmreplay.selectors import Lifo as LifoSelector
from shmreplay.selectors import Prioritized as PrioritizedSelector
from shmreplay.selectors import Selector as ItemSelector
from shmreplay.selectors import Uniform as UniformSelector
from shmreplay.server import Server
from shmreplay.structured_writer import StructuredWriter
from shmreplay.table import Table
from shmreplay.trajectory_writer import TrajectoryWriter
from shmreplay.writer import Writer

__all__ = [
    "Checkpointer",
    "Client",
    "FifoSelector",
    "HeapSelector",
    "ItemSelector",
    "LifoSelector",
    "PrioritizedSelector",
    "RateLimiter",
    "Sampler",
    "Server",
    "StructuredWriter",
    "Table",
    "TableExtension",
    "TrajectoryWriter",
    "UniformSelector",
    "WeakCellRef",
    "Writer",
    "create_default_checkpointer",
    "selector_from_proto",
]


def create_default_checkpointer(
    name: str, group: str = "", fallback_checkpoint_path: str | None = None
) -> Checkpointer:
    """Returns what ``checkpointers.DefaultCheckpointer`` comes down to.

    Args:
        name: Directory to keep checkpoints in.
        group: Has to be empty when a checkpoint is written, as in Reverb.
        fallback_checkpoint_path: A checkpoint to load where the directory has none.
    """
    return Checkpointer(name, group, fallback_checkpoint_path)
