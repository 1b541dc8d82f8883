"""Properties of every verdict: under restarts and `paceline train` too, no port opened, no variable told."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.chaos.setting import write_setting
from tests.launching.launched import Launched, paceline_run
from tests.watch.test_watcher import STEPS, WAITS

pytestmark = pytest.mark.timeout(240)
_END_S = 120.0


def list_ports(job: Launched) -> int:
    """Return how many sockets wait for connections over the network."""
    sockets = set()
    for process in job.processes():
        with suppress(psutil.Error):
            for connection in process.net_connections("inet"):
                if connection.status in (psutil.CONN_LISTEN, psutil.CONN_NONE):
                    sockets.add((connection.type, connection.laddr))
    return len(sockets)


def test_a_verdict_after_a_restart(tmp_path: Path) -> None:
    flags = ["--nproc-per-node", "2", "--max-restarts", "1", "--hang-after", "4"]
    with Launched(tmp_path, paceline_run(*flags, STEPS, "fail-then-sleep", "3", "1")) as job:
        assert job.wait(_END_S) == 1
        assert "the first attempt" in job.text
        verdict = job.text[job.text.index("paceline: rank 1 never reached all_reduce number 3") :]
        assert verdict.splitlines()[0].endswith("[PL800]")
        assert f"steps.py:{WAITS} in main" in verdict
        assert not job.find_left(5)


def test_no_port_is_opened(tmp_path: Path) -> None:
    found = []
    for flags in (["--no-watch"], []):
        command = paceline_run("--nproc-per-node", "2", *flags, STEPS, "nothing", "1000", "0")
        with Launched(tmp_path / str(len(found)), command) as job:
            job.wait_for("rank 0 step 8", _END_S)
            found.append(list_ports(job))
    assert found[0] == found[1] > 0


def test_no_variable_is_reported(tmp_path: Path) -> None:
    secret = "hunter2-of-the-environment"
    command = paceline_run("--nproc-per-node", "2", "--hang-after", "3", STEPS, "sleep", "3", "1")
    with Launched(tmp_path, command, env={"API_TOKEN": secret}) as job:
        assert job.wait(_END_S) == 1
        assert "[PL800]" in job.text
        written = [path.read_bytes() for path in job.work.rglob("*") if path.is_file()]
        assert written
        assert not any(secret.encode() in data for data in [job.text.encode(), *written])


def test_a_stopped_rank_of_a_training_is_named(tmp_path: Path) -> None:
    write_setting(tmp_path / "work")
    recipe = str(tmp_path / "work" / "recipe.toml")
    words = ["train", recipe, "--nproc", "2", "--hang-after", "4", "--set", "train.epochs=300"]
    command = [str(Path(sys.executable).with_name("paceline")), *words]
    with Launched(tmp_path, command) as job:
        job.wait_for("step 5: validation", _END_S)
        (began,) = job.tmp.glob("paceline-launch-*/began-1")
        os.kill(int(began.read_text()), signal.SIGSTOP)
        assert job.wait(_END_S) == 1
        verdict = job.text[job.text.index("paceline: rank 1 never ") :]
        assert verdict.splitlines()[0].endswith("[PL809]")
        assert not job.find_left(5, ignored=["torchinductor"])  # torch makes that folder in any training


@pytest.mark.parametrize(("how", "code"), [("stop", "PL809"), ("sleep", "PL808")])
def test_a_rank_that_hangs_in_a_sum_is_named(tmp_path: Path, how: str, code: str) -> None:
    script = Path(__file__).parent / "scripts" / "own" / "sums.py"
    flags = ["--nproc-per-node", "3", "--hang-after", "4"]
    with Launched(tmp_path, paceline_run(*flags, str(script), how, "1")) as job:
        assert job.wait(_END_S) == 1
        (first,) = [line for line in job.text.splitlines() if line.endswith(f"[{code}]")]
        assert first.startswith("paceline: rank 1 ")
        if how == "sleep":
            lines = script.read_text().splitlines()
            (number,) = [number for number, line in enumerate(lines, 1) if "SLEEPS" in line]
            assert f"sums.py:{number}" in job.text


def test_a_rank_that_dies_in_a_sum_is_named(tmp_path: Path) -> None:
    script = Path(__file__).parent / "scripts" / "own" / "sums.py"
    with Launched(tmp_path, paceline_run("--nproc-per-node", "3", str(script), "die", "1")) as job:
        assert job.wait(_END_S) == 1
        assert "rank 1 was killed by SIGKILL" in job.text


_WITHOUT_COLLECTION = """
import gc
import torch
from torch import nn

gc.disable()
model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(6):
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
kept = [one for one in gc.get_objects() if isinstance(one, torch.Tensor) and one.grad_fn is not None]
print("kept", len(kept))
"""


def test_no_graph_waits_for_the_garbage_collection(tmp_path: Path) -> None:
    """Large trainings collect by hand: a cycle through a frame of ours would keep each step's results."""
    (tmp_path / "train.py").write_text(_WITHOUT_COLLECTION)
    done = subprocess.run(
        [*paceline_run(), "--nproc-per-node", "1", str(tmp_path / "train.py")],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.stdout == "kept 0\n", done.stderr
