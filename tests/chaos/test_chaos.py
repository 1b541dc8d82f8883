"""Real runs whose processes are killed, in short; `make chaos` is long. `pytest -m chaos` runs these."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.plan import Plan, Plans
from tests.chaos.run import MODES, Chaos, make_cases
from tests.chaos.setting import Case


class Written(Plans):
    """Plans as they are written here."""

    def __init__(self, *plans: Plan) -> None:
        self.left = list(plans)

    def deal(self, case: Case) -> Plan:
        return self.left.pop(0)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short path: sockets are made below it, whose paths have at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="chaos-") as name:
        yield Path(name)


@pytest.mark.chaos
@pytest.mark.timeout(300)
def test_killed_in_the_middle_of_a_save_and_given_again(folder: Path) -> None:
    in_a_write = Plan("save", "rank 0", 0.0, "kill in a write", 3, 0.5, None, 1)
    undisturbed = Plan("never", "", 0.0, "", 0, 0.0, "flip a bit", 1)
    chaos = Chaos(folder, 0, plans=Written(in_a_write, undisturbed))
    chaos.run([Case("fast", 1, 0)], num_kills=1)
    told = chaos.tally
    assert told.wrong == []
    assert dict(told.kills) == {"rank 0": 1}
    assert dict(told.faults) == {"kill in a write": 1}
    assert dict(told.damages) == {"flip a bit": 1}
    assert (told.starts, told.resumes) == (2, 1)
    assert told.most_lost_to_damage == 8, "step 12 was not saved, and 8 was damaged"


@pytest.mark.chaos
@pytest.mark.timeout(900)
@pytest.mark.parametrize("reduction", ["fast", "exact"])
def test_killed_at_random_instants(reduction: str, folder: Path) -> None:
    chaos = Chaos(folder, 1)
    chaos.run(make_cases([reduction], MODES.split(",")), num_kills=8)
    assert chaos.tally.wrong == []
    assert chaos.tally.resumes > 0
