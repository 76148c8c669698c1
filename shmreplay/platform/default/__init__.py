"""The module name of Reverb's default platform."""

from shmreplay.platform.default import checkpointers

__all__ = ["checkpointers"]
