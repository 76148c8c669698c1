"""What bench/ease.py counts, and what README.md shows of it."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

from bench import ease

ROOT = Path(__file__).parent.parent.parent


def test_lines_with_code_are_counted() -> None:
    source = (
        '# no\n\nimport os\n\n\ndef f():  # yes\n    """Yes."""\n    return (\n        1\n    )\n'
    )
    assert ease.lines_of_code(source) == 6


def test_every_contender_has_a_program() -> None:
    programs = {path.stem.removeprefix("with_") for path in ease.PROGRAMS.glob("*.py")}
    assert programs == set(ease.INSTALLS)


def test_our_program_runs() -> None:
    runpy.run_path(str(ease.PROGRAMS / "with_shmreplay.py"))


def test_a_contender_without_figures_has_none_in_the_table() -> None:
    there, missing = ease.Ease("a", 7, 3.4, 1.25, 1234.5), ease.Ease("b", 8, problem="no wheel")
    assert ease.table([there, missing]).splitlines()[2:] == [
        "| a | 7 | 3 | 1.2 | 1,234 |",
        "| b | 8 | - | - | - |",
    ]


def test_an_unknown_contender_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        ease.main(["nobody"])
    assert "no such contender: nobody" in capsys.readouterr().err


def test_readme_shows_the_last_run() -> None:
    record = json.loads((ease.RESULTS / "ease.json").read_text(encoding="utf-8"))
    shown = ease.table([ease.Ease(**one) for one in record["contenders"]])
    assert shown in (ROOT / "README.md").read_text(encoding="utf-8")
    for one in record["contenders"]:
        source = (ease.PROGRAMS / f"with_{one['name']}.py").read_text(encoding="utf-8")
        assert one["lines"] == ease.lines_of_code(source)
