"""Metrics on several disks: a disk that refuses them ends all ranks with one message, and none waits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline.errors import PacelineError
from paceline.train.belongings import METRICS
from paceline.train.state.disks import Disks, SharedDisk
from paceline.train.state.follow import SharedRows
from tests.dist.pool import Pool

ROWS = "".join(f'{{"step": {step}}}\n' for step in (1, 2, 3))


def resume_with_a_leftover(world: Any, base: str, kind: str) -> tuple[str, str, str]:
    """Rank 1's disk has no rows, and what a killed process left in the place where they arrive."""
    disks = Disks((SharedDisk((0,), "node0"), SharedDisk((1,), "node1")), world.rank)
    folder = Path(base) / str(world.rank)
    folder.mkdir()
    partial = folder / f".{METRICS}.partial"
    if world.is_main:
        (folder / METRICS).write_text(ROWS)
    elif kind == "folder":  # which unlink cannot remove, as a file on a disk that became read-only
        partial.mkdir()
    else:
        partial.write_text("half a r")
    code = text = ""
    try:
        SharedRows(world, disks, folder).resume(2)
    except PacelineError as error:
        code, text = error.code, error.saw
    found = folder / METRICS
    return code, text, found.read_text() if found.exists() else ""


def test_a_leftover_is_replaced(ranks: Pool, tmp_path: Path) -> None:
    kept = ROWS[: len(ROWS) * 2 // 3]
    assert ranks.run(resume_with_a_leftover, 2, (str(tmp_path), "file")) == [("", "", kept)] * 2


def test_a_leftover_that_cannot_be_removed_ends_all_ranks(ranks: Pool, tmp_path: Path) -> None:
    main, other = ranks.run(resume_with_a_leftover, 2, (str(tmp_path), "folder"))
    for code, text, _ in (main, other):
        assert code == "PL523"
        assert f"{METRICS} could not be copied to node1" in text
    assert main[1] == other[1]
    assert other[2] == "", "half of the rows are never taken for all"
