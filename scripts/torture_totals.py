"""What a torture run is asked to do, and what it has seen."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Options:
    """What a run is asked to do."""

    seconds: float
    seed: int
    kills: int | None = None
    rate: float = 20.0
    """Kills a second that are tried for."""
    audit_every_s: float = 8.0
    stall_s: float = 2.0
    """Seconds at one operation of a running worker that count as a stall."""
    kill_server: bool = False
    name: str = ""
    capacity: int = 256 << 20


@dataclass
class Totals:
    """What a run has seen."""

    seed: int = 0
    seconds: float = 0.0
    kills: int = 0
    server_kills: int = 0
    stops: int = 0
    audits: int = 0
    items_verified: int = 0
    queue_items: int = 0
    lost_in_consumers: int = 0
    repairs: int = 0
    tables_shut: int = 0
    longest_stall_s: float = 0.0
    longest_stall_of: str = ""
    stalls: int = 0
    stuck: int = 0
    bad_payloads: int = 0
    bytes_leaked: int = 0
    left_in_shared_memory: int = 0
    stalled: list[str] = field(default_factory=list)
    """Where workers were when they had stalled for so long."""
    faults: list[str] = field(default_factory=list)

    @property
    def good(self) -> bool:
        """Whether everything was as promised."""
        wrong = self.stalls + self.stuck + self.bad_payloads + self.left_in_shared_memory
        return not (wrong or self.bytes_leaked or self.faults)
