"""Replaces functions of torch temporarily, and leaves a user's replacements in place.

A user may have replaced one of torch's functions before (another attention, a context manager of torch that
patches), or may do so while Paceline's are in place. So the present function is read on entry, only torch's
own is replaced, and on exit only Paceline's is restored.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class PatchedFunction:
    """The place of a function of torch.

    Attributes:
        place: the module that holds it.
        make: returns the replacement of the function found there (`None` if the module gets torch's own from
            elsewhere), or `None` to leave that function alone.
    """

    place: Any
    name: str
    make: Callable[[Any], Callable[..., Any] | None]


class Patches:
    """A set of replacements in force inside `applied`; entering again changes nothing."""

    def __init__(self, spots: list[PatchedFunction]) -> None:
        self._spots = spots
        self._lock = threading.Lock()
        self._depth = 0
        self._saved: list[tuple[PatchedFunction, Any, Any]] = []
        # The function found at each spot, and its replacement. Compiled code depends on that being the same
        # object in every step.
        self._made: list[tuple[Any, Callable[..., Any] | None] | None] = [None] * len(spots)
        # The same of the first time, when torch's own functions are usually found.
        self._first = list(self._made)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Replace the functions inside the context."""
        with self._lock:
            if self._depth == 0:
                self._apply()
            self._depth += 1
        try:
            yield
        finally:
            with self._lock:
                self._depth -= 1
                if self._depth == 0:
                    self._restore()

    def _apply(self) -> None:
        for number, spot in enumerate(self._spots):
            found = spot.place.__dict__.get(spot.name)
            # A user who patched inside the context and undid it afterwards has permanently restored
            # Paceline's.
            for earlier in (self._first[number], self._made[number]):
                if earlier is not None and found is not None and found is earlier[1]:
                    found = earlier[0]
            made = self._made[number]
            if made is None or made[0] is not found:
                made = self._made[number] = found, spot.make(found)
                self._first[number] = self._first[number] or made
            ours = made[1]
            if ours is not None:
                setattr(spot.place, spot.name, ours)
                self._saved.append((spot, found, ours))

    def _restore(self) -> None:
        for spot, found, ours in self._saved:
            if spot.place.__dict__.get(spot.name) is not ours:
                continue  # replaced in the meantime by a user, who wants it to stay
            if found is None:
                delattr(spot.place, spot.name)
            else:
                setattr(spot.place, spot.name, found)
        self._saved.clear()
