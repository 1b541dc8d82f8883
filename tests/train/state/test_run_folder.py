"""A run's folder: whose it is, one run at a time, and nothing written where it is refused."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from paceline.errors import PacelineError
from paceline.recipe import load_recipe
from paceline.recipe.load import parse_recipe
from paceline.recipe.schema import Recipe
from paceline.train.state import run_folder
from paceline.train.state.owner import read_owner
from paceline.train.state.run_folder import check_run_folder, claim_run_folder
from tests.train.cases import digits_recipe


def recipe(*settings: str) -> Recipe:
    return parse_recipe(digits_recipe(), settings)


def claim(folder: Path, *settings: str) -> None:
    claim_run_folder(folder, recipe(*settings)).close()


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_new_folder_gets_the_recipe(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "new"
    with claim_run_folder(folder, recipe()):
        assert load_recipe(folder / "recipe.toml") == recipe()
        owner = read_owner(folder / ".lock")
        assert owner is not None
        assert (owner.pid, owner.launcher_pid) == (os.getpid(), os.getppid())
    assert sorted(contents(folder)) == [".lock", "recipe.toml"]


@pytest.mark.parametrize(
    "setting",
    [
        "train.steps=99",
        "layout.dp_replicate=3",
        "checkpoint.every=1",
        "ddp.bucket_cap_mb=5.0",
        "train.compile=true",
    ],
)
def test_a_resumable_key_may_change_and_is_noted(tmp_path: Path, setting: str) -> None:
    claim(tmp_path)
    check_run_folder(tmp_path, recipe(setting))
    claim(tmp_path, setting)
    assert load_recipe(tmp_path / "recipe.toml") == recipe(setting)


@pytest.mark.parametrize(
    ("setting", "difference"),
    [
        ("train.seed=5", "train.seed: 0 there, 5 here"),
        ("train.microbatch_size=10", "train.microbatch_size: 20 there, 10 here"),
        ("optimizer.lr=0.5", "optimizer.lr: 0.1 there, 0.5 here"),
        ("model.width=8", "model.width: 4 there, 8 here"),
    ],
)
def test_another_recipes_folder_is_refused_with_the_difference(
    tmp_path: Path, setting: str, difference: str
) -> None:
    claim(tmp_path)
    before = contents(tmp_path)
    for refuse in (check_run_folder, claim_run_folder):
        with pytest.raises(PacelineError) as caught:
            refuse(tmp_path, recipe(setting, "train.steps=50"))
        assert caught.value.code == "PL530"
        assert difference in caught.value.saw
        assert "train.steps" not in caught.value.saw
    assert contents(tmp_path) == before
    claim(tmp_path)


def test_two_runs_at_once_are_refused(tmp_path: Path) -> None:
    with claim_run_folder(tmp_path, recipe()):
        before = contents(tmp_path)
        for refuse in (check_run_folder, claim_run_folder):
            begin_s = time.monotonic()
            with pytest.raises(PacelineError) as caught:
                refuse(tmp_path, recipe())
            assert time.monotonic() - begin_s < 1, "a run that goes on is refused at once"
            assert caught.value.code == "PL533"
            assert (
                f"in use by another run (process {os.getpid()} on {socket.gethostname()})" in caught.value.saw
            )
        assert contents(tmp_path) == before
    claim(tmp_path)


HOLDER = """
import os, signal, sys, time
from pathlib import Path
from tests.train.state.test_run_folder import recipe
from paceline.train.state.run_folder import claim_run_folder
launcher = int(sys.argv[2]) if len(sys.argv) > 2 else None
held = claim_run_folder(Path(sys.argv[1]), recipe(), launcher_pid=launcher)
"""


def hold(folder: Path, then: str, *words: str) -> subprocess.Popen[str]:
    """Start a process that claims the folder and then does something."""
    return subprocess.Popen(
        [sys.executable, "-c", HOLDER + then, str(folder), *words],
        cwd=Path(__file__).parents[3],
        stdout=subprocess.PIPE,
        text=True,
    )


def a_dead_process() -> int:
    with subprocess.Popen(["true"]) as process:
        process.wait(10)
    return process.pid


def test_a_killed_run_leaves_the_folder_free(tmp_path: Path) -> None:
    """The lock goes with the process, whatever is in the file."""
    with hold(tmp_path, "os.kill(os.getpid(), signal.SIGKILL)") as holder:
        assert holder.wait(60) == -signal.SIGKILL
    assert read_owner(tmp_path / ".lock") is not None
    check_run_folder(tmp_path, recipe())
    claim(tmp_path)


def test_a_loader_worker_that_outlives_its_rank_holds_no_lock(tmp_path: Path) -> None:
    then = """
