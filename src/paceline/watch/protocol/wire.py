"""Packs and unpacks the messages between the thread in a rank and the launcher, and between launchers.

A message is four bytes of length, big-endian, and that many bytes: the name of its type, a space, and JSON.
The JSON is a list of the message's fields and of its frames. A record inside is a list of its own fields, and
a frame is its number in the list of frames, because the calls of a loop share most of theirs. The annotations
of the types tell how to read them again.

A rank sends a `Beat` unprompted every second, and a `Report` for each `Ask`. Every rank packs messages, and
importing pydantic for it would cost each rank 0.5 s. Its JSON also rejects paths that are not UTF-8, which
Python holds as surrogates.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from paceline.watch.protocol.report import Beat, Frame, Report

_LENGTH_BYTES = 4
_MAX_BYTES = 64 << 20
_T = TypeVar("_T")


@dataclass(frozen=True)
class Ask:
    """The launcher's request for a report.

    Attributes:
        is_full: whether to include all calls that are still recorded, not just the latest ones.
    """

    is_full: bool = False


Message = Beat | Report | Ask
_KINDS: dict[bytes, Any] = {b"Beat": Beat, b"Report": Report, b"Ask": Ask}


def to_json(record: object) -> str:
    """Return a dataclass as JSON of ASCII: a path that is not UTF-8 has surrogates, which have no bytes."""
    frames: dict[Frame, int] = {}

    def encode(value: Any) -> object:
        return frames.setdefault(value, len(frames)) if type(value) is Frame else [*vars(value).values()]

    text = json.dumps(record, separators=(",", ":"), default=encode)
    return f"[{text},{json.dumps([[*vars(frame).values()] for frame in frames], separators=(',', ':'))}]"


def from_json(kind: Callable[..., _T], text: str | bytes) -> _T:
    """Return the dataclass of this type that `to_json` has converted.

    Raises:
        ValueError: it is something else.
    """
    try:
        value, frames = json.loads(text)
        found: _T = _find_reader(kind)(value, [Frame(*each) for each in frames])
    except (AttributeError, IndexError, KeyError, RecursionError, TypeError) as error:
        raise ValueError(f"no {kind} that can be read: {error!r}") from error
    return found


def pack(message: Message) -> bytes:
    """Return the bytes of a message."""
    body = f"{type(message).__name__} {to_json(message)}".encode("ascii")
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
            name, _, text = bytes(self._bytes[_LENGTH_BYTES:end]).partition(b" ")
            del self._bytes[:end]
            if name not in _KINDS:
                raise ValueError(f"a message of the kind {name[:20]!r}")
            yield from_json(_KINDS[name], text)


# ---- reading by annotations


@cache
def _find_reader(kind: Any) -> Any:
    """Return the function that restores a value of a type; `None` if JSON keeps it as it is."""
    args = get_args(kind)
    if kind is Frame:
        return lambda value, frames: frames[value]
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        return _read_record(kind, [_find_reader(hints[field.name]) for field in fields(kind)])
    if isinstance(kind, UnionType):  # with None
        inner = _find_reader(next(each for each in args if each is not NoneType))
        return (
            None if inner is None else lambda value, frames: None if value is None else inner(value, frames)
        )
    if get_origin(kind) is tuple and args[-1] is not Ellipsis:
        return _read_record(lambda *values: values, [_find_reader(each) for each in args])
    if get_origin(kind) is tuple:
        each = _find_reader(args[0])
        if each is None:
            return lambda value, frames: tuple(value)
        return lambda value, frames: tuple([each(item, frames) for item in value])
    if get_origin(kind) is dict:
        key, each = args[0], _find_reader(args[1]) or (lambda value, frames: value)
        return lambda value, frames: {key(name): each(item, frames) for name, item in value.items()}
    return None


def _read_record(kind: Any, readers: Sequence[Any]) -> Callable[[Any, Sequence[Frame]], Any]:
    def read(value: Any, frames: Sequence[Frame]) -> Any:
        pairs = zip(readers, value, strict=True)
        return kind(*[each if reader is None else reader(each, frames) for reader, each in pairs])

    return read
