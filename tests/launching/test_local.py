"""`launch`: results, one verdict, signals, and nobody left alive."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from paceline.errors import PacelineError
from paceline.launching.ending.endings import RankFailed
from paceline.launching.local import launch
from tests.launching import jobs

JOBS = Path(jobs.__file__)


def run_job(*words: str, **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(JOBS), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, **options)  # type: ignore[call-overload,no-any-return]


# ---- results


def test_results_come_by_rank() -> None:
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    assert launch(jobs.ranks_and_sum, nproc=2, args=(10,)) == [(0, 21, threads), (1, 21, threads)]


def test_large_results_arrive() -> None:
    assert all(torch.equal(result, torch.ones(1_000_000)) for result in launch(jobs.large_result, nproc=2))


def test_handlers_and_environment_are_put_back() -> None:
    def state() -> tuple[object, ...]:
        return dict(os.environ), [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]

    before = state()
    launch(os.getpid, nproc=1)
    assert state() == before


def test_ranks_have_the_present_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The keeper has started with another one."""
    launch(os.getpid, nproc=1)
    monkeypatch.setenv("PACELINE_TEST_WORD", "new")
    assert launch(jobs.sees, nproc=2, args=("PACELINE_TEST_WORD",)) == ["new", "new"]
    monkeypatch.delenv("PACELINE_TEST_WORD")
    assert launch(jobs.sees, nproc=1, args=("PACELINE_TEST_WORD",)) == [None]


def test_a_rank_does_not_fork_itself_for_loader_workers() -> None:
    """A fork beside gloo's threads hangs now and then, and with it the run."""
    assert launch(jobs.tell_start_method, nproc=1) == ["forkserver"]


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_a_rank_may_end_before_its_loader_workers(method: str) -> None:
    assert launch(jobs.leave_workers_running, nproc=2, args=(method,)) == [0, 0]


PROGRAM = """
import os, torch
from paceline.launching.local import launch
from paceline.world import start
def here(word): return os.environ["RANK"] + word
def compute():
    with start(device="cpu"):
        return torch.sin(torch.zeros(10**6)).sum().item()
# OpenMP's threads don't survive a fork: a forked rank that computed with several would hang.
torch.set_num_threads(2)
torch.sin(torch.randn(10**6))
assert launch(compute, nproc=2) == [0, 0]
assert launch(here, nproc=2, args=("a",)) == ["0a", "1a"]
assert launch(lambda: 5, nproc=1) == [5]
assert launch(os.getpgrp, nproc=1) != [os.getpgrp()]
"""


@pytest.mark.parametrize("way", ["-c", "stdin", "file"])
def test_functions_of_the_main_module(way: str, tmp_path: Path) -> None:
    path = tmp_path / "main.py"
    path.write_text(PROGRAM.replace("assert", "if __name__ == '__main__': assert"))
    words = {"-c": ["-c", PROGRAM], "stdin": ["-"], "file": [str(path)]}[way]
    done = subprocess.run(
        [sys.executable, *words],
        input=PROGRAM if way == "stdin" else None,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr


# ---- refusals


@pytest.mark.parametrize(
    ("nproc", "code"), [(0, "PL320"), (-2, "PL320"), (1.5, "PL400"), (True, "PL400"), (100_000, "PL321")]
)
def test_bad_numbers_of_ranks(nproc: int, code: str) -> None:
    with pytest.raises(PacelineError) as caught:
        launch(os.getpid, nproc=nproc)
    assert caught.value.code == code
    assert f"nproc={nproc!r}" in str(caught.value)


def test_more_ranks_than_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    few = psutil.virtual_memory()._replace(available=600_000_000)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: few)
    with pytest.raises(PacelineError, match=r"0\.6 GB of memory.*at most nproc=2") as caught:
        launch(os.getpid, nproc=3)
    assert caught.value.code == "PL321"


def test_a_rank_does_not_launch() -> None:
    with pytest.raises(PacelineError, match="already one of several ranks") as caught:
        launch(jobs.launched_inside, nproc=1)
    assert caught.value.code == "PL323"


def test_a_local_function_after_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(PacelineError, match="uses CUDA already") as caught:
        launch(lambda: None, nproc=1)
    assert caught.value.code == "PL324"


