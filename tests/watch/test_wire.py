"""The bytes between a rank and the launcher."""

from __future__ import annotations

import dataclasses

import pytest

from paceline.launching.ending.endings import Ending
from paceline.watch.protocol.report import Beat, Call, Frame, Group, Pace, PlaceTime, Report, Stack
from paceline.watch.protocol.wire import Ask, Unpacker, pack

FRAMES = (Frame("/a/train.py", 3, "step", "loss.backward()"), Frame("/torch/\udce9.py", 0, "f"))
CALL = Call("0", 5, "all_reduce", ((2, 3), ()), ("float32", "int64"), "sum", None, False, 1.5, FRAMES)
BEAT = Beat(2, 1.25, "running", {"0": 5}, {"0": 4}, (dataclasses.replace(CALL, frames=()),), 77, False)
PACED = dataclasses.replace(
    BEAT, pace=Pace(5, (PlaceTime(0.75, True, FRAMES), PlaceTime(0.25, False, FRAMES[:1])))
)
REPORT = Report(
    2,
    3.5,
    "joining",
    {"0": Group("0", "world", (0, 1))},
    (CALL, CALL),
    (Stack("MainThread", FRAMES),),
    meets="address 127.0.0.1, port 29500, for 2 ranks",
    num_named=3,
    made_at={"1": FRAMES[0]},
)
LAST = dataclasses.replace(
    REPORT,
    phase="leaving",
    last=Ending(0, "error", 1, 5.0, True, words="failed with OSError: gone"),
    issued={"0": 5},
)


def test_messages_come_through_however_they_are_cut():
    messages = [BEAT, PACED, Ask(), REPORT, LAST]
    data = b"".join(map(pack, messages))
    for size in (1, 7, len(data)):
        unpacker = Unpacker()
        parts = [data[at : at + size] for at in range(0, len(data), size)]
        assert [message for part in parts for message in unpacker.feed(part)] == messages


def test_frames_are_written_once():
    many = dataclasses.replace(REPORT, calls=(CALL,) * 100)
    assert pack(many).count(b"loss.backward()") == 1
    assert list(Unpacker().feed(pack(many))) == [many]


@pytest.mark.parametrize(
    "body", [b"[]", b"{}", b"nonsense", b'{"bet":{}}', b'{"beat":{"calls":[]}}', b'{"report":{"frames":3}}']
)
def test_other_bytes_are_refused(body):
    with pytest.raises(ValueError):  # noqa: PT011 (of any text)
        list(Unpacker().feed(len(body).to_bytes(4, "big") + body))


def test_a_length_beyond_reason_is_refused():
    with pytest.raises(ValueError, match="bytes; the most is"):
        list(Unpacker().feed(b"GET / HTTP/1.1"))
