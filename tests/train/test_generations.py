"""Two starts of one run that do not know of each other, as two halves of a job on a common disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.checkpoint import CheckpointFolder
from paceline.checkpoint.manifest import read_manifest
from paceline.errors import PacelineError
from tests.dist.pool import Pool
from tests.train.state.test_saving import build_trainer, steps


def list_commits(folder: str) -> dict[int, int]:
    """Return the generation that each step was committed by."""
    found = CheckpointFolder(folder, keep=9).steps()
    return {step: read_manifest(path).identity["generation"] for step, path in found.items()}


def train_twice(world: Any, folder: str, options: dict[str, Any]) -> dict[str, Any]:
    """Run an older start beside a newer one, then a third one that is late."""
    old = build_trainer(**options)
    old.resume(folder)
    for _ in steps(old, 2):
        old.save(wait=True)
    new = build_trainer(**options)
    late = build_trainer(**options)
    assert new.resume(folder) == late.resume(folder) == 2
    next(steps(old, 1))
    old.save(wait=True)  # the newer one has not begun yet
    codes = []
    for trainer in (new, old, late):
        try:
            next(steps(trainer, 1))
            trainer.save(wait=True)
            codes.append("")
        except PacelineError as error:
            codes.append(error.code)
    seen = list_commits(folder)
    third = build_trainer(**options)
    third.resume(folder)
    for _ in steps(third, 2):
        third.save(wait=True)
    try:
        next(steps(old, 1))
        old.save(wait=True)
    except PacelineError as error:
        codes.append(error.code)
    for trainer in (old, new, late, third):
        trainer.close()
    return {"codes": codes, "seen": seen, "commits": list_commits(folder)}


@pytest.mark.parametrize("mode", ["full", "sharded"])
def test_a_run_has_one_history(ranks: Pool, tmp_path: Path, mode: str) -> None:
    options = {"layout": "dp_replicate=2", "mode": mode, "asynchronous_saves": False, "keep": 9}
    found = ranks.run(train_twice, 2, (str(tmp_path / "run"), options))
    assert found[0] == found[1]
    # The older one saved step 3 before the two others took a step, so these are behind it, and it goes on.
    assert found[0]["codes"] == ["PL383", "", "PL383", "PL383"]
    assert found[0]["seen"] == {1: 1, 2: 1, 3: 1, 4: 1}
    assert found[0]["commits"] == {1: 1, 2: 1, 3: 1, 4: 1, 5: 2, 6: 2}
