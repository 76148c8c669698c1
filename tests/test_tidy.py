"""Holds the house rules that no linter knows: lengths, banned calls, who may import whom."""

from __future__ import annotations

import ast
import fnmatch
import io
import itertools
import os
import re
import tokenize
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import shmreplay
import shmreplay._native

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "shmreplay"
CORE = PACKAGE / "_core"

FUNCTION_LINES = 70
LINE_LENGTH = 100
CORE_FILE_LINES = 400

# A module may import those of the lines above its own.
LAYERS = [
    {"errors", "compat"},
    {"limits", "checkpointers", "counters", "wording"},
    {"textproto"},
    {"tree", "selectors", "rate_limiters", "replay_sample", "extensions"},
    {
        "spec",
        "item_selectors",
        "patterns",
        "padding",
        "platform",
        "table_checks",
        "history_structure",
    },
    {"protobuf"},
    {"reverb_types"},
    {"table_config"},
    {"binding_support", "cc", "table"},
    {"pattern_plan"},
    {"pattern_building"},
    {"pattern_signature"},
    {"_native"},
    {"item_schema", "checkpoint_format", "sizes", "store_file"},
    {"segment", "checkpoint_check", "checkpoint_files"},
    {"checkpoint_scratch"},
    {"checkpoint_image"},
    {"checkpoint_data"},
    {"checkpoint"},
    {"lease"},
    {"attachment", "ports"},
    {"store"},
    {"recovery"},
    {"overview"},
    {"address", "connection"},
    {"step_in_place"},
    {"batches", "sampler", "shard_batch", "trajectory_writer"},
    {"drawing", "inserting", "live_table", "structured_writer", "writer"},
    {"client_link"},
    {"client_tables"},
    {"client", "structured", "pattern_stream", "extension_thread", "checkpoint_thread"},
    {"checkpoint_restore"},
    {"bridge"},
    {"shard"},
    {"shard_group"},
    {"shard_near"},
    {"shard_changes", "shard_draw"},
    {"sharded_client"},
    {"server", "dump", "dataset", "tf_client", "doctor", "monitor", "serve_config"},
    {"command_support", "quick_bench", "top", "integrations"},
    {
        "command_bench",
        "command_check",
        "command_doctor",
        "command_clean",
        "command_dump",
        "command_inspect",
        "command_info",
        "command_keygen",
        "command_ls",
        "command_serve",
        "command_minari",
        "command_size",
        "command_top",
    },
    {"cli", "metrics", "pybind", "reverb_server"},
    {"__main__", "server_executable", "trajectory_dataset", "timestep_dataset", "pattern_dataset"},
]

# What is imported only where it is called for, by functions: a client's way to other hosts.
LATE = {("client_link", "bridge")}

# The same for the core, where a name without a suffix stands for header and source: a header knows
# only those above, a source file also those of its own line.
CORE_LAYERS = [
    {"layout_events.h", "layout_blocks.h", "layout_kinds.h"},
    {"layout_participant.h", "layout_receipts.h"},
    {"layout.h"},
    {"handles.h"},
    {"account.h", "rows_apart.h"},
    {"shmreplay.h"},
    {"remote.h"},
    {"checkpoint.h", "guard.h", "peek.h"},
    {"internal.h"},
    {"fault.h"},
    {"lock", "guard.c"},
    {"arena.h", "huge.h", "table.h", "shape.h"},
    {"arena_chunks.h", "arena.c", "arena_check.c", "arena_rebuild.c", "commit.c", "huge.c"},
    {"schema.c", "index.h"},
    {"index_epoch", "index_fifo", "index_heap", "index_sumtree", "index_uniform", "index.c"},
    {"bytes.h", "packed.h", "steps.h"},
    {"ledger", "steps.c", "packed.c", "refs.c", "gather.c"},
    {"events", "stripe.h", "limiter", "reach"},
    {"bytes.c", "hold", "stripe.c", "stripe_rebuild.c"},
    {"evict", "lock_all", "shape.c"},
    {"receipt"},
    {"repair.c"},
    {"configure.c", "insert.c", "list.c", "sample.c", "keys.c"},
    {"account.c", "session.c", "store.c", "check.c", "inspect.c", "restore.c", "snapshot.c"},
]

