"""Tables against the model of `oracle.py`, under random runs of every operation.

After every step the engine checks its own structures, and every counter of the table is compared
with the model. What is in the table is compared by probing (an update of a key to the priority it
has tells whether the key is there), by every sample, and by draining the table in the order of its
sampler.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import shmreplay as reverb
from tests.model import oracle

TABLE = "table"
SIZES = (8 << 20, 16 << 20, 32 << 20)
# Steps in an item of the layout that overlaps.
WINDOW = 3
BORROWS_AT_ONCE = 3
KINDS = ("fifo", "lifo", "uniform", "prioritized", "min_heap", "max_heap")
PAIRS = [(sampler, remover) for sampler in (*KINDS, "epoch") for remover in KINDS]
# With these no total order is needed, so the slots may be spread over several stripes.
STRIPED_PAIRS = [
    (sampler, remover)
    for sampler in ("uniform", "prioritized")
    for remover in ("fifo", "uniform", "prioritized")
]

# Few values, so that ties are common.
weights = st.sampled_from([0.0, 0.001, 0.5, 1.0, 1.0, 2.0, 3.5, 100.0])
ranks = st.sampled_from([-math.inf, -2.0, -0.0, 0.0, 0.5, 1.0, 1.0, 2.0, 100.0, math.inf])
exponents = st.sampled_from([0.0, 0.5, 1.0, 2.0, -1.0])
# The same few numbers pick keys by position, so that rules meet each other's keys.
picks = st.lists(st.integers(0, 31), max_size=4)
foreign_keys = st.sampled_from([2**64 - 1, 2**64 - 12345])


def make_selector(kind: str, exponent: float) -> tuple[Any, oracle.Selector]:
    """The selector of the engine, and the model's."""
    match kind:
        case "fifo":
            return reverb.selectors.Fifo(), oracle.Fifo()
        case "lifo":
            return reverb.selectors.Lifo(), oracle.Lifo()
        case "uniform":
            return reverb.selectors.Uniform(), oracle.Uniform()
        case "prioritized":
            return reverb.selectors.Prioritized(exponent), oracle.Prioritized(exponent)
        case "epoch":
            return reverb.selectors.Epoch(), oracle.Epoch()
        case "min_heap":
            return reverb.selectors.MinHeap(), oracle.MinHeap()
        case _:
            assert kind == "max_heap"
            return reverb.selectors.MaxHeap(), oracle.MaxHeap()


@st.composite
def limiters(draw: st.DrawFn) -> tuple[Any, oracle.Limiter]:
    """A limiter of the engine, and the model's. All numbers are exact in binary."""
    kind = draw(st.sampled_from(["min_size", "min_size", "ratio", "queue", "stack", "general"]))
    size = draw(st.integers(1, 5))
    ratio = draw(st.sampled_from([0.5, 1.0, 1.5, 2.0, 4.0]))
    limits = reverb.rate_limiters
    match kind:
        case "min_size":
            return limits.MinSize(size), oracle.Limiter.min_size(size)
        case "ratio":
            buffer = max(1.0, ratio) + draw(st.sampled_from([0.0, 0.5, 3.0, 10.0]))
            return (
                limits.SampleToInsertRatio(ratio, size, buffer),
                oracle.Limiter.ratio(ratio, size, buffer),
            )
        case "queue":
            return limits.Queue(size), oracle.Limiter.queue(size)
        case "stack":
            return limits.Stack(size), oracle.Limiter.queue(size)
        case _:
            low = draw(st.sampled_from([-4.0, -0.5, 0.0, 2.0]))
            high = low + draw(st.sampled_from([2.0, 8.5, 40.0]))
            numbers = (ratio, size, low, high)
            return limits.RateLimiter(*numbers), oracle.Limiter(*numbers)


def step_of(serial: int) -> dict[str, Any]:
    """A step that says in each of its fields which one it is."""
    return {"id": np.int64(serial), "x": np.full(3, serial, np.float32)}


