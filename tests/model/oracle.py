"""What a table does, in plain Python.

This module is the specification that the engine is tested against: slow, obvious, and without a
random number anywhere. Where the engine draws at random, the model gives the *distribution*:
which keys may come out, and with what probability. The caller tells the model what the engine did
(`TableModel.sample`, `TableModel.insert_run`), and the model refuses what was not allowed.

Keys are any integers; the model never makes one up.
"""

from __future__ import annotations

import copy
import math
import sys
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field


class IllegalMoveError(AssertionError):
    """Raised when the model is told of something that the table must not have done."""


class Selector(ABC):
    """Chooses one of the keys it holds; a table has one to sample and one to remove."""

    deterministic: bool
    # True where an update moves a key among others of the same priority.
    ordered_by_touch = False

    def __init__(self) -> None:
        # A dict keeps the order of insertion, and assigning to a present key does not change it.
        self._priorities: dict[int, float] = {}

    def insert(self, key: int, priority: float) -> None:
        if key in self._priorities:
            raise IllegalMoveError(f"key {key} inserted twice")
        self._priorities[key] = priority

    def update(self, key: int, priority: float) -> None:
        if key not in self._priorities:
            raise IllegalMoveError(f"update of the absent key {key}")
        self._priorities[key] = priority

    def delete(self, key: int) -> None:
        if key not in self._priorities:
            raise IllegalMoveError(f"delete of the absent key {key}")
        del self._priorities[key]

    def clear(self) -> None:
        self._priorities.clear()

    def refuses(self, priority: float) -> bool:
        """Whether a table with this selector must answer `priority` with a PriorityError."""
        return math.isnan(priority)

    def drawn(self, key: int) -> None:
        """Tells that the key, which it has, was sampled."""
        if key not in self._priorities:
            raise IllegalMoveError(f"draw of the absent key {key}")

    @abstractmethod
    def distribution(self) -> dict[int, float]:
        """The keys that may be chosen now, each with its exact probability.

        The probability is also what a sample reports. Keys that cannot be chosen are left out.
        """


class Fifo(Selector):
    """The oldest key. Priorities are ignored and updates move nothing."""

    deterministic = True

    def distribution(self) -> dict[int, float]:
        return {next(iter(self._priorities)): 1.0}


class Lifo(Selector):
    """The newest key. Priorities are ignored and updates move nothing."""

    deterministic = True

    def distribution(self) -> dict[int, float]:
        return {next(reversed(self._priorities)): 1.0}


class Uniform(Selector):
    """Any key, all equally likely."""

    deterministic = False

    def distribution(self) -> dict[int, float]:
        return dict.fromkeys(self._priorities, 1.0 / len(self._priorities))


class Epoch(Selector):
    """Each key once in a pass; a pass ends when a draw finds nothing left of it."""

    deterministic = False

    def __init__(self) -> None:
        super().__init__()
        self._left: set[int] = set()

    def insert(self, key: int, priority: float) -> None:
        super().insert(key, priority)
        self._left.add(key)

    def delete(self, key: int) -> None:
        super().delete(key)
        self._left.discard(key)

    def clear(self) -> None:
        super().clear()
        self._left.clear()

    def drawn(self, key: int) -> None:
        super().drawn(key)
        if not self._left:
            self._left.update(self._priorities)
        self._left.remove(key)

    def distribution(self) -> dict[int, float]:
        possible = self._left or set(self._priorities)
        return dict.fromkeys(possible, 1.0 / len(possible))


class Prioritized(Selector):
    """A key in proportion to priority ** exponent.

    Priority zero has weight zero whatever the exponent (also 0 ** 0). Where all weights are zero,
    all keys are equally likely.
    """

    deterministic = False

    def __init__(self, priority_exponent: float) -> None:
        super().__init__()
        self.priority_exponent = priority_exponent

    def refuses(self, priority: float) -> bool:
        if math.isnan(priority) or priority < 0.0 or math.isinf(priority):
            return True
        return math.isinf(self.weight(priority))

    def weight(self, priority: float) -> float:
        if priority == 0.0:
            return 0.0
        try:
            return float(priority**self.priority_exponent)
        except OverflowError:
            return math.inf

    def distribution(self) -> dict[int, float]:
        weights = {key: self.weight(priority) for key, priority in self._priorities.items()}
        total = math.fsum(weights.values())
        if total == 0.0:
            return dict.fromkeys(weights, 1.0 / len(weights))
        return {key: weight / total for key, weight in weights.items() if weight > 0.0}