child = os.fork()
if child == 0:
    time.sleep(60)
    os._exit(0)
print(child, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    with hold(tmp_path, then) as holder:
        assert holder.stdout is not None
        child = int(holder.stdout.readline())
        try:
            assert holder.wait(60) == -signal.SIGKILL
            begin_s = time.monotonic()
            check_run_folder(tmp_path, recipe())
            claim(tmp_path)
            assert time.monotonic() - begin_s < 1
        finally:
            os.kill(child, signal.SIGKILL)


def test_ranks_without_a_launcher_are_waited_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    then = "print('held', flush=True); time.sleep(1.0)"
    with hold(tmp_path, then, str(a_dead_process())) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        begin_s = time.monotonic()
        check_run_folder(tmp_path, recipe())
        assert 0.5 < time.monotonic() - begin_s < 10
        assert f"process {holder.pid}), whose launcher has ended, to save and exit" in caplog.text
        assert caplog.text.count("waiting for rank 0") == 1
    claim_run_folder(tmp_path, recipe()).close()


def test_ranks_that_never_leave_are_reported_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_folder, "_LEAVING_S", 0.3)
    with claim_run_folder(tmp_path, recipe(), launcher_pid=a_dead_process()):
        with pytest.raises(PacelineError, match="PL533") as caught:
            claim(tmp_path)
        assert f"kill -9 {os.getpid()}" in caught.value.fix


@pytest.mark.parametrize("text", ["", "1234\n", "[]", "\x00" * 40, '{"pid": 1}'])
def test_a_lock_that_reports_nothing_is_given_a_second(text: str, tmp_path: Path) -> None:
    """It may just be being written, or held by someone who only looks."""
    with claim_run_folder(tmp_path, recipe()) as held:
        (tmp_path / ".lock").write_text(text)
        freed = threading.Timer(0.3, held.close)
        freed.start()
        claim(tmp_path)
        freed.join()
    with claim_run_folder(tmp_path, recipe()):
        (tmp_path / ".lock").write_text(text)
        with pytest.raises(PacelineError, match=r"unknown process.*PL533"):
            claim(tmp_path)


def test_looking_makes_nothing(tmp_path: Path) -> None:
    check_run_folder(tmp_path / "a" / "b", recipe())
    assert not (tmp_path / "a").exists()


def test_a_file_in_the_way_is_refused(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    for refuse in (check_run_folder, claim_run_folder):
        with pytest.raises(PacelineError, match="PL532"):
            refuse(tmp_path / "runs" / "demo", recipe())
    assert (tmp_path / "runs").read_text() == ""


def test_a_folder_that_may_not_be_written_to_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Permissions don't hold back the superuser, whom tests often run as.
    def refuse(self: Path, *args: object, **kwargs: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(PacelineError, match="PL532"):
        check_run_folder(tmp_path / "demo", recipe())
    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(PacelineError, match=r"Permission denied.*--out.*PL532"):
        claim_run_folder(tmp_path / "demo", recipe())


def test_a_name_that_no_checkpoint_could_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PacelineError, match=r"names in UTF-8 alone.*PL532"):
        check_run_folder(tmp_path / os.fsdecode(b"de\xffmo"), recipe())


def test_a_full_disk_is_reported_and_the_lock_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Path, *args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", full)
        with pytest.raises(PacelineError, match=r"No space left on device.*PL532"):
            claim_run_folder(tmp_path, recipe())
    claim(tmp_path)


def test_a_run_on_another_node_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "node7")
    with claim_run_folder(tmp_path, recipe()):
        monkeypatch.undo()
        with pytest.raises(PacelineError, match=rf"another run \(process {os.getpid()} on node7\).*PL533"):
            claim(tmp_path)
