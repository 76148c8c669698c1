"""Numbers as people read them."""

from __future__ import annotations

__all__ = ["age", "rate", "size"]


def size(nbytes: float) -> str:
    """Bytes: `16.0 MiB`."""
    for unit, shift in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if nbytes >= 1 << shift:
            return f"{nbytes / (1 << shift):.1f} {unit}"
    return f"{nbytes:.0f} B"


def rate(per_second: float | None) -> str:
    """Things in a second: `1.2k`; a dash where there are none, or it is not known."""
    if per_second is None or per_second <= 0:
        return "-"
    for unit, factor in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if per_second >= 0.9995 * factor:
            return f"{per_second / factor:.3g}{unit}"
    return f"{per_second:.3g}"


def age(seconds: float) -> str:
    """A time: `42 s`, `3 min`, `5.0 h`."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
