"""Every code block of the README runs, each in a process of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from shmreplay import cli

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
PYTHON = [code for language, code in BLOCKS if language == "python"]
SHELL = [code for language, code in BLOCKS if language == "sh"]
TOML = [code for language, code in BLOCKS if language == "toml"]
DEADLINE_S = 120


# Packages of the extras: a block that imports one is skipped where it is not installed.
EXTRAS = ("torch", "jax", "stable_baselines3", "minari", "gymnasium", "prometheus_client")


def title(code: str) -> str:
    line = README[: README.index(code)].count("\n") + 1
    return f"line {line}"


@pytest.mark.parametrize("code", PYTHON, ids=title)
def test_python_block_runs(code: str, tmp_path: Path) -> None:
    imported = set(re.findall(r"^(?:import|from) (\w+)", code, re.MULTILINE))
    for name in sorted(imported & set(EXTRAS)):
        pytest.importorskip(name, reason=f"{name} is not installed; tests/README.md says how")
    program = tmp_path / "snippet.py"  # a file, since spawned processes import it
    program.write_text(code)
    result = subprocess.run(
        [sys.executable, "-W", "error", str(program)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert result.returncode == 0, result.stderr


def test_there_are_blocks() -> None:
    assert len(PYTHON) >= 8
    assert {language for language, _ in BLOCKS} <= {"python", "sh", "toml"}


@pytest.mark.parametrize("text", TOML, ids=title)
def test_a_file_of_tables_can_be_served(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(text)
    assert cli.main(["serve", str(tmp_path / "config.toml"), "--check"]) == 0


@pytest.mark.parametrize("code", SHELL, ids=title)
def test_commands_exist(code: str) -> None:
    for line in code.splitlines():
        command = line.split("#")[0].split()
        if not command:
            continue
        if command[0].startswith("scripts/"):
            assert os.access(ROOT / command[0], os.X_OK), command
        elif command[0] == "shmreplay":
            cli._parser().parse_args(command[1:])  # ends the test if it does not understand
        else:
            assert command[:3] == ["python", "-m", "bench"], command


def test_nothing_is_left_to_fill_in() -> None:
    assert not re.findall(r"\b[A-Z]+_[A-Z_]*SECTION\b", README)


def test_both_commands_stand_at_the_top() -> None:
    top = README[: README.index("## ")]
    assert "scripts/quickstart" in top
    assert "scripts/test" in top
