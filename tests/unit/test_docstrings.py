"""Every public class, function and method says what it is, takes and raises."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import shmreplay


def members(owner: Any, path: str) -> Iterator[tuple[str, Any]]:
    """The public classes, functions, methods and properties of a module or class of ours."""
    names = getattr(owner, "__all__", None) or list(vars(owner))
    if inspect.isclass(owner):
        bases = [base for base in owner.__mro__ if base.__module__.startswith("shmreplay.")]
        names = list({name: None for base in bases for name in vars(base)})
    for name in names:
        if name.startswith("_"):
            continue
        member = inspect.getattr_static(owner, name)
        member = getattr(member, "__func__", member)  # of a classmethod or staticmethod
        if isinstance(member, ModuleType) or inspect.isclass(member):
            home = member.__name__ if isinstance(member, ModuleType) else member.__module__
            if home.startswith("shmreplay.") and (
                owner is shmreplay or home == getattr(owner, "__name__", None)
            ):
                yield f"{path}.{name}", member
                yield from members(member, f"{path}.{name}")
        elif isinstance(member, property) or (
            inspect.isfunction(member) and member.__module__.startswith("shmreplay.")
        ):
            yield f"{path}.{name}", member


def raises(function: Any) -> bool:
    """Whether the function's own body has a `raise` of something new."""
    inner = (ast.FunctionDef, ast.Lambda, ast.ClassDef)

    def found(node: ast.AST) -> bool:
        parts = [each for each in ast.iter_child_nodes(node) if not isinstance(each, inner)]
        return any((isinstance(p, ast.Raise) and p.exc is not None) or found(p) for p in parts)

    return found(ast.parse(textwrap.dedent(inspect.getsource(function))).body[0])


def lacking(member: Any) -> list[str]:
    """What a docstring does not say."""
    text = inspect.getdoc(member)
    if not text:
        return ["any docstring"]
    if not inspect.isfunction(member):
        return []
    section = re.search(r"^Args:\n((?: .*\n?|\n)*)", text, re.MULTILINE)
    args = section[1] if section else ""
    names = [name for name in inspect.signature(member).parameters if name not in ("self", "cls")]
    absent = [n for n in names if not re.search(rf"^ +\*{{0,2}}{n}\b.*:", args, re.MULTILINE)]
    if raises(member) and "Raises:\n" not in text:
        absent.append("Raises")
    return absent


def test_every_public_thing_says_what_it_is_takes_and_raises() -> None:
    found = dict(members(shmreplay, "shmreplay"))
    assert len(found) > 150
    missing = {path: lacking(member) for path, member in found.items() if lacking(member)}
    assert not missing, "\n".join(f"{path}: {', '.join(what)}" for path, what in missing.items())
