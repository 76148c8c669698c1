"""How far does it go with many clients, large payloads and large tables?

The figures that the Reverb paper has for its server, taken here: insert and sample throughput by
payload and by number of client processes, on one table of one stripe and striped, in overload; the
same over the bridge; the latency of a learner; and the cost of a call by the size of the table.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import cycle, islice
from typing import TYPE_CHECKING

from bench import library, paper_costs
from bench.bridge import free_port
from bench.harness import Bench, Contender, Figure, Measure, Quantity, Reading
from bench.payloads import PAYLOADS, frames
from bench.peers_cases import remote_batch
from bench.peers_ours import payload_loop
from bench.processes import Crew, Prepare, Work
from bench.targets import Target

if TYPE_CHECKING:
    import shmreplay

NAME = "paper"
QUESTION = "How far does it go with many clients, large payloads and large tables?"
BY_NAME = True
CLIENTS = (1, 2, 8, 32, 200)
QUICK_CLIENTS = (1, 8)
REMOTE_CLIENTS = (1, 8, 200, 1000)
QUICK_REMOTE_CLIENTS = (1, 40)
REMOTE_PROCESSES = 4
REMOTE_THREADS = 4
REMOTE_PAYLOAD = 4_000
REMOTE_CASE = "insert 4 kB over the bridge"
STRIPES = {"one stripe": 1, "striped": 8}
OVERLOAD_BOX = 4.0
OVERLOAD_CLIENTS = 100
CHUNKS = {400: 16, 4_000: 16, 40_000: 4, 400_000: 1}
FAIR = "most items of a client / least"
OVERLOAD = 0.95
LATENCY_LIMIT = 1.2
FLAT_LIMIT = 2.0
_CORES = "there are as many actors as cores: the learner waits for one of them to give up its own"
_OVERLOAD = (
    "more clients than cores take turns on them: each turn begins with cold caches, and one that "
    "is preempted under a lock holds up the others until it runs again; bench/scaling.py has the "
    "same for processes that share nothing"
)
_FLAT = (
    "a table that does not fit the caches any more costs misses: a slot, a block and its row each, "
    "and for priorities the levels of the tree"
)


def label(count: int) -> str:
    """Returns the row of so many clients."""
    return f"{count} client{'s' * (count > 1)}"


def _rows(size: int) -> int:
    return max(500, min(50_000, 200_000_000 // size))


def _serve(stack: ExitStack, size: int, stripes: int, port: int | None = None) -> shmreplay.Server:
    """Serves a full table of payloads."""
    reverb, rows = library.require(), _rows(size)
    table = reverb.Table(
        library.TABLE,
        reverb.selectors.Uniform(),
        reverb.selectors.Fifo(),
        rows,
        reverb.rate_limiters.MinSize(1),
        stripes=stripes,
    )
    # Room for the blocks that 200 writers hold open.
    capacity = 2 * rows * (size + 512) + 200 * 4 * size + 2 * library.SPARE_BYTES
    server: shmreplay.Server = stack.enter_context(
        reverb.Server([table], port=port, capacity=capacity)
    )
    with reverb.Client(server.address) as client:
        # By a writer as the clients have it: all items of one structure can be stacked.
        with ExitStack() as filling:
            payload_loop(library.structured_writer(filling, client, ("x",)), size)(rows)
    return server


def inserting(stack: ExitStack, address: str, size: int) -> Work:
    """A client process that writes payloads."""
    client = stack.enter_context(library.require().Client(address))
    loop = payload_loop(library.structured_writer(stack, client, ("x",)), size)
    loop(CHUNKS[size])
    return Work(loop, CHUNKS[size])


def sampling(stack: ExitStack, address: str, size: int) -> Work:
    """A client process that samples batches of about 400 kB."""
    client = stack.enter_context(library.require().Client(address))

    def loop(calls: int) -> None:
        for _ in range(calls):
            client.sample_batch(library.TABLE, remote_batch(size))

    loop(1)
    return Work(loop, 1)


def remote(stack: ExitStack, address: str, clients: int) -> Work:
    """A process that plays several remote clients, each with a socket and a writer of its own.

    Threads share them out and go round theirs, so that each client has items under way while the
    others' are confirmed.
    """
    reverb = library.require()
    groups = [range(i, clients, REMOTE_THREADS) for i in range(min(REMOTE_THREADS, clients))]
    payloads = frames(REMOTE_PAYLOAD, 16)
    writers = []
    for _ in range(clients):
        client = stack.enter_context(reverb.Client(address))
        writer = client.trajectory_writer(1, confirm=False)
        stack.callback(writer.close)
        writers.append(writer)

    def write(index: int, items: int) -> None:
        writer = writers[index]
        for payload in islice(cycle(payloads), items):
            writer.append({"x": payload})
            writer.create_item(library.TABLE, 1.0, {"x": writer.history["x"][-1]})
        writer.flush()

    def go_round(group: range, deadline: float, counts: list[int], errors: list[str]) -> None:
        try:
            for index in cycle(group):
                write(index, CHUNKS[REMOTE_PAYLOAD])
                if time.monotonic() > deadline:
                    return
                counts[index] += CHUNKS[REMOTE_PAYLOAD]
        except reverb.errors.ReverbError as error:
            errors.append(repr(error))

    def several(deadline: float) -> list[int]:
        counts, errors = [0] * clients, list[str]()
        threads = [
            threading.Thread(target=go_round, args=(group, deadline, counts, errors))
            for group in groups
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise RuntimeError(f"{len(errors)} of {len(groups)} threads failed: {errors[0]}")
        return counts

    for index in range(clients):
        write(index, 1)
    return Work(lambda calls: None, 1, several=several)


class Fairness:
    """Measures a crew, and keeps how even its members were."""

    def __init__(self, crew: Crew) -> None:
        self._crew = crew
        self.ratios: list[float] = []

    def __call__(self, seconds: float) -> Reading:
        """Measures; a call is an item (or batch) of any member."""
        self._crew.start(seconds)
        counts = self._crew.counts(seconds)
        self.ratios.append(max(counts) / max(1, min(counts)))
        return Reading(sum(counts), seconds)


def _many(
    bench: Bench,
    case: str,
    clients: tuple[int, ...],
    crew_of: Callable[[ExitStack, int], Crew],
    size: int,
    items: int,
) -> None:
    """Compares numbers of clients; notes how fair the most were treated."""
    kept: dict[int, Fairness] = {}
    most, shown = clients[-1], size in (400, REMOTE_PAYLOAD)

    def prepare(stack: ExitStack, count: int) -> Measure:
        kept[count] = Fairness(crew_of(stack, count))
        return kept[count]

    def note_fairness() -> None:
        ratios = tuple(kept[most].ratios[1:]) if most in kept else ()  # The first was the warm-up.
        if shown and ratios:
            bench.quantities.append(Quantity(NAME, case, f"{label(most)}: {FAIR}", "x", ratios))

    bench.compare(
        NAME,
        case,
        [
            Contender(
                label(n),
                partial(prepare, count=n),
                ours=True,
                box=OVERLOAD_BOX if shown and n >= OVERLOAD_CLIENTS else None,
            )
            for n in clients
        ],
        bytes_per_item=size,
        items_per_call=items,
        box=1.0,
        after=note_fairness,
    )


def _crew(stack: ExitStack, count: int, address: str, work: Prepare, size: int) -> Crew:
    return Crew(stack, work, [(address, size)] * count)


def _throughput(bench: Bench) -> None:
    quick = bench.settings.quick
    clients = QUICK_CLIENTS if quick else CLIENTS
    sizes = {k: v for k, v in PAYLOADS.items() if not quick or v in (400, 400_000)}
    kinds: tuple[tuple[str, Prepare], ...] = (("insert", inserting), ("sample", sampling))
    for text, size in sizes.items():
        for stripe_text, stripes in STRIPES.items():
            for what, work in kinds:
                case = f"{what} {text}, {stripe_text}"
                if bench.has(NAME, case):
                    continue
                with ExitStack() as stack:
                    address = _serve(stack, size, stripes).address

                    crew_of = partial(_crew, address=address, work=work, size=size)
                    items = 1 if what == "insert" else remote_batch(size)
                    _many(bench, case, clients, crew_of, size, items)


def _remote(bench: Bench) -> None:
    clients = QUICK_REMOTE_CLIENTS if bench.settings.quick else REMOTE_CLIENTS
    if bench.has(NAME, REMOTE_CASE):
        return
    with ExitStack() as stack:
        port = free_port()
        _serve(stack, REMOTE_PAYLOAD, 1, port)
        address = f"tcp://127.0.0.1:{port}"

        def crew_of(inner: ExitStack, count: int) -> Crew:
            processes = min(REMOTE_PROCESSES, count)
            shares = [len(range(i, count, processes)) for i in range(processes)]
            return Crew(inner, remote, [(address, share) for share in shares])

        _many(bench, REMOTE_CASE, clients, crew_of, REMOTE_PAYLOAD, 1)


def run(bench: Bench) -> None:
    """Measures this question."""
    _throughput(bench)
    _remote(bench)
    paper_costs.latencies(bench, NAME)
    paper_costs.costs(bench, NAME)


def quantity_targets(quantities: Sequence[Quantity]) -> list[Target]:
    """Returns what latencies and fairness are held to.

    A learner beside as many actors as leave cores over is as fast as alone; clients under overload
    are served alike.

    Args:
        quantities: What was measured.
    """
    found: list[Target] = []
    case = paper_costs.LATENCY_CASE
    for each in quantities:
        row = (each.question, each.case, each.name)
        if each.question == NAME and each.name.endswith(FAIR):
            found.append(Target(f"{each.case}, {each.name}", row, 2.0, False, "x", "quantity"))
        elif each.question == NAME and each.case == case and not each.name.startswith("0 "):
            actors, _, percentile = each.name.partition(" actors, ")
            found.append(
                Target(
                    f"sample_batch(256) beside {actors} actors, {percentile}: against none",
                    row,
                    LATENCY_LIMIT,
                    False,
                    "x",
                    "quantity",
                    (each.question, each.case, f"0 actors, {percentile}"),
                    _CORES if int(actors) >= (os.cpu_count() or 1) else "",
                )
            )
    return found


def targets(figures: Sequence[Figure]) -> list[Target]:
    """Returns what the most clients are held to: the best that any number of clients reached.

    Args:
        figures: What was measured.
    """
    found: list[Target] = []
    mine = [
        f for f in figures if f.question == NAME and f.contender.split()[-1].startswith("client")
    ]
    for case in dict.fromkeys(figure.case for figure in mine):
        here = [figure for figure in mine if figure.case == case]
        peak = max(here, key=lambda figure: figure.items_per_second.median)
        found.append(
            Target(
                f"{case}, {here[-1].contender}: total rate against the best, {peak.contender}",
                (NAME, case, here[-1].contender),
                OVERLOAD,
                True,
                "x",
                "items/s",
                (NAME, case, peak.contender),
                _OVERLOAD,
            )
        )
    for case in paper_costs.COST_CASES:
        here = [f for f in figures if f.question == NAME and f.case == case]
        if len(here) > 1:
            found.append(
                Target(
                    f"{case}: time with {here[-1].contender} against {here[0].contender}",
                    (NAME, case, here[-1].contender),
                    FLAT_LIMIT,
                    False,
                    "x",
                    "us",
                    (NAME, case, here[0].contender),
                    _FLAT,
                )
            )
    return found
