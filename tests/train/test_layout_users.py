"""Users' models and data under layouts: BatchNorm, adapters, frozen models, odd batches, unused weights."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import paceline
from tests.dist.pool import Pool, RankError
from tests.train.test_layouts import Tokens, build_gpt, distance, next_token_loss

STEPS = 3


class Lora(nn.Module):
    """A frozen linear layer, and a trained product of two narrow matrices beside it."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.normal_(self.up.weight, std=0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def build_lora() -> nn.Module:
    model = build_gpt().requires_grad_(False)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear) and name in ("q_proj", "v_proj", "down_proj"):
                setattr(module, name, Lora(child))
    return model


class Branching(nn.Module):
    """Uses one of two branches, by the first id of a microbatch."""

    def __init__(self) -> None:
        super().__init__()
        self.model = build_gpt()
        self.even = nn.Parameter(torch.ones(64))
        self.odd = nn.Parameter(torch.ones(64))
        self.never = nn.Parameter(torch.ones(64))

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(ids) * (self.odd if int(ids[0, 0]) % 2 else self.even)


class LayerDrop(nn.Module):
    """Leaves blocks out at random, all of them too, and uses a parameter at random."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(64, 16)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 16)) for _ in range(3)
        )
        self.sometimes = nn.Parameter(torch.zeros(16))
        self.never = nn.Parameter(torch.ones(64))
        self.head = nn.Linear(16, 64)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for block in self.blocks:
            if torch.rand(()) < 0.5:
                x = x + block(x)
        if random.random() < 0.3:
            x = x + self.sometimes
        return self.head(x)


def train_all(world: Any, layouts: list[str], case: str) -> list[dict[str, Any]]:
    return [_train(world, layout, case) for layout in layouts]


def _train(world: Any, layout: str, case: str) -> dict[str, Any]:
    models: dict[str, Any] = {"lora": build_lora, "unused": Branching, "layerdrop": LayerDrop}
    trainer = paceline.Trainer(
        models.get(case, build_gpt),
        forward=lambda model, batch: model(batch["ids"][:, :-1]),
        loss=next_token_loss,
        optimizer=lambda named: torch.optim.AdamW(
            [p for _, p in named if p.requires_grad], lr=1e-2, weight_decay=0.1
        ),
        layout=layout,
        example={"ids": torch.zeros(2, 9, dtype=torch.int64)},
        microbatch_size=2,
        clip_norm=0.5,
        dtype="fp64",
        reduction="fast",
    )
    found: dict[str, Any] = {"layout": layout, "losses": [], "norms": [], "start": trainer.whole_state()}
    for share in make_batches(trainer, case):
        step = trainer.step(share)
        found["losses"].append(step.loss)
        found["norms"].append(step.grad_norm)
        if step.number == STEPS:
            break
    found["end"] = trainer.whole_state()
    trainer.close()
    return found


def make_batches(trainer: paceline.Trainer, case: str) -> Any:
    if case != "own batches":
        # Two samples make one microbatch: with more ranks than that, some own none.
        return trainer.loader(Tokens(), global_batch_size=2 if case == "few samples" else 8)
    dp = trainer._dp
    rank, size = (0, 1) if dp is None else (dp.rank, dp.size)
    # Microbatches of 2, so that they are those of one process whatever rank has them; the last rank has less.
    cuts = {1: [0, 10], 2: [0, 6, 10], 4: [0, 4, 8, 10, 10]}[size]
    whole = [torch.stack([Tokens()[10 * step + n]["ids"] for n in range(10)]) for step in range(STEPS)]
    return [{"ids": ids[cuts[rank] : cuts[rank + 1]]} for ids in whole]


LAYOUTS = {
    2: ["dp_shard=2", "dp_shard=2 zero=1", "tp=2"],
    4: ["dp_replicate=2 dp_shard=2", "dp_shard=2 tp=2"],
}
CASES = {
    "lora": LAYOUTS,
    "few samples": {2: ["dp_shard=2", "dp_shard=2 zero=2"], 4: ["dp_shard=4", "dp_shard=2 tp=2"]},
    "own batches": {**LAYOUTS, 4: [*LAYOUTS[4], "dp_shard=4"]},
    "unused": {2: ["dp_shard=2", "dp_shard=2 zero=1"], 4: ["dp_replicate=2 dp_shard=2"]},
    "layerdrop": {
        2: ["dp_replicate=2", "dp_shard=2", "dp_shard=2 zero=1", "dp_shard=2 zero=2"],
        3: ["dp_replicate=3", "dp_shard=3"],
        4: ["dp_replicate=2 dp_shard=2"],
    },
}


@pytest.mark.parametrize("case", CASES)
def test_is_trained_as_in_one_process(ranks: Pool, case: str) -> None:
    ((one,),) = ranks.run(train_all, 1, ([""], case))
    for nproc, layouts in CASES[case].items():
        for of_rank in ranks.run(train_all, nproc, (layouts, case), timeout_s=60):
            for found in of_rank:
                assert found["losses"] == pytest.approx(one["losses"], rel=1e-12), found["layout"]
                assert found["norms"] == pytest.approx(one["norms"], rel=1e-11), found["layout"]
                if found["end"]:
                    assert distance(one["start"], found["start"]) == 0, found["layout"]
                    assert distance(one["end"], found["end"]) < 1e-9, found["layout"]
    if case in ("unused", "layerdrop"):
        assert torch.equal(one["end"]["never"], one["start"]["never"]), "no decay without a gradient"
    if case == "lora":
        for name, tensor in one["end"].items():
            is_trained = ".up." in name or ".down." in name
            assert torch.equal(tensor, one["start"][name]) != is_trained, name


def train_two_models(world: Any, layout: str) -> None:
    paceline.Trainer(
        {"generator": nn.Linear(4, 4), "critic": nn.Linear(4, 1)},
        optimizer={
            "generator": lambda named: torch.optim.SGD([p for _, p in named], lr=0.1),
            "critic": lambda named: torch.optim.SGD([p for _, p in named], lr=0.1),
        },
        step=lambda update: update("critic", lambda models, batch: F.relu(models["critic"](batch)).mean()),
        layout=layout,
    )


@pytest.mark.parametrize("layout", ["dp_shard=2", "tp=2"])
def test_named_models_are_refused(ranks: Pool, layout: str) -> None:
    with pytest.raises(RankError, match=r"named models with layout.*PL423") as caught:
        ranks.run(train_two_models, 2, (layout,))
    assert len(caught.value.causes) == 2


class Turned(LayerDrop):
    """Calls two blocks in another order on rank 1."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for number in [0, 2, 1] if torch.distributed.get_rank() else [0, 1, 2]:
            x = x + self.blocks[number](x)
        return self.head(x)


def train_turned(world: Any, layout: str) -> None:
    trainer = paceline.Trainer(
        Turned,
        forward=lambda model, batch: model(batch["ids"][:, :-1]),
        loss=next_token_loss,
        optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1),
        layout=layout,
        microbatch_size=2,
    )
    for share in trainer.loader(Tokens(), global_batch_size=8):
        trainer.step(share)


@pytest.mark.parametrize("layout", ["dp_shard=2", "dp_shard=2 zero=1"])
def test_blocks_in_another_order_by_rank_are_refused(ranks: Pool, layout: str) -> None:
    with pytest.raises(RankError, match=r"this rank goes on to .* where another one goes on to .*PL443"):
        ranks.run(train_turned, 2, (layout,), timeout_s=10)