def test_a_script_without_a_guard(tmp_path: Path) -> None:
    path = tmp_path / "unguarded.py"
    path.write_text(PROGRAM)
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "[PL325]" in done.stderr
    assert '__name__ == "__main__"' in "".join(done.stderr.splitlines()[-3:])


def test_a_log_folder_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PacelineError) as caught:
        launch(os.getpid, nproc=1, log_dir=tmp_path / "file" / "logs")
    assert caught.value.code == "PL326"


# ---- failures: one verdict, the first one


def test_a_rank_that_raises_is_named_with_its_traceback() -> None:
    with pytest.raises(
        RankFailed, match=r"rank 1 failed first, at .*jobs.py:\d+ in raise_on_one: ValueError: boo"
    ) as caught:
        launch(jobs.raise_on_one, nproc=3)
    assert caught.value.rank == 1
    assert caught.value.exit_code == 1
    assert "in raise_on_one" in caught.value.trace


def test_an_error_of_ours_arrives_as_it_is() -> None:
    with pytest.raises(PacelineError) as caught:
        launch(jobs.raise_ours_on_one, nproc=3)
    assert str(caught.value) == "The wheel is flat. It must be round. Pump. [PL999]"


def test_an_error_of_ours_is_reported_once() -> None:
    done = run_job("raise_ours_on_one", "2")
    assert done.returncode == 2
    assert (done.stdout + done.stderr).count("The wheel is flat") == 1
    assert "Traceback" not in done.stdout + done.stderr


def test_a_killed_rank_is_named_with_its_signal() -> None:
    with pytest.raises(
        RankFailed, match=r"rank 1 was killed by SIGKILL. .*\n.*did not kill it for memory"
    ) as caught:
        launch(jobs.killed_on_one, nproc=3)
    assert (caught.value.rank, caught.value.signal_name, caught.value.status) == (1, "SIGKILL", -9)


def test_exit_codes_are_reported() -> None:
    with pytest.raises(RankFailed, match="rank 1 exited with code 7") as caught:
        launch(jobs.exit_seven_on_one, nproc=2)
    assert caught.value.status == 7


def test_a_rank_without_a_record_is_the_cause_of_one_that_lost_it(tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match="rank 1 exited with code 7") as caught:
        launch(jobs.exit_seven_while_another_waits, nproc=2, log_dir=tmp_path)
    assert caught.value.rank == 1
    assert f"{tmp_path}/rank-0001.log" in str(caught.value), "as for a script"


def test_the_word_of_sys_exit_is_reported() -> None:
    with pytest.raises(RankFailed, match="rank 1 failed first: no more road"):
        launch(jobs.sys_exit_on_one, nproc=2)


def test_a_rank_that_will_not_go_is_ended() -> None:
    began = time.monotonic()
    with pytest.raises(RankFailed, match="rank 1 failed first"):
        launch(jobs.fail_while_another_sleeps, nproc=2)
    assert time.monotonic() - began < 15


# ---- stopping


def test_ranks_that_stop_by_themselves() -> None:
    with pytest.raises(SystemExit) as caught:
        launch(jobs.stop_by_themselves, nproc=2)
    assert caught.value.code == 75


class Running:
    """A launcher whose two ranks run."""

    def __init__(self, job: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(JOBS), job, "2"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.pids: list[int] = []
        assert self.process.stdout is not None
        while len(self.pids) < 2:
            line = self.process.stdout.readline()
            assert line, "the launcher ended"
            if line.startswith("running"):
                self.pids.append(int(line.split()[-1]))

    def finish(self) -> str:
        return self.process.communicate(timeout=30)[0]

    def wait_for_ranks(self, limit_s: float) -> list[int]:
        """Return the ranks that are still alive after so many seconds at most."""
        end = time.monotonic() + limit_s
        while (alive := [pid for pid in self.pids if is_alive(pid)]) and time.monotonic() < end:
            time.sleep(0.05)
        return alive


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def running(request: pytest.FixtureRequest) -> Iterator[Running]:
    launcher = Running(request.param)
    yield launcher
    for pid in [launcher.process.pid, *launcher.pids]:
        if is_alive(pid):
            os.kill(pid, signal.SIGKILL)
    launcher.process.wait()
    assert launcher.process.stdout is not None
    launcher.process.stdout.close()


@pytest.mark.parametrize("running", ["stop_when_asked"], indirect=True)
@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 75), (signal.SIGHUP, 75), (signal.SIGUSR1, 75)],
)
def test_a_signal_reaches_every_rank_once(running: Running, number: int, code: int) -> None:
    # As a terminal does it: to all processes of the launcher's group.
    os.killpg(running.process.pid, number)
    running.process.send_signal(number)  # and `timeout` to the process itself too
    out = running.finish()
    assert sorted(out.splitlines()) == ["saved 0 after 1", "saved 1 after 1"]
    assert running.process.returncode == code
    assert running.wait_for_ranks(0) == []