def payload_of(data: Any) -> tuple[bool, tuple[int, ...]]:
    """Whether an item has a time dimension, and the serials of its steps.

    Args:
      data: columns id int64[T] or [], x float32[T, 3] or [3]: a dict, or flat in the dict's order.
    """
    ids, x = (data["id"], data["x"]) if isinstance(data, Mapping) else data
    assert ids.dtype == np.int64 and x.dtype == np.float32
    assert x.shape == (*ids.shape, 3)
    np.testing.assert_array_equal(x, np.broadcast_to(ids[..., None], x.shape))
    return ids.ndim == 1, tuple(int(serial) for serial in ids.reshape(-1))


class TableMachine(RuleBasedStateMachine):
    """One table, one client. `layout` says what kinds of items meet in it.

    steps: items of one step, with a time dimension; rows: of one step, without; windows: of three
    steps that overlap; mixed: all of these, and since they cannot be stacked, batches of one.
    """

    # Set by `run`, which makes a class for each pair of selectors.
    pair: tuple[str, str]
    striped: bool
    unique_name: Callable[[], str]

    def __init__(self) -> None:
        super().__init__()
        self._cleanup = ExitStack()
        self._borrows: list[tuple[ExitStack, list[tuple[Any, Any]]]] = []

    # ------------------------------------------------------------------ life

    @initialize(
        limiter=limiters(),
        exponent=st.tuples(exponents, exponents),
        max_size=st.integers(1, 20),
        max_times_sampled=st.sampled_from([0, 0, 1, 3]),
        layout=st.sampled_from(["steps", "rows", "windows", "mixed"]),
        stripes=st.sampled_from([1, None]),
        seed=st.integers(0, 2**32),
        capacity=st.sampled_from(SIZES),
    )
    def create(
        self,
        limiter: tuple[Any, oracle.Limiter],
        exponent: tuple[float, float],
        max_size: int,
        max_times_sampled: int,
        layout: str,
        stripes: int | None,
        seed: int,
        capacity: int,
    ) -> None:
        sampler = make_selector(self.pair[0], exponent[0])
        remover = make_selector(self.pair[1], exponent[1])
        if self.striped:
            # A table has no more stripes than items.
            stripes, max_times_sampled = min(3, max_size), 0
        self.table = reverb.Table(
            TABLE,
            sampler[0],
            remover[0],
            max_size,
            limiter[0],
            max_times_sampled,
            seed=seed,
            stripes=stripes,
        )
        server = reverb.Server([self.table], name=type(self).unique_name(), capacity=capacity)
        self._cleanup.callback(server.stop)
        self.client = self._cleanup.enter_context(reverb.Client(server.address))
        self.writer = self.client.trajectory_writer(num_keep_alive_refs=WINDOW)
        self._cleanup.callback(self.writer.close)
        self.model = oracle.TableModel(
            sampler[1], remover[1], max_size, limiter[1], max_times_sampled
        )
        self.layout = layout
        # The model's keys are serials of items. An item that `Client.insert` made has a key of the
        # engine that nobody knows before the item is sampled.
        self.key_of: dict[int, int] = {}
        self.item_of: dict[int, int] = {}
        self._serials = iter(range(1, 1 << 20))
        # Of the writer: the steps it keeps alive, each with its episode.
        self._episode = ("writer", next(self._serials))
        self._alive: list[tuple[int, Any]] = []

    def teardown(self) -> None:
        for borrow, _ in self._borrows:
            borrow.close()
        self._cleanup.close()

    @invariant()
    def counters_agree(self) -> None:
        self.client.check()
        info = self.client.server_info()[TABLE]
        assert (
            oracle.Counts(
                info.current_size,
                info.num_episodes,
                info.num_deleted_episodes,
                info.num_unique_samples,
                info.rate_limiter_info.insert_stats.completed,
                info.rate_limiter_info.sample_stats.completed,
            )
            == self.model.counts()
        )
        assert self.client.max_priority(TABLE) == self.model.max_priority
        for count in (1, 2, 5):
            assert self.table.can_sample(count) == self.model.limiter.can_sample(count)
            assert self.table.can_insert(count) == self.model.limiter.can_insert(count)

    @invariant()
    def borrowed_views_stay(self) -> None:
        for _, loans in self._borrows:
            for data, payload in loans:
                assert payload_of(data) == payload

    @invariant()
    def contents_agree(self) -> None:
        # Where updates move nothing, looking changes nothing.
        if not self._ordered_by_touch:
            self._probe(reverse=False)

    # --------------------------------------------------------------- helpers

    @property
    def _ordered_by_touch(self) -> bool:
        return self.model.sampler.ordered_by_touch or self.model.remover.ordered_by_touch

    def _priorities(self) -> st.SearchStrategy[float]:
        return weights if "prioritized" in self.pair else ranks

    def _given_and_meant(self, data: st.DataObject) -> tuple[float | None, float]:
        """A priority to insert with, and what it stands for."""
        given = data.draw(st.none() | self._priorities())
        return given, self.model.max_priority if given is None else given

    def _probe(self, reverse: bool) -> None:
        """Looks for every key there ever was; counts as a touch of those that are there."""
        serials = sorted(self.key_of, reverse=reverse)
        for serial in serials:
            item = self.model.items.get(serial)
            priority = 1.0 if item is None else item.priority
            found = self.client.update_priorities(TABLE, [self.key_of[serial]], [priority])
            assert found == self.model.update({serial: priority})
        # Keys that are long gone say nothing new.
        for serial in sorted(serials)[:-24]:
            if serial not in self.model.items:
                self.item_of.pop(self.key_of.pop(serial))

    def _new_item(self, priority: float, payload: Any, episodes: Iterable[Any]) -> oracle.Item:
        return oracle.Item(next(self._serials), priority, payload, frozenset(episodes))

    def _entered(self, new: list[oracle.Item], keys: list[int] | None) -> None:
        """Tells the model of inserts that the engine made, and of what they pushed out."""
        if keys is not None:
            for item, key in zip(new, keys, strict=True):
                assert key not in self.item_of
                self.key_of[item.key], self.item_of[key] = key, item.key
        gone = None
        if not self.model.remover.deterministic:
            gone = self._look_who_left([*self.model.items.values(), *new])
        states = self.model.insert_run(new, gone)
        # Several orders of removal may be possible; the count of deleted episodes tells which.
        deleted = self.client.server_info()[TABLE].num_deleted_episodes
        states = [state for state in states if state.num_deleted_episodes == deleted]
        assert len(states) == 1, f"no legal order of removal deletes {deleted} episodes"
        self.model = states[0]
        if gone is not None:
            self.model.update({serial: item.priority for serial, item in self.model.items.items()})

    def _look_who_left(self, candidates: list[oracle.Item]) -> set[int]:
        """Serials that are gone; touches those that are not, in the order of the candidates."""
        gone = set()
        for item in candidates:
            key = self.key_of[item.key]
            if self.client.update_priorities(TABLE, [key], [item.priority]) == 0:
                gone.add(item.key)
        return gone

    def _sampled(self, info: Any, data: Any) -> tuple[bool, tuple[int, ...]]:
        """Tells the model of one sample, and compares what came with it."""
        payload = payload_of(data)
        serial = self.item_of.get(info.key)
        if serial is None:
            (serial,) = (s for s, item in self.model.items.items() if item.payload == payload)
            assert serial not in self.key_of, "an item came under two keys"
            self.key_of[serial], self.item_of[info.key] = info.key, serial
        want = self.model.sample(serial)
        assert payload == want.payload
        assert info.table_size == want.table_size
        assert info.priority == want.priority
        assert info.times_sampled == want.times_sampled
        assert info.probability == pytest.approx(want.probability, rel=1e-12, abs=0.0)
        return payload

    def _known_keys(self, positions: list[int]) -> dict[int, int]:
        """Keys of the engine, present or gone, to the model's; each at most once."""
        keys = list(self.item_of)[-32:]
        if not keys:
            return {}
        chosen = [keys[position % len(keys)] for position in positions]
        return {key: self.item_of[key] for key in chosen}

    def _expect_wait(self, call: Callable[[], Any]) -> None:
        with pytest.raises(reverb.DeadlineExceededError):
            call()

    # --------------------------------------------------------------- inserts

    # The key of an item that `insert` made is not known: one could not see that it left by chance.
    @precondition(lambda self: self.layout in ("steps", "mixed"))
    @precondition(lambda self: self.model.remover.deterministic)
    @rule(data=st.data())
    def insert(self, data: st.DataObject) -> None:
        given, priority = self._given_and_meant(data)
        serial = next(self._serials)

        def call() -> None:
            self.client.insert(step_of(serial), {TABLE: given}, timeout=0)

        if not self.model.limiter.can_insert(1):
            self._expect_wait(call)
            return
        call()
        self._entered([self._new_item(priority, (True, (serial,)), [serial])], None)

    @precondition(lambda self: self.layout in ("rows", "mixed"))
    @rule(data=st.data(), count=st.integers(1, 4), shared=st.booleans())
    def insert_batch(self, data: st.DataObject, count: int, shared: bool) -> None:
        given = 1 if shared else count
        priorities = data.draw(st.lists(self._priorities(), min_size=given, max_size=given))
        allowed = self.model.inserts_allowed(count)
        serials = [next(self._serials) for _ in range(max(allowed, 1))]
        priorities = (priorities * count)[: len(serials)]
        batch = {
            "id": np.array(serials, np.int64),
            "x": np.repeat(np.array(serials, np.float32)[:, None], 3, axis=1),
        }
        argument: Any = priorities[0] if shared else np.array(priorities)
        if shared and data.draw(st.booleans()):
            argument, priorities = None, [self.model.max_priority] * len(serials)

        def call() -> Any:
            return self.client.insert_batch(TABLE, batch, argument, timeout=0)

        if allowed == 0:
            self._expect_wait(call)
            return
        keys = call()
        assert keys.dtype == np.uint64 and keys.shape == (len(serials),)
        episode = ("batch", serials[0])
        new = [
            self._new_item(priority, (False, (serial,)), [episode])
            for serial, priority in zip(serials, priorities, strict=True)
        ]
        self._entered(new, [int(key) for key in keys])

    @rule(data=st.data(), squeeze=st.booleans())
    def write_step_and_item(self, data: st.DataObject, squeeze: bool) -> None:
        serial = next(self._serials)
        self.writer.append(step_of(serial))
        self._alive = [*self._alive, (serial, self._episode)][-WINDOW:]
        length = {"steps": 1, "rows": 1, "windows": WINDOW}.get(
            self.layout, min(2, len(self._alive))
        )
        squeeze = squeeze and length == 1 if self.layout == "mixed" else self.layout == "rows"
        if len(self._alive) < length or not self.model.limiter.can_insert(1):
            return
        given, priority = self._given_and_meant(data)
        history = self.writer.history
        index = -1 if squeeze else slice(-length, None)
        trajectory = {"id": history["id"][index], "x": history["x"][index]}
        key = self.writer.create_item(TABLE, given, trajectory)
        assert key is not None
        steps = self._alive[-length:]
        payload = (not squeeze, tuple(serial for serial, _ in steps))
        self._entered([self._new_item(priority, payload, {e for _, e in steps})], [int(key)])

    @rule(clear=st.booleans())
    def end_episode(self, clear: bool) -> None:
        self.writer.end_episode(clear_buffers=clear)
        assert self.writer.episode_steps == 0
        self._episode = ("writer", next(self._serials))
        if clear:
            self._alive = []

    # --------------------------------------------------------------- samples

    @rule(count=st.integers(1, 6))
    def sample_batch(self, count: int) -> None:
        count = 1 if self.layout == "mixed" else count

        def call() -> Any:
            return self.client.sample_batch(TABLE, count, timeout=0)

        if not self.model.limiter.can_sample(1):
            self._expect_wait(call)
            return
        info, data = call()
        assert [column.dtype for column in info] == ["u8", "f8", "i8", "f8", "i4"]
        rows = len(info.key)
        assert all(column.shape == (rows,) for column in info)
        for row in range(rows):
            one = type(info)(*(column[row].item() for column in info))
            self._sampled(one, {name: column[row] for name, column in data.items()})
        assert rows == count or not self.model.limiter.can_sample(1)

    @rule(count=st.integers(1, 3))
    def sample(self, count: int) -> None:
        # Where samples take items away, what is allowed depends on the draws: then one by one.
        count = 1 if self.model.max_times_sampled else count
        allowed = max(n for n in range(count + 1) if n == 0 or self.model.limiter.can_sample(n))

        def call() -> list[Any]:
            generator = self.client.sample(TABLE, max(allowed, 1), emit_timesteps=False, timeout=0)
            return list(generator)

        if allowed == 0:
            self._expect_wait(call)
            return
        samples = call()
        assert len(samples) == allowed
        for info, data in samples:
            assert [type(value) for value in info] == [int, float, int, float, int]
            self._sampled(info, data)

    @precondition(lambda self: len(self._borrows) < BORROWS_AT_ONCE)
    @precondition(lambda self: self.model.limiter.can_sample(1))
    @rule()
    def borrow(self) -> None:
        borrow = ExitStack()
        loans = borrow.enter_context(self.client.borrow(TABLE, 1, timeout=0))
        self._borrows.append((borrow, []))
        for info, data in loans:
            assert not data["id"].flags.writeable and not data["x"].flags.writeable
            self._borrows[-1][1].append((data, self._sampled(info, data)))
        assert len(loans) == 1

    @precondition(lambda self: self._borrows)
    @rule(position=st.integers(0, BORROWS_AT_ONCE - 1))
    def give_back(self, position: int) -> None:
        borrow, loans = self._borrows.pop(position % len(self._borrows))
        loans.clear()
        borrow.close()

    @rule()
    def drain(self) -> None:
        """Takes one item after the other out of the table, in the order of the sampler."""
        while self.model.limiter.can_sample(1):
            info, data = self.client.sample_batch(TABLE, 1, timeout=0)
            one = type(info)(*(column[0].item() for column in info))
            self._sampled(one, {name: column[0] for name, column in data.items()})
            self.client.mutate_priorities(TABLE, None, [one.key])
            self.model.mutate({}, [self.item_of[one.key]])

    # ------------------------------------------------------------ priorities

    @rule(data=st.data(), positions=picks, foreign=foreign_keys)
    def update_priorities(self, data: st.DataObject, positions: list[int], foreign: int) -> None:
        known = self._known_keys(positions)
        priorities = [data.draw(self._priorities()) for _ in range(len(known) + 1)]
        keys = np.array([*known, foreign], np.uint64)
        found = self.client.update_priorities(TABLE, keys, np.array(priorities))
        assert found == self.model.update(dict(zip(known.values(), priorities, strict=False)))

    @rule(data=st.data(), updated=picks, deleted=picks, foreign=foreign_keys)
    def mutate(
        self, data: st.DataObject, updated: list[int], deleted: list[int], foreign: int
    ) -> None:
        updates = {key: data.draw(self._priorities()) for key in self._known_keys(updated)}
        deletes = self._known_keys(deleted)
        self.client.mutate_priorities(TABLE, {**updates, foreign: 1.0}, [*deletes, foreign])
        self.model.mutate(
            {self.item_of[key]: priority for key, priority in updates.items()},
            list(deletes.values()),
        )

    @precondition(lambda self: self._ordered_by_touch)
    @rule(reverse=st.booleans())
    def probe(self, reverse: bool) -> None:
        self._probe(reverse)

    @rule()
    def reset(self) -> None:
        self.client.reset(TABLE)
        self.model.reset()

    @rule(data=st.data(), positions=picks, where=st.integers(0, 4))
    def bad_priority(self, data: st.DataObject, positions: list[int], where: int) -> None:
        bad = [math.nan]
        if "prioritized" in self.pair:
            bad += [-1.0, -1e-300, -math.inf, math.inf]
        priority = data.draw(st.sampled_from(bad))
        assert self.model.refuses(priority)
        known = list(self._known_keys(positions))
        step = step_of(next(self._serials))
        rows = {name: np.stack([value, value]) for name, value in step.items()}
        with pytest.raises(reverb.errors.PriorityError):
            match where:
                case 0:
                    self.client.insert(step, {TABLE: priority}, timeout=0)
                case 1:
                    self.client.insert_batch(TABLE, rows, [1.0, priority], timeout=0)
                case 2:
                    good = [1.0] * len(known)
                    self.client.update_priorities(TABLE, [*known, 7], [*good, priority])
                case 3:
                    updates = {**dict.fromkeys(known, 1.0), 7: priority}
                    self.client.mutate_priorities(TABLE, updates, known)
                case _:
                    self.writer.append(step)
                    self._alive = [*self._alive, (int(step["id"]), self._episode)][-WINDOW:]
                    last = {name: self.writer.history[name][-1:] for name in step}
                    self.writer.create_item(TABLE, priority, last)


