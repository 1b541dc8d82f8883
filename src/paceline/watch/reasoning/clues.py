"""Finds likely causes in the code around the lines where ranks are."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from paceline.own_code import is_own
from paceline.phrases import join, name_ranks
from paceline.watch.protocol.report import Call, Frame
from paceline.watch.protocol.words import name_line, own_frames, pick, sequence_of
from paceline.watch.reasoning.source import LoopInSource, Source, SourceSpot

# More clues would be guesses.
_MANY_CLUES = 2
# A line that only reads what the launcher has set.
_FROM_LAUNCHER = re.compile(r"environ(\[|\.get\()\W*(WORLD_SIZE|RANK)\W*$")
_JOINING = ("WORLD_SIZE", "RANK", "MASTER_PORT", "MASTER_ADDR")


@dataclass(frozen=True)
class Side:
    """The ranks that took one of two ways.

    Attributes:
        frames: the user's own, innermost first; empty for ranks that have ended.
        is_in_backward: whether autograd issued the call that they are in.
        has_ended: whether their script is over, and nothing killed it.
        lines: of their collectives in the group in question, by number: file, line, and FSDP's module.
    """

    ranks: tuple[int, ...]
    frames: tuple[Frame, ...] = ()
    is_in_backward: bool = False
    has_ended: bool = False
    lines: Mapping[int, tuple[str, int, str]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Name of the ranks in messages: `ranks 0 and 1`."""
        return name_ranks(self.ranks)


def list_clues(
    here: Side, there: Side, source: Source, *, is_apart: bool = False, is_usual: bool = False
) -> list[str]:
    """Return sentences on why ranks took different ways, the likeliest first.

    Args:
        here: ranks that wait.
        there: ranks that they wait for.
        is_apart: whether each side has called what the other has not, so that neither is merely behind.
        is_usual: whether they have been apart at these lines before, as ranks that send and receive are.
    """
    clues = [] if is_usual else explain_condition([here.frames, there.frames], source)
    clues += _explain_handler(here, there, source)
    clues += _explain_shift(here, there)
    is_past = is_apart or _is_later(there, here)
    is_past_backward = here.is_in_backward and is_past and not there.is_in_backward
    if not clues:
        clues += _explain_swallowing(here, there, source)
        clues += _explain_left_loop(here, there, source)
    if not clues and is_apart:
        clues += _explain_left_loop(there, here, source)
    if not clues and is_past_backward:
        clues.append(_explain_backward(there))
    if not clues:
        clues += _explain_branch(here, there, source)
    return clues[:_MANY_CLUES]


def explain_condition(sides: Sequence[tuple[Frame, ...]], source: Source) -> list[str]:
    """Return the rank-dependent conditions that may have sent ranks to these different places.

    Args:
        sides: the user's frames of each side, innermost first; frames common to all decide nothing.
    """
    clues = []
    for n, frames in enumerate(sides):
        others = {_line(f) for m, side in enumerate(sides) if m != n for f in side}
        for frame in _up_to(frames, others):
            spot = source.find_rank_condition(frame)
            if spot is not None:
                where = name_line(frame)
                clues.append(f"Likely cause: whether {where} is reached depends on the rank: {_quote(spot)}.")
                break
    return clues


def _line(frame: Frame) -> tuple[str, int]:
    return frame.file, frame.line


def _up_to(frames: Sequence[Frame], others: set[tuple[str, int]]) -> list[Frame]:
    """Return the frames from the innermost one up to the first that others share.

    The package's own frames, which stand for a script that has none, are left out: their conditions and
    handlers are the same on all ranks and cause nothing.
    """
    found = []
    for frame in frames:
        if _line(frame) in others:
            break
        if is_own(frame.file):
            found.append(frame)
    return found


def _find_line(side: Side, fork: Frame) -> int | None:
    """Return the line at which ranks are in a frame's function, or `None` if they are not in it."""
    lines = [f.line for f in side.frames if (f.file, f.function) == (fork.file, fork.function)]
    return lines[-1] if lines else None


def _is_later(side: Side, other: Side) -> bool:
    """Return whether ranks are at a later line than others, in the function where their ways part."""
    frames = _up_to(other.frames, {_line(f) for f in side.frames})
    line = _find_line(side, frames[-1]) if frames else None
    return line is not None and line > frames[-1].line


def _find_spot(
    side: Side, other: Side, find: Callable[[Frame], SourceSpot | None]
) -> tuple[str, str] | tuple[None, None]:
    """Return a line of one side, where its way parts from the other's, and what is found around that line."""
    for frame in _up_to(side.frames, {_line(f) for f in other.frames}):
        spot = find(frame)
        if spot is not None:
            return name_line(frame), _quote(spot)
    return None, None


def _explain_handler(here: Side, there: Side, source: Source) -> list[str]:
    """Return the clue that an exception took the missing rank into a handler, if its line is in one."""
    _, spot = _find_spot(there, here, source.find_handler)
    return (
        [f"Likely cause: an exception on {there.name} led into {spot}; the others had none."] if spot else []
    )


def _explain_backward(there: Side) -> str:
    its = pick(there.ranks, "its loss does not", "their losses do not")
    return (
        f"Likely cause: {there.name} finished backward without the all-reduce of all gradients: parameters "
        f"that {its} use (find_unused_parameters=True), no_sync() there alone, or fewer backward passes."
    )


