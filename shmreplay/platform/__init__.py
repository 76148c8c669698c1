"""The names of modules under which programs written for Reverb find its checkpointers."""

from shmreplay.platform import checkpointers_lib, default

__all__ = ["checkpointers_lib", "default"]
