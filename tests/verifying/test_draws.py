"""The draws of a forward besides its dropout are named, and are not a difference on their own."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import paceline
from paceline.cli.verify_report import Asked, describe_end
from paceline.verifying.check import resolve_layout, verify_subject
from paceline.world import World
from tests.dist.pool import Pool
from tests.verifying.runs import PoolRunner
from tests.verifying.test_verify import subject


class Noise(nn.Module):
    """Drops elements, with torch.rand as people write it."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (torch.rand(x.shape) < 0.9) if self.training else x


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.drop, self.path = nn.Linear(96, 96), nn.Dropout(0.1), Noise()
        self.head = nn.Linear(96, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        x = x + self.path(self.drop(self.layer(x)))
        output: Tensor = self.head(functional.rrelu(x, training=self.training))
        return output


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(16, 8, num_layers=2, dropout=0.1, batch_first=True)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(self.lstm(x)[0][:, -1])
        return output


class Quiet(nn.Module):
    """All of its draws are by sample."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.drop, self.head = nn.Linear(96, 96), nn.Dropout(0.1), nn.Linear(96, 4)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(
            functional.dropout(self.drop(self.layer(x.flatten(1))), 0.2, self.training)
        )
        return output


@pytest.mark.parametrize(
    ("model", "named"),
    [
        (Residual, [("PL450", "path", "rand"), ("PL450", "the model", "rrelu")]),
        (Recurrent, [("PL452", "lstm", "LSTM")]),
        (Quiet, []),
    ],
)
def test_draws_that_depend_on_more_than_the_sample_are_named(
    ranks: Pool, model: type[nn.Module], named: list[tuple[str, str, str]]
) -> None:
    verified = verify_subject(subject(model), [resolve_layout("dp_replicate=2")], run=PoolRunner(ranks))
    assert verified.ok, verified.findings
    found = [(finding.code, finding.where) for finding in verified.draws]
    assert [pair for pair in found if pair[0] != "PL453"] == [(code, where) for code, where, _ in named]
    for finding, (_, _, what) in zip(verified.draws, named, strict=False):
        assert what in finding.saw
    told = describe_end(verified, Asked([]))
    assert all(str(finding) in told for finding in verified.draws)
    table: Any = json.loads(json.dumps(asdict(verified), default=str))
    assert [draw["code"] for draw in table["draws"]] == [code for code, _ in found]


def test_looking_for_draws_leaves_no_trace(ranks: Pool) -> None:
    assert ranks.run(find_twice, 1, ()) == [True]


def find_twice(_world: World) -> bool:
    """Return whether generators, buffers and the next step are as they would have been."""

    def train(*, looks: bool) -> list[Tensor]:
        model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), Noise(), nn.Linear(8, 1))
        torch.manual_seed(3)
        for parameter in model.parameters():
            nn.init.normal_(parameter)
        trainer = paceline.Trainer(
            model,
            forward=lambda module, batch: module(batch["x"]),
            loss=lambda output, batch: (output.square().sum(), len(output)),
            optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1),
            microbatch_size=4,
        )
        data = [{"x": torch.randn(8, generator=torch.Generator().manual_seed(n))} for n in range(16)]
        for share in trainer.loader(data, global_batch_size=8):
            trainer.step(share)
            if looks:
                before = torch.get_rng_state()
                assert [f.where for f in trainer.find_random_draws(share)] == ["2"]
                assert torch.equal(before, torch.get_rng_state())
        return [tensor.clone() for tensor in model.state_dict().values()]

    return all(map(torch.equal, train(looks=False), train(looks=True)))


def test_training_reports_once_of_draws_that_depend_on_the_layout(ranks: Pool) -> None:
    (told,) = ranks.run(train_recurrent, 1, ())
    assert len(told) == 1
    assert "[PL452]" in told[0]


def train_recurrent(_world: World) -> list[str]:
    """Return the log of three steps of a model with dropout inside an LSTM."""
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("paceline.train.runners.runner").addHandler(handler)
    trainer = paceline.Trainer(
        Recurrent(),
        forward=lambda module, batch: module(batch["x"]),
        loss=lambda output, batch: (output.square().sum(), len(output)),
        optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1),
    )
    for _ in range(3):
        trainer.step({"x": torch.randn(4, 6, 16)})
    logging.getLogger("paceline.train.runners.runner").removeHandler(handler)
    return told
