"""Command line of `scripts/torture`."""

from __future__ import annotations

import os

# Before numpy is imported: its threads would make every fork slower.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import argparse
import gc
import json
import sys
from dataclasses import asdict

from torture_supervisor import run
from torture_totals import Options, Totals


def parse(arguments: list[str]) -> tuple[Options, bool]:
    """Reads the command line; the second value says whether to print JSON."""
    parser = argparse.ArgumentParser(
        prog="scripts/torture",
        description="Kills the processes of one store at random, and checks that nothing is lost, "
        "torn, stuck or leaked. Exits with 1 if something was.",
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="how long (default: 60)")
    parser.add_argument("--seed", type=int, default=1, help="of all that is random (default: 1)")
    parser.add_argument("--kills", type=int, help="end earlier, after so many kills")
    parser.add_argument("--rate", type=float, default=20.0, help="kills a second to try for")
    parser.add_argument("--audit-every", type=float, default=8.0, help="seconds between audits")
    parser.add_argument("--stall", type=float, default=2.0, help="seconds that are a stall")
    parser.add_argument("--kill-server", action="store_true", help="kill the server as well")
    parser.add_argument("--name", default="", help="of the store")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    given = parser.parse_args(arguments)
    if given.seconds <= 0 or given.rate <= 0 or given.audit_every <= 0:
        parser.error("--seconds, --rate and --audit-every must be above 0")
    return Options(
        seconds=given.seconds,
        seed=given.seed,
        kills=given.kills,
        rate=given.rate,
        audit_every_s=given.audit_every,
        stall_s=given.stall,
        kill_server=given.kill_server,
        name=given.name,
    ), given.json


def report(totals: Totals) -> None:
    """Prints what was seen."""
    for stall in totals.stalled:
        print(f"stalled: {stall}")
    for fault in totals.faults:
        print(f"FAULT {fault}")
    print(f"seed                  {totals.seed}")
    print(f"seconds               {totals.seconds:.1f}")
    print(f"kills                 {totals.kills} (of the server: {totals.server_kills})")
    print(f"stopped for a moment  {totals.stops}")
    print(f"audits                {totals.audits}")
    print(f"items verified        {totals.items_verified}")
    print(f"queue items consumed  {totals.queue_items}")
    print(f"gone with a consumer  {totals.lost_in_consumers}")
    print(f"repairs               {totals.repairs}")
    print(f"tables shut           {totals.tables_shut}")
    print(f"longest stall         {totals.longest_stall_s:.2f} s {totals.longest_stall_of}")
    print(f"stalls                {totals.stalls}")
    print(f"stuck                 {totals.stuck}")
    print(f"bad payloads          {totals.bad_payloads}")
    print(f"bytes leaked          {totals.bytes_leaked}")
    print(f"left in /dev/shm      {totals.left_in_shared_memory}")
    print("all as promised" if totals.good else "FAILED")


def main(arguments: list[str]) -> int:
    """Runs; returns the exit code."""
    options, as_json = parse(arguments)
    print(f"seed {options.seed}", flush=True)
    gc.freeze()  # children then leave these pages shared
    try:
        totals = run(options)
    except KeyboardInterrupt:
        print("interrupted; nothing was left behind")
        return 130
    report(totals)
    if as_json:
        print(json.dumps({**asdict(totals), "good": totals.good}))
    return 0 if totals.good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
