"""Puts functions in the place of torch's own for a while, and leaves a user's in place.

A user may have replaced one of torch's functions before (another attention, a context manager of torch's own
that patches), or may do so while ours are in place. So what is there is read on entry, only torch's own is
replaced, and on exit only what is still ours is put back.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class PatchedFunction:
    """A place of one of torch's functions.

    Attributes:
        place: the module that holds it.
        name: its name there.
        make: gives what takes the place of the function found there (`None` where the module finds torch's
            own elsewhere), or `None` to leave that alone.
    """

    place: Any
    name: str
    make: Callable[[Any], Callable[..., Any] | None]


class Patches:
    """Replaces functions as long as somebody is inside of `applied`; entering again changes nothing.

    Args:
        spots: what is replaced.
    """

    def __init__(self, spots: list[PatchedFunction]) -> None:
        self._spots = spots
        self._lock = threading.Lock()
        self._depth = 0
        self._saved: list[tuple[PatchedFunction, Any, Any]] = []
        # Per spot what was found, and what was made for it: compiled code depends on it being the same
        # object in every step.
        self._made: list[tuple[Any, Callable[..., Any] | None] | None] = [None] * len(spots)
        # The same of the first time, when torch's own are usually found.
        self._first = list(self._made)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Replace the functions inside of this."""
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
            # A user who patched inside of this and undid it afterwards has put ours back, to stay.
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
                continue  # replaced in the meantime by a user, who means it to stay
            if found is None:
                delattr(spot.place, spot.name)
            else:
                setattr(spot.place, spot.name, found)
        self._saved.clear()
