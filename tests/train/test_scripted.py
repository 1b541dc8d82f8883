"""Scripted and traced parts of a model train as the plain ones, or are refused by name."""

from __future__ import annotations

import functools
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.errors import PacelineError
from paceline.train.trainer import Trainer
from paceline.verifying.check import build_default_optimizer, resolve_layout, verify_subject
from paceline.verifying.subject import UserSubject
from paceline.world import World
from tests.dist.pool import Pool, RankError
from tests.verifying.runs import PoolRunner
from tests.verifying.two_steps import TWO_STEPS


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.gelu(self.linear(x))


class Model(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.emb, self.head = nn.Embedding(32, 16), nn.Linear(16, 32)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch.jit is deprecated
            self.blocks = nn.ModuleList([convert(Block(), kind) for _ in range(2)])

    def forward(self, ids: Tensor) -> Tensor:
        x = self.emb(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def convert(block: nn.Module, kind: str) -> nn.Module:
    if kind == "scripted":
        return torch.jit.script(block)
    if kind == "traced":
        return torch.jit.trace(block, torch.zeros(2, 8, 16))
    return block


def make(step: int) -> Tensor:
    return torch.randint(0, 32, (8, 8), generator=torch.Generator().manual_seed(step))


def measure(output: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), ids.flatten())


def train(world: World, kind: str, layouts: tuple[str, ...]) -> list[list[float]]:
    found = []
    for layout in layouts:
        torch.manual_seed(0)
        trainer = Trainer(
            Model(kind),
            loss=measure,
            optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1),
            layout=layout,
            example=make(0),
            microbatch_size=2,
        )
        share = make(1)[world.rank * 8 // world.world_size :][: 8 // world.world_size]
        rows = share if layout.startswith("dp") else make(1)
        found.append([trainer.step(rows).loss for _ in range(3)])
    return found


@functools.cache
def train_plainly() -> list[float]:
    torch.manual_seed(0)
    model, losses = Model("plain"), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        loss = measure(model(make(1)), make(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("kind", ["scripted", "traced"])
def test_they_train_as_in_plain_torch(ranks: Pool, kind: str) -> None:
    for losses in ranks.run(train, 2, (kind, ("dp_replicate=2",)))[0]:
        assert losses == pytest.approx(train_plainly(), rel=1e-5)


@pytest.mark.parametrize(
    ("kind", "layout"),
    [("scripted", "dp_shard=2"), ("traced", "tp=2"), ("scripted", "cp=2"), ("traced", "pp=2")],
)
def test_scripts_are_refused_by_name_where_the_model_is_divided(ranks: Pool, kind: str, layout: str) -> None:
    with pytest.raises(RankError) as caught:
        ranks.run(train, 2, (kind, (layout,)))
    [error, *_] = caught.value.causes.values()
    assert isinstance(error, PacelineError)
    assert error.code == "PL728"
    assert "blocks.0 is scripted or traced" in str(error)


def test_verify_compares_scripted_modules(ranks: Pool) -> None:
    subject = UserSubject(
        model_fn=functools.partial(Model, "scripted"),
        batch_fn=make,
        loss=measure,
        forward=None,
        optimizer=build_default_optimizer,
        **TWO_STEPS,
    )
    layouts = [resolve_layout(each) for each in ("dp_replicate=2", "tp=2")]
    replicated, split = verify_subject(subject, layouts, run=PoolRunner(ranks)).results
    assert replicated.status == "ok", list(map(str, replicated.findings))
    assert split.status == "refused"
    assert split.findings[0].code == "PL728"
