"""What is said where a package is not installed that a command needs."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

import shmreplay as reverb
from shmreplay import cli


@pytest.mark.parametrize("command", ["export", "import"])
def test_commands_say_what_to_install(
    make_server: Callable[..., reverb.Server],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    command: str,
) -> None:
    server = make_server([reverb.Table.queue("episodes", 10)])
    monkeypatch.setitem(sys.modules, "minari", None)
    assert cli.main([command, "--minari", "test/x-v0", server.name, "episodes"]) == 1
    said = capsys.readouterr().err
    assert "minari" in said and "pip install 'shmreplay[minari]'" in said
