"""The name of the package under which programs written for Reverb find its table settings."""

from shmreplay.cc.checkpointing import checkpoint_pb2

__all__ = ["checkpoint_pb2"]