def run(new_name: Callable[[], str], selectors: tuple[str, str], several_stripes: bool) -> None:
    class Machine(TableMachine):
        pair = selectors
        striped = several_stripes
        unique_name = staticmethod(new_name)

    run_state_machine_as_test(
        Machine,
        settings=settings(
            # A table takes several examples; there are dozens of tables.
            max_examples=settings().max_examples // 4,
            stateful_step_count=40,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
        ),
    )


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_table_does_what_the_model_says(
    unique_name: Callable[[], str], pair: tuple[str, str]
) -> None:
    run(unique_name, pair, several_stripes=False)


@pytest.mark.parametrize("pair", STRIPED_PAIRS, ids="-".join)
def test_striped_table_does_what_the_model_says(
    unique_name: Callable[[], str], pair: tuple[str, str]
) -> None:
    run(unique_name, pair, several_stripes=True)


# The model itself, against facts that were observed at Reverb.


def filled(sampler: oracle.Selector, *priorities: float, **options: Any) -> oracle.TableModel:
    """A table that got items 1, 2, ... with these priorities."""
    usual: dict[str, Any] = {
        "remover": oracle.Fifo(),
        "max_size": 100,
        "limiter": oracle.Limiter.min_size(1),
    }
    model = oracle.TableModel(sampler=sampler, **{**usual, **options})
    for key, priority in enumerate(priorities, start=1):
        model.insert(oracle.Item(key, priority, episodes=frozenset([key])))
    return model


