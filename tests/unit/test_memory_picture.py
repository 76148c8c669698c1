"""The picture in README.md is what its script draws."""

from __future__ import annotations

import runpy
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(name="script", scope="module")
def fixture_script() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "scripts" / "memory_picture.py"))


def test_the_file_is_what_the_script_draws(script: dict[str, Any]) -> None:
    assert script["main"](["--check"]) == 0


def test_a_file_that_is_not_is_told(
    script: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "memory.svg"
    assert script["main"](["--check", "--output", str(target)]) == 1
    assert "run it again" in capsys.readouterr().err
    assert script["main"](["--output", str(target)]) == 0
    assert script["main"](["--check", "--output", str(target)]) == 0


def test_it_is_well_formed_and_shown(script: dict[str, Any]) -> None:
    root = ElementTree.fromstring(script["picture"]())
    width, height = (float(root.attrib[name]) for name in ("width", "height"))
    for box in root.iter("{http://www.w3.org/2000/svg}rect"):
        assert float(box.get("x", 0)) + float(box.attrib["width"]) <= width
        assert float(box.get("y", 0)) + float(box.attrib["height"]) <= height
    assert "](scripts/memory.svg)" in (ROOT / "README.md").read_text(encoding="utf-8")
