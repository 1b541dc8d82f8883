"""Words and numbers that several rules use: divisors, degrees, changed settings and refused mixes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from pydantic import BaseModel

from paceline.finding import Finding
from paceline.recipe.layout import Layout


def refuse_mixes(given: str, mixes: Iterable[tuple[bool, str, str, str, str]]) -> Iterator[Finding]:
    """Yield what a setting cannot be combined with in this version.

    Args:
        given: the setting, as `layout.cp=2`.
        mixes: whether the other setting is there, its key, its value, the rule and the fix.
    """
    for is_there, key, saw, rule, fix in mixes:
        if is_there:
            yield Finding(
                "PL492", key, f"{given} with {saw}.", f"{rule} This version does not support it.", fix
            )


def name_degrees(layout: Layout, **facts: bool) -> str:
    """Return the degrees above 1 of the axes with these properties, as `layout.tp=2`."""
    return " ".join(f"layout.{axis}={degree}" for axis, degree in layout.list_several(**facts).items())


def divisors(number: int) -> list[int]:
    """Return all divisors in ascending order."""
    small = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def largest_divisor(number: int, limit: int) -> int:
    """Return the largest divisor of `number` that is at most `limit`."""
    return max(n for n in divisors(number) if n <= limit)


def list_changed(section: BaseModel, besides: frozenset[str] = frozenset()) -> str:
    """Return the keys of a section that are not at their defaults, as `shard.prefetch=2, ...`."""
    name = type(section).__name__.removesuffix("Section").lower()
    default: Any = type(section)()
    changed = {
        key: getattr(section, key)
        for key in type(section).model_fields
        if key not in besides and getattr(section, key) != getattr(default, key)
    }
    return ", ".join(
        f"{name}.{key}={str(value).lower() if isinstance(value, bool) else value}"
        for key, value in changed.items()
    )


def list_numbers(numbers: list[int]) -> str:
    """Return numbers in words, `1, 2 or 4`; of many, the first and the last."""
    if len(numbers) > 12:
        numbers = [*numbers[:10], numbers[-1]]
    texts = [str(n) for n in numbers]
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} or {texts[-1]}"
