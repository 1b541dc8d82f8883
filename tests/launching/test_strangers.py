"""Strangers at every open port of a job of two nodes: it goes on, and tells them nothing.

They reach the ports and do not speak torch's protocols. One that does may do anything, since torch's stores
and gloo have no authentication (docs/run.md, "Open ports").
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import struct
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil
import pytest

from tests.launching.launched import Launched, paceline_run, script
from tests.launching.test_meeting import c10d, free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

DEEP = b'{"a":' * 50_000
# What a stranger sends; it then waits for an answer.
WORDS = {
    "nothing": b"",
    "a request of HTTP": b"GET /status HTTP/1.1\r\nHost: node0\r\n\r\n",
    "a greeting of TLS": bytes.fromhex("16030100c2010000be0303") + bytes(180),
    "zeros": bytes(4096),
    "ones": b"\xff" * 4096,
    "noise": random.Random(1).randbytes(5000),
    "much noise": random.Random(2).randbytes(1 << 20),
    "deep JSON": struct.pack(">I", len(DEEP)) + DEEP,
    "a length of a gigabyte": struct.pack(">I", 1 << 30) + bytes(10_000),
    "a length of 2^63": struct.pack("<Q", 1 << 63) + bytes(10_000),
    "a request for the job's state": struct.pack(">I", 30) + b'{"kind": "status", "job": "j"}',
    "a pickle": b"\x80\x04cos\nsystem\n(S'true'\ntR.",
}
_MANY = 100


def attack(port: int, words: bytes) -> bytes:
    """Send words to a port of this machine, and return the answer."""
    answer = b""
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), 2) as link:
        link.settimeout(0.3)
        link.sendall(words)
        while len(answer) < 1 << 20 and (part := link.recv(65536)):
            answer += part
    return answer


def crowd(port: int) -> None:
    """Hold many connections open, and end each with a reset."""
    with ExitStack() as stack:
        for _ in range(_MANY):
            with suppress(OSError):
                link = stack.enter_context(socket.create_connection(("127.0.0.1", port), 2))
                link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        time.sleep(0.5)


def list_ports(jobs: list[Launched]) -> set[int]:
    """Return the ports at which launchers and ranks listen."""
    found = set()
    for job in jobs:
        for process in job.processes():
            with suppress(psutil.Error):
                links = process.net_connections("tcp")
                found |= {link.laddr.port for link in links if link.status == psutil.CONN_LISTEN}
    return found


def test_strangers_at_the_ports_of_a_job_disturb_nothing_and_learn_nothing(tmp_path: Path) -> None:
    words = ["--nnodes", "2", *c10d(f"127.0.0.1:{free_port()}"), "--max-restarts", "0"]
    command = paceline_run(*words, script("steps.py"), str(tmp_path))
    steps = tmp_path / "steps.jsonl"

    def count() -> int:
        return len(steps.read_text().splitlines()) if steps.exists() else 0

    def await_steps(least: int) -> None:
        end_s = time.monotonic() + 60
        while count() < least:
            assert time.monotonic() < end_s, [job.text for job in jobs]
            assert all(job.process.poll() is None for job in jobs), [job.text for job in jobs]
            time.sleep(0.1)

    with ExitStack() as stack:
        jobs = [stack.enter_context(Launched(tmp_path / str(node), command)) for node in range(2)]
        await_steps(5)
        ports = list_ports(jobs)
        assert len(ports) >= 4, "the store of the job, that of the round, and gloo's of two ranks"
        secrets = [b'"paceline"', b"nodes", str(tmp_path).encode(), os.uname().nodename.encode(), b"steps.py"]
        for port in sorted(ports):
            for kind, sent in WORDS.items():
                answer = attack(port, sent)
                assert not any(secret in answer for secret in secrets), (port, kind, answer[:500])
            crowd(port)
            await_steps(count() + 5)
        assert list_ports(jobs) == ports
        rows = [json.loads(line) for line in steps.read_text().splitlines()]
        assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
        assert len({row["born_s"] for row in rows}) == 1, "the same ranks all the while"
        for job in jobs:
            job.signal(signal.SIGTERM)
        assert [job.wait(60) for job in jobs] == [75, 75], [job.text for job in jobs]
