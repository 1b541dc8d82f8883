"""A fault triggers at its place, once, and in no other save."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.checkpoint import CheckpointFolder, files, is_usable, verify
from paceline.errors import PacelineError
from tests.chaos.faults import KINDS, Fault, Hook, load_fault
from tests.chaos.plan import _VICTIMS, _VICTIMS_IN_A_SAVE, Plans
from tests.chaos.setting import Case
from tests.checkpoint.states import save


class Killed(BaseException):
    """Raised in place of the end of the process: nothing may happen after it."""


def strike(victim: str) -> None:
    raise Killed(victim)


def whole(folder: CheckpointFolder) -> list[int]:
    steps = folder.steps()
    assert all(is_usable(verify(path)) for path in steps.values())
    return list(steps)


@pytest.mark.parametrize("kind", [k for k in KINDS if k not in ("kill in the copy", "kill in retention")])
@pytest.mark.parametrize("place", [1, 3, 4])  # a checkpoint has five files
@pytest.mark.parametrize("number", [1, 3])
def test_a_fault_strikes_in_its_save(kind: str, place: int, number: int, tmp_path: Path) -> None:
    run = tmp_path / "out"
    folder = CheckpointFolder(run, keep=9)
    fault = load_fault(Fault(kind, number, place, "rank 0", str(tmp_path / "fired")).dump())
    with files.inject(Hook(fault, strike)):
        for step in range(1, number):
            save(folder, step)
        assert not (tmp_path / "fired").exists()
        with pytest.raises(Killed if fault.kills else PacelineError) as caught:
            save(folder, number)
        if not fault.kills:
            assert caught.value.code == "PL508"  # type: ignore[attr-defined]
        assert (tmp_path / "fired").exists()
        assert whole(folder) == list(range(1, number))
        for step in (number, number + 1):  # it strikes once
            save(folder, step)
    assert whole(folder) == list(range(1, number + 2))


@pytest.mark.parametrize("place", [1, 2, 5])
def test_a_kill_in_retention_waits_for_a_checkpoint_to_be_removed(place: int, tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path / "out", keep=2)
    fault = Fault("kill in retention", 1, place, "rank 0", str(tmp_path / "fired"))
    with files.inject(Hook(fault, strike)):
        for step in (1, 2):
            save(folder, step)
        with pytest.raises(Killed):
            save(folder, 3)
        # Before its renaming the oldest one is whole; after it, it no longer counts.
        assert whole(folder) == ([1, 2, 3] if place == 1 else [2, 3])
        assert bool(list(folder.path.glob(".trash-*"))) is (place > 1)
        save(folder, 4)
    assert whole(folder) == [3, 4]
    assert not list(folder.path.glob(".trash-*"))


@pytest.mark.parametrize("place", [0, 1, 7, 8, 500, 3000])
def test_a_write_ends_at_its_byte(place: int, tmp_path: Path) -> None:
    written = 0

    def strike(victim: str) -> None:
        nonlocal written
        written = sum(path.stat().st_size for path in tmp_path.glob("out/checkpoints/.tmp-*/*"))
        raise Killed

    fault = Fault("kill in a write", 1, place, "rank 0", str(tmp_path / "fired"))
    with files.inject(Hook(fault, strike)), pytest.raises(Killed):
        save(CheckpointFolder(tmp_path / "out", keep=1), 1)
    assert written == place


def test_plans_come_from_the_seed_and_leave_nothing_out() -> None:
    def deal(seed: int) -> list[object]:
        plans = Plans(seed)
        return [plans.deal(Case("fast", 2, 2)) for _ in range(60)]

    assert deal(3) == deal(3)
    assert deal(3) != deal(4)
    plans = Plans(0)
    dealt = [plans.deal(Case("exact", None, 2, "sharded", True)) for _ in range(200)]
    by_clock = {plan.victim for plan in dealt if plan.when != "save" and plan.nproc > 1}
    assert by_clock == set(_VICTIMS)
    assert {plan.fault for plan in dealt if plan.when == "save"} == set(KINDS)
    assert {plan.victim for plan in dealt if plan.when == "save"} == set(_VICTIMS_IN_A_SAVE)
    assert {plan.nproc for plan in dealt} == {1, 2, 3, 4}
    assert {plan.damage for plan in dealt} == {None, "flip a bit", "cut a file", "remove a file"}


def test_nobody_is_to_be_killed_who_is_not_there() -> None:
    plans = Plans(0)
    alone = {plans.deal(Case("fast", 1, 0)).victim for _ in range(200)}
    assert not alone & {"another rank", "loader worker"}
