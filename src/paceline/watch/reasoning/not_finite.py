"""Explains the first gradient that is not finite: its rank, its backward pass and its place in the model."""

from __future__ import annotations

from collections.abc import Mapping

from paceline.phrases import join, name_ranks
from paceline.watch.protocol.report import Effect, NotFinite, SharedPlace, Verdict
from paceline.watch.protocol.words import pick
from paceline.watch.reasoning.verdict import build_verdict

# Each rank reports within two beats; a rank that detects it a pass later is not the first.
_WAIT_S = 2.5


class FirstNotFinite:
    """The findings of the ranks, collected until the first one is certain."""

    def __init__(self) -> None:
        self._found: dict[int, NotFinite] = {}
        self._since_s = 0.0
        self._is_reported = False

    def note(self, rank: int, found: NotFinite, now_s: float) -> None:
        """Keep a rank's finding; only its first one counts."""
        if rank in self._found:
            return
        self._since_s = self._since_s if self._found else now_s
        self._found[rank] = found

    def read(self, now_s: float, *, is_last: bool = False) -> Verdict | None:
        """Return the verdict once, after all ranks have had time to report or none will any more; else
        `None`."""
        if self._is_reported or not self._found or (now_s - self._since_s < _WAIT_S and not is_last):
            return None
        self._is_reported = True
        return explain_not_finite(self._found)


def explain_not_finite(found: Mapping[int, NotFinite]) -> Verdict:
    """Return the verdict on what ranks have found, by rank; it ends nothing."""
    number = min(one.number for one in found.values())
    first = {rank: one for rank, one in found.items() if one.number == number}
    # A rank whose own gradient was not finite knows more than one that received its consequences.
    own = {rank: one for rank, one in first.items() if one.effect != "inherited"}
    first = own or first
    effect = next(iter(first.values())).effect
    ranks = tuple(sorted(first))
    begins = sorted({_name_module(one) for one in first.values()} - {""})
    headline = _headline(effect, ranks, number, join(begins) if begins else "")
    return build_verdict("PL821", headline, _list_places(first), more=_list_hints(first))


def _headline(effect: Effect, ranks: tuple[int, ...], number: int, begins: str) -> str:
    who, have = name_ranks(ranks), pick(ranks, "has", "have")
    where = f" in {begins}" if begins else ""
    began = f"; it began{where}" if where else ""
    if effect in ("applied", "raised"):
        return f"{who} had the first gradient that is not finite, in backward pass {number}{began}"
    if effect == "skipped":
        since = f"again and again since backward pass {number}"
        return f"{who} {have} had gradients that are not finite, {since}{began}"
    return f"{who} {have} weights that are not finite{where}, since before backward pass {number}"


def _list_places(found: Mapping[int, NotFinite]) -> tuple[SharedPlace, ...]:
    same: dict[NotFinite, list[int]] = {}
    for rank, one in sorted(found.items()):
        # Everything but the place may differ by rank, and is irrelevant here.
        key = NotFinite(0, 0.0, one.effect, one.parameter, one.kind, one.is_at_end, one.frames)
        same.setdefault(key, []).append(rank)
    return tuple(SharedPlace(tuple(ranks), _describe(one), one.frames) for one, ranks in same.items())


def _describe(found: NotFinite) -> str:
    if found.effect == "inherited":
        return f"has it in {found.parameter or 'all weights'}, and went through backward"
    if not found.parameter:
        return "went through backward"
    rest = "" if found.is_at_end else ", and none in what comes after it in the model"
    return f"has it in {found.parameter}{rest}"


def _list_hints(found: Mapping[int, NotFinite]) -> tuple[str, ...]:
    own = [one for one in found.values() if one.effect != "inherited"]
    if not own or not all(one.is_at_end for one in own):
        return ()
    return ("That is the model's end: the loss itself may not be finite.",)


def _name_module(found: NotFinite) -> str:
    """Return a parameter's module: `body.scale (ScaleShift)`, or the parameter's name if the model owns
    it."""
    if not found.parameter:
        return ""
    module = found.parameter.rpartition(".")[0]
    return f"{module or found.parameter} ({found.kind})"
