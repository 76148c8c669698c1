"""How fast are the bridge and checkpoints beside dm-reverb's gRPC and checkpoints?"""

from __future__ import annotations

from bench.harness import Bench
from bench.payloads import PAYLOADS
from bench.peers import REVERB, Peer, measure
from bench.peers_cases import REMOTE_CASES

NAME = "peers_remote"
QUESTION = "How fast are the bridge and checkpoints beside dm-reverb's?"
BY_NAME = True
PEERS = (
    Peer("ours_remote", None, "shmreplay", {}),
    Peer("reverb_remote", "reverb", REVERB, {}),
)
QUICK_SIZES = (400, 400_000)


def run(bench: Bench) -> None:
    """Measures this question."""
    skipped = {str(size) for size in PAYLOADS.values() if size not in QUICK_SIZES}
    cases = {
        key: case
        for key, case in REMOTE_CASES.items()
        if not (bench.settings.quick and key.split("-")[1] in skipped)
    }
    measure(bench, NAME, PEERS, cases, 1.0)
