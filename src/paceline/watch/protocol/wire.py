"""Packs and unpacks the messages between the thread in a rank and the launcher, over a Unix stream socket.

A message is four bytes of length, big-endian, followed by that many bytes of JSON: an object with one key,
its kind (`beat`, `report` or `ask`). A rank sends a `Beat` unprompted every second, and a `Report` for each
`Ask`. A report lists each distinct frame once and its stacks refer to frames by number, because the calls of
a loop share most of their frames.

This is written by hand on purpose: every rank packs messages, and importing pydantic would cost each rank 0.5
s. Its JSON also rejects paths that are not UTF-8, which Python holds as surrogates. `nodes.py` avoids it for
the same reason.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from paceline.launching.ending.endings import Ending
from paceline.watch.protocol.report import (
    Beat,
    Call,
    Fact,
    Frame,
    Group,
    NotFinite,
    Pace,
    PlaceTime,
    Report,
    Stack,
)

_LENGTH_BYTES = 4
_MAX_BYTES = 64 << 20


@dataclass(frozen=True)
class Ask:
    """The launcher's request for a report.

    Attributes:
        is_full: whether to include all calls that are still recorded, not just the latest ones.
    """

    is_full: bool = False


Message = Beat | Report | Ask


def pack(message: Message) -> bytes:
    """Return the bytes of a message."""
    text: dict[str, Any]
    if isinstance(message, Beat):
        # Not `asdict` of hundreds of calls, which takes 5 ms.
        calls = [{**vars(call), "frames": ()} for call in message.calls]
        others = asdict(replace(message, calls=(), pace=None, facts=()))
        pace, facts = _pace_to_json(message.pace), facts_to_json(message.facts)
        text = {"beat": {**others, "calls": calls, "pace": pace, "facts": facts}}
    elif isinstance(message, Report):
        text = {"report": _report_to_json(message)}
    else:
        text = {"ask": asdict(message)}
    # ASCII, because a path that is not UTF-8 has surrogates, which have no bytes of their own.
    body = json.dumps(text, separators=(",", ":")).encode("ascii")
    return len(body).to_bytes(_LENGTH_BYTES, "big") + body


class Unpacker:
    """A parser that assembles messages from a stream of bytes, in pieces of any size."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> Iterator[Message]:
        """Take the next bytes, and yield the messages that they complete.

        Raises:
            ValueError: these bytes do not follow this protocol.
        """
        self._bytes += data
        while len(self._bytes) >= _LENGTH_BYTES:
            length = int.from_bytes(self._bytes[:_LENGTH_BYTES], "big")
            if length > _MAX_BYTES:
                raise ValueError(f"a message of {length} bytes; the most is {_MAX_BYTES}")
            end = _LENGTH_BYTES + length
            if len(self._bytes) < end:
                return
            body = bytes(self._bytes[_LENGTH_BYTES:end])
            del self._bytes[:end]
            yield _unpack(body)


def _unpack(body: bytes) -> Message:
    try:
        ((kind, value),) = json.loads(body).items()
        if kind == "beat":
            return _beat_from_json(value)
        if kind == "report":
            return _report_from_json(value)
        if kind == "ask":
            return Ask(**value)
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise ValueError(f"a message that cannot be read: {error!r}") from error
    raise ValueError(f"a message of the kind {kind!r}")


def _beat_from_json(value: dict[str, Any]) -> Beat:
    calls = tuple(_call_from_json(call, ()) for call in value["calls"])
    found = value["not_finite"]
    if found is not None:
        found = NotFinite(**{**found, "frames": tuple(Frame(**frame) for frame in found["frames"])})
    pace, facts = _pace_from_json(value["pace"]), facts_from_json(value["facts"])
    return Beat(**{**value, "calls": calls, "not_finite": found, "pace": pace, "facts": facts})