class _Heap(Selector):
    """The key with the least (sign * priority, touch), where a touch is an insert or any update.

    So equal priorities go in order of their last touch, the longest untouched first; an update to
    the same priority counts as a touch.
    """

    deterministic = True
    ordered_by_touch = True
    sign: float

    def __init__(self) -> None:
        super().__init__()
        self._touches: dict[int, int] = {}
        self._clock = 0

    def _touch(self, key: int) -> None:
        self._touches[key] = self._clock
        self._clock += 1

    def insert(self, key: int, priority: float) -> None:
        super().insert(key, priority)
        self._touch(key)

    def update(self, key: int, priority: float) -> None:
        super().update(key, priority)
        self._touch(key)

    def delete(self, key: int) -> None:
        super().delete(key)
        del self._touches[key]

    def clear(self) -> None:
        super().clear()
        self._touches.clear()

    def distribution(self) -> dict[int, float]:
        def rank(key: int) -> tuple[float, int]:
            return self.sign * self._priorities[key], self._touches[key]

        return {min(self._priorities, key=rank): 1.0}


class MinHeap(_Heap):
    """The key of the lowest priority; ties as in `_Heap`."""

    sign = 1.0


class MaxHeap(_Heap):
    """The key of the highest priority; ties as in `_Heap`."""

    sign = -1.0


@dataclass
class Limiter:
    """The arithmetic that decides who may go on: three counters and four parameters.

    Evictions and deletes lower the size that is held against `min_size_to_sample`; they never
    give insert budget back.
    """

    samples_per_insert: float
    min_size_to_sample: int
    min_diff: float
    max_diff: float
    inserts: int = 0
    samples: int = 0
    deletes: int = 0

    @classmethod
    def min_size(cls, size: int) -> Limiter:
        return cls(1.0, size, -sys.float_info.max, sys.float_info.max)

    @classmethod
    def ratio(cls, samples_per_insert: float, min_size: int, error_buffer: float) -> Limiter:
        """What `SampleToInsertRatio` with a number as its buffer stands for."""
        centre = samples_per_insert * min_size
        return cls(samples_per_insert, min_size, centre - error_buffer, centre + error_buffer)

    @classmethod
    def queue(cls, size: int) -> Limiter:
        """What `Queue` and `Stack` stand for."""
        return cls(1.0, 1, 0.0, float(size))

    @property
    def size(self) -> int:
        return self.inserts - self.deletes

    def can_sample(self, count: int = 1) -> bool:
        diff = self.inserts * self.samples_per_insert - self.samples - count
        return self.size >= self.min_size_to_sample and diff >= self.min_diff

    def can_insert(self, count: int = 1) -> bool:
        diff = (self.inserts + count) * self.samples_per_insert - self.samples
        return self.size + count <= self.min_size_to_sample or diff <= self.max_diff

    def reset(self) -> None:
        self.inserts = self.samples = self.deletes = 0


@dataclass
class Item:
    """An item as the table holds it. `payload` is whatever the test compares data with."""

    key: int
    priority: float
    payload: Hashable = None
    # Every episode that a step of the item belongs to: an item may span several.
    episodes: frozenset[Hashable] = frozenset()
    times_sampled: int = 0
    # What it keeps in memory: blocks of steps, which items share, with their bytes, and a record
    # of its own.
    blocks: Mapping[Hashable, int] = field(default_factory=dict)
    record_bytes: int = 0


@dataclass(frozen=True)
class Sampled:
    """What one sample must report, and the payload that must come with it."""

    key: int
    probability: float
    table_size: int
    priority: float
    times_sampled: int
    payload: Hashable


@dataclass(frozen=True)
class Counts:
    """The counters of `TableInfo`."""

    current_size: int
    num_episodes: int
    num_deleted_episodes: int
    num_unique_samples: int
    inserts_completed: int
    samples_completed: int


