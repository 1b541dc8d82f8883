"""Formats quantities for people: bytes, seconds, counts and rates with a suitable unit."""

from __future__ import annotations


def format_bytes(num_bytes: float) -> str:
    """Format bytes in binary units: `1536` as `1.5 KiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


def format_seconds(seconds: float) -> str:
    """Format a duration: `0.0021` as `2.1 ms`, `75` as `1 min 15 s`."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    if seconds < 1:
        return f"{seconds * 1e3:.1f} ms"
    return f"{seconds:.1f} s" if seconds < 60 else _format_minutes(round(seconds))


def format_wait(seconds: float) -> str:
    """Format a wait in whole seconds: `62 s`, `4 min 10 s`."""
    whole = max(0, round(seconds))
    return f"{whole} s" if whole < 120 else _format_minutes(whole)


def _format_minutes(seconds: int) -> str:
    minutes, rest = divmod(seconds, 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def format_count(count: float) -> str:
    """Format a count or a rate in decimal units: `130_000` as `130k`, `20_300_000` as `20.3M`."""
    for limit, suffix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(count) >= limit:
            return f"{count / limit:.3g}{suffix}"
    return f"{count:.3g}"