# Why: a condition variable hangs whoever notifies after a waiter was killed; a file that is only
# made longer has no memory, and the first touch kills the process; the tracker of
# multiprocessing.shared_memory removes segments that others use; unpickling runs what a stranger
# sent; strcpy writes past its end; a library does not print.
BANNED_IN_C = ["pthread_cond_", "ftruncate", "strcpy", "strcat", "sprintf", "printf", "gets"]
BANNED_IN_PYTHON = {"ftruncate", "truncate", "shared_memory", "pickle", "marshal", "print"}

# Written so that this file does not find itself.
MARKERS = r"\b(TO[D]O|FIX[M]E|X[X]X|HA[C]K|Not[I]mplementedError)\b"
MACHINE_PATHS = r"(?<![\w.])/(work|root|home)/\w"


def sources(*patterns: str) -> list[Path]:
    """Files of the repository, by patterns relative to its root."""
    generated = {PACKAGE / "_native.c"}
    return sorted({f for p in patterns for f in ROOT.glob(p) if f.is_file()} - generated)


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


PYTHON = sources("shmreplay/**/*.py", "tests/**/*.py", "bench/**/*.py", "scripts/*.py")
LIBRARY = sources("shmreplay/**/*.py")
CYTHON = sources("shmreplay/*.pyx", "shmreplay/_binding/*.pxi")
C = sources("shmreplay/_core/*.[ch]", "tests/native/*.[ch]", "bench/c/*.[ch]")
CORE_FILES = sources("shmreplay/_core/*.[ch]")
SCRIPTS = [
    f for f in sources("scripts/*", ".ci/*") if f.suffix in ("", ".sh") and os.access(f, os.R_OK)
]
TEXT = sorted({*PYTHON, *CYTHON, *C, *SCRIPTS, *sources("*.toml", "*.md", "**/README.md")})

each = pytest.mark.parametrize


def without_comments(text: str) -> str:
    """C without comments and the insides of strings, on the same lines."""

    def blank(match: re.Match[str]) -> str:
        return re.sub(r"[^\n]", " ", match.group())

    pattern = r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\''
    return re.sub(pattern, blank, text, flags=re.DOTALL)


# ---------------------------------------------------------------- lengths


