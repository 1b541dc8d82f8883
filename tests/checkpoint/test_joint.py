"""A save that two writers make together, of which one is killed before each of its operations."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from paceline.checkpoint import CheckpointFolder, alive, verify
from paceline.checkpoint.alive import Hold, find_live
from paceline.checkpoint.content import full
from paceline.checkpoint.names import SAVING, TMP
from paceline.checkpoint.tensors import tensor_bytes
from paceline.checkpoint.writing import joint
from paceline.checkpoint.writing.joint import Order
from paceline.checkpoint.writing.state_copy import lay_out
from paceline.checkpoint.writing.waiting import await_writers
from paceline.errors import PacelineError
from tests.checkpoint.states import (
    IDENTITY,
    RECIPE,
    assert_loaded,
    list_names,
    load_newest,
    make_model,
    make_optimizer,
    make_state,
    save,
)

ROOT = Path(__file__).parents[2]
STEP = 2


def prepare(run: Path, data: Path, keep: int = 1) -> list[Order]:
    """Return the orders of two writers that share the files of a checkpoint; `data` has the bytes of both."""
    content = full.prepare(make_model(STEP), make_optimizer(STEP), make_state(STEP), RECIPE)
    plans = content.list_files()
    shares: list[list[tuple[str, int, int]]] = [[], []]
    with data.open("wb") as stream:
        for number, (plan, place) in enumerate(zip(plans, lay_out(plans), strict=True)):
            shares[number % 2].append(place)
            stream.seek(place[1])
            for piece in plan.pieces:
                stream.write(piece if isinstance(piece, bytes) else tensor_bytes(piece))
    return [
        Order(str(run), keep, STEP, "abcd", writer, (0, 1), "full", IDENTITY, content.num_bytes, share)
        for writer, share in enumerate(shares)
    ]


def start(order: Order, data: Path, kill_at: int = -1) -> subprocess.Popen[str]:
    words = [sys.executable, "-m", "tests.checkpoint.joint_writer", json.dumps(asdict(order)), str(data)]
    return subprocess.Popen([*words, str(kill_at)], cwd=ROOT, stdout=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str]) -> dict[str, Any] | None:
    """Return the output of a writer, or `None` if it was killed."""
    text, _ = process.communicate(timeout=60)
    return json.loads(text) if process.returncode == 0 else None


def run_writers(run: Path, data: Path, kill_at: int = -1) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    first, second = prepare(run, data)
    for begin in (SAVING, TMP):  # else the numbers of operations depend on who makes these first
        (run / f"checkpoints/{begin}step-{STEP:08d}-abcd").mkdir(parents=True)
    processes = start(first, data, kill_at), start(second, data)
    killed, other = finish(processes[0]), finish(processes[1])
    assert other is not None
    return killed, other


def goes_on(run: Path) -> int:
    """Return the step that a later start finds; nothing of the save is left after the next one."""
    folder = CheckpointFolder(run, keep=1)
    assert all(verify(path) == [] for path in folder.steps().values())
    loaded = load_newest(folder)
    assert loaded is not None
    loaded.identity.pop("save", None)
    assert_loaded(loaded, loaded.step)
    save(folder, 9)
    assert list_names(run) == ["step-00000009"]
    return loaded.step


def test_two_writers_commit_once(tmp_path: Path) -> None:
    run = tmp_path / "run"
    save(CheckpointFolder(run, keep=1), 1)
    for found in run_writers(run, tmp_path / "data"):
        assert found is not None
        assert found["outcome"] == {"path": str(run / "checkpoints/step-00000002"), "error": None}
    assert list_names(run) == ["step-00000002"], "the older one, too, is gone"
    assert goes_on(run) == STEP


def check_kill(tmp_path: Path, number: int) -> bool | None:
    """Kill a writer before an operation: whether the save was committed; `None` if it came through."""
    run = tmp_path / str(number)
    save(CheckpointFolder(run, keep=1), 1)
    killed, other = run_writers(run, tmp_path / "data", number)
    outcome = other["outcome"]
    step = goes_on(run)
    assert step == (STEP if outcome["path"] else 1)
    assert outcome["path"] or outcome["error"][0] == "PL540"
    return None if killed is not None else outcome["path"] is not None


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_killed_before_every_operation(tmp_path: Path) -> None:
    seen = []
    for number in range(1, 1000):
        found = check_kill(tmp_path, number)
        if found is None:
            break
        seen.append(found)
    assert len(seen) > 20
    # Up to the record, the share of the killed writer is missing; from then on, the other one commits.
    assert seen == sorted(seen)
    assert set(seen) == {False, True}


def test_killed_before_the_record_and_after_it(tmp_path: Path) -> None:
    save(CheckpointFolder(tmp_path / "counted", keep=1), 1)
    found, _ = run_writers(tmp_path / "counted", tmp_path / "data")
    assert found is not None
    record = next(n for n, text in enumerate(found["operations"], 1) if text.startswith("rename .record"))
    assert check_kill(tmp_path, record) is False
    assert check_kill(tmp_path, record + 1) in (True, None)


def test_a_save_under_way_is_left_alone_and_keeps_other_runs_out(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, keep=2)
    save(folder, 1)
    code = (
        "import sys; from pathlib import Path; from paceline.checkpoint.alive import Hold; "
        "stream = Hold(Path(sys.argv[1]) / 'alive-00000', sys.argv[2]); print('held', flush=True); input()"
    )
    saving, temporary = folder.path / f"{SAVING}step-00000002-ab", folder.path / ".tmp-step-00000002-ab"
    for path in (saving, temporary):
        path.mkdir()
    words = [sys.executable, "-c", code, str(saving), "this run"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        writer.stdout.readline()
        assert [live.run for live in find_live(folder.path)] == ["this run"]
        with pytest.raises(PacelineError, match="PL510"), folder.begin(2, num_bytes=0, identity={"run": "b"}):
            pass
        with folder.begin(2, num_bytes=0, identity={"run": "this run"}):
            assert saving.exists()
            assert temporary.exists()
        with pytest.raises(PacelineError, match="PL547"):
            await_writers(folder.path, limit_s=0.2)
        writer.kill()
    await_writers(folder.path, limit_s=0.2)
    save(folder, 3)
    assert list_names(tmp_path) == ["step-00000001", "step-00000003"]


def test_own_lock_is_no_living_writer(tmp_path: Path) -> None:
    saving = tmp_path / f"{SAVING}step-00000002-ab"
    saving.mkdir()
    with Hold(saving / "alive-00000", None):
        assert list(find_live(tmp_path, own=saving)) == []


def test_a_writer_that_never_comes_ends_the_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joint, "_APPEARS_S", 0.3)
    first, _ = prepare(tmp_path / "run", tmp_path / "data")
    found = joint.JointSave(first)
    found.begin()
    data = (tmp_path / "data").read_bytes()
    found.write(lambda start, num_bytes: [memoryview(data)[start : start + num_bytes]])
    outcome = found.conclude()
    found.leave(outcome)
    assert outcome.error is not None
    assert outcome.error.code == "PL540"
    assert "writer of rank 1" in outcome.error.saw
    assert f"process {os.getpid()}" in outcome.error.saw


def save_without_locks(
    folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str, delay_s: float, beats: bool = True
) -> dict[int, Any]:
    """Run two writers on nodes that do not see each other's locks; the second needs longer."""
    monkeypatch.setattr(joint, "_SILENT_S", 1.5)
    monkeypatch.setattr(alive, "_BEAT_S", 0.3 if beats else 1000.0)
    hosts = {"writer-0": "a", "writer-1": "b"}
    monkeypatch.setattr(socket, "gethostname", lambda: hosts.get(threading.current_thread().name, "c"))
    monkeypatch.setattr(alive, "is_held", lambda path: False if path.exists() else None)
    monkeypatch.setattr(joint, "is_held", alive.is_held)
    if kind == "nolock":

        def refuse(*_: Any) -> None:
            raise OSError(errno.ENOSYS, "Function not implemented")

        monkeypatch.setattr(fcntl, "lockf", refuse)
    orders, found = prepare(folder / "run", folder / "data"), {}
    data = (folder / "data").read_bytes()

    def write(order: Order) -> None:
        def read(start: int, num_bytes: int) -> Iterator[memoryview]:
            time.sleep(delay_s * order.writer)
            yield memoryview(data)[start : start + num_bytes]

        save = joint.JointSave(order)
        save.begin()
        save.write(read)
        found[order.writer] = save.conclude()
        save.leave(found[order.writer])

    threads = [threading.Thread(target=write, args=(each,), name=f"writer-{each.writer}") for each in orders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.mark.parametrize("kind", ["nolock", "localflock"])
def test_a_slow_writer_whose_lock_is_not_seen_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    found = save_without_locks(tmp_path, monkeypatch, kind, 1.0)
    assert [found[writer].error for writer in (0, 1)] == [None, None]
    assert verify(tmp_path / "run/checkpoints/step-00000002") == []


def test_a_silent_writer_whose_lock_is_not_seen_ends_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = save_without_locks(tmp_path, monkeypatch, "localflock", 1.0, beats=False)
    assert {each.error and each.error.code for each in found.values()} == {"PL540"}


def test_a_writer_that_stands_still_ends_the_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joint, "STILL_S", 1.5)
    first, _ = prepare(tmp_path / "run", tmp_path / "data")
    saving = tmp_path / "run/checkpoints" / f"{SAVING}step-00000002-abcd"
    saving.mkdir(parents=True)
    code = (
        "import sys; from pathlib import Path; from paceline.checkpoint.alive import Hold; "
        "stream = Hold(Path(sys.argv[1]) / 'alive-00001', None); print('held', flush=True); input()"
    )
    words = [sys.executable, "-c", code, str(saving)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        other.stdout.readline()
        other.send_signal(signal.SIGSTOP)
        save = joint.JointSave(first)
        save.begin()
        save.write(lambda start, num_bytes: [memoryview(bytes(num_bytes))])
        outcome = save.conclude()
        save.leave(outcome)
        other.kill()
    assert outcome.error is not None
    assert outcome.error.code == "PL549"
    assert "The writer of rank 1 has made no progress" in outcome.error.saw
