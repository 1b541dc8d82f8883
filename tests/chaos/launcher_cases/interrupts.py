"""Suite C: asked to end at any time, it ends in time, and reports that in one line."""

from __future__ import annotations

import os
import signal
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from tests.chaos.launcher_cases.case import Case
from tests.launching.launched import Launched, paceline_run, script
from tests.launching.nodes import Nodes

_READY_S = 60
# Between the beginning of the command and that of its ranks.
_EARLY_S = (0.2, 0.5, 0.8, 1.1, 1.4, 1.7, 2.0, 2.4, 2.8, 3.2)
_SHUTDOWN_S = 5
_CODES = {"SIGINT": 1}  # as torchrun's; any other signal gives the code for "stopped, not finished"
CTRL_C = b"\x03"


def press_ctrl_c(job: Launched) -> None:
    """Send SIGINT to the whole foreground group, as a terminal does."""
    os.write(job.terminal, CTRL_C)


def check_once(folder: Path, *, by_terminal: bool, is_cold: bool, name: str = "SIGINT") -> None:
    """Check that each rank gets one signal, and has the time to save."""
    words = ["--nproc-per-node", "2", *(["--cold"] if is_cold else [])]
    command = paceline_run(*words, script("endless.py"), "saves")
    with Launched(folder, command, has_terminal=by_terminal) as job:
        job.wait_for(r"ready \d", _READY_S, 2)
        if by_terminal:
            press_ctrl_c(job)
        else:
            job.signal(signal.Signals[name])
        code = job.wait(15)
        for rank in range(2):
            assert f"rank {rank} saved after 1 signals\n" in job.text, job.text
        assert code == _CODES.get(name, 75), f"exit code {code}:\n{job.text}"
        assert f"stopped by {name}.\n" in job.text, job.text
        assert "Traceback" not in job.text, job.text
        assert not (left := job.find_left(5)), f"left: {left}"


def check_twice(folder: Path, *, by_terminal: bool, is_cold: bool) -> None:
    """Check that a second signal kills ranks that ignore the first one."""
    words = ["--nproc-per-node", "2", *(["--cold"] if is_cold else [])]
    command = paceline_run(*words, script("endless.py"), "plain", "SIGINT")
    with Launched(folder, command, has_terminal=by_terminal) as job:
        job.wait_for(r"ready \d", _READY_S, 2)
        for number in range(2):
            if by_terminal:
                press_ctrl_c(job)
            else:
                job.signal(signal.SIGINT)
            if number == 0:
                time.sleep(1.5)
                assert job.process.poll() is None, f"the first one ended it:\n{job.text}"
        code = job.wait(3)
        assert code == 1, f"exit code {code}:\n{job.text}"
        assert "stopped by SIGINT; 2 did not leave in time and were killed.\n" in job.text, job.text
        assert not (left := job.find_left(3)), f"left: {left}"


def check_early(folder: Path, *, after_s: float, name: str, is_cold: bool) -> None:
    """Check a signal before ranks exist, or while they are started."""
    words = ["--nproc-per-node", "2", "--shutdown-timeout", "3", *(["--cold"] if is_cold else [])]
    command = paceline_run(*words, script("endless.py"), "plain")
    with Launched(folder, command, has_terminal=name == "Ctrl-C") as job:
        time.sleep(after_s)
        if name == "Ctrl-C":
            press_ctrl_c(job)
        else:
            job.signal(signal.Signals[name])
        code = job.wait(10)
        assert code != 0, f"exit code 0:\n{job.text}"
        # A rank that has begun reports its KeyboardInterrupt, as under torchrun.
        text = job.text if "ready" not in job.text else ""
        # While Python still imports the package, on a busy machine, nothing of it can take the signal.
        has_begun = "_get_module_details" not in text
        ours = [line for line in text.splitlines() if "src/paceline" in line and has_begun]
        assert not ours, f"a traceback of the launcher:\n{text}"
        assert not (left := job.find_left(10)), f"left: {left}\n{job.text}"


