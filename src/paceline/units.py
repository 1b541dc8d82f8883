"""Quantities for people: bytes, seconds, counts and rates with a fitting unit."""

from __future__ import annotations


def format_bytes(num_bytes: float) -> str:
    """`1536` gives `1.5 KiB`; binary units, as memory and files are counted."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


def format_seconds(seconds: float) -> str:
    """`0.0021` gives `2.1 ms`, `75` gives `1 min 15 s`."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    if seconds < 1:
        return f"{seconds * 1e3:.1f} ms"
    return f"{seconds:.1f} s" if seconds < 60 else _format_minutes(round(seconds))


def format_wait(seconds: float) -> str:
    """`62 s`, `4 min 10 s`; whole seconds, for waits that nobody measures in milliseconds."""
    whole = max(0, round(seconds))
    return f"{whole} s" if whole < 120 else _format_minutes(whole)


def _format_minutes(seconds: int) -> str:
    minutes, rest = divmod(seconds, 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def format_count(count: float) -> str:
    """`130_000` gives `130k`, `20_300_000` gives `20.3M`; decimal units, for things and rates."""
    for limit, suffix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(count) >= limit:
            return f"{count / limit:.3g}{suffix}"
    return f"{count:.3g}"