@pytest.mark.parametrize("running", ["save_for_long"], indirect=True)
def test_ranks_that_were_asked_to_stop_may_take_their_time(running: Running) -> None:
    running.process.send_signal(signal.SIGINT)
    assert sorted(running.finish().splitlines()) == ["saved 0", "saved 1"]
    assert running.process.returncode == 130


@pytest.mark.parametrize("running", ["never_stop"], indirect=True)
def test_a_second_ctrl_c_kills(running: Running) -> None:
    running.process.send_signal(signal.SIGINT)
    time.sleep(1.0)
    assert len([pid for pid in running.pids if is_alive(pid)]) == 2
    running.process.send_signal(signal.SIGINT)
    began = time.monotonic()
    running.finish()
    assert time.monotonic() - began < 8
    assert running.process.returncode == 130
    assert running.wait_for_ranks(1) == []


@pytest.mark.parametrize("running", ["stop_when_asked"], indirect=True)
def test_ranks_stop_in_order_when_the_launcher_dies(running: Running) -> None:
    running.process.kill()
    assert running.wait_for_ranks(5) == []
    assert sorted(running.finish().splitlines()) == ["saved 0 after 1", "saved 1 after 1"]


@pytest.mark.slow  # ten seconds of grace
@pytest.mark.parametrize("running", ["never_stop"], indirect=True)
def test_ranks_die_with_the_launcher(running: Running) -> None:
    running.process.kill()
    assert running.wait_for_ranks(20) == []


def test_a_killed_keeper_is_distinguished_from_a_failed_rank() -> None:
    """In a process of its own, whose next launch must start another."""
    program = (
        "import os\n"
        "from paceline.launching.ending.endings import RankFailed\n"
        "from paceline.launching.local import launch\n"
        "from tests.launching import jobs\n"
        "try:\n"
        "    launch(jobs.kill_keeper, nproc=1)\n"
        "except RankFailed as error:\n"
        "    print(error)\n"
        "print(launch(jobs.tell_start_method, nproc=1))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(JOBS.parent.parent.parent)},
    )
    assert "The process that ranks are forked from was killed" in done.stdout, done.stderr
    assert done.stdout.endswith("['forkserver']\n"), "the next launch starts another keeper"


# ---- logs


def test_logs_hold_everything_and_rank_0_keeps_the_terminal(tmp_path: Path) -> None:
    program = (
        "from paceline.launching.local import launch\nfrom tests.launching.jobs import print_a_line\n"
        "launch(print_a_line, nproc=2, log_dir='logs')\n"
    )
    root = JOBS.parent.parent.parent
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(root)},
    )
    assert (done.returncode, done.stdout) == (0, "out of 0\n"), done.stderr
    assert "raw err of 0" in done.stderr
    assert "raw err of 1" not in done.stderr
    logs = {path.name: path.read_text() for path in (tmp_path / "logs").iterdir()}
    assert sorted(logs) == ["rank-0000.log", "rank-0001.log"]
    for rank in range(2):
        assert f"out of {rank}\n" in logs[f"rank-000{rank}.log"]
        assert f"raw err of {rank}\n" in logs[f"rank-000{rank}.log"]


def test_last_words_of_killed_ranks_are_logged(tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match="SIGKILL"):
        launch(jobs.die_talking, nproc=1, log_dir=tmp_path)
    log = tmp_path / "rank-0000.log"
    end = time.monotonic() + 5
    while "last words of 0" not in log.read_text() and time.monotonic() < end:
        time.sleep(0.05)
    assert "last words of 0\n" in log.read_text()


def test_tracebacks_are_logged(tmp_path: Path) -> None:
    with pytest.raises(RankFailed):
        launch(jobs.raise_on_one, nproc=2, log_dir=tmp_path)
    assert "ValueError: boo" in (tmp_path / "rank-0001.log").read_text()
