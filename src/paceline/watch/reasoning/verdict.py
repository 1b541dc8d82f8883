"""Builds a verdict: merges ranks at the same place, and adds the rule and the next move of its code."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from paceline.phrases import name_ranks
from paceline.watch.protocol.report import Frame, SharedPlace, Verdict
from paceline.watch.protocol.words import name_call, name_group, name_place, to_plural
from paceline.watch.reasoning.states import State

# With more places than this, the last ones, of few ranks each, are merged into one.
_MANY_PLACES = 12


@dataclass(frozen=True)
class Advice:
    """The rule and the next move that belong to a code.

    Attributes:
        rule: the rule that was broken.
        fix: the next move, unless a more specific one is known.
    """

    rule: str
    fix: str


ADVICE: dict[str, Advice] = {
    "PL800": Advice(
        "A collective completes only when every rank of its group has called it.",
        "Check the line where the missing rank is: make the call on every rank or on none.",
    ),
    "PL801": Advice(
        "A collective completes only when every rank of its group has called it; a rank that has ended "
        "never will.",
        "Give all ranks the same number of steps, and make them leave their loops together.",
    ),
    "PL802": Advice(
        "The ranks of a group must call the same collectives in the same order.",
        "Make the order the same on all ranks: no collective in a branch, a loop or an except that only "
        "some ranks take.",
    ),
    "PL803": Advice(
        "This collective needs tensors of one size on all ranks of its group.",
        "Print the shape on each rank before the call; pad, or exchange the sizes first.",
    ),
    "PL804": Advice(
        "A collective needs the same dtype on all ranks of its group; it converts nothing.",
        "Convert before the call, with the same `.to(dtype)` on every rank.",
    ),
    "PL805": Advice(
        "A reduction needs the same operation on all ranks of its group.",
        "Pass the same `op=` on every rank.",
    ),
    "PL806": Advice(
        "Ranks that share several groups must call the collectives of these groups in one order.",
        "Choose an order of the groups (for example outer axis first), and use it on all ranks.",
    ),
    "PL807": Advice(
        "Every rank of the job must call new_group, init_device_mesh and the like in the same order, "
        "including groups that it is not in.",
        "Move the call out of the branch, or pass `use_local_synchronization=True` on all members.",
    ),
    "PL808": Advice(
        "Each send needs a receive on the other side, and each receive a send, in the same order.",
        "Pair them by rank. If two ranks exchange data, use batch_isend_irecv, or have one of them receive "
        "first.",
    ),
    "PL809": Advice(
        "A stopped process takes part in no collective.",
        "Resume it with `kill -CONT PID`, or end it with `kill -KILL PID`.",
    ),
    "PL810": Advice(
        "init_process_group returns when as many ranks as the world size says have met at one address and "
        "port.",
        "Take rank, world size, address and port from the environment that `paceline run` sets.",
    ),
    "PL811": Advice(
        "A job makes progress when its ranks compute or communicate.",
        "Check the lines above: the ranks wait there for something that does not arrive.",
    ),
    "PL812": Advice(
        "A collective needs all of its group's machines.",
        "Check that the node and its network are up, then start the job again; it resumes from its "
        "checkpoint if the script saves one.",
    ),
    "PL813": Advice(
        "Once all ranks have called a collective, it depends on the network and the backend alone.",
        "Check the links between these nodes (GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME, firewall, MTU), and "
        "that each rank has its own device.",
    ),
}


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
    advice = ADVICE[code]
    # The same cause may be found twice.
    once = tuple(dict.fromkeys(more))
    return Verdict(code, headline, tuple(places), rule or advice.rule, fix or advice.fix, once)


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
