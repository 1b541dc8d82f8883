"""Watching, profiling and counting memory change no bit of any layout, and no layout refuses them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from paceline.watch.rank.first_not_finite import Gradients
from paceline.world import World
from tests.dist.pool import Pool
from tests.launching.launched import Launched, paceline_run
from tests.watch.scripts.layouts import train

SCRIPT = str(Path(__file__).parent / "scripts" / "layouts.py")
TWO = ("dp_replicate=2", "dp_replicate=2!", "dp_shard=2", "dp_shard=2!", "tp=2", "tp=2 sequence=true")
TWO = (*TWO, "cp=2", "pp=2", "dp_replicate=2 ep=2", "dp_shard=2 ep=2")
FOUR = ("dp_shard=2 tp=2", "pp=2 dp_replicate=2 ep=2", "dp_shard=2 cp=2", "pp=2 tp=2")


def train_watched(world: World, layouts: tuple[str, ...]) -> tuple[list[str], list[str], int]:
    """Return the bits of the layouts, those with gradients watched, and the number of hooks seen."""
    plain = [train(layout) for layout in layouts]
    gradients, num_hooks = Gradients(), 0
    gradients.install(torch)
    try:
        watched = []
        for layout in layouts:
            watched.append(train(layout))
            num_hooks += gradients.passes > 0
    finally:
        gradients.remove()
    return plain, watched, num_hooks


def test_the_watch_of_gradients_changes_nothing(ranks: Pool) -> None:
    layouts = ("dp_replicate=2 ep=2", "dp_shard=2 ep=2")
    for plain, watched, num_hooks in ranks.run(train_watched, 2, (layouts,)):
        assert plain == watched
        assert num_hooks, "nothing was watched"


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("nproc", "layouts"), [(2, TWO), (4, FOUR)], ids=["two", "four"])
def test_what_looks_on_changes_nothing(tmp_path: Path, nproc: int, layouts: tuple[str, ...]) -> None:
    found = []
    program = paceline_run()[0]
    ways = (["run", "--no-watch"], ["profile", "--out", "recorded", "--from", "3"])
    for number, way in enumerate(ways):
        command = [program, *way, "--nproc-per-node", str(nproc), SCRIPT, *layouts]
        with Launched(tmp_path / str(number), command) as job:
            code = job.wait(140.0)
            assert code == 0, job.text
            found.append([line for line in job.text.splitlines() if " | " in line])
    assert [line.partition(" | ")[0] for line in found[0]] == list(layouts)
    assert found[0] == found[1]