def _explain_swallowing(here: Side, there: Side, source: Source) -> list[str]:
    """Return the clue that the call is in a `try` whose handler continues after an exception."""
    line, spot = _find_spot(here, there, source.find_swallowing)
    way = f"an exception on {there.name} alone skips the call"
    text = f"Possible cause: {line} is in a try whose {spot} continues without raising: {way}."
    return [text] if spot else []


def _explain_branch(here: Side, there: Side, source: Source) -> list[str]:
    """Return the clue that the call is in a branch, whatever its condition."""
    line, spot = _find_spot(here, there, lambda frame: source.find_condition(frame, _find_line(there, frame)))
    way = f"only if {spot} lets it, which may differ between ranks"
    return [f"Possible cause: {line} is reached {way}."] if spot else []


def _explain_left_loop(here: Side, there: Side, source: Source) -> list[str]:
    """Return the clue that some ranks have left a loop that the others are in.

    By which way they have left, and whether they had fewer iterations or left out a call, nothing shows.
    """
    loops = _find_left_loops(here, there, source)
    for loop in loops:
        if loop.ways_out:
            ways = loop.ways_out[:2]
            listed = " or ".join(
                _quote(test) + (f" with `{way.text}`" if way.line > test.line else "") for test, way in ways
            )
            place = name_line(loop.spot.frame)
            is_round = all("continue" in way.text for _, way in ways)
            what = f"a round of the loop at {place} early" if is_round else f"the loop at {place} earlier"
            return [f"Likely cause: {there.name} left {what}, by {listed} or at its end."]
    for loop in reversed(loops):
        if loop.spot.text.startswith(("for", "async for")):
            return [
                f"Likely cause: {there.name} ran fewer iterations of the loop {_quote(loop.spot)}, as with "
                "uneven numbers of batches (DistributedSampler, drop_last=True or Join make them even), or "
                "left out a call in one."
            ]
    return []


def list_lines(calls: Iterable[Call], group: str) -> dict[int, tuple[str, int, str]]:
    """Return the user's lines of a rank's collectives in a group, and FSDP's modules, by number."""
    own = {c.number: (own_frames(c.frames)[:1], c) for c in calls if c.group == group and not sequence_of(c)}
    return {number: (*_line(frames[0]), c.module) for number, (frames, c) in own.items() if frames}


def _explain_shift(here: Side, there: Side) -> list[str]:
    """Return the clue that from some call on, one side is a call of the other's ahead.

    Their lines agree up to there, and afterwards each line of the one is that of the other's next call.
    """
    common = sorted(here.lines.keys() & there.lines.keys())
    apart = [number for number in common if here.lines[number] != there.lines[number]]
    if not apart or apart[0] == common[0]:
        return []
    for more, less in ((here, there), (there, here)):
        after = [number for number in common if number >= apart[0] and number + 1 in more.lines]
        if after and all(more.lines[number + 1] == less.lines[number] for number in after):
            file, line, module = more.lines[apart[0]]
            what = f"the call of {module}" if module else "the call"
            return [
                f"Likely cause: {less.name} left out {what} at {name_line(Frame(file, line, ''))}, "
                f"which is number {apart[0]} on {more.name}."
            ]
    return []


def _find_left_loops(here: Side, there: Side, source: Source) -> list[LoopInSource]:
    """Return the loops that `here` is in and `there` has left, outermost first."""
    frames = _up_to(here.frames, {_line(f) for f in there.frames})
    if not frames:
        return []
    if there.has_ended and not there.frames:
        return [loop for frame in reversed(frames) for loop in source.find_loops(frame)]
    line = _find_line(there, frames[-1])
    if line is None or not _is_later(there, here):
        return []
    left = [loop for loop in source.find_loops(frames[-1]) if loop.ends < line]
    inside = [loop for frame in reversed(frames[:-1]) for loop in source.find_loops(frame)]
    return [*left, *inside]


def explain_joining(here: Side, there: Side, source: Source) -> list[str]:
    """Return the clues that the script itself sets how the ranks meet, or lets only some of them join."""
    clues = explain_condition([here.frames, there.frames], source)
    for path in dict.fromkeys(frame.file for frame in here.frames):
        for name in _JOINING:
            spot = source.find_text(
                path, rf"environ(\[\W*{name}\W*\]\s*=[^=]|\.(update|setdefault)\(.*\b{name}\b)"
            )
            if spot is not None:
                clues.append(f"Likely cause: the script sets {name} itself: {_quote(spot)}.")
    return (clues or _explain_meeting(here, source))[:_MANY_CLUES]


def _explain_meeting(here: Side, source: Source) -> list[str]:
    """Return the clue of the arguments that the script passes to init_process_group, and their origins."""
    for frame in here.frames:
        found = source.find_meeting(frame)
        text = source.line(frame.file, frame.line)
        if found is None or "init_process_group" not in text:
            continue
        names = dict.fromkeys(found)
        patterns = [rf"^\s*{name}\s*=[^=]|--{name.replace('_', '[-_]')}\b" for name in names]
        spots = [source.find_text(frame.file, pattern) for pattern in patterns]
        origins = [_quote(spot) for spot in spots if spot and not _FROM_LAUNCHER.search(spot.text)]
        call = _quote(SourceSpot(frame.file, frame.line, text))
        given = f", with {join(origins)}" if origins else ""
        return [f"Likely cause: the script itself sets how the ranks meet: {call}{given}."]
    return []


def _quote(spot: SourceSpot) -> str:
    code = re.split(r"\s+#", spot.text)[0]
    return f"`{code}` ({name_line(spot.frame)})"
