"""Decodes the events of a trace part by part, so that memory holds the text of one part only.

A part ends between two events, at a comma between two tables. Such a comma may be inside of an event or a
text too. A part begins with an event, so it ended at the right place if and only if it is a list of events.
Otherwise an earlier comma is tried; if none fits, all that is left becomes one part, which is right and needs
more memory.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

PART_BYTES = 16 << 20
_BEGIN = re.compile(rb'\s*(?:\[|\{.*?"traceEvents"\s*:\s*\[)', re.DOTALL)
_BETWEEN = re.compile(rb"\}\s*,\s*\{")
# Where commas between tables are looked for, from the end of the part.
_TAIL_BYTES = 1 << 16
_MOST_TRIES = 4


class TextTooLongError(Exception):
    """The text of a trace exceeds the limit."""


def decode_parts(
    stream: BinaryIO,
    decode_events: Callable[[bytes], Any],
    decode_whole: Callable[[bytes], Any],
    *,
    take: Callable[[Any], None],
    most_bytes: int,
    part_bytes: int = PART_BYTES,
) -> Any:
    """Return the decoded trace with the events of its last part; pass on those of the other parts.

    Args:
        stream: the text of a table with a list `traceEvents`, or of a list.
        decode_events: decodes a list of events; raises `ValueError` if the text is none.
        decode_whole: decodes the trace, whose list then has the events of the last part.
        take: called with the events of each part before.
        most_bytes: of the text.
        part_bytes: of a part; a longer event makes it longer.

    Raises:
        TextTooLongError: if the text is longer.
        ValueError: as `decode_whole`.
    """
    rest, left = _read(stream, part_bytes, most_bytes)
    found = _BEGIN.match(rest)
    begin = found.end() if found is not None else 0
    head, rest = rest[:begin], rest[begin:]
    while True:
        more, left = _read(stream, part_bytes, left)
        if not more:
            break
        events = None
        if found is not None:
            for end, following in _find_ends(rest):
                try:
                    events = decode_events(b"[" + rest[:end] + b"]")
                except ValueError:
                    continue
                rest = rest[following:]
                break
        if events is None:
            data, _ = _read(stream, left + 1, left)
            rest += more + data
            break
        take(events)
        del events
        rest += more
    return decode_whole(head + rest)


def _read(stream: BinaryIO, num_bytes: int, left: int) -> tuple[bytes, int]:
    """Return the next bytes, fewer only at the end, and how many more are allowed."""
    data = stream.read(num_bytes)
    if len(data) > left:
        raise TextTooLongError
    return data, left - len(data)


def _find_ends(text: bytes) -> Iterator[tuple[int, int]]:
    """Yield where a part may end and the next one then begins, the last ones first."""
    begin = max(0, len(text) - _TAIL_BYTES)
    places = [(match.start() + 1, match.end() - 1) for match in _BETWEEN.finditer(text, begin)]
    if not places:
        places = [(match.start() + 1, match.end() - 1) for match in _BETWEEN.finditer(text)]
    yield from places[: -_MOST_TRIES - 1 : -1]
