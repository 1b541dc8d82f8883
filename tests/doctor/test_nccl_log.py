"""Logs of NCCL_DEBUG=INFO, in the forms of NCCL 2.10 to 2.30."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.cli.main import main
from paceline.doctor.nccl_log import describe_nccl_log, judge_nccl_log, read_nccl_log

SOCKET = """\
[rank0]: starting
gpu-a:101:101 [0] NCCL INFO Bootstrap : Using eth0:10.9.0.5<0>
gpu-a:101:101 [0] NCCL INFO NCCL version 2.29.2+cuda12.8
gpu-a:101:140 [0] NCCL INFO NET/IB : No device found.
gpu-a:101:140 [0] NCCL INFO NET/Socket : Using [0]eth0:10.9.0.5<0> [1]docker0:172.17.0.1<0>
gpu-a:101:140 [0] NCCL INFO Using network Socket
gpu-a:101:140 [0] NCCL INFO Channel 00/02 :    0   1   2   3
gpu-a:101:140 [0] NCCL INFO Channel 01/02 :    0   1   2   3
gpu-a:101:140 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM/read
gpu-b:202:240 [0] NCCL INFO Channel 00/0 : 1[1] -> 2[0] [receive] via NET/Socket/0
gpu-a:101:101 [0] NCCL INFO AllReduce: 1024 Bytes -> Algo TREE proto LL channel{Lo..Hi}={0..1}
gpu-a:101:101 [0] NCCL INFO AllReduce: 67108864 Bytes -> Algo RING proto SIMPLE channel{Lo..Hi}={0..1}
"""
IB = """\
n1:7:9 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB ; OOB ib0:10.0.0.1<0>
n1:7:9 [0] NCCL INFO Using network IB
n1:7:9 [0] NCCL INFO Channel 00/0 : 0[0] -> 8[0] [send] via NET/IB/0/GDRDMA
n1:7:9 [0] NCCL INFO Channel 01/0 : 0[0] -> 8[0] [send] via NET/IB/1/GDRDMA
n1:7:9 [0] NCCL INFO Channel 00 : 0[1b000] -> 1[1c000] via P2P/IPC
n1:7:9 [0] NCCL INFO 8192 Bytes -> Algo 1 proto 2 time 42.1
"""


def judge(text: str) -> dict[str, str]:
    return {finding.code: str(finding) for finding in judge_nccl_log(read_nccl_log(text))}


def test_what_nccl_chose_is_listed() -> None:
    said = describe_nccl_log(read_nccl_log(SOCKET))
    assert "NCCL         2.29.2+cuda12.8" in said
    assert "network      Socket (eth0, docker0)" in said
    assert "channels     2, the first ring 0 1 2 3" in said
    assert "1 by P2P, 1 by NET/Socket" in said
    assert "Tree LL 1024 to 1024 B; Ring Simple 67108864 to 67108864 B" in said
    assert "Ring Simple 8192 to 8192 B" in describe_nccl_log(read_nccl_log(IB))


def test_tcp_between_nodes_and_interfaces_that_lead_nowhere() -> None:
    found = judge(SOCKET)
    assert found.keys() == {"PL994", "PL995"}
    assert "by TCP over eth0 and docker0: it found no InfiniBand or RoCE device" in found["PL994"]
    assert "NCCL may use docker0" in found["PL995"]
    off = judge(SOCKET + "gpu-a:101:140 [0] NCCL INFO NCCL_IB_DISABLE set by environment to 1.\n")
    assert "NCCL_IB_DISABLE is set" in off["PL994"]


def test_a_fast_network_has_no_finding_and_half_of_it_has() -> None:
    assert judge(IB) == {}
    slow = IB.replace("NET/IB/1/GDRDMA", "NET/IB/1")
    slow += "n1:7:9 [0] NCCL INFO NET/IB : GPU Direct RDMA Disabled for HCA 1 'mlx5_1'\n"
    found = judge(slow)
    assert found.keys() == {"PL996"}
    assert "1 of 2 connections" in found["PL996"]
    assert "HCA 1 'mlx5_1'" in found["PL996"]


@pytest.mark.parametrize(
    ("line", "seen"),
    [
        ("n1:7:9 [0] NCCL INFO NCCL_P2P_DISABLE set by environment to 1", "NCCL_P2P_DISABLE=1 is set"),
        ("n1:7:9 [0] NCCL INFO P2P is disabled between connected GPUs 1 and 0.", "connected GPUs 1 and 0"),
    ],
)
def test_exchange_within_a_node_that_is_off(line: str, seen: str) -> None:
    found = judge(f"{IB}{line}\n")
    assert found.keys() == {"PL997"}
    assert seen in found["PL997"]


def test_one_machine_without_a_network_has_no_finding() -> None:
    lines = [line for line in SOCKET.splitlines() if "gpu-b" not in line]
    assert judge("\n".join(lines)) == {}


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "run.log"
    log.write_text(SOCKET)
    assert main(["doctor", "--nccl-log", str(log)]) == 1
    out = capsys.readouterr().out
    assert "the first ring 0 1 2 3" in out
    assert "[PL994]" in out
    assert main(["doctor", "--nccl-log", str(log), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["rings"] == {"00": [0, 1, 2, 3], "01": [0, 1, 2, 3]}
    log.write_text("epoch 1\n")
    assert main(["doctor", "--nccl-log", str(log)]) == 2
    assert "PL998" in capsys.readouterr().err
