"""The command on real nodes: namespaces with links of one speed, and faults planted in them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.launching.nodes import Nodes, why_no_nodes

REASON = why_no_nodes()
pytestmark = [
    pytest.mark.skipif(REASON is not None, reason=REASON or ""),
    pytest.mark.timeout(150),
    pytest.mark.slow,
]
COUNT = 3
RATE_MBIT = 200.0


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    with Nodes(COUNT) as made:
        for node in range(COUNT):
            made.limit(node, RATE_MBIT)
        yield made


def ask(
    nodes: Nodes,
    tmp_path: Path,
    *words: str,
    names: Sequence[Any] = ("address",) * COUNT,
    environ: Sequence[dict[str, str]] = ({},) * COUNT,
    only: Sequence[int] = range(COUNT),
    limit_s: float = 100,
) -> tuple[dict[str, Any], list[str], list[int]]:
    """Run the command on the nodes; return the first one's table, what the others printed, and exit codes."""
    command = [sys.executable, "-m", "paceline", "doctor", "--nnodes", str(COUNT), "--rdzv-endpoint"]
    command += [f"{nodes.address(0)}:29500", "--join-timeout", "15", *words]
    with ExitStack() as stack:
        running = []
        for node in only:
            given = ["--json"] if node == 0 else []
            running.append(
                stack.enter_context(
                    subprocess.Popen(
                        nodes.command(node, [*command, *given], own_name=names[node]),
                        stdout=subprocess.PIPE,
                        stderr=subprocess.PIPE,
                        text=True,
                        cwd=tmp_path,
                        env=os.environ | {"OMP_NUM_THREADS": "1"} | environ[node],
                    )
                )
            )
        printed = [process.communicate(timeout=limit_s) for process in running]
    codes = [process.returncode for process in running]
    return json.loads(printed[0][0] or "{}"), [out + error for out, error in printed], codes


def told(table: dict[str, Any]) -> list[str]:
    """Return the findings, without those on a machine that other tests keep busy."""
    return [
        f"{found['where']}: {found['saw']} [{found['code']}]"
        for found in table["findings"]
        if found["code"] not in ("PL970", "PL971")
    ]


def test_a_healthy_cluster(nodes: Nodes, tmp_path: Path) -> None:
    started_s = time.monotonic()
    table, printed, codes = ask(nodes, tmp_path, "--folder", str(tmp_path), "--nodelist", "good.txt")
    assert told(table) == []
    assert table["nodes"] == ["node0", "node1", "node2"]
    assert len(table["links"]) == COUNT * (COUNT - 1)
    assert all(10e6 < link["bytes_per_s"] < 60e6 for link in table["links"])
    assert table["all_reduce_s"].keys() >= {"8", str(1 << 20)}
    assert "checked" in printed[1]
    assert time.monotonic() - started_s < 100
    if codes[0] == 0:
        assert (tmp_path / "good.txt").read_text().split() == ["node0", "node1", "node2"]
        assert (tmp_path / "good.txt.failed").read_text() == ""


def test_a_slow_node_and_a_name_for_loopback(nodes: Nodes, tmp_path: Path) -> None:
    nodes.limit(2, 20.0)
    table, _, codes = ask(nodes, tmp_path, "--no-collectives", names=("address", "loopback", "address"))
    found = told(table)
    assert any(line.startswith("all links of node2: ") and "PL985" in line for line in found), found
    assert any(line.startswith("node1: gloo would announce 127.0.1.1 there") for line in found), found
    assert len(found) == 2
    assert codes == [1, 1, 1]


