"""The modules of dm-reverb 0.14, their names, and parameters: what `reverb_modules.json` has.

Where dm-reverb is installed, run it to write that file anew.
"""

from __future__ import annotations

import importlib
import inspect
import json
import pkgutil
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_suffix(".json")

LEFT_OUT = {
    "reverb.cc.ops": "TensorFlow operations, which our Python classes stand for",
    "reverb.libpybind": "the library behind reverb.pybind",
    "reverb.lib": "libraries that cannot be imported",
    "reverb.pip_package": "of Reverb's build",
    "reverb.platform.default.ensure_tf_install": "of Reverb's own start",
    "reverb.platform.default.load_op_library": "of Reverb's own start",
    "reverb.platform.default.server_main_command_line_args": "reverb_server has its own",
}
"""Beginnings of modules that are not there, and why."""

Described = dict[str, dict[str, list[str] | None]]
"""Module -> name or Class.method -> its parameters in order; None: it takes none, or says none."""


def parameters(function: Any) -> list[str] | None:
    try:
        names = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return None
    return [name for name in names if name not in ("self", "cls")]


def described() -> Described:
    """What the installed package has."""
    package = importlib.import_module("reverb")
    found: Described = {}
    names = ["reverb", *(m.name for m in pkgutil.walk_packages(package.__path__, "reverb."))]
    for module_name in names:
        if module_name.startswith(tuple(LEFT_OUT)):
            continue
        module = importlib.import_module(module_name)
        entries: dict[str, list[str] | None] = {}
        for name, value in sorted(vars(module).items()):
            origin = str(getattr(value, "__module__", ""))
            own = origin.split(".")[0] in ("reverb", "functools") and not inspect.ismodule(value)
            if name.startswith("_") or not own:
                continue
            entries[name] = parameters(value)
            if inspect.isclass(value) and not origin.endswith(("libpybind", "_pb2")):
                for method, function in sorted(vars(value).items()):
                    if not method.startswith("_") and not isinstance(function, type):
                        entries[f"{name}.{method}"] = parameters(getattr(value, method))
        found[module_name] = entries
    return found


def golden() -> Described:
    """What the file holds."""
    found: Described = json.loads(FILE.read_text())
    return found


if __name__ == "__main__":
    FILE.write_text(json.dumps(described(), indent=1) + "\n")
