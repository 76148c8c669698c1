"""The signature of a table whose items patterns make."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shmreplay import errors, tree
from shmreplay.pattern_building import paths_of
from shmreplay.pattern_plan import check_names
from shmreplay.patterns import (
    Config,
    PatternNode,
    named_fields,
)
from shmreplay.spec import TensorSpec, as_signature

__all__ = ["infer_signature"]


def infer_signature(configs: Sequence[Config], step_spec: Any) -> Any:
    """Returns the signature of a table that the items of all these configs fit.

    Args:
        configs: Of one table and of one structure.
        step_spec: Structure of specs of the steps: anything with shape and dtype.

    Returns:
        `TensorSpec`s in the structure of the patterns, named after their path. Where lengths
        differ, the leading dimension is None.

    Raises:
        InvalidArgumentError: There are no configs, or they do not go together.
        SignatureError: The fields of `step_spec` have other names than those of the reference step.
    """
    if not configs:
        raise errors.InvalidArgumentError(
            "At least one config must be provided. Got none: make them with create_config()."
        )
    structure = configs[0].pattern_structure
    for config in configs:
        if not _same_structure(structure, config.pattern_structure):
            raise errors.InvalidArgumentError(
                "All configs must have exactly the same pattern_structure. Got different ones: "
                "make a writer for each, or give their patterns one structure."
            )
    tables = sorted({config.table for config in configs})
    if len(tables) > 1:
        raise errors.InvalidArgumentError(
            "All configs must target the same table but provided configs included "
            f"{', '.join(tables)}. Make a writer for each table."
        )
    signature = as_signature(step_spec)
    check_names(paths_of(signature), [named_fields(config) for config in configs])
    step = tree.flatten(signature)
    paths = [path for path, _ in tree.flatten_with_path(structure)]
    merged = [
        _merged_spec(path, [_spec_of(config.flat[i], step, path) for config in configs])
        for i, path in enumerate(paths)
    ]
    return tree.unflatten_as(structure, merged)


def _same_structure(one: Any, other: Any) -> bool:
    try:
        tree.assert_same_structure(one, other)
    except errors.InvalidArgumentError:
        return False
    return True


def _spec_of(node: PatternNode, step: Sequence[TensorSpec], path: tree.Path) -> TensorSpec:
    if not 0 <= node.flat_source_index < len(step):
        raise errors.InvalidArgumentError(
            f"the pattern refers at {path!r} to field {node.flat_source_index} of a step, but "
            f"step_spec has {len(step)} fields. There must be one: give the step_spec of the steps "
            "that will be appended."
        )
    spec = step[node.flat_source_index]
    shape = (node.length, *spec.shape) if node.HasField("start") else spec.shape
    return TensorSpec(shape, spec.dtype)


def _merged_spec(path: tree.Path, specs: Sequence[TensorSpec]) -> TensorSpec:
    if len({spec.dtype for spec in specs}) > 1:
        raise errors.InvalidArgumentError(
            f"Configs produce trajectories with multiple dtypes at {path!r}. Got "
            f"{[spec.dtype.name for spec in specs]}; expected one. Give them tables of their own."
        )
    shape = specs[0].shape
    for spec in specs[1:]:
        if len(spec.shape) != len(shape) or spec.shape[1:] != shape[1:]:
            raise errors.InvalidArgumentError(
                f"Configs produce trajectories with incompatible shapes at {path!r}. Got "
                f"{[spec.shape for spec in specs]}; expected one. Give them tables of their own."
            )
        if spec.shape != shape:
            shape = (None, *shape[1:])
    return TensorSpec(shape, specs[0].dtype, "/".join(map(str, path)))
