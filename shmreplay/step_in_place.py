"""A step that is written where it is stored: its columns, and the block in which that is done."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from shmreplay import errors, tree
from shmreplay.spec import TensorSpec

if TYPE_CHECKING:
    from shmreplay.trajectory_writer import TrajectoryWriter

__all__ = ["StepInPlace", "StepLayout", "check_declared"]


class StepInPlace:
    """A step that is written in place; see `TrajectoryWriter.next_step`."""

    def __init__(self, writer: TrajectoryWriter, spec: Any) -> None:
        """See `TrajectoryWriter.next_step`."""
        self._writer = writer
        self._spec = spec
        self._arrays: list[Any] = []

    def __enter__(self) -> Any:
        """Opens the step; returns the structure of arrays."""
        writer = self._writer
        if self._spec is not None:
            layout = writer.layout_of_spec(self._spec)
        else:
            layout = writer.layout_of_history()
        self._arrays = writer.place_open(layout.numbers)
        return layout.unflatten(self._arrays)

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Appends the step, or drops it if the block raised. The arrays become read-only."""
        for array in self._arrays:
            array.flags.writeable = False
        self._writer.place_close(exc_type is None)


class StepLayout:
    """Columns of a step that is written in place, and the structure that they make."""

    def __init__(self, numbers: Sequence[int], structure: Any) -> None:
        """Numbers of the columns, in the order of the structure's leaves."""
        self.numbers = tuple(numbers)
        self._structure = structure
        flat = type(structure) is dict and not any(map(tree.is_nested, structure.values()))
        self._keys = sorted(structure) if flat else None

    def unflatten(self, arrays: list[Any]) -> Any:
        """Returns the structure with these arrays, one a column, as its leaves."""
        if self._keys is not None:
            return dict(zip(self._keys, arrays))  # noqa: B905 - as many as columns
        return tree.unflatten_as(self._structure, arrays)


def check_declared(path: tuple[Any, ...], spec: TensorSpec) -> None:
    """Checks that a column that is made known before its first value has a full shape.

    Raises:
        SignatureError: A size is missing.
    """
    if any(d is None for d in spec.shape):
        raise errors.SignatureError(
            f"column {path}: next_step needs a full shape, got {spec}. Give every size in spec=."
        )
