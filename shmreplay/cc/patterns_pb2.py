"""What a structured writer is told, under Reverb's names; see ``patterns``."""

from __future__ import annotations

from shmreplay.patterns import ConditionProto as Condition
from shmreplay.patterns import Config as StructuredWriterConfig
from shmreplay.patterns import PatternNode, Priority

__all__ = ["Condition", "PatternNode", "Priority", "StructuredWriterConfig"]
