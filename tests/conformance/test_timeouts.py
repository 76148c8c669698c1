"""Changes of a table whose extensions are behind: they end at their deadline, and say how far."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import shmreplay as reverb
from shmreplay import errors, limits

if TYPE_CHECKING:
    from shmreplay.extensions import ExtensionItem

PATIENCE = 60.0

MakeClient = Callable[..., tuple[reverb.Server, reverb.Client]]


class Gate(reverb.TableExtension):
    """Is behind while it is closed."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.open.set()
        self.reached = threading.Event()

    def on_insert(self, item: ExtensionItem) -> None:
        if not self.open.is_set():
            self.reached.set()
        assert self.open.wait(PATIENCE)


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.open.set()


def table(gate: Gate) -> reverb.Table:
    return reverb.Table(
        "t",
        reverb.selectors.Uniform(),
        reverb.selectors.Fifo(),
        5000,
        reverb.rate_limiters.MinSize(1),
        extensions=[gate],
    )


def close(gate: Gate, client: reverb.Client) -> None:
    """From here on nothing is taken out of the line of changes that extensions are to be told."""
    gate.open.clear()
    client.insert_batch("t", {"x": np.zeros(1)})
    assert gate.reached.wait(PATIENCE)


def fill(server: reverb.Server, key: Any) -> None:
    """Fills that line."""
    client = server.localhost_client()
    for _ in range(limits.EXTENSION_EVENTS + 1):
        try:
            client.update_priorities("t", key, 1.0, timeout=0)
        except errors.DeadlineExceededError:
            return
    pytest.fail("the line is never full")


@pytest.mark.parametrize("seconds", [0, 0.02])
def test_calls_that_wait_for_extensions_end_at_their_deadline_and_change_nothing(
    make_client: MakeClient, gate: Gate, seconds: float
) -> None:
    server, client = make_client([table(gate)])
    writer = client.trajectory_writer(1)
    writer.append({"x": 7.0})
    keys = client.insert_batch("t", {"x": np.zeros(300)})
    close(gate, client)
    fill(server, keys[:1])
    before, priorities = client.server_info()["t"], client.items("t").priority
    calls: list[Callable[[], Any]] = [
        lambda: client.update_priorities("t", keys[:10], 2.0, timeout=seconds),
        lambda: client.mutate_priorities("t", {int(keys[0]): 2.0}, timeout=seconds),
        lambda: client.mutate_priorities("t", deletes=keys[:10].tolist(), timeout=seconds),
        lambda: client.configure_table("t", max_size=3, timeout=seconds),
        lambda: server.configure_table("t", max_size=3, timeout=seconds),
        lambda: client.reset("t", timeout=seconds),
        lambda: writer.replace_item(
            "t", int(keys[0]), {"x": writer.history["x"][-1]}, timeout=seconds
        ),
    ]
    for call in calls:
        with pytest.raises(reverb.DeadlineExceededError, match="its extensions are behind"):
            call()
    assert client.server_info()["t"] == before
    assert (client.items("t").priority == priorities).all()
    gate.open.set()
    assert client.update_priorities("t", keys[:10], 2.0, timeout=PATIENCE) == 10
    client.mutate_priorities("t", {int(keys[0]): 3.0}, keys[1:3].tolist(), timeout=PATIENCE)
    client.configure_table("t", max_size=200, timeout=PATIENCE)
    assert client.server_info()["t"].current_size == 200
    client.reset("t", timeout=PATIENCE)
    assert client.server_info()["t"].current_size == 0


def test_a_change_of_many_keys_says_at_its_deadline_how_many_are_done(
    make_client: MakeClient, gate: Gate
) -> None:
    server, client = make_client([table(gate)])
    keys = client.insert_batch("t", {"x": np.zeros(100)})
    close(gate, client)
    with pytest.raises(reverb.DeadlineExceededError, match=r"\(\d+ of \d+ keys are done\)") as e:
        client.update_priorities("t", np.tile(keys, 30), 2.0, timeout=0.05)
    done = int(str(e.value).split("(")[1].split(" of ")[0])
    assert 100 <= done < 3000
    assert (client.items("t").priority == 2.0).sum() == 100
    with pytest.raises(reverb.DeadlineExceededError, match="come before updates"):
        client.mutate_priorities("t", dict.fromkeys(keys.tolist(), 1.0), keys.tolist(), timeout=0)
    gate.open.set()
    server.stop()
