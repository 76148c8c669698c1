"""The names of modules under which programs written for Reverb find its messages.

The messages are plain values that answer the same fields, `HasField` and `WhichOneof`; those that
travel between Reverb's client and its server alone are not there.
"""

from shmreplay.cc import checkpointing, patterns_pb2, schema_pb2

__all__ = ["checkpointing", "patterns_pb2", "schema_pb2"]
