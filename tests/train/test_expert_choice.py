"""Experts that a user names or excludes: `Trainer(experts=...)`, with the bits of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.checkpoint import hash_tensors
from tests.dist.pool import Pool
from tests.train.test_expert_lists import (
    LOOPS,
    NUM_EXPERTS,
    DeepModel,
    Expert,
    Ids,
    Model,
    OnlyHit,
    build_trainer,
)


class Branches(OnlyHit):
    """A mixture whose list has a name of its own."""

    def __init__(self) -> None:
        super().__init__()
        del self.experts
        self.branches = nn.ModuleList(Expert() for _ in range(NUM_EXPERTS))

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__("branches" if name == "experts" else name)


class Heads(OnlyHit):
    """A mixture behind a list that is named like experts, and holds norms that run one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.expert_norms = nn.ModuleList(nn.LayerNorm(16) for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for norm in self.expert_norms:
            x = norm(x)
        return super().forward(x)


KINDS: dict[str, Any] = {"Branches": Branches, "Heads": Heads, "OnlyHit": OnlyHit}
# By case: the mixture, `experts=`, and the parameters of experts that a rank of two holds, by mixture.
CASES: dict[str, tuple[str, dict[str, bool], tuple[float, float]]] = {
    "named": ("Branches", {"*.branches": True}, (0.5, 0.5)),
    "one named": ("Branches", {"mixtures.1.branches": True}, (1.0, 0.5)),
    "one excluded": ("OnlyHit", {"mixtures.0.experts": False}, (1.0, 0.5)),
    "no mixture": ("Heads", {"*.expert_norms": False}, (0.5, 0.5)),
}


def train(world: Any, case: str, layout: str, deep: bool = False) -> Any:
    kind, experts, _ = CASES[case]
    LOOPS[kind] = KINDS[kind]
    example = {"ids": torch.stack([Ids()[n]["ids"] for n in range(2)])} if deep else None
    if deep:
        experts = {key.replace("mixtures.0", "blocks.0.mixture"): wanted for key, wanted in experts.items()}
    model = DeepModel(kind) if deep else Model(kind)
    trainer = build_trainer(model, layout, clip_norm=0.5, experts=experts, example=example)
    steps = [trainer.step(share) for share in trainer.loader(Ids(), global_batch_size=8)]
    held = [
        sum(p.numel() for name, p in trainer.model.named_parameters() if f".{place}.{key}." in name)
        for place in range(2)
        for key in ("branches" if kind == "Branches" else "experts",)
    ]
    state = trainer.whole_state()
    trainer.close()
    return [(step.loss, step.grad_norm) for step in steps], hash_tensors(state) if world.is_main else "", held


@pytest.mark.parametrize("case", CASES)
def test_chosen_experts_have_the_bits_of_one_process(ranks: Pool, case: str) -> None:
    numbers, weights, whole = ranks.run(train, 1, (case, ""))[0]
    found = ranks.run(train, 2, (case, "dp_replicate=2 ep=2"))
    assert found[0][:2] == (numbers, weights)
    for _, _, held in found:
        assert held == [size * part for size, part in zip(whole, CASES[case][2], strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("case", ["named", "one excluded"])
@pytest.mark.parametrize(
    ("layout", "num_ranks"), [("dp_shard=2 ep=2", 2), ("pp=2 dp_replicate=2 ep=2", 4), ("pp=2", 2)]
)
def test_chosen_experts_go_with_other_axes(ranks: Pool, case: str, layout: str, num_ranks: int) -> None:
    numbers, weights, _ = ranks.run(train, 1, (case, "", True))[0]
    assert ranks.run(train, num_ranks, (case, layout, True))[0][:2] == (numbers, weights)