@pytest.mark.parametrize(
    ("exponent", "expected"),
    [
        (1.0, [0.25, 0.125, 0.5, 0.125]),
        (0.5, [0.261204, 0.184699, 0.369398, 0.184699]),
        (0.0, [0.25, 0.25, 0.25, 0.25]),
        (-1.0, [0.1818182, 0.3636364, 0.0909091, 0.3636364]),
    ],
)
def test_model_prioritized_probabilities(exponent: float, expected: list[float]) -> None:
    model = filled(oracle.Prioritized(exponent), 2.0, 1.0, 4.0, 1.0)
    assert list(model.sampler.distribution().values()) == pytest.approx(expected, rel=1e-5)


def test_model_prioritized_zero_weights() -> None:
    assert filled(oracle.Prioritized(1.0), 0.0, 0.0, 0.0).sampler.distribution() == {
        1: 1 / 3,
        2: 1 / 3,
        3: 1 / 3,
    }
    assert filled(oracle.Prioritized(1.0), 0.0, 0.0, 0.0, 3.0).sampler.distribution() == {4: 1.0}
    model = filled(oracle.Prioritized(0.0), 0.0, 1.0, 5.0)
    assert model.sampler.distribution() == {2: 0.5, 3: 0.5}


def test_model_heap_ties_go_by_touch() -> None:
    model = filled(oracle.MaxHeap(), 5.0, 5.0, 7.0, 5.0, max_times_sampled=1)
    taken = []
    while model.items:
        (key,) = model.sampler.distribution()
        taken.append((key, model.sample(key).table_size))
    assert taken == [(3, 4), (1, 3), (2, 2), (4, 1)]
    model = filled(oracle.MinHeap(), 5.0, 5.0, 5.0)
    model.update({1: 5.0})
    assert model.sampler.distribution() == {2: 1.0}


