"""`shmreplay doctor` and `shmreplay bench`: what they say of this machine, and of a worse one."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import shmreplay as reverb
from shmreplay import cli, doctor, recovery, segment
from shmreplay.doctor import HINT, OK, PROBLEM, Finding
from tests.conftest import SHARED_MEMORY
from tests.process.servants import Other, make_tables

MakeServer = Callable[..., reverb.Server]
GIB = 1 << 30


def of(topic: str) -> Finding:
    (found,) = [each for each in doctor.examine() if each.topic == topic]
    return found


def test_this_machine(make_server: MakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    server = make_server(make_tables())
    cli.main(["doctor", "--json"])  # others of this user may have damaged stores
    found = {each["topic"]: each for each in json.loads(capsys.readouterr().out)}
    for topic in ("Python", "C library", "kernel", "numpy", "posix_ipc", "lz4", "record locks"):
        assert found[topic]["level"] == OK, found[topic]
    assert "libzmq" in found["pyzmq"]["found"]
    assert found[f"store {server.name}"]["found"] == "served"
    assert {"/dev/shm", "huge pages", "open files", "file size"} <= set(found)
    assert all(each["remedy"] for each in found.values() if each["level"] != OK)
    left = [entry.name for entry in SHARED_MEMORY.iterdir() if entry.name.startswith(".doctor-")]
    assert not left


def test_the_text_says_what_to_do(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    findings = [
        Finding("kernel", "6.1"),
        Finding("huge pages", "never", HINT, "Write advise."),
        Finding("lz4", "is not there", PROBLEM, "pip install lz4"),
    ]
    monkeypatch.setattr(doctor, "examine", lambda: iter(findings))
    assert cli.main(["doctor"]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "ok       kernel      6.1",
        "hint     huge pages  never",
        "                     -> Write advise.",
        "problem  lz4         is not there",
        "                     -> pip install lz4",
        "1 problem, 1 hint",
    ]
    monkeypatch.setattr(doctor, "examine", lambda: iter(findings[:2]))
    assert cli.main(["doctor"]) == 0


@pytest.mark.parametrize(
    ("whole", "free", "level", "remedy"),
    [
        (64 << 20, 64 << 20, PROBLEM, "--shm-size"),
        (8 * GIB, 10 << 20, HINT, "shmreplay ls"),
        (8 * GIB, 4 * GIB, OK, ""),
    ],
)
def test_room_in_shared_memory(
    whole: int, free: int, level: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = (4096, 4096, whole // 4096, free // 4096, free // 4096, 1, 1, 1, 0, 255)
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result(blocks))
    found = of("/dev/shm")
    assert found.level == level
    assert remedy in found.remedy


def test_no_shared_memory_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment, "DIRECTORY", str(tmp_path / "none"))
    monkeypatch.setattr(recovery, "names", list)
    assert of(str(tmp_path / "none")).level == PROBLEM
    assert of("record locks").level == PROBLEM


@pytest.mark.parametrize(
    ("enabled", "options", "kernel", "level", "found", "remedy"),
    [
        ("never", "rw,size=1g", "6.1.0-9-amd64", OK, "MADV_COLLAPSE", ""),
        ("never", "rw,huge=always", "5.15.0", OK, "huge=always", ""),
        ("never", "rw,huge=within_size,size=1g", "5.15.0", OK, "huge=within_size", ""),
        ("never", "rw", "6.0.12", HINT, "older than 6.1", "remount,huge=within_size"),
        ("advise", "rw,huge=never", "5.15.0", HINT, "huge=never", "remount,huge=within_size"),
        ("deny", "rw,huge=always", "6.18.0", HINT, "is deny", "echo never > "),
        ("force", "rw", "5.15.0", OK, "is force", ""),
        (None, "rw", "6.18.0", OK, "not in this kernel", ""),
    ],
)
def test_huge_pages(
    enabled: str | None,
    options: str,
    kernel: str,
    level: str,
    found: str,
    remedy: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kinds = ("always", "within_size", "advise", "never", "deny", "force")
    if enabled is not None:
        text = " ".join(f"[{kind}]" if kind == enabled else kind for kind in kinds)
        (tmp_path / "enabled").write_text(text + "\n")
    (tmp_path / "mounts").write_text(
        "tmpfs /dev/shm tmpfs rw,huge=advise 0 0\n"
        f"tmpfs /dev/shm tmpfs {options} 0 0\n"
        "tmpfs /dev/shm/below tmpfs rw,huge=always 0 0\n"
    )
    monkeypatch.setattr(doctor, "_SHMEM_ENABLED", tmp_path / "enabled")
    monkeypatch.setattr(doctor, "_MOUNTS", tmp_path / "mounts")
    monkeypatch.setattr(platform, "release", lambda: kernel)
    seen = of("huge pages")
    assert seen.level == level
    assert found in seen.found
    assert remedy in seen.remedy


def test_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (100, 100))
    assert (of("open files").level, of("address space").level) == (HINT, HINT)
    assert of("file size").level == PROBLEM
    assert "ulimit -f unlimited" in of("file size").remedy
    assert of("locked memory").level == OK


def test_an_old_kernel_and_a_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.metadata.version

    def version(package: str) -> str:
        if package == "lz4":
            raise importlib.metadata.PackageNotFoundError(package)
        return real(package)

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(platform, "release", lambda: "5.4.0-99-generic")
    assert of("lz4") == Finding("lz4", "is not there", PROBLEM, "pip install lz4")
    assert of("kernel").level == HINT


def test_leftover_stores(store_name: str, others: Callable[[], Other]) -> None:
    server = others()
    server.call("serve", store_name)
    server.kill()
    found = of(f"store {store_name}")
    assert found.level == HINT
    assert f"shmreplay clean {store_name}" in found.remedy
    path = SHARED_MEMORY / f"shmreplay.{os.geteuid()}.{store_name}"
    path.write_bytes(b"nonsense" * 1000)
    path.chmod(0o600)
    assert of(f"store {store_name}").level == PROBLEM


def test_bench(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "--seconds", "0.001", "--json"]) == 0
    results: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    assert len(results) == 4
    assert all(each["items_per_s"] > 0 and each["beside_items_per_s"] > 0 for each in results)
    assert cli.main(["bench", "--seconds", "0.001"]) == 0
    text = capsys.readouterr().out
    for word in ("ITEMS/S", "insert_batch of 256", "sample_batch", "borrow", "memcpy"):
        assert word in text
    assert cli.main(["bench", "--seconds", "-1"]) == 2
    assert "--seconds -1: expected seconds from" in capsys.readouterr().err