def test_differing_settings_and_folders(nodes: Nodes, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print(1)\n")
    environ = ({}, {}, {"NCCL_ALGO": "Ring", "TZ": "Asia/Tokyo"})
    table, _, _ = ask(nodes, tmp_path, "--no-collectives", "train.py", environ=environ)
    found = told(table)
    assert any("NCCL_ALGO: node2 has Ring; the others have none" in line for line in found), found
    assert any("time zone: node2 has +0900" in line for line in found), found
    assert len(found) == 2


def test_what_larger_messages_cannot_pass(nodes: Nodes, tmp_path: Path) -> None:
    """The switch carries 600 bytes towards node 1, whose own interface believes in 1,500."""
    subprocess.run(["ip", "-n", nodes.switch, "link", "set", "p1", "mtu", "600"], check=True)
    table, _, _ = ask(nodes, tmp_path, "--no-collectives")
    found = told(table)
    assert found
    assert all("nothing larger arrives" in line and "PL984" in line and "node1" in line for line in found), (
        found
    )


def test_a_node_that_others_cannot_reach_and_one_that_never_comes(nodes: Nodes, tmp_path: Path) -> None:
    rule = ["ip", "-n", nodes.namespace(2), "route", "add", "blackhole", nodes.address(1)]
    subprocess.run(rule, check=True)
    table, _, _ = ask(nodes, tmp_path, "--no-collectives")
    found = told(table)
    assert {line.split(":")[0] for line in found} == {"node1 to node2", "node2 to node1"}, found
    table, _, codes = ask(nodes, tmp_path, "--no-collectives", only=(0, 1))
    assert any("1 of 3 nodes did not come; node0 and node1 did" in line for line in told(table))
    assert codes == [1, 1]


def test_a_node_that_sends_slowly_and_receives_fast(nodes: Nodes, tmp_path: Path) -> None:
    shape = ["tc", "-n", nodes.namespace(1), "qdisc", "replace", "dev", "eth0", "root"]
    shape += ["tbf", "rate", "20mbit", "burst", "4000", "latency", "100ms"]
    subprocess.run(shape, check=True)
    table, _, _ = ask(nodes, tmp_path, "--no-collectives")
    found = told(table)
    assert len(found) == 1, found
    assert found[0].startswith("all links from node1: "), found


def test_a_node_whose_packets_are_lost_on_the_way_out(nodes: Nodes, tmp_path: Path) -> None:
    """What node 1 sends to node 2 is lost, and what node 2 sends arrives."""
    words = ["neigh", "replace", nodes.address(2), "lladdr", "02:00:00:00:00:99", "nud", "permanent"]
    subprocess.run(["ip", "-n", nodes.namespace(1), *words, "dev", "eth0"], check=True)
    table, _, _ = ask(nodes, tmp_path, "--no-collectives")
    found = told(table)
    assert found
    assert all("PL984" in line and "node1" in line and "node2" in line for line in found), found


def test_a_link_that_loses_packets(nodes: Nodes, tmp_path: Path) -> None:
    lose = ["tc", "-n", nodes.switch, "qdisc", "replace", "dev", "p2", "root", "netem", "loss", "5%"]
    done = subprocess.run(lose, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"this kernel cannot lose packets: {done.stderr.strip()}")
    table, _, _ = ask(nodes, tmp_path, "--no-collectives")
    found = told(table)
    assert found
    assert all("PL985" in line and "node2" in line for line in found), found


def test_wrong_results_of_one_node(nodes: Nodes, tmp_path: Path) -> None:
    """A patched torch on node 1 adds one to what an all-reduce returns."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "if 'cluster.rank' in ' '.join(sys.orig_argv):\n"
        "    import torch.distributed as dist\n"
        "    real = dist.all_reduce\n"
        "    def all_reduce(tensor, *words, **named):\n"
        "        real(tensor, *words, **named)\n"
        "        tensor += 1\n"
        "    dist.all_reduce = all_reduce\n"
    )
    path = f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    table, _, _ = ask(nodes, tmp_path, environ=({}, {"PYTHONPATH": path}, {}))
    assert [line for line in told(table) if "PL989" in line] == [
        "node1: all_reduce gave wrong numbers. [PL989]"
    ]


def wait_for_a_message(pid: int, address: str) -> None:
    """Wait until a process's node has had a connection with an address: the check has begun."""
    # The kernel lists addresses as hexadecimal numbers, with the last byte first.
    remote = f" {int.from_bytes(socket.inet_aton(address), 'little'):08X}:"
    end_s = time.monotonic() + 100
    while remote not in Path(f"/proc/{pid}/net/tcp").read_text():
        assert time.monotonic() < end_s
        time.sleep(0.05)


def test_a_node_that_stops_in_the_middle(nodes: Nodes, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "paceline", "doctor", "--nnodes", "3", "--rdzv-endpoint"]
    command += [f"{nodes.address(0)}:29500", "--no-collectives"]
    with ExitStack() as stack:
        running = [
            stack.enter_context(
                subprocess.Popen(
                    nodes.command(node, [*command, *(["--json"] if node == 0 else [])]),
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    cwd=tmp_path,
                )
            )
            for node in range(COUNT)
        ]
        wait_for_a_message(running[2].pid, nodes.address(1))
        running[2].kill()
        out, error = running[0].communicate(timeout=100)
        for process in running[1:]:
            process.communicate(timeout=100)
    found = told(json.loads(out))
    assert any(line.startswith("node2: it fell silent during") for line in found), (found, error)
    assert running[0].returncode == 1
