"""Suite B: nothing of a job is left, whatever ends it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tests.chaos.launcher_cases.case import Case
from tests.launching.launched import ASKING, Launched, paceline_run, script
from tests.launching.nodes import Nodes

KINDS = ("plain", "loader-fork", "loader-spawn", "spawn", "ignores SIGTERM", "daemon")
_READY_S = 60
_GONE_S = 15
# The launch's own folder, and the one for multiprocessing's sockets beside it.
_FOLDERS = ("paceline-launch-", "pymp-pl-")


def _ask(job: Launched, ranks: list[int], number: int) -> None:
    job.signal(number)


def _ask_twice(job: Launched, ranks: list[int]) -> None:
    job.signal_group(signal.SIGINT)
    time.sleep(1.0)  # sooner it is taken for one that was sent twice by mistake
    job.signal_group(signal.SIGINT)


def _crash(job: Launched, ranks: list[int]) -> None:
    os.kill(ranks[1], signal.SIGSEGV)


def _hang_up(job: Launched, ranks: list[int]) -> None:
    job.close_terminal()


def _kill_launcher(job: Launched, ranks: list[int]) -> None:
    os.kill(job.process.pid, signal.SIGKILL)


def _kill_helper(job: Launched, ranks: list[int], index: int) -> None:
    os.kill(job.helpers()[index], signal.SIGKILL)


def _kill_both(job: Launched, ranks: list[int]) -> None:
    for pid in (job.process.pid, job.helpers()[0]):
        os.kill(pid, signal.SIGSTOP)  # so that neither sees the other's end
    for pid in (job.helpers()[0], job.process.pid):
        os.kill(pid, signal.SIGKILL)


EVENTS: dict[str, Callable[[Launched, list[int]], None]] = {
    **{name: partial(_ask, number=number) for name, number in ASKING.items()},
    "SIGINT twice": _ask_twice,
    "crash of a rank": _crash,
    "closed terminal": _hang_up,
    "SIGKILL launcher": _kill_launcher,
    "SIGKILL keeper": partial(_kill_helper, index=0),
    "SIGKILL pump": partial(_kill_helper, index=1),
    "SIGKILL launcher and keeper": _kill_both,
}


def check_orphans(folder: Path, *, event: str, kind: str, is_cold: bool) -> None:
    """Start a job of a kind, let something happen to it, and look for what is left."""
    kind, *ignored = kind.split()
    kind = "plain" if kind == "ignores" else kind
    if event == "SIGINT twice":
        ignored.append("SIGINT")
    words = ["--nproc-per-node", "2", "--shutdown-timeout", "3", *(["--cold"] if is_cold else [])]
    command = paceline_run(*words, script("endless.py"), kind, *ignored)
    # Where launcher and keeper were killed, nobody could remove their folders.
    stays = _FOLDERS if event == "SIGKILL launcher and keeper" else ()
    with Launched(folder, command, has_terminal=event == "closed terminal") as job:
        ranks = [int(pid) for pid in job.wait_for(r"ready \d pid (\d+)", _READY_S, 2)]
        job.note_ports()
        EVENTS[event](job, ranks)
        left = job.find_left(_GONE_S, stays)
        assert not left, f"left after {_GONE_S} s: {left}\n{job.text}"
        code = job.wait(5)
        assert code != 0, f"exit code 0:\n{job.text}"
        if event in ASKING and kind == "plain":
            assert (code, f"stopped by {event}" in job.text) == (1 if event == "SIGINT" else 75, True), (
                f"{code}:\n{job.text}"
            )


def check_power_cut_leaves_nothing(folder: Path) -> None:
    """Check that nothing of a node survives the end of its process namespace."""
    with Nodes(1) as nodes:
        words = paceline_run("--nproc-per-node", "2", script("endless.py"), "daemon")
        around = partial(nodes.command, 0)
        with Launched(folder, words, around=lambda command: nodes.powered(around(command))) as job:
            job.wait_for(r"ready \d", _READY_S, 2)
            job.process.kill()
            left = job.find_left(5, _FOLDERS)
            assert not left, f"left: {left}"


def cases(times: int) -> list[Case]:
    """Return all events with all kinds, warm and cold."""
    return [
        Case(
            "B",
            f"{event}{', cold' if is_cold else ''}",
            kind,
            partial(check_orphans, event=event, kind=kind, is_cold=is_cold),
        )
        for is_cold in (False, True)
        for event in EVENTS
        for kind in KINDS
    ]
