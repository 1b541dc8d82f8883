"""The bytes between a rank and the launcher."""

from __future__ import annotations

import dataclasses

import pytest

from paceline.launching.ending.endings import Ending
from paceline.launching.watcher import WatchMessage
from paceline.watch.launcher.clock import Stillness
from paceline.watch.launcher.nodes import NodeState
from paceline.watch.protocol.report import (
    Beat,
    Call,
    Fact,
    Frame,
    Group,
    Pace,
    PlaceTime,
    Process,
    Report,
    Seen,
    Stack,
)
from paceline.watch.protocol.wire import Ask, Unpacker, from_json, pack, to_json
from paceline.watch.reasoning.pace import BeatInterval, RankPace

FRAMES = (Frame("/a/train.py", 3, "step", "loss.backward()"), Frame("/torch/\udce9.py", 0, "f"))
CALL = Call("0", 5, "all_reduce", ((2, 3), ()), ("float32", "int64"), "sum", None, False, 1.5, FRAMES)
BEAT = Beat(2, 1.25, "running", {"0": 5}, {"0": 4}, 77, False)
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
FACT = Fact("weights", "step 3", (0, 1), 7, {"sums": [1.5, None]}, FRAMES)
LAST = dataclasses.replace(
    REPORT,
    phase="leaving",
    last=Ending(0, "error", 1, 5.0, True, words="failed with OSError: gone"),
    issued={"0": 5},
)


def test_messages_come_through_however_they_are_cut():
    messages = [BEAT, PACED, dataclasses.replace(BEAT, facts=(FACT,)), Ask(), REPORT, LAST]
    data = b"".join(map(pack, messages))
    for size in (1, 7, len(data)):
        unpacker = Unpacker()
        parts = [data[at : at + size] for at in range(0, len(data), size)]
        assert [message for part in parts for message in unpacker.feed(part)] == messages


def test_frames_are_written_once():
    many = dataclasses.replace(REPORT, calls=(CALL,) * 100)
    assert pack(many).count(b"loss.backward()") == 1
    assert list(Unpacker().feed(pack(many))) == [many]


def test_what_nodes_publish_comes_through():
    process = Process(7, "node1", 12, "sleeping", native=FRAMES)
    seen = Seen(8, {7: process}, {7: LAST}, 2.5)
    message = WatchMessage("it hangs", {"code": "PL800", "places": [{"ranks": [0]}]})
    state = NodeState("node1", (7,), Stillness(1.0, 2.0, has_waiting=True), seen, message)
    pace = RankPace(7, ("0", "1"), (BeatInterval(3, -0.5, 1.0, 0.25, 4, ("0",), 9),))
    state = dataclasses.replace(state, paces=(pace,), asked_at_s=9.5, answers={7: REPORT}, facts=((7, FACT),))
    assert from_json(NodeState, to_json(state)) == state


@pytest.mark.parametrize(
    "body",
    [
        *(b"[]", b"nonsense", b"Bet [[],[]]", b"Beat", b"Beat [[],[]]", b"Beat {}", b"Ask [[true,1],[]]"),
        *(b"Report [3,[]]", b"Report " + b"[" * 100_000, pack(REPORT)[4:].replace(b"[0,1]", b"[0,9]")),
    ],
)
def test_other_bytes_are_refused(body):
    with pytest.raises(ValueError):  # noqa: PT011 (of any text)
        list(Unpacker().feed(len(body).to_bytes(4, "big") + body))


def test_a_length_beyond_reason_is_refused():
    with pytest.raises(ValueError, match="bytes; the most is"):
        list(Unpacker().feed(b"GET / HTTP/1.1"))