def test_model_new_item_may_be_the_victim() -> None:
    model = filled(oracle.Fifo(), 5.0, 4.0, 1.0, remover=oracle.MinHeap(), max_size=2)
    assert set(model.items) == {1, 2}
    assert (model.limiter.inserts, model.limiter.deletes) == (3, 1)
    assert set(filled(oracle.Fifo(), *[1.0] * 4, remover=oracle.Lifo(), max_size=2).items) == {1, 2}


def test_model_max_times_sampled() -> None:
    model = filled(oracle.Fifo(), 1.0, 1.0, max_times_sampled=2)
    taken = []
    for _ in range(4):
        (key,) = model.sampler.distribution()
        taken.append(model.sample(key).key)
    assert taken == [1, 1, 2, 2]
    assert model.counts() == oracle.Counts(0, 0, 2, 2, 2, 4)


def test_model_limiter_worked_example() -> None:
    limiter = oracle.Limiter(2.0, 3, 2.0, 10.0)
    for _ in range(5):
        assert limiter.can_insert()
        limiter.inserts += 1
    assert not limiter.can_insert()
    for _ in range(8):
        assert limiter.can_sample()
        limiter.samples += 1
    assert not limiter.can_sample()
    queue = oracle.Limiter.queue(3)
    assert [queue.can_insert(n) for n in (1, 2, 3, 4)] == [True, True, True, False]


def test_model_random_removal_gives_every_legal_table() -> None:
    model = filled(oracle.Fifo(), 1.0, 1.0, remover=oracle.Uniform(), max_size=2)
    new = [
        oracle.Item(3, 1.0, episodes=frozenset("e")),
        oracle.Item(4, 1.0, episodes=frozenset("e")),
    ]
    # Either 1 left and then 3, or 3 and then 1; only then does the new episode end for a moment.
    after = model.insert_run(new, {1, 3})
    assert sorted(state.num_deleted_episodes for state in after) == [1, 2]
    assert all(set(state.items) == {2, 4} for state in after)
    with pytest.raises(oracle.IllegalMoveError):
        model.insert_run(new, {1, 2, 3})
    with pytest.raises(oracle.IllegalMoveError):
        model.insert_run(new)


def test_model_never_removes_weight_zero() -> None:
    model = filled(oracle.Fifo(), 0.0, 1.0, remover=oracle.Prioritized(1.0), max_size=2)
    with pytest.raises(oracle.IllegalMoveError):
        model.insert_run([oracle.Item(3, 1.0)], {1})
    assert len(model.insert_run([oracle.Item(3, 1.0)], {2})) == 1
