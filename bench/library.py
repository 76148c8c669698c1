"""The one place that opens shmreplay, so that its absence is one clear error."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from bench.payloads import TRANSITION_BYTES, batch_chunks

if TYPE_CHECKING:
    import shmreplay

TABLE = "replay"
FILL_ROWS = 1024
SPARE_BYTES = 256 << 20


class LibraryMissingError(RuntimeError):
    """shmreplay cannot be imported here."""


def require() -> Any:
    """Returns the module shmreplay.

    Raises:
        LibraryMissingError: It cannot be imported, and why.
    """
    try:
        import shmreplay
    except ImportError as error:
        raise LibraryMissingError(
            f"shmreplay cannot be imported ({error}); install it first: pip install -e ."
        ) from error
    if not hasattr(shmreplay, "Server"):
        # A bare folder of that name imports as an empty namespace.
        raise LibraryMissingError(
            "the shmreplay found has no Server in it; install it first: pip install -e ."
        )
    return shmreplay


def serve(
    stack: ExitStack,
    rows: int,
    item_bytes: int,
    *,
    exponent: float | None = None,
    stripes: int | None = None,
    spare_bytes: int = SPARE_BYTES,
) -> tuple[str, shmreplay.Client]:
    """Serves one table of `rows` items, as long as the stack lives.

    Args:
        stack: Closes the client and stops the server.
        rows: The table's size; the oldest item is evicted.
        item_bytes: Payload of an item in bytes; the store gets room for it twice.
        exponent: Of the priorities; None for a uniform table.
        stripes: Of the table; None leaves it to the library.
        spare_bytes: Room beside the items.

    Returns:
        The store's address and a client.

    Raises:
        LibraryMissingError: shmreplay cannot be imported.
    """
    reverb = require()
    uniform = exponent is None
    table = reverb.Table(
        TABLE,
        sampler=reverb.selectors.Uniform() if uniform else reverb.selectors.Prioritized(exponent),
        remover=reverb.selectors.Fifo(),
        max_size=rows,
        rate_limiter=reverb.rate_limiters.MinSize(1),
        stripes=stripes,
    )
    # Twice the payload: blocks that are being evicted and blocks that are being filled, plus slots
    # and the records of trajectories.
    capacity = 2 * rows * (item_bytes + 512) + spare_bytes
    server = stack.enter_context(reverb.Server([table], capacity=capacity))
    client: shmreplay.Client = stack.enter_context(reverb.Client(server.address))
    return server.address, client


def fill(client: shmreplay.Client, rows: int) -> None:
    """Fills the table with `rows` transitions; `action` counts them."""
    for chunk in batch_chunks(rows, FILL_ROWS):
        client.insert_batch(TABLE, chunk, priorities=1.0)


def check_size(client: shmreplay.Client, rows: int) -> None:
    """Checks that the table is full: a benchmark of a half-empty table measures something else.

    Raises:
        RuntimeError: It is not.
    """
    size = client.server_info()[TABLE].current_size
    if size != rows:
        raise RuntimeError(f"expected a full table of {rows} items before measuring, found {size}")


def structured_writer(
    stack: ExitStack, client: shmreplay.Client, fields: Iterable[str]
) -> shmreplay.StructuredWriter:
    """Returns a writer that makes an item of every step."""
    structured = require().structured
    step = structured.create_reference_step(dict.fromkeys(fields))
    pattern = {field: column[-1:] for field, column in step.items()}
    writer = client.structured_writer([structured.create_config(pattern, TABLE)])
    stack.callback(writer.close)
    return writer


class FilledTable:
    """One full table of transitions for several contenders that only read it or set priorities.

    It is served by the first that asks, on that one's stack, which is the comparison's.
    """

    def __init__(self, rows: int, exponent: float | None = None) -> None:
        """Notes what to serve.

        Args:
            rows: The table's size.
            exponent: Of the priorities; None for a uniform table.
        """
        self.rows = rows
        self._exponent = exponent
        self._client: shmreplay.Client | None = None

    def client(self, stack: ExitStack) -> shmreplay.Client:
        """Returns the client of the table, filled in batches of `FILL_ROWS`.

        Raises:
            LibraryMissingError: shmreplay cannot be imported.
            RuntimeError: The table is not full after filling it.
        """
        if self._client is None:
            _, client = serve(stack, self.rows, TRANSITION_BYTES, exponent=self._exponent)
            fill(client, self.rows)
            check_size(client, self.rows)
            self._client = client
        return self._client
