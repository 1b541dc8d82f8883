"""Traces that are decoded in parts: the same events come out, wherever a part ends."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

from paceline.profiling.parts import TextTooLongError, decode_parts

NASTY = 'a },{ "traceEvents": [ \\\\ " } , {'
EVENTS: list[dict[str, Any]] = [
    {"name": f"event {number}", "args": {"list": [{"a": 1}, {"b": number}], "text": NASTY}}
    for number in range(40)
]


def decode(data: bytes) -> Any:
    found = json.loads(data)
    if not isinstance(found, list) or not all("name" in each for each in found):
        raise ValueError("no events")
    return found


def read(text: str, part_bytes: int, most_bytes: int = 1 << 30) -> tuple[Any, list[int]]:
    taken: list[Any] = []
    sizes: list[int] = []

    def take(events: Any) -> None:
        taken.extend(events)
        sizes.append(len(events))

    table = decode_parts(
        io.BytesIO(text.encode()), decode, json.loads, take=take, most_bytes=most_bytes, part_bytes=part_bytes
    )
    if isinstance(table, list):
        return taken + table, sizes
    return {**table, "traceEvents": taken + table["traceEvents"]}, sizes


@pytest.mark.parametrize("part_bytes", [1, 7, 100, 1000, 1 << 20])
@pytest.mark.parametrize("indent", [None, 4])
@pytest.mark.parametrize(
    "table",
    [
        {"schema": NASTY, "traceEvents": EVENTS, "paceline": [{"name": "x"}, {"name": NASTY}]},
        EVENTS,
        {"traceEvents": []},
        {"other": EVENTS, "traceEvents": EVENTS[:1]},
    ],
    ids=["table", "list", "empty", "another list first"],
)
def test_parts_are_the_whole(table: Any, indent: int | None, part_bytes: int) -> None:
    assert read(json.dumps(table, indent=indent), part_bytes)[0] == table


def test_the_memory_of_a_part_is_bounded() -> None:
    plain = [{"name": "x" * 80} for _ in range(1000)]
    found, sizes = read(json.dumps({"traceEvents": plain, "rest": [{"a": 1}]}, indent=2), 2000)
    assert found == {"traceEvents": plain, "rest": [{"a": 1}]}
    assert len(sizes) > 40
    assert max(sizes) < 50


def test_a_longer_text_is_refused() -> None:
    text = json.dumps(EVENTS)
    assert read(text, 100, len(text))[0] == EVENTS
    with pytest.raises(TextTooLongError):
        read(text, 100, len(text) - 1)


@pytest.mark.parametrize("part_bytes", [100, 1 << 20])
def test_a_text_that_is_cut_off_is_refused(part_bytes: int) -> None:
    with pytest.raises(ValueError, match=r"."):
        read(json.dumps(EVENTS)[:-30], part_bytes)