@dataclass
class TableModel:
    """A table.

    Attributes:
      sampler: chooses what a sample returns.
      remover: chooses what leaves when there are more than `max_size` items.
      max_size: the number of items that stay.
      limiter: who may insert and sample now.
      max_times_sampled: an item leaves as it is sampled for this time; below one, never.
      max_bytes: the bytes of the items that stay; zero: any.
      episode_bytes: the bytes of each episode.
    """

    sampler: Selector
    remover: Selector
    max_size: int
    limiter: Limiter
    max_times_sampled: int = 0
    max_bytes: int = 0
    episode_bytes: int = 0
    items: dict[int, Item] = field(default_factory=dict)
    num_deleted_episodes: int = 0
    num_unique_samples: int = 0
    # The largest priority of an insert or update since the last reset.
    highest: float | None = None
    # Episode -> how many items have a step of it. Absent when that is zero.
    _episode_items: Counter[Hashable] = field(default_factory=Counter)

    def refuses(self, priority: float) -> bool:
        """Whether the priority must be answered with a PriorityError, nothing being changed."""
        return self.sampler.refuses(priority) or self.remover.refuses(priority)

    @property
    def max_priority(self) -> float:
        """What an item that is inserted without a priority gets."""
        return 1.0 if self.highest is None else self.highest

    def _see(self, priority: float) -> None:
        self.highest = priority if self.highest is None else max(self.highest, priority)

    @property
    def nbytes(self) -> int:
        """What the items keep in memory, what they share once."""
        blocks: dict[Hashable, int] = {}
        for item in self.items.values():
            blocks.update(item.blocks)
        records = sum(item.record_bytes for item in self.items.values())
        return sum(blocks.values()) + records + len(self._episode_items) * self.episode_bytes

    def _is_over(self) -> bool:
        return len(self.items) > self.max_size or 0 < self.max_bytes < self.nbytes

    def counts(self) -> Counts:
        return Counts(
            current_size=len(self.items),
            num_episodes=len(self._episode_items),
            num_deleted_episodes=self.num_deleted_episodes,
            num_unique_samples=self.num_unique_samples,
            inserts_completed=self.limiter.inserts,
            samples_completed=self.limiter.samples,
        )

    # Inserting: the new item enters first; only then, while the table is over its size or its
    # bytes, items leave. That may be the new one. Each of them counts one delete.

    def insert(self, item: Item) -> None:
        """Inserts where the item that leaves, if any, is not a matter of chance."""
        (after,) = self.insert_run([item])
        self.__dict__.update(after.__dict__)

    def insert_run(
        self, new: Sequence[Item], gone: AbstractSet[int] | None = None
    ) -> list[TableModel]:
        """Every table that inserting `new` in order may have led to; this one stays as it is.

        Args:
          new: the items, in the order of their inserts.
          gone: the keys that were seen to have left, where chance had a part in it. None: it had
            none.

        Returns:
          The tables that differ: by what they hold, or by a count that depends on the order in
          which things left.

        Raises:
          IllegalMoveError: no legal run of inserts loses just these keys.
        """
        states = [copy.deepcopy(self)]
        for item in new:
            states = _without_doubles(
                [after for state in states for after in state._insert_one(item, gone)]
            )
        if gone is not None:
            states = [state for state in states if not gone & state.items.keys()]
        if not states:
            raise IllegalMoveError(f"inserting {[item.key for item in new]} cannot lose {gone}")
        return states

    def _insert_one(self, item: Item, gone: AbstractSet[int] | None) -> list[TableModel]:
        if self.refuses(item.priority):
            raise IllegalMoveError(f"priority {item.priority} got into the table")
        if not self.limiter.can_insert(1):
            raise IllegalMoveError("an insert passed the limiter that had to wait")
        state = copy.deepcopy(self)
        state.items[item.key] = copy.deepcopy(item)
        state.sampler.insert(item.key, item.priority)
        state.remover.insert(item.key, item.priority)
        state._episode_items.update(item.episodes)
        state.limiter.inserts += 1
        state._see(item.priority)
        return state._evict(gone)

    def _evict(self, gone: AbstractSet[int] | None) -> list[TableModel]:
        """Every table that evicting may lead to, down to the bounds."""
        done: list[TableModel] = []
        states = [self]
        while states:
            done += [state for state in states if not (state._is_over() and state.items)]
            over = [state for state in states if state._is_over() and state.items]
            states = _without_doubles([after for state in over for after in state._evict_one(gone)])
        return _without_doubles(done)

    def _evict_one(self, gone: AbstractSet[int] | None) -> list[TableModel]:
        victims = self.remover.distribution()
        if gone is None and len(victims) != 1:
            raise IllegalMoveError("which item left is a matter of chance, and nobody looked")
        after = []
        for victim in victims if gone is None else victims.keys() & gone:
            branch = copy.deepcopy(self)
            branch._delete(victim)
            after.append(branch)
        return after

    def bound_bytes(self, max_bytes: int) -> None:
        """Another bound, where the items that leave, if any, are not a matter of chance."""
        self.max_bytes = max_bytes
        (after,) = self._evict(None)
        self.__dict__.update(after.__dict__)

    def inserts_allowed(self, most: int) -> int:
        """How many inserts, one after the other and at most `most`, the limiter lets pass."""
        limiter, size = copy.copy(self.limiter), len(self.items)
        for passed in range(most):
            if not limiter.can_insert(1):
                return passed
            limiter.inserts += 1
            size += 1
            if size > self.max_size:
                limiter.deletes += 1
                size -= 1
        return most

    # Sampling is with replacement. An item that was sampled for the last time leaves after its
    # report was written, so `table_size` still counts it.

    def sample(self, key: int) -> Sampled:
        """One sample, which the engine says gave `key`.

        Raises:
          IllegalMoveError: the limiter forbids it, or the sampler cannot give that key.
        """
        if not self.limiter.can_sample(1):
            raise IllegalMoveError("a sample passed the limiter that had to wait")
        distribution = self.sampler.distribution()
        if key not in distribution:
            raise IllegalMoveError(f"sampled {key}, possible were {distribution}")
        self.sampler.drawn(key)
        item = self.items[key]
        self.limiter.samples += 1
        self.num_unique_samples += item.times_sampled == 0
        item.times_sampled += 1
        sampled = Sampled(
            key=key,
            probability=distribution[key],
            table_size=len(self.items),
            priority=item.priority,
            times_sampled=item.times_sampled,
            payload=item.payload,
        )
        if item.times_sampled == self.max_times_sampled:
            self._delete(key)
        return sampled

    def update(self, priorities: Mapping[int, float]) -> int:
        """Sets priorities in order; unknown keys are passed over. Returns how many were known."""
        if any(self.refuses(priority) for priority in priorities.values()):
            raise IllegalMoveError(f"one of the priorities {priorities} had to be refused")
        found = 0
        for key, priority in priorities.items():
            if key in self.items:
                self.items[key].priority = priority
                self._see(priority)
                self.sampler.update(key, priority)
                self.remover.update(key, priority)
                found += 1
        return found

    def mutate(self, updates: Mapping[int, float], deletes: Sequence[int]) -> None:
        """All the deletes, then all the updates; unknown keys are passed over in both."""
        for key in deletes:
            if key in self.items:
                self._delete(key)
        self.update(updates)

    def reset(self) -> None:
        """Empties the table and sets every counter to zero, the limiter's three among them."""
        self.items.clear()
        self.sampler.clear()
        self.remover.clear()
        self._episode_items.clear()
        self.num_deleted_episodes = self.num_unique_samples = 0
        self.limiter.reset()
        self.highest = None

    def _delete(self, key: int) -> None:
        for episode in self.items.pop(key).episodes:
            self._episode_items[episode] -= 1
            if self._episode_items[episode] == 0:
                del self._episode_items[episode]
                self.num_deleted_episodes += 1
        self.sampler.delete(key)
        self.remover.delete(key)
        self.limiter.deletes += 1


def _without_doubles(states: Sequence[TableModel]) -> list[TableModel]:
    """Drops tables that no later call can tell from one that is kept."""
    by_content = {
        (frozenset(state.items), state.num_deleted_episodes): state for state in reversed(states)
    }
    return list(by_content.values())