def python_functions(path: Path) -> Iterator[tuple[str, int]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            yield node.name, node.end_lineno - node.lineno + 1


def cython_functions(path: Path) -> Iterator[tuple[str, int]]:
    """By indentation: a function goes on until a line that is not further in than its first."""
    lines = path.read_text().splitlines()
    for start, line in enumerate(lines):
        match = re.match(r"( *)(?:cdef|cpdef|def) (?!class )[^=]*?(\w+)\(", line)
        if match is None:
            continue
        end = start + 1
        while end < len(lines) and (
            not lines[end].strip()
            or len(lines[end]) - len(lines[end].lstrip()) > len(match.group(1))
        ):
            end += 1
        while not lines[end - 1].strip():
            end -= 1
        if end - start > 1:  # else a declaration
            yield match.group(2), end - start


def c_functions(path: Path) -> Iterator[tuple[str, int]]:
    """From the line where something of the top level begins, to the brace that ends its body."""
    start, depth = 0, 0
    lines = without_comments(path.read_text()).splitlines()
    for number, line in enumerate(lines):
        if depth == 0 and re.match(r"\w", line):
            start = number
        depth += line.count("{") - line.count("}")
        if depth == 0 and line == "}" and "(" in lines[start]:
            yield lines[start].split("(")[0].split()[-1].lstrip("*"), number - start + 1


def functions(path: Path) -> list[tuple[str, int]]:
    if path.suffix in (".c", ".h"):
        return list(c_functions(path))
    return list(cython_functions(path) if path in CYTHON else python_functions(path))


@each("path", [*PYTHON, *CYTHON, *C], ids=name_of)
def test_functions_are_short(path: Path) -> None:
    long = [f"{name}: {n} lines" for name, n in functions(path) if n > FUNCTION_LINES]
    assert not long, f"longer than {FUNCTION_LINES} lines: {long}"


def test_functions_are_found() -> None:
    """The measures above see what they should: else they would pass whatever the length."""
    lengths = {name: n for path in [*LIBRARY, *CYTHON, *CORE_FILES] for name, n in functions(path)}
    for known in ("sr_insert", "sr_at", "create_item", "raise_status", "trajectory_writer"):
        assert 2 <= lengths[known] <= FUNCTION_LINES, known
    assert len(lengths) > 300


@each("path", [*CYTHON, *C, *SCRIPTS, PACKAGE / "_native.pyi"], ids=name_of)
def test_lines_are_short(path: Path) -> None:
    lines = path.read_text().splitlines()
    long = [n for n, line in enumerate(lines, start=1) if len(line) > LINE_LENGTH]
    assert not long, f"longer than {LINE_LENGTH} characters: lines {long}"


@each("path", CORE_FILES, ids=name_of)
def test_core_files_are_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= CORE_FILE_LINES


# ---------------------------------------------------------------- banned


@each("path", CORE_FILES, ids=name_of)
def test_no_banned_calls_in_the_core(path: Path) -> None:
    code = without_comments(path.read_text())
    if path.name == "internal.h":  # an assertion that fails says so
        code = code.replace("fprintf(stderr", "")
    code = code.replace("snprintf", "")
    found = [banned for banned in BANNED_IN_C if re.search(rf"\b{banned}", code)]
    assert not found
    assert "Python.h" not in path.read_text(), "the core knows nothing of Python"


@each("path", LIBRARY, ids=name_of)
def test_no_banned_names_in_the_library(path: Path) -> None:
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
    found = {t.string for t in tokens if t.type == tokenize.NAME} & BANNED_IN_PYTHON
    assert not found


@each("path", CYTHON, ids=name_of)
def test_no_banned_names_in_the_binding(path: Path) -> None:
    text = re.sub(r'""".*?"""', "", path.read_text(), flags=re.DOTALL)
    code = re.sub(r'"(?:\\.|[^"\\\n])*"|#.*', "", text)
    banned = {*BANNED_IN_PYTHON, "pthread_cond_wait", "strcpy"}
    assert not banned & set(re.findall(r"\w+", code)) - {"auto_pickle"}


@each("path", TEXT, ids=name_of)
def test_nothing_is_left_for_later(path: Path) -> None:
    text = path.read_text()
    assert not re.search(MARKERS, text)
    assert not re.search(MACHINE_PATHS, text), "a path of one machine"


# ---------------------------------------------------------------- layers


def imported(tree: ast.AST, nested: bool) -> Iterator[str]:
    """Modules of this package that are imported, `nested` ones within functions included."""
    for node in ast.iter_child_nodes(tree):
        inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        typing_only = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        if isinstance(node, ast.ImportFrom) and node.module == "shmreplay":
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("shmreplay."):
            yield str(node.module).split(".")[1]
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("shmreplay."):
                    yield alias.name.split(".")[1]
        elif not typing_only and (nested or not inside):
            yield from imported(node, nested)


def modules() -> dict[str, list[str]]:
    """Every module of the package, and what it imports of the others."""
    found: dict[str, list[str]] = {}
    for path in LIBRARY:
        module = path.relative_to(PACKAGE).with_suffix("").parts[0]
        if module != "__init__":
            names = set(imported(ast.parse(path.read_text()), nested=True)) - {module}
            early = set(imported(ast.parse(path.read_text()), nested=False))
            names -= {name for name in names - early if (module, name) in LATE}
            found.setdefault(module, []).extend(names)
    statements = re.findall(
        r"^from shmreplay(?:\.(\w+))? import ([^(\n]+|\([^)]*\))",
        (PACKAGE / "_native.pyx").read_text(),
        flags=re.MULTILINE,
    )
    found["_native"] = [
        name for module, names in statements for name in ([module] if module else names.split(", "))
    ]
    return found


def test_imports_follow_the_layers() -> None:
    level = {name: n for n, layer in enumerate(LAYERS) for name in layer}
    found = modules()
    unknown = set(found) - set(level)
    assert not unknown, f"give {sorted(unknown)} a place in LAYERS"
    assert set(level) == set(found), "LAYERS names modules that are not there"
    for module, names in found.items():
        upward = [name for name in names if level[name] >= level[module]]
        assert not upward, f"{module} imports {upward}, which must not be below it"


def test_the_map_of_the_package_is_true() -> None:
    """What `shmreplay.__doc__` tells a newcomer: each line of modules lies above the one before."""
    level = {name: n for n, layer in enumerate(LAYERS) for name in layer} | {"_core": -1}
    lines = re.findall(r"^    (\S+(?: \S+)*)  \S", shmreplay.__doc__ or "", flags=re.MULTILINE)
    levels = [[level[name] for name in line.split()] for line in lines]
    assert len(levels) >= 9
    for lower, upper in itertools.pairwise(levels):
        assert max(lower) < min(upper), lines


def core_layer(name: str) -> int:
    for number, layer in enumerate(CORE_LAYERS):
        if {name, Path(name).stem} & layer:
            return number
    pytest.fail(f"give {name} a place in CORE_LAYERS")


@each("path", CORE_FILES, ids=name_of)
def test_includes_follow_the_layers(path: Path) -> None:
    own = core_layer(path.name)
    for header in re.findall(r'^#include "(.*)"', path.read_text(), flags=re.MULTILINE):
        if path.suffix == ".h":
            assert core_layer(header) < own, f"{path.name} includes {header}"
        else:
            assert core_layer(header) <= own, f"{path.name} includes {header}"


# ---------------------------------------------------------------- what there is


def test_the_top_level_holds_nothing_else() -> None:
    allowed = {"pyproject.toml", "shmreplay", "tests", "bench", "scripts", "README.md"}
    ignored = [line.rstrip("/") for line in (ROOT / ".gitignore").read_text().split()]
    stray = [
        entry.name
        for entry in ROOT.iterdir()
        if entry.name not in allowed
        and not entry.name.startswith(".")
        and not any(fnmatch.fnmatch(entry.name, pattern) for pattern in ignored)
    ]
    assert not stray


def test_scripts_can_be_run() -> None:
    for path in SCRIPTS:
        assert os.access(path, os.X_OK), path
        assert path.read_text().startswith("#!/usr/bin/env "), path


def test_the_native_module_exports_what_its_stub_says() -> None:
    stub = ast.parse((PACKAGE / "_native.pyi").read_text())
    names, defined = [], set()
    for node in stub.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names = ast.literal_eval(node.value)
        elif isinstance(node, ast.ClassDef | ast.FunctionDef):
            defined.add(node.name)
        elif isinstance(node, ast.AnnAssign):
            defined.add(ast.unparse(node.target))
    exported = shmreplay._native.__all__
    assert names == exported
    assert {name for name in defined if not name.startswith("_")} == set(exported)
    assert all(hasattr(shmreplay._native, name) for name in exported)


def test_the_build_knows_every_file() -> None:
    """What is listed is compiled, looked at for changes, and part of a source distribution."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (extension,) = project["tool"]["setuptools"]["ext-modules"]
    assert extension["sources"] == [
        "shmreplay/_native.pyx",
        *map(name_of, sources("shmreplay/_core/*.c")),
    ]
    assert extension["depends"] == [
        *map(name_of, sources("shmreplay/_binding/*.pxi")),
        *map(name_of, sources("shmreplay/_core/*.h")),
    ]
