"""Collects facts until a beat takes them to the launcher."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from paceline.watch.protocol.report import Fact
from paceline.watch.protocol.words import own_frames
from paceline.watch.rank.sentinels.numbers import Sample
from paceline.watch.rank.threads import Mark, resolve

_MOST_WAITING = 512
_MOST_BYTES_PER_BEAT = 64 << 10
_MANY_FRAMES = 4


class Outbox:
    """The facts that no beat has taken yet; the newest are dropped if there are too many."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[Fact, tuple[Mark, ...]]] = deque()

    def put(
        self,
        kind: str,
        event: str,
        ranks: tuple[int, ...],
        passes: int,
        marks: tuple[Mark, ...],
        values: Mapping[str, Any],
    ) -> None:
        """Add a fact; see `Fact`. Values may be samples that have not arrived."""
        if len(self._waiting) < _MOST_WAITING:
            self._waiting.append((Fact(kind, event, ranks, passes, values), marks))

    def drain(self) -> tuple[Fact, ...]:
        """Return the facts that a beat may take; called by the watching thread."""
        found: list[Fact] = []
        num_bytes = 0
        while self._waiting and num_bytes < _MOST_BYTES_PER_BEAT:
            first, marks = self._waiting[0]
            if not all(map(_is_here, first.values.values())):
                break
            self._waiting.popleft()
            values = {name: _read(value) for name, value in first.values.items()}
            num_bytes += len(json.dumps(values))
            frames = own_frames(resolve(marks))[:_MANY_FRAMES]
            found.append(replace(first, values=values, frames=frames))
        return tuple(found)


def _is_here(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_is_here, value))
    return not isinstance(value, Sample) or value.is_here


def _read(value: Any) -> Any:
    if isinstance(value, list):
        return [_read(one) for one in value]
    return value.value if isinstance(value, Sample) else value
