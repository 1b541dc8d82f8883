"""Builds a verdict: merges ranks at the same place, and adds the rule and the next move of its code."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from paceline.codes import read_pages
from paceline.phrases import name_ranks
from paceline.watch.protocol.report import Frame, SharedPlace, Verdict
from paceline.watch.protocol.words import name_call, name_group, name_place, to_plural
from paceline.watch.reasoning.states import State

# With more places than this, the last ones, of few ranks each, are merged into one.
_MANY_PLACES = 12


def find_rule(code: str) -> str:
    """Return the rule that belongs to a code: the first sentence of its page."""
    return _first_sentence(read_pages()[code].why)


def find_fix(code: str) -> str:
    """Return the next move that belongs to a code, unless a more specific one is known."""
    return _first_sentence(read_pages()[code].fix)


def _first_sentence(text: str) -> str:
    return text.partition(". ")[0].removesuffix(".") + "."


def build_verdict(
    code: str,
    headline: str,
    places: Sequence[SharedPlace],
    *,
    rule: str = "",
    fix: str = "",
    more: Iterable[str] = (),
) -> Verdict:
    """Return a verdict with its code's rule and next move, or more specific ones."""
    # The same cause may be found twice.
    once = tuple(dict.fromkeys(more))
    return Verdict(code, headline, tuple(places), rule or find_rule(code), fix or find_fix(code), once)


def list_places(states: Iterable[State]) -> list[SharedPlace]:
    """Return the places of ranks, merged if equal; those that wait come first, then by rank."""
    shared: dict[tuple[bool, str, tuple[tuple[str, int], ...]], list[State]] = {}
    for state in states:
        key = (not state.waits, state.words, tuple((f.file, f.line) for f in state.frames))
        shared.setdefault(key, []).append(state)
    ordered = sorted(shared.items(), key=lambda item: (item[0][0], -len(item[1]), item[1][0].rank))
    shown = [_build_place(members) for _, members in ordered]
    if len(shown) <= _MANY_PLACES:
        return shown
    rest = sorted(rank for place in shown[_MANY_PLACES - 1 :] for rank in place.ranks)
    return [*shown[: _MANY_PLACES - 1], SharedPlace(tuple(rest), "is elsewhere")]


def _build_place(members: Sequence[State]) -> SharedPlace:
    return SharedPlace(tuple(state.rank for state in members), members[0].words, members[0].frames)


def name_wait(state: State, world_size: int) -> str:
    """Return what a rank waits in, as a noun: `all_reduce number 57 of tp (ranks 8-15)`."""
    if state.call is None:
        return state.operation
    return name_call(state.call, name_group(state.group, state.call.group, world_size))


def name_at(frames: Sequence[Frame]) -> str:
    """Return the innermost place: ` at train.py:31 in evaluate`; empty if no line is known."""
    return f" at {name_place(frames[0])}" if frames else ""


def name_state(states: Sequence[State]) -> str:
    """Return what ranks do: `it is asleep in time.sleep at train.py:88`, `they have ended (exit code 0)`."""
    first = states[0]
    words = f"it {first.words}" if len(states) == 1 else f"they {to_plural(first.words)}"
    return words + name_at(first.frames)


def name_states(states: Sequence[State]) -> str:
    """Return ranks with what they do: `rank 2 is asleep in time.sleep at train.py:88`."""
    first = states[0]
    words = first.words if len(states) == 1 else to_plural(first.words)
    return f"{name_ranks(s.rank for s in states)} {words}{name_at(first.frames)}"
