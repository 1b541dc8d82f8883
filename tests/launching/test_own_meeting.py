"""Scripts that set MASTER_PORT or start processes, and variables of other launchers beside flags."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import psutil
import pytest

from paceline.launching.ending.endings import RankFailed
from tests.launching.launched import Launched, paceline_run, script

LIMIT_S = 60


def run(folder: Path, *words: str, env: dict[str, str | None] | None = None) -> tuple[int, list[str], str]:
    """Return the exit code, the lines with sums, and all output."""
    with Launched(folder, paceline_run(*words), env=env) as job:
        code = job.wait(LIMIT_S)
        return code, sorted(re.findall(r"sum .*", job.text)), job.text


def find_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        (("--nproc-per-node", "2"), "env"),
        pytest.param((), "torch", marks=pytest.mark.slow),
        pytest.param(("--nproc-per-node", "2"), "tcp", marks=pytest.mark.slow),
        pytest.param((), "fork", marks=pytest.mark.slow),
        pytest.param(("--cold", "--nproc-per-node", "2"), "env", marks=pytest.mark.slow),
        pytest.param(("--cold",), "torch", marks=pytest.mark.slow),
        pytest.param((), "spawn", marks=pytest.mark.slow),
        pytest.param((), "forkserver", marks=pytest.mark.slow),
        pytest.param((), "program", marks=pytest.mark.slow),
    ],
)
def test_a_script_meets_at_a_port_of_its_own(words: tuple[str, ...], kind: str, tmp_path: Path) -> None:
    code, sums, text = run(tmp_path, *words, script("own_meeting.py"), kind, find_port())
    assert (code, sums) == (0, ["sum 2 of 2", "sum 2 of 2"]), text


def test_a_port_that_several_ranks_serve_is_explained() -> None:
    error = "torch.distributed.DistNetworkError: The server socket has failed to listen on any local address."
    assert "let each take its number from RANK" in str(RankFailed(1, 1, trace=error))
    assert "RANK" not in str(RankFailed(1, 1, trace="RuntimeError: failed to listen"))


def test_the_store_of_one_node_is_reached_from_this_machine_alone(tmp_path: Path) -> None:
    with Launched(tmp_path, paceline_run("--nproc-per-node", "1", script("sums.py"), "40")) as job:
        job.wait_for("runs as 0", LIMIT_S)
        sockets = psutil.Process(job.process.pid).net_connections("tcp")
        listening = [socket.laddr.ip for socket in sockets if socket.status == psutil.CONN_LISTEN]
        assert listening
        assert set(listening) == {"127.0.0.1"}


# ---- variables of another launcher

POD = {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}


def test_flags_come_before_variables(tmp_path: Path) -> None:
    env = {**POD, "RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": find_port()}
    code, sums, text = run(tmp_path, "--nproc-per-node", "2", script("sums.py"), env=env)
    assert (code, len(sums)) == (0, 2), text
    assert "in the environment: not used, because this command starts ranks" in text


@pytest.mark.slow
def test_variables_without_flags_make_a_rank(tmp_path: Path) -> None:
    env = {**POD, "RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": find_port()}
    code, sums, text = run(tmp_path, script("sums.py"), env=env)
    assert (code, len(sums)) == (0, 1), text
    assert "this process is rank 0 of 1, as the environment says" in text


@pytest.mark.slow
def test_variables_that_give_no_address_start_a_rank(tmp_path: Path) -> None:
    code, sums, text = run(tmp_path, script("sums.py"), env={"RANK": "0", "WORLD_SIZE": "1"})
    assert (code, len(sums)) == (0, 1), text


def test_the_numbers_of_pods_are_those_of_nodes(tmp_path: Path) -> None:
    port = find_port()
    pods = [{**POD, "RANK": str(rank), "WORLD_SIZE": "2", "MASTER_PORT": port} for rank in range(2)]
    first, second = (paceline_run("--nproc-per-node", n, script("sums.py")) for n in ("1", "2"))
    with (
        Launched(tmp_path / "0", first, env=pods[0]) as one,
        Launched(tmp_path / "1", second, env=pods[1]) as other,
    ):
        assert (one.wait(LIMIT_S), other.wait(LIMIT_S)) == (0, 0), one.text + other.text
        assert "on 0 of 3" in one.text
        assert "on 2 of 3" in other.text
        assert "this is node 1 of 2, without --nnodes" in other.text


def test_ranks_of_torchrun_do_not_start_ranks(tmp_path: Path) -> None:
    env = {"TORCHELASTIC_RUN_ID": "x", "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    env |= {"LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    code, _, text = run(tmp_path, "--nproc-per-node", "2", script("sums.py"), env=env)
    assert code == 2
    assert "[PL348]" in text


def test_a_port_that_another_process_has_is_named(tmp_path: Path) -> None:
    with socket.create_server(("", 0)) as taken:
        port = str(taken.getsockname()[1])
        code, _, text = run(tmp_path, "--master-port", port, script("sums.py"))
    assert code == 2
    assert "another process has it" in text, text
    assert "[PL344]" in text
