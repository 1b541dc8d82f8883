"""Words for ranks, calls, groups and places in the user's code."""

from __future__ import annotations

import os
from collections.abc import Sequence

from paceline.launching.ending.endings import name_signal
from paceline.own_code import PACKAGE, is_own, shorten_path
from paceline.phrases import name_ranks
from paceline.watch.protocol.report import Call, Frame, Group

# A description lists at most this many different tensors.
_MANY_TENSORS = 3
_LABELS = {"", "undefined", "default_pg", "world"}


def pick(ranks: Sequence[int] | frozenset[int], one: str, several: str) -> str:
    """Return the singular form of a verb or noun for one rank, the plural form for several."""
    return one if len(ranks) == 1 else several


_PLURALS = {
    "is": "are",
    "was": "were",
    "has": "have",
    "does": "do",
    "waits": "wait",
    "computes": "compute",
    "stands": "stand",
    "compiles": "compile",
    "lives": "live",
    "calls": "call",
    "gives": "give",
    "sends": "send",
    "receives": "receive",
}


def to_plural(words: str) -> str:
    """Turn a phrase about one rank into one about several: `waits in all_reduce` into `wait in
    all_reduce`."""
    verb, _, rest = words.partition(" ")
    plural = f"{_PLURALS.get(verb, verb)} {rest}"
    return plural.replace("its script", "their scripts").replace("but does not", "but do not")


def name_group(group: Group | None, name: str, world_size: int = 0) -> str:
    """Return a group's name for messages: `world`, `tp (ranks 8-15)`, `group 3 (ranks 0 and 2)`.

    Args:
        group: as a member knows it; `None` if no member has reported it.
        name: torch's name.
        world_size: 0 if unknown.
    """
    label = "" if group is None or group.label in _LABELS else group.label
    if name == "0" or (not label and group is not None and len(group.ranks) == world_size):
        return label or "world"
    label = label or f"group {name}"
    return label if group is None else f"{label} ({name_ranks(group.ranks)})"


def name_label(group: Group | None, name: str) -> str:
    """Return a group's name without its ranks, the same for all groups along one axis of a mesh."""
    if group is not None and group.label not in _LABELS:
        return group.label
    return "world" if name == "0" else f"group {name}"


def is_pairwise(call: Call) -> bool:
    """Return whether a call is a send or a receive."""
    return call.operation.startswith(("send", "recv"))


def sequence_of(call: Call) -> str:
    """Return the sequence, within its group, in which a call is numbered: `""`, or the operation if it has
    its own."""
    return call.operation if call.operation == "monitored_barrier" or is_pairwise(call) else ""


def name_call(call: Call, group: str) -> str:
    """Return a call's name: `all_reduce number 57 of world`, `recv number 3 from rank 1`."""
    if is_pairwise(call):
        way = "to" if call.operation.startswith("send") else "from"
        peer = "any rank" if call.peer is None else f"rank {call.peer}"
        return f"{call.operation} number {call.number} {way} {peer}"
    return f"{call.operation} number {call.number} of {group}"


def name_purpose(call: Call) -> str:
    """Return, to follow "waits", what a rank of a pipeline waits for: `for the gradient of microbatch 5`."""
    return f"until {call.purpose} is taken" if call.operation.startswith("send") else f"for {call.purpose}"


def describe_tensors(call: Call) -> str:
    """Return a call's tensors in words: `float32 [128], sum`, `3 x float32 [128]`; empty if unknown."""
    dtypes = call.dtypes or ("",)
    kinds = [f"{dtypes[min(n, len(dtypes) - 1)]} {list(size)}".strip() for n, size in enumerate(call.sizes)]
    if len(kinds) > 1 and len(set(kinds)) == 1:
        kinds = [f"{len(kinds)} x {kinds[0]}"]
    if len(kinds) > _MANY_TENSORS:
        kinds = [*kinds[:_MANY_TENSORS], f"{len(kinds) - _MANY_TENSORS} more"]
    return ", ".join([*kinds, *([call.reduce_op] if call.reduce_op else [])])


def own_frames(frames: Sequence[Frame]) -> tuple[Frame, ...]:
    """Return the user's frames, innermost first; if there are none, those of Paceline's training."""
    own = tuple(frame for frame in frames if is_own(frame.file))
    if own:
        return own
    ours = tuple(frame for frame in frames if frame.file.startswith(PACKAGE + os.sep))
    return tuple(f for f in ours if os.path.relpath(f.file, PACKAGE).split(os.sep)[0] not in _STARTERS)


# These packages run the script; no rank is ever stuck in them by itself.
_STARTERS = {"watch", "launching", "cli"}


def name_line(frame: Frame) -> str:
    """Return a frame's file and line: `train.py:31`."""
    path = shorten_path(frame.file)
    return f"{path}:{frame.line}" if frame.line else path


def name_place(frame: Frame) -> str:
    """Return a frame's place: `train.py:31 in evaluate`, or `train.py:31` outside of functions."""
    where = name_line(frame)
    return where if frame.function in ("", "<module>") else f"{where} in {frame.function}"


def name_exit(exit_code: int | None) -> str:
    """Return how a process ended, to follow "it": `has ended (exit code 0)`, `was killed by SIGKILL`."""
    signal_name = None if exit_code is None else name_signal(exit_code)
    if signal_name is not None:
        return f"was killed by {signal_name}"
    return "has ended" if exit_code is None else f"has ended (exit code {exit_code})"
