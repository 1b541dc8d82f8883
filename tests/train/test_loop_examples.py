"""Five well-known loops: the same weights on any number of ranks, and when they go on elsewhere."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.dist.pool import Pool
from tests.train.loops import hash_state

FOLDER = Path(__file__).parents[2] / "examples" / "loops"
# By example, the layouts besides replicas.
EXAMPLES = {
    "language_model": [(2, "dp_shard=2")],
    "batches_of_its_own": [(2, "dp_shard=2")],
    "vision": [(2, "dp_shard=2")],
    "gan": [],
    "ppo": [(2, "dp_shard=2")],
}


class EndedError(Exception):
    """The end of a start, in the middle of the run."""


def train(world: Any, name: str, layout: str, folder: str, most_steps: int = 0) -> str:
    sys.path.insert(0, str(FOLDER))
    example = importlib.import_module(name)
    loops: list[Any] = []
    if most_steps:
        import paceline
        from paceline.train.loop import Loop

        class Ending(Loop):
            def save(self, **settings: Any) -> Any:
                saved = super().save(**settings)
                if self.step_number >= most_steps:
                    raise EndedError
                return saved

        loops.append(paceline.Loop)
        example.paceline = _With(example.paceline, Ending)
    try:
        return hash_state(example.train(layout, folder).whole_state())
    except EndedError:
        return ""
    finally:
        sys.path.remove(str(FOLDER))
        del sys.modules[name]


class _With:
    """The package with another Loop."""

    def __init__(self, package: Any, loop: Any) -> None:
        self.package, self.Loop = package, loop

    def __getattr__(self, name: str) -> Any:
        return getattr(self.package, name)


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_weights_do_not_depend_on_the_ranks(ranks: Pool, tmp_path: Path, name: str) -> None:
    expected = ranks.run(train, 1, (name, "", str(tmp_path / "one")))[0]
    for nproc, layout in [(3, "dp_replicate=3"), *EXAMPLES[name]]:
        found = ranks.run(train, nproc, (name, layout, str(tmp_path / layout.replace(" ", "-"))))[0]
        assert found == expected, layout


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_run_goes_on_with_other_ranks(ranks: Pool, tmp_path: Path, name: str) -> None:
    expected = ranks.run(train, 1, (name, "", str(tmp_path / "whole")))[0]
    folder = str(tmp_path / "parts")
    layouts = [(3, "dp_replicate=3"), *(EXAMPLES[name] or [(2, "dp_replicate=2")]), (1, "")]
    for number, (nproc, layout) in enumerate(layouts):
        most_steps = (8, 14, 0)[number]
        found = ranks.run(train, nproc, (name, layout, folder, most_steps))[0]
    assert found == expected
