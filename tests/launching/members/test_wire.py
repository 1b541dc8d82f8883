"""Launchers that talk over real sockets, the state that `paceline run --status` prints, and bad input."""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from paceline.cli.main import main
from paceline.errors import PacelineError
from paceline.launching.members.endpoints import read_endpoints
from paceline.launching.members.membership import Membership
from paceline.launching.members.records import Terms
from paceline.launching.members.status import ask_status
from paceline.launching.members.wire import Wire, listen, pack, unpack
from paceline.launching.members.world import Member, NodeWorld, Waits


class Node:
    """A launcher without ranks."""

    def __init__(self, name: str, endpoint: tuple[str, int], *, founds: bool, job: str = "j") -> None:
        listener = listen("127.0.0.1", endpoint[1] if founds else 0)
        self.me = Member(name, name, "127.0.0.1", listener.getsockname()[1])
        self.changed = threading.Condition()
        self.world: NodeWorld | None = None
        self.losses: list[str] = []
        self.errors: list[PacelineError] = []
        self.wire = Wire(listener, 0.02)
        self.inner = Membership(
            self.me,
            Terms(job, 1, 3),
            Waits(last_call_s=60.0),
            self.wire,
            self,
            time.monotonic(),
            endpoints=[endpoint],
            founds=founds,
        )
        self.wire.start(self.inner)
        self.want()

    def want(self) -> None:
        self.wire.post(lambda: self.inner.want_round({"store_port": 1, "master_port": 1}, time.monotonic()))

    def formed(self, world: NodeWorld) -> None:
        with self.changed:
            self.world = world
            self.changed.notify_all()

    def over(self, reason: str, *, lost: bool) -> None:
        self.losses.append(reason)
        self.want()

    def closed(self, *, failed: bool) -> None: ...

    def failed(self, error: PacelineError) -> None:
        self.errors.append(error)

    def wait_for(self, *names: str) -> None:
        with self.changed:
            assert self.changed.wait_for(
                lambda: self.world is not None and {m.name for m in self.world.members} == set(names), 20
            ), f"{self.me.name}: {self.world}"


@contextmanager
def three() -> Iterator[list[Node]]:
    endpoint = "127.0.0.1", find_free_port()
    nodes = [Node(name, endpoint, founds=name == "a") for name in "abc"]
    try:
        for node in nodes:
            node.wait_for("a", "b", "c")
        yield nodes
    finally:
        for node in nodes:
            node.wire.end()


def find_free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_launchers_go_on_over_sockets_when_the_first_one_ends() -> None:
    with three() as (first, *others):
        first.wire.end()
        for node in others:
            node.wait_for("b", "c")
            assert node.losses == ["a (127.0.0.1) is lost: its connection was closed"]


def test_the_state_of_a_job_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with three() as nodes:
        # Asked at one that follows: it names the leader.
        place = f"127.0.0.1:{nodes[2].me.port}"
        assert main(["run", "--status", "--rdzv-endpoint", place, "--rdzv-id", "j"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0] == "job j: frozen, round 1, 1 to 3 nodes"
        assert [line.split()[0] for line in lines[2:]] == ["0", "1", "2"]
        assert lines[2].split()[1] == "a", (
            "the one of the endpoint is number 0, the others follow as they came"
        )
        assert {line.split()[1] for line in lines[2:]} == {"a", "b", "c"}
        nodes[1].wire.end()
        nodes[0].wait_for("a", "c")
        assert main(["run", "--status", "--json", "--rdzv-endpoint", place, "--rdzv-id", "j"]) == 0
        report = json.loads(capsys.readouterr().out)
        assert (report["state"], report["round"]) == ("frozen", 2)
        assert main(["run", "--status", "--rdzv-endpoint", place, "--rdzv-id", "k"]) == 2
        assert "serves the job 'j'" in capsys.readouterr().err
    assert main(["run", "--status", "--rdzv-endpoint", place, "--rdzv-id", "j"]) == 1
    assert "non-existent" in capsys.readouterr().out


def test_another_job_at_the_endpoint_is_refused_by_name() -> None:
    with three() as nodes:
        stranger = Node("x", ("127.0.0.1", nodes[0].me.port), founds=False, job="k")
        deadline = time.monotonic() + 20
        while not stranger.errors:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        stranger.wire.end()
        assert stranger.errors[0].code == "PL376"
        assert "serves the job 'j'" in str(stranger.errors[0])
        assert nodes[0].losses == []


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        struct.pack(">I", 1 << 30),
        pack({"kind": "join"}),
        pack({"kind": "ask", "job": "j", "member": {"key": 1}}),
        pack({"kind": "propose", "job": "j", "world": None}),
        struct.pack(">I", 2) + b"[]",
        struct.pack(">I", 4) + b"\xff\xff\xff\xff",
        b"",
    ],
)
def test_what_is_no_message_disturbs_nobody(data: bytes) -> None:
    with three() as nodes:
        for node in nodes:
            with socket.create_connection(("127.0.0.1", node.me.port)) as link:
                link.sendall(data)
        time.sleep(0.3)
        report = ask_status([("127.0.0.1", nodes[0].me.port)], "j")
        assert report is not None
        assert [member["is_here"] for member in report["members"]] == [True] * 3
        assert [node.losses for node in nodes] == [[], [], []]


def test_messages_are_read_as_they_were_sent_in_any_pieces() -> None:
    messages = [{"kind": "a", "text": "ä" * 1000}, {"kind": "b"}, {"n": [1, None, 2.5]}]
    data, found, buffer = b"".join(map(pack, messages)), [], bytearray()
    for i in range(0, len(data), 7):
        buffer += data[i : i + 7]
        found += unpack(buffer)
    assert (found, buffer) == (messages, b"")


@pytest.mark.parametrize(
    ("text", "endpoints"),
    [
        ("", [("localhost", 29400)]),
        ("node0", [("node0", 29400)]),
        ("node0:1", [("node0", 1)]),
        ("node0:1,node1:2", [("node0", 1), ("node1", 2)]),
        ("node0, node1:7", [("node0", 7), ("node1", 7)]),
        ("[::1]:7", [("::1", 7)]),
        ("::1", [("::1", 29400)]),
        ("[::1]", [("::1", 29400)]),
    ],
)
def test_endpoints(text: str, endpoints: list[tuple[str, int]]) -> None:
    assert read_endpoints(text) == endpoints


@pytest.mark.parametrize("text", ["node0:x", "node0:0", "node0:70000", "a:1,b:"])
def test_a_port_that_is_none_is_refused(text: str) -> None:
    if text.endswith(":"):
        assert read_endpoints(text) == [("a", 1), ("b", 1)]
        return
    with pytest.raises(PacelineError, match="PL377"):
        read_endpoints(text)


@pytest.mark.parametrize("words", [["--detect-s", "0"], ["--detect-s", "nan"], ["--join-timeout", "-1"]])
def test_a_wait_that_is_too_short_is_refused(
    words: list[str], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    codes: list[int] = []

    def note(code: int) -> None:
        codes.append(code)
        raise SystemExit(code)

    monkeypatch.setattr("os._exit", note)
    with pytest.raises(SystemExit):
        main(["run", *words, "train.py"])
    assert codes == [2]
    assert "PL378" in capfd.readouterr().err
