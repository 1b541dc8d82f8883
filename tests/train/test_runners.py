"""A runner decides the order of forwards and backwards, and no number depends on it."""

from __future__ import annotations

import ast
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn

import paceline
from paceline.train import building
from paceline.train.runners.whole import WholeRunner
from paceline.train.runners.work import Round, Work
from paceline.train.trainer import Trainer
from paceline.world import start
from tests.train.cases import Trained, take_steps

TRAIN = Path(paceline.__file__).parent / "train"


class ForwardsFirst(WholeRunner):
    """Runs all forwards before all backwards, as stages of a pipeline do."""

    def run(self, work: Work) -> float:
        assert self._exact is not None
        self._statistics.begin(work.share.num_owned)
        self._exact.begin(work.share.num_owned)
        rounds: list[Round] = []
        for number, samples in enumerate(work.share.samples):
            index, batch = work.share.microbatches[number]
            each = Round(index, self._start(work, index, batch), is_last=False)
            with self._drawing(work, samples):
                self.forward(work, each)
            self._report(work, each)
            rounds.append(each)
        for each, samples in zip(rounds, work.share.samples, strict=True):
            with self._drawing(work, samples):
                self.backward(work, each)
            self._exact.set_aside(each.index)
        work.launch.now()
        self._exact.end(reduced=False)
        return 0.0


def train(layout: str) -> Trained:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), nn.ReLU()) for _ in range(3)]
    model = nn.Sequential(*blocks)
    trainer = Trainer(
        model,
        loss=lambda output, batch: (output.square().sum(), len(output)),
        optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=0.01),
        microbatch_size=3,
        layout=layout,
    )
    return take_steps(trainer, [torch.randn(8, 6) for _ in range(3)])


@pytest.mark.parametrize("layout", ["", "recompute=block"])
def test_backwards_may_come_after_all_forwards(layout: str) -> None:
    with start():
        expected = train(layout)
    with start(), mock.patch.object(building, "WholeRunner", ForwardsFirst):
        found = train(layout)
    assert found.hash == expected.hash
    assert found.losses == expected.losses


def test_only_one_place_asks_how_a_layout_runs() -> None:
    asked = [
        f"{path.name}:{node.lineno}"
        for path in TRAIN.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and getattr(node.func, "id", "") == "isinstance"
        and {"Replica", "Shards", "WholeRunner", "ShardedRunner"}
        & {getattr(part, "id", "") for part in ast.walk(node.args[1])}
    ]
    assert asked == []
