"""A table's settings as the store, checkpoints and the bridge hold them."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any, NamedTuple

from shmreplay import rate_limiters, reverb_types, selectors, spec
from shmreplay.errors import ArgumentTypeError, InvalidArgumentError
from shmreplay.limits import MAX_CONFIG_JSON_BYTES, MAX_STRIPES
from shmreplay.table_checks import (
    check_bytes,
    check_events,
    check_name,
    check_seed,
    check_sizes,
    checked_compress,
    needs_order,
)

__all__ = ["Changeable", "TableConfig"]


class Changeable(NamedTuple):
    """The settings that a table in use may be given anew: ``Client.configure_table``."""

    max_size: int
    max_times_sampled: int
    samples_per_insert: float
    min_size_to_sample: int
    min_diff: float
    max_diff: float
    max_bytes: int = 0


@dataclasses.dataclass(frozen=True)
class TableConfig:
    """A table's settings as plain numbers and strings: what the store and checkpoints hold.

    Making one checks every setting and raises InvalidArgumentError or ArgumentTypeError.
    """

    name: str
    sampler_kind: str
    sampler_exponent: float
    remover_kind: str
    remover_exponent: float
    max_size: int
    max_times_sampled: int
    samples_per_insert: float
    min_size_to_sample: int
    min_diff: float
    max_diff: float
    stripes: int
    seed: int | None
    signature_json: str
    """A signature as ``spec.signature_to_json`` writes it; ``'null'`` for none."""
    events: int = 0
    """Changes that its extensions may be behind; 0 for a table without extensions."""
    compress: str = "none"
    """How the steps of its items are compressed: ``'lz4'``, or ``'none'``: not."""
    max_bytes: int = 0
    """Bound on the bytes that its items keep in memory; 0: none."""

    def __post_init__(self) -> None:
        """Checks the settings, as the class says."""
        check_name(self.name)
        check_sizes(self.max_size, self.max_times_sampled)
        check_bytes(self.max_bytes)
        check_seed(self.seed)
        selectors.from_kind(self.sampler_kind, self.sampler_exponent)
        selectors.from_kind(self.remover_kind, self.remover_exponent)
        if self.remover_kind == "epoch":
            raise InvalidArgumentError(
                f"Got an epoch remover for table {self.name!r}; expected another selector: an item"
                " is removed once, so passes mean nothing there. Use Uniform()."
            )
        self._check_stripes()
        check_events(self.events, self.stripes)
        checked_compress(self.compress)

    def _check_stripes(self) -> None:
        stripes, hint = self.stripes, "Leave stripes out for a default that fits."
        if not 1 <= stripes <= min(MAX_STRIPES, self.max_size):
            raise InvalidArgumentError(
                f"Got {stripes} stripes for table {self.name!r} of max_size {self.max_size};"
                f" expected 1 to {min(MAX_STRIPES, self.max_size)}. {hint}"
            )
        if stripes > 1 and needs_order(self.sampler_kind, self.remover_kind):
            raise InvalidArgumentError(
                f"Got {stripes} stripes for table {self.name!r} with a {self.sampler_kind} sampler"
                f" and a {self.remover_kind} remover; expected 1, as samplers other than uniform"
                " and prioritized, and lifo and heap removers, need one order over all items."
                f" {hint}"
            )

    def rate_limiter(self) -> rate_limiters.RateLimiter:
        """Returns the limiter."""
        return rate_limiters.RateLimiter(
            self.samples_per_insert, self.min_size_to_sample, self.min_diff, self.max_diff
        )

    def sampler(self) -> selectors.Selector:
        """Returns the sampler."""
        return selectors.from_kind(self.sampler_kind, self.sampler_exponent)

    def remover(self) -> selectors.Selector:
        """Returns the remover."""
        return selectors.from_kind(self.remover_kind, self.remover_exponent)

    def signature(self) -> Any:
        """Returns the signature, a structure of ``TensorSpec``, or None."""
        return spec.signature_from_json(self.signature_json)

    def changeable(self) -> Changeable:
        """Returns those settings that a table in use may be given anew."""
        return Changeable(**{name: getattr(self, name) for name in Changeable._fields})

    def info(
        self, counts: reverb_types.TableCounts, now: Changeable | None = None
    ) -> reverb_types.TableInfo:
        """Returns these settings with ``counts`` as Reverb's ``TableInfo``.

        Args:
            counts: The counters.
            now: What holds in place of the declared settings, if that was changed.
        """
        if now is None:
            now = self.changeable()
        limiter = reverb_types.RateLimiterInfo(
            samples_per_insert=now.samples_per_insert,
            min_size_to_sample=now.min_size_to_sample,
            min_diff=now.min_diff,
            max_diff=now.max_diff,
            insert_stats=reverb_types.RateLimiterCallStats(counts.inserts),
            sample_stats=reverb_types.RateLimiterCallStats(counts.samples),
        )
        return reverb_types.TableInfo(
            name=self.name,
            sampler_options=reverb_types.KeyDistributionOptions(
                self.sampler_kind, self.sampler_exponent
            ),
            remover_options=reverb_types.KeyDistributionOptions(
                self.remover_kind, self.remover_exponent
            ),
            max_size=now.max_size,
            max_times_sampled=now.max_times_sampled,
            rate_limiter_info=limiter,
            signature=self.signature(),
            current_size=counts.current_size,
            num_episodes=counts.num_episodes,
            num_deleted_episodes=counts.num_deleted_episodes,
            num_unique_samples=counts.num_unique_samples,
            table_worker_time=reverb_types.TableWorkerTime(),
            insert_blocked_by=reverb_types.insert_blocked_by(limiter, counts.current_size),
            sample_blocked_by=reverb_types.sample_blocked_by(limiter, counts.current_size),
            sampling_mass=counts.sampling_mass,
            max_bytes=now.max_bytes,
            current_bytes=counts.current_bytes,
        )

    def to_json(self) -> str:
        """Returns the settings as JSON text."""
        return json.dumps(dataclasses.asdict(self), allow_nan=False, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> TableConfig:
        """Returns the settings that ``to_json`` wrote; the text is not trusted.

        Raises:
            InvalidArgumentError: It is not such a text, or a setting is out of its range.
        """
        if len(text) > MAX_CONFIG_JSON_BYTES:
            raise _malformed(f"{len(text)} bytes, more than {MAX_CONFIG_JSON_BYTES}")
        try:
            values = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise _malformed(f"text that is not JSON ({error})") from error
        if not isinstance(values, dict) or set(values) != set(_FIELD_TYPES):
            raise _malformed(f"other fields than {', '.join(_FIELD_TYPES)}")
        for field, types in _FIELD_TYPES.items():
            if type(values[field]) not in types:
                raise _malformed(f"{field} {values[field]!r}")
            if type(values[field]) is float and not math.isfinite(values[field]):
                raise _malformed(f"{field} {values[field]!r}")
        try:
            config = cls(**values)
            config.rate_limiter()
        except ArgumentTypeError as error:  # numbers that do not fit Reverb's C types
            raise InvalidArgumentError(f"Got damaged settings of a table. {error}") from error
        config.signature()
        return config


_FIELD_TYPES: dict[str, tuple[type, ...]] = {
    field.name: {
        "str": (str,),
        "int": (int,),
        "float": (float,),
        "int | None": (int, type(None)),
    }[str(field.type)]
    for field in dataclasses.fields(TableConfig)
}


def _malformed(what: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"Got the settings of a table with {what}; expected what TableConfig.to_json() returns."
        " They were damaged, or written by another version."
    )