def check_waiting(folder: Path, *, meeting: str, node: int, name: str) -> None:
    """Check a signal while the launcher waits for a node that does not come."""
    with Nodes(2) as nodes:
        words = ["--nnodes", "2", "--nproc-per-node", "1", *_meet(meeting, nodes, node)]
        command = paceline_run(*words, script("endless.py"), "plain")
        with Launched(folder, command, around=partial(nodes.command, node)) as job:
            job.wait_for("this node is reached at", 30)
            job.wait_for_threads(30)
            time.sleep(1)  # into the wait
            job.signal(signal.Signals[name])
            code = job.wait(8)
            assert code == _CODES.get(name, 75), f"exit code {code}:\n{job.text}"
            assert f"stopped by {name}" in job.text, job.text
            assert "terminate called" not in job.text, job.text
            assert not (left := job.find_left(5)), f"left: {left}"


def check_partitioned(folder: Path, *, meeting: str, name: str = "SIGTERM") -> None:
    """Check a signal while the other node is out of reach."""
    with Nodes(2) as nodes, ExitStack() as stack:
        jobs = []
        for node in range(2):
            words = ["--nnodes", "2", "--nproc-per-node", "1", "--shutdown-timeout", str(_SHUTDOWN_S)]
            words += ["--detect-s", "60"]  # or the job would end by itself
            command = paceline_run(*words, *_meet(meeting, nodes, node), script("endless.py"), "plain")
            around = partial(nodes.command, node)
            jobs.append(stack.enter_context(Launched(folder / str(node), command, around=around)))
        for job in jobs:
            job.wait_for(r"ready \d", _READY_S)
        nodes.cut(1)
        time.sleep(8)  # the agents' keep-alives are stuck by then
        for job in jobs:
            job.signal(signal.Signals[name])
        began_s = time.monotonic()
        for node, job in enumerate(jobs):
            left_s = began_s + _SHUTDOWN_S + 10 - time.monotonic()
            code = job.wait(max(0.1, left_s))
            assert code == _CODES.get(name, 75), f"exit code {code} of node {node}:\n{job.text}"
            assert f"stopped by {name}" in job.text, job.text
        for job in jobs:
            assert not (left := job.find_left(5)), f"left: {left}"


def _meet(meeting: str, nodes: Nodes, node: int) -> list[str]:
    if meeting == "c10d":
        return ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{nodes.address(0)}:29501", "--rdzv-id", "c"]
    return ["--node-rank", str(node), "--master-addr", nodes.address(0)]


def cases(times: int) -> list[Case]:
    """Return all of them, once."""
    found = []
    for is_cold in (False, True):
        cold = ", cold" if is_cold else ""
        for by_terminal in (False, True):
            how = "Ctrl-C in a terminal" if by_terminal else "SIGINT to the launcher"
            once = partial(check_once, by_terminal=by_terminal, is_cold=is_cold)
            twice = partial(check_twice, by_terminal=by_terminal, is_cold=is_cold)
            found += [Case("C", f"once{cold}", how, once), Case("C", f"twice{cold}", how, twice)]
        check = partial(check_once, by_terminal=False, is_cold=is_cold, name="SIGTERM")
        found.append(Case("C", f"once{cold}", "SIGTERM to the launcher", check))
        for name in ("Ctrl-C", "SIGTERM"):
            for after_s in _EARLY_S:
                early = partial(check_early, after_s=after_s, name=name, is_cold=is_cold)
                found.append(Case("C", f"before ranks exist, {name}{cold}", f"after {after_s} s", early))
    for meeting in ("c10d", "static"):
        for name in ("SIGINT", "SIGTERM"):
            for node in range(2):
                wait = partial(check_waiting, meeting=meeting, node=node, name=name)
                found.append(Case("C", "waiting for another node", f"{meeting}, {name}, node {node}", wait))
            cut = partial(check_partitioned, meeting=meeting, name=name)
            found.append(Case("C", "another node out of reach", f"{meeting}, {name}", cut))
    return found
