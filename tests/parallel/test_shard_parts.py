"""Under dp_shard: blocks that only hold their parts, and parameters without a dimension."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.parallel.shard import setup
from paceline.train.trainer import Trainer
from tests.dist.pool import Pool, RankError
from tests.parallel.sharded import LENGTH, VOCAB, WIDTH, Toy, microbatch


def held_block() -> nn.ModuleDict:
    mlp = nn.ModuleList([nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)])
    return nn.ModuleDict({"norm": nn.LayerNorm(WIDTH), "mlp": mlp, "gains": nn.ParameterDict()})


class Parts(nn.Module):
    """Blocks of containers, none of which is called; scalars in a block and outside; a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(held_block() for _ in range(2))
        for block in self.blocks:
            block["gains"]["out"] = nn.Parameter(torch.ones(WIDTH))
            block["gains"]["all"] = nn.Parameter(torch.tensor(0.7))
        self.logit_scale = nn.Parameter(torch.tensor(1.3))
        self.frozen_scale = nn.Parameter(torch.tensor(0.5), requires_grad=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            up, down = block["mlp"]
            gains = block["gains"]
            x = x + gains["all"] * gains["out"] * down(F.gelu(up(block["norm"](x)))) * self.frozen_scale
        return F.linear(x, self.embed.weight) * self.logit_scale.exp()


def build_trainer(layout: str, model: Any, **settings: Any) -> Trainer:
    return Trainer(
        model,
        forward=lambda model, ids: model(ids[:, :-1]),
        loss=lambda logits, ids: (
            F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum"),
            torch.tensor(float(ids[:, 1:].numel())),
        ),
        optimizer=lambda named: torch.optim.AdamW(
            [p for _, p in named if p.requires_grad], lr=0.05, foreach=True
        ),
        layout=layout,
        microbatch_size=2,
        clip_norm=0.5,
        dtype="fp64",
        **settings,
    )


def share(world: Any, step: int, num_microbatches: int = 4) -> Tensor:
    """Return a rank's samples of a step; the first ranks have more, so that the others have idle rounds."""
    most = -(-num_microbatches // world.world_size)
    own = range(num_microbatches)[most * world.rank : most * (world.rank + 1)]
    batch = [microbatch(index, step) for index in own]
    return torch.cat(batch) if batch else torch.zeros((0, LENGTH + 1), dtype=torch.long)


def train(world: Any, layout: str, folder: str, settings: dict[str, Any]) -> Any:
    """Return losses and norms of three more steps, and whole weights."""
    trainer = build_trainer(layout, Parts, **settings)
    trainer.resume(folder)
    steps = []
    for _ in range(3):
        step = trainer.step(share(world, trainer.step_number))
        steps.append((float(step.loss), float(step.grad_norm)))
    trainer.save()
    return steps, trainer.whole_state()


FAST = {"reduction": "fast"}


@pytest.fixture(scope="module")
def alone(ranks: Pool, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Twice three steps of one process."""
    folder = str(tmp_path_factory.mktemp("alone"))
    return [ranks.run(train, 1, ("", folder, {}))[0] for _ in range(2)]


@pytest.mark.parametrize(
    ("nproc", "layout", "then"),
    [
        (2, "dp_shard=2", ""),
        (1, "", "dp_shard=2 zero=2"),
        (3, "dp_shard=3", "dp_replicate=2"),
        (4, "dp_replicate=2 dp_shard=2 zero=1", "dp_shard=3 recompute=block"),
    ],
)
def test_bits_are_those_of_one_process(
    ranks: Pool, alone: list[Any], tmp_path: Path, nproc: int, layout: str, then: str
) -> None:
    degrees = [int(word.partition("=")[2]) for word in then.split() if word.startswith("dp_")]
    for (steps, state), words, number in zip(alone, (layout, then), (nproc, *degrees, 1), strict=False):
        results = ranks.run(train, number, (words, str(tmp_path), {}))
        assert all(result[0] == steps for result in results)
        weights = results[0][1]
        assert state["logit_scale"].shape == ()
        assert weights.keys() == state.keys()
        for name, tensor in state.items():
            assert torch.equal(weights[name], tensor), name


@pytest.mark.parametrize(("nproc", "layout"), [(2, "dp_shard=2"), (3, "dp_shard=3 zero=2")])
def test_the_fast_reduction_is_close(
    ranks: Pool, alone: list[Any], tmp_path: Path, nproc: int, layout: str
) -> None:
    results = ranks.run(train, nproc, (layout, str(tmp_path), FAST))
    for steps, _ in results:
        torch.testing.assert_close(steps, alone[0][0], rtol=1e-10, atol=1e-12)
    for name, tensor in alone[0][1].items():
        torch.testing.assert_close(results[0][1][name], tensor, rtol=1e-9, atol=1e-9, msg=name)


class Unused(Parts):
    """A scalar that the first rank's microbatches use, and one that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.never = nn.Parameter(torch.tensor(1.0))
        self.seldom = nn.Parameter(torch.tensor(1.0))

    def forward(self, ids: Tensor) -> Tensor:
        output = super().forward(ids)
        return output * self.seldom if torch.equal(ids, microbatch(0)[:, :-1]) else output


def train_unused(world: Any, layout: str) -> Any:
    trainer = build_trainer(layout, Unused())
    step = trainer.step(share(world, 0))
    state = trainer.whole_state()
    return float(step.grad_norm), [state.get("never"), state.get("seldom")]


def test_unused_scalars(ranks: Pool) -> None:
    sharded = ranks.run(train_unused, 2, ("dp_shard=2",))[0]
    replicated = ranks.run(train_unused, 2, ("dp_replicate=2",))[0]
    assert sharded == replicated
    assert sharded[1][0] == 1.0, "as in one process, what nobody used has no weight decay"
    assert sharded[1][1] != 1.0


class HandUsed(nn.Module):
    """Blocks with a forward, which the model does by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(WIDTH, 2, WIDTH) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block.linear2(F.gelu(block.linear1(block.norm1(x))))
        return F.linear(x, self.embed.weight)


class Outside(nn.Module):
    """Calls parts of its blocks before and after the blocks, and reads weights of blocks before and after."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(WIDTH, 2, WIDTH, 0.0) for _ in range(4))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        early = self.blocks[2].linear2(x)
        for number, block in enumerate(self.blocks):
            x = block(x) if number != 3 else x + F.gelu(block.linear1(block.norm1(x)))
        x = x + early + F.linear(x, self.blocks[0].linear1.weight)
        penalty = sum(block.norm2.weight.square().sum() for block in self.blocks[1:3])
        return F.linear(x, self.embed.weight) * penalty


def build_outside(number: int) -> nn.Module:
    torch.manual_seed(0)
    return (HandUsed, Outside)[number]()


def train_outside(world: Any, layout: str, settings: dict[str, Any]) -> Any:
    found = []
    for number in range(2):
        trainer = build_trainer(layout, build_outside(number), **settings)
        losses = [float(trainer.step(share(world, step)).loss) for step in range(3)]
        kinds = {type(module.__dict__["_parameters"]) for module in trainer.model.modules()}
        assert kinds == {dict}, "the first step alone is watched"
        found.append((losses, trainer.whole_state()))
    return found


def train_plainly(number: int) -> tuple[list[float], dict[str, Tensor]]:
    """Return losses and weights of a loop of torch alone."""
    model, losses = build_outside(number).double(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for step in range(3):
        optimizer.zero_grad()
        batches = [microbatch(index, step) for index in range(4)]
        for ids in batches:
            logits = model(ids[:, :-1]).flatten(0, 1)
            loss = F.cross_entropy(logits, ids[:, 1:].flatten(), reduction="sum")
            (loss / sum(each[:, 1:].numel() for each in batches)).backward()
            losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    weight = 4 * microbatch(0)[:, 1:].numel()
    return [sum(losses[4 * n : 4 * n + 4]) / weight for n in range(3)], dict(model.named_parameters())


@pytest.mark.parametrize(
    ("nproc", "layout", "settings"),
    [(2, "dp_shard=2", {}), (2, "dp_shard=2 zero=2", FAST), (3, "dp_shard=3 recompute=block", {})],
)
def test_blocks_that_are_used_outside_of_their_calls(
    ranks: Pool, nproc: int, layout: str, settings: dict[str, Any]
) -> None:
    for number, (losses, state) in enumerate(ranks.run(train_outside, nproc, (layout, settings))[0]):
        expected, weights = train_plainly(number)
        torch.testing.assert_close(losses, expected, rtol=1e-9, atol=1e-9)
        for name, tensor in weights.items():
            torch.testing.assert_close(state[name], tensor.detach(), rtol=1e-6, atol=1e-6, msg=name)


class Late(Toy):
    """Reads a weight of a block in the second step for the first time."""

    num_forwards = 0

    def forward(self, ids: Tensor) -> Tensor:
        self.num_forwards += 1
        x = super().forward(ids)
        return x * self.blocks[0].gain.sum() if self.num_forwards > 2 else x


def train_late(world: Any) -> None:
    trainer = build_trainer("dp_shard=2", Late())
    for step in range(2):
        trainer.step(share(world, step))


def test_a_later_use_is_refused_with_its_line(ranks: Pool) -> None:
    with pytest.raises(
        RankError, match=r"test_shard_parts.py:\d+ in forward uses a parameter of a block.*PL435"
    ):
        ranks.run(train_late)


def build_tables() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB))


def train_tables(world: Any, table_bytes: int) -> Any:
    with mock.patch.object(setup, "_TABLE_BYTES", table_bytes):
        gathered = []
        for model in (Toy(), build_tables()):
            trainer = build_trainer("dp_shard=2" if world.world_size > 1 else "", model)
            for step in range(2):
                trainer.step(share(world, step))
            gathered.append(trainer.whole_state())
        units = (
            []
            if world.world_size == 1
            else [unit.name for unit in trainer._updates["model"].runner._shards.units]
        )
        return gathered, units


def test_large_tables_are_gathered_one_by_one(ranks: Pool) -> None:
    (toy, tables), _ = ranks.run(train_tables, 1, (0,))[0]
    found, units = ranks.run(train_tables, 2, (0,))[0]
    assert units == ["0", "1", ""], "the tied table of the other model stays with it"
    for state, other in zip((toy, tables), found, strict=True):
        assert all(torch.equal(other[name], tensor) for name, tensor in state.items())
