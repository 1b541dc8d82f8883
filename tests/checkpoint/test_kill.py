"""SIGKILL in the middle of a save, at every operation and at random instants."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.checkpoint import CheckpointFolder, files, verify
from tests.checkpoint.saver import Fault, Saver
from tests.checkpoint.states import assert_loaded, list_names, load_newest, save


@pytest.fixture(scope="module")
def saver() -> Iterator[Saver]:
    saver = Saver()
    yield saver
    saver.close()


@pytest.fixture(scope="module")
def first_rename(tmp_path_factory: pytest.TempPathFactory) -> int:
    """The number of the operation with which a save begins to change what is there."""
    folder = CheckpointFolder(tmp_path_factory.mktemp("counted"), keep=2)
    save(folder, 1)
    fault = Fault()
    with files.inject(fault):
        save(folder, 2)
    return fault.operations.index("rename") + 1


def goes_on(run: Path, *possible: int, keep: int = 2, broken_before: bool = False) -> int:
    """Load what a killed process left, saves the next step, and asserts that nothing is left over."""
    folder = CheckpointFolder(run, keep=keep)
    broken = [path for path in folder.steps().values() if verify(path)]
    assert broken == ([folder.path / "step-00000002"] if broken_before and broken else [])
    loaded = load_newest(folder)
    assert loaded is not None
    assert loaded.step in possible
    assert_loaded(loaded, loaded.step)
    save(folder, 99)
    assert_loaded(load_newest(folder), 99)
    assert all(name.startswith(("step-", "corrupt-step-")) for name in list_names(run))
    assert "step-00000099" in list_names(run)
    return loaded.step


def test_killed_at_every_operation_of_a_save(saver: Saver, tmp_path: Path) -> None:
    seen = []
    for operation in range(1, 1000):
        run = tmp_path / str(operation)
        save(CheckpointFolder(run, keep=1), 1)  # keep=1: the save also removes one
        killed = saver.save(run, [2], keep=1, kill_at=operation)
        seen.append(goes_on(run, 1, 2, keep=1))
        if not killed:
            break
    assert len(seen) > 40
    # One instant commits: before it every kill leaves step 1, from then on step 2.
    assert seen == sorted(seen)
    assert set(seen) == {1, 2}


def test_killed_while_replacing_a_valid_checkpoint(saver: Saver, first_rename: int, tmp_path: Path) -> None:
    for operation in range(first_rename, 1000):
        run = tmp_path / str(operation)
        folder = CheckpointFolder(run, keep=2)
        save(folder, 1)
        save(folder, 2)
        killed = saver.save(run, [2], kill_at=operation)
        assert goes_on(run, 2) == 2
        if not killed:
            break


def test_killed_while_replacing_a_broken_checkpoint(saver: Saver, first_rename: int, tmp_path: Path) -> None:
    seen = []
    for operation in range(first_rename, 1000):
        run = tmp_path / str(operation)
        folder = CheckpointFolder(run, keep=2)
        save(folder, 1)
        (save(folder, 2) / "state.json").unlink()
        killed = saver.save(run, [2], kill_at=operation)
        seen.append(goes_on(run, 1, 2, broken_before=True))
        if not killed:
            break
    assert seen == sorted(seen)
    assert set(seen) == {1, 2}


def test_killed_in_the_very_first_save(saver: Saver, tmp_path: Path) -> None:
    for operation in (1, 2, 5, 20, 35):
        run = tmp_path / str(operation)
        assert saver.save(run, [1], kill_at=operation)
        folder = CheckpointFolder(run, keep=1)
        assert load_newest(folder) is None
        save(folder, 1)
        assert list_names(run) == ["step-00000001"]


def test_killed_at_random_instants(saver: Saver, tmp_path: Path) -> None:
    chance = random.Random(0)
    folder = CheckpointFolder(tmp_path, keep=2)
    save(folder, 1)
    step, num_killed = 1, 0
    for _ in range(20):
        steps = list(range(step + 1, step + 30))
        num_killed += saver.save(tmp_path, steps, delay_s=chance.uniform(0.005, 0.15))
        loaded = load_newest(folder)
        assert loaded is not None
        assert step <= loaded.step <= steps[-1]
        assert_loaded(loaded, loaded.step)
        step = loaded.step
    assert num_killed >= 10
    assert step > 1
