"""What a launcher says of the place where nodes meet, when they did not."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.doctor import meeting_check
from paceline.doctor.meeting_check import describe_meeting, find_announced
from tests.launching.nodes import Nodes, why_no_nodes

REASON = why_no_nodes()


@pytest.fixture
def own_name(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Have the name node1 stand for an address."""
    real = socket.getaddrinfo

    def stand_for(address: str) -> None:
        def getaddrinfo(host: str | bytes, *words: Any, **named: Any) -> Any:
            host = os.fsdecode(host)
            if host == "node1" and not address:
                raise socket.gaierror(-2, "Name or service not known")
            return real(address if host == "node1" else host, *words, **named)

        monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)

    monkeypatch.setattr(socket, "gethostname", lambda: "node1")
    return stand_for


def test_what_gloo_would_announce(own_name: Any) -> None:
    own_name("127.0.1.1")
    assert find_announced({}) == ("127.0.1.1", "the name node1 stands for it")
    own_name("")
    assert find_announced({}) == ("127.0.0.1", "the name node1 stands for nothing")
    own_name("192.0.2.7")
    assert find_announced({})[1] == "the name node1 stands for 192.0.2.7, which is another machine's"
    assert find_announced({"GLOO_SOCKET_IFNAME": "lo"}) == ("127.0.0.1", "GLOO_SOCKET_IFNAME=lo")
    assert find_announced({"GLOO_SOCKET_IFNAME": "ib7"})[1] == "GLOO_SOCKET_IFNAME=ib7 has no address"


def test_the_path_and_the_name_in_one_sentence(own_name: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    own_name("127.0.1.1")
    # The test's server is on the loopback.
    monkeypatch.setattr(meeting_check, "is_loopback", lambda host: host != "127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        said = describe_meeting("127.0.0.1", port, {})
        assert f"node1 reaches 127.0.0.1 on port {port}, but gloo would announce 127.0.1.1 here" in said
        assert "/etc/hosts" in said
    said = describe_meeting("127.0.0.1", port, {})
    assert f"reaches 127.0.0.1, where nothing listens on port {port}" in said
    monkeypatch.setattr(meeting_check, "_PATIENCE_S", 0.2)
    assert "on node1, no.such.name.invalid does not resolve" in describe_meeting(
        "no.such.name.invalid", 1, {}
    )
    assert describe_meeting("", 0, {}).startswith("node1: gloo would announce 127.0.1.1")


@pytest.mark.slow
@pytest.mark.skipif(REASON is not None, reason=REASON or "")
@pytest.mark.timeout(120)
def test_ranks_that_cannot_meet_are_told_why(tmp_path: Path) -> None:
    """Both nodes announce their loopback, so each connects to itself."""
    script = tmp_path / "meet.py"
    script.write_text(
        "import datetime\nimport torch.distributed as dist\n"
        "dist.init_process_group('gloo', timeout=datetime.timedelta(seconds=5))\n"
        "dist.barrier()\n"
    )
    command = [sys.executable, "-m", "paceline", "run", "--nnodes", "2", "--nproc-per-node", "1"]
    command += ["--rdzv-backend", "c10d", "--join-timeout", "20"]
    with Nodes(2) as nodes:
        command += ["--rdzv-endpoint", f"{nodes.address(0)}:29400", str(script)]
        running = [
            subprocess.Popen(
                nodes.command(node, command),
                stderr=subprocess.PIPE,
                text=True,
                cwd=tmp_path,
                env=os.environ | {"GLOO_SOCKET_IFNAME": "lo"},
            )
            for node in range(2)
        ]
        said = [process.communicate(timeout=100)[1] for process in running]
    # The node whose ranks fail first ends the job; the other one may lose the store before its ranks fail.
    announced = "gloo would announce 127.0.0.1 here (GLOO_SOCKET_IFNAME=lo), at which"
    told = [f"doctor: node{n} reaches 10.77.0.10" in said[n] and announced in said[n] for n in range(2)]
    assert any(told), said
    assert all(told[n] or "[PL372]" in said[n] for n in range(2)), said
