"""`TFClient`: inserting, sampling and updating as TensorFlow operations."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

import numpy as np

from shmreplay import tree
from shmreplay.client import Client
from shmreplay.replay_sample import INFO_DTYPES, ReplaySample, SampleInfo

__all__ = ["TFClient", "as_text", "tensorflow_is_installed"]


def tensorflow_is_installed() -> bool:
    """Returns whether TensorFlow could be imported; does not import it."""
    # A module that stands in for it need not have a spec.
    loaded = sys.modules.get("tensorflow") is not None
    return loaded or importlib.util.find_spec("tensorflow") is not None


def as_text(value: Any) -> str:
    """Returns the text of a scalar string tensor's value: bytes or str, or an array of one."""
    text = np.asarray(value).item()
    return text.decode() if isinstance(text, bytes) else str(text)


class TFClient:
    """A client whose calls are TensorFlow operations, for use within `tf.function`s as well.

    The operations run Python code of the process that they were made in.
    """

    def __init__(
        self, server_address: str, shared_name: str | None = None, name: str = "reverb"
    ) -> None:
        """Makes a client; the first operation connects.

        Args:
            server_address: As for `Client`.
            shared_name: Accepted for Reverb's sake; nothing is shared between graphs.
            name: Begins the names of the operations.

        Raises:
            ImportError: TensorFlow is not installed.
            InvalidArgumentError: It is not such an address.
        """
        if not tensorflow_is_installed():
            raise ImportError(
                "TFClient needs TensorFlow, which is not installed: pip install 'shmreplay[tf]'. "
                "Client does the same with numpy arrays."
            )
        import tensorflow as tf

        self._tf = tf
        self._name = name
        self._client = Client(server_address)

    @property
    def server_address(self) -> str:
        """The address that it was made with."""
        return self._client.server_address

    def sample(self, table: str, data_dtypes: Any, name: str | None = None) -> ReplaySample:
        """Samples the first step of an item.

        Args:
            table: Name of the table: str or string tensor.
            data_dtypes: Structure of the dtypes of the data, with a leaf for each column.
            name: Of the operation.

        Returns:
            `ReplaySample` of tensors, `data` in the structure of data_dtypes.
        """
        tf = self._tf
        wanted = [tf.as_dtype(dtype) for dtype in tree.flatten(data_dtypes)]

        def draw(table_name: Any) -> list[Any]:
            steps = next(self._client.sample(as_text(table_name)))
            info, leaves = steps[0]
            got = [tf.as_dtype(leaf.dtype) for leaf in leaves]
            if got != wanted:
                raise ValueError(
                    f"Got an item with columns of {[d.name for d in got]}; expected what "
                    "data_dtypes "
                    f"says, {[d.name for d in wanted]}. Give data_dtypes those of the items."
                )
            values = [dt.type(value) for dt, value in zip(INFO_DTYPES, info, strict=True)]
            return [*values, *leaves]

        outputs = tf.numpy_function(
            draw,
            [table],
            [*(tf.as_dtype(dtype) for dtype in INFO_DTYPES), *wanted],
            name=self._op_name(name, "sample"),
        )
        for info_output in outputs[: len(INFO_DTYPES)]:
            info_output.set_shape(())
        data = tree.unflatten_as(data_dtypes, outputs[len(INFO_DTYPES) :])
        return ReplaySample(SampleInfo(*outputs[: len(INFO_DTYPES)]), data)

    def insert(self, data: Any, tables: Any, priorities: Any, name: str | None = None) -> Any:
        """Inserts one step as an item into each of some tables.

        Args:
            data: Sequence of tensors.
            tables: Names of the tables: string tensor [N].
            priorities: Of the item in each table: float64 tensor [N].
            name: Of the operation.

        Returns:
            The operation; None where it was run at once.

        Raises:
            ValueError: tables or priorities are not such tensors, or differ in shape.
        """
        tf = self._tf
        if tables.dtype != tf.string or tables.shape.rank != 1:
            raise ValueError(
                f"tables must be a string tensor of rank 1, got {tables}. Use tf.constant([name])."
            )
        if priorities.dtype != tf.float64 or priorities.shape.rank != 1:
            raise ValueError(
                f"priorities must be a float64 tensor of rank 1, got {priorities}. Use tf.cast()."
            )
        if not tables.shape.is_compatible_with(priorities.shape):
            raise ValueError(
                "priorities and tables must have the same shape, got "
                f"{priorities.shape} and {tables.shape}. Give one for each table."
            )

        def put(names: Any, values: Any, *leaves: Any) -> None:
            self._client.insert(
                [_of_fixed_width(leaf) for leaf in leaves],
                {as_text(n): float(p) for n, p in zip(names, values, strict=True)},
            )

        return self._run(put, [tables, priorities, *data], name, "insert")

    def update_priorities(
        self, table: str, keys: Any, priorities: Any, name: str | None = None
    ) -> Any:
        """Sets new priorities. Keys that are not there any more are skipped.

        Args:
            table: Name of the table: str or string tensor.
            keys: uint64 tensor [N].
            priorities: float64 tensor [N].
            name: Of the operation.

        Returns:
            The operation; None where it was run at once.
        """

        def update(table_name: Any, wanted: Any, values: Any) -> None:
            self._client.update_priorities(as_text(table_name), wanted, values)

        return self._run(update, [table, keys, priorities], name, "update_priorities")

    def _run(self, function: Any, inputs: list[Any], name: str | None, what: str) -> Any:
        """An operation without outputs: None in eager mode, where it has run by then."""
        tf = self._tf
        result = tf.numpy_function(function, inputs, [], name=self._op_name(name, what))
        return None if tf.executing_eagerly() else result

    def _op_name(self, name: str | None, what: str) -> str:
        return f"{self._name}_{what}" if name is None else name


def _of_fixed_width(leaf: Any) -> Any:
    """The value of a tensor; that of a string tensor, which comes as objects, as wide as it is."""
    if isinstance(leaf, bytes) or leaf.dtype != object:
        return leaf
    return leaf.astype("S")
