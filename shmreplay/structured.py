"""The structured writer under the module name that Reverb gives it; see ``structured_writer``."""

from __future__ import annotations

from shmreplay.structured_writer import (
    Condition,
    ConditionProto,
    Config,
    Pattern,
    PatternTransform,
    ReferenceStep,
    StructuredWriter,
    constant_priority_fn,
    create_config,
    create_reference_step,
    infer_signature,
    pattern_from_transform,
    td_error,
    unpack_pattern,
)

__all__ = [
    "Condition",
    "ConditionProto",
    "Config",
    "Pattern",
    "PatternTransform",
    "ReferenceStep",
    "StructuredWriter",
    "constant_priority_fn",
    "create_config",
    "create_reference_step",
    "infer_signature",
    "pattern_from_transform",
    "td_error",
    "unpack_pattern",
]