def facts_to_json(facts: Sequence[Fact]) -> list[dict[str, Any]]:
    """Return facts as JSON-able values."""
    return [{**vars(fact), "frames": [asdict(frame) for frame in fact.frames]} for fact in facts]


def facts_from_json(value: list[dict[str, Any]]) -> tuple[Fact, ...]:
    """Return the facts that `facts_to_json` has converted."""
    return tuple(
        Fact(
            **{**one, "ranks": tuple(one["ranks"]), "frames": tuple(Frame(**each) for each in one["frames"])}
        )
        for one in value
    )


def _pace_to_json(pace: Pace | None) -> dict[str, Any] | None:
    if pace is None:
        return None
    frames = _Frames()
    places = [[place.seconds, place.is_waiting, frames.add(place.frames)] for place in pace.places]
    return {"samples": pace.samples, "places": places, "frames": frames.to_json()}


def _pace_from_json(value: dict[str, Any] | None) -> Pace | None:
    if value is None:
        return None
    frames = [Frame(*fields) for fields in value["frames"]]
    return Pace(
        value["samples"],
        tuple(
            PlaceTime(seconds, is_waiting, tuple(frames[number] for number in numbers))
            for seconds, is_waiting, numbers in value["places"]
        ),
    )


class _Frames:
    """Distinct frames, numbered in the order of their first use."""

    def __init__(self) -> None:
        self.numbers: dict[Frame, int] = {}

    def add(self, frames: Sequence[Frame]) -> list[int]:
        return [self.numbers.setdefault(frame, len(self.numbers)) for frame in frames]

    def to_json(self) -> list[list[str | int]]:
        return [[frame.file, frame.line, frame.function, frame.text] for frame in self.numbers]


def _report_to_json(report: Report) -> dict[str, Any]:
    frames = _Frames()
    calls = [{**vars(call), "frames": frames.add(call.frames)} for call in report.calls]
    stacks = [{"thread": stack.thread, "frames": frames.add(stack.frames)} for stack in report.stacks]
    return {
        "rank": report.rank,
        "time_s": report.time_s,
        "phase": report.phase,
        "groups": [asdict(group) for group in report.groups.values()],
        "calls": calls,
        "stacks": stacks,
        "last": asdict(report.last) if report.last is not None else None,
        "issued": report.issued,
        "meets": report.meets,
        "joins_as": report.joins_as,
        "num_microbatches": report.num_microbatches,
        "num_named": report.num_named,
        "made_at": {name: frames.add([frame])[0] for name, frame in report.made_at.items()},
        "action": report.action,
        "awaited": report.awaited,
        "frames": frames.to_json(),
    }


def _report_from_json(value: dict[str, Any]) -> Report:
    frames = [Frame(*fields) for fields in value["frames"]]
    groups = [Group(group["name"], group["label"], tuple(group["ranks"])) for group in value["groups"]]
    return Report(
        rank=value["rank"],
        time_s=value["time_s"],
        phase=value["phase"],
        groups={group.name: group for group in groups},
        calls=tuple(_call_from_json(call, frames) for call in value["calls"]),
        stacks=tuple(
            Stack(stack["thread"], tuple(frames[number] for number in stack["frames"]))
            for stack in value["stacks"]
        ),
        last=Ending(**value["last"]) if value["last"] is not None else None,
        issued=value["issued"],
        meets=value["meets"],
        joins_as=value["joins_as"],
        num_microbatches=value["num_microbatches"],
        num_named=value["num_named"],
        made_at={name: frames[number] for name, number in value["made_at"].items()},
        action=value["action"],
        awaited=value["awaited"],
    )


def _call_from_json(value: dict[str, Any], frames: Sequence[Frame]) -> Call:
    return Call(
        **{
            **value,
            "sizes": tuple(tuple(size) for size in value["sizes"]),
            "dtypes": tuple(value["dtypes"]),
            "splits": tuple(tuple(each) for each in value["splits"]),
            "frames": tuple(frames[number] for number in value["frames"]),
        }
    )
