"""Experts in a list, which the user's code calls in a loop: under pp and tp, and refused under ep."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import paceline
from paceline.checkpoint import hash_tensors
from paceline.errors import PacelineError
from tests.dist.pool import Pool

WIDTH, NUM_EXPERTS, VOCAB = 16, 4, 40


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.up(x)))


class Mixture(nn.Module):
    """A router and experts, without the loop."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, NUM_EXPERTS, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(NUM_EXPERTS))

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, chosen = self.gate(x).softmax(-1).topk(2, dim=-1)
        return weights / weights.sum(-1, keepdim=True), chosen


class IndexAdd(Mixture):
    """As in transformers before its version 5: tokens of an expert are added to the result in place."""

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        batch, length, width = hidden.shape
        hidden = hidden.view(-1, width)
        logits = self.gate(hidden)
        weights, chosen = torch.topk(F.softmax(logits, dim=1, dtype=torch.float), 2, dim=-1)
        weights /= weights.sum(dim=-1, keepdim=True)
        weights = weights.to(hidden.dtype)
        final = torch.zeros((batch * length, width), dtype=hidden.dtype, device=hidden.device)
        mask = F.one_hot(chosen, num_classes=NUM_EXPERTS).permute(2, 1, 0)
        for number in range(NUM_EXPERTS):
            expert = self.experts[number]
            place, top = torch.where(mask[number])
            current = hidden[None, top].reshape(-1, width)
            current = expert(current) * weights[top, place, None]
            final.index_add_(0, top, current.to(hidden.dtype))
        return final.reshape(batch, length, width), logits


class OnlyHit(Mixture):
    """Experts without tokens are not called, and rows are written by their places."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        tokens = x.flatten(0, 1)
        weights, chosen = self.route(tokens)
        found = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            rows, places = torch.where(chosen == number)
            if rows.numel() == 0:
                continue
            found[rows] += weights[rows, places].unsqueeze(-1) * expert(tokens[rows])
        return found.view_as(x), weights


class Everything(Mixture):
    """Each expert gets all tokens in their shape; a mask chooses among the answers."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, chosen = self.route(x)
        found = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            share = torch.where(chosen == number, weights, 0.0).sum(-1, keepdim=True)
            found = torch.where(share > 0, found + share * expert(x), found)
        return found, weights


class Stacked(Mixture):
    """All answers are joined, and weighted in one product."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, chosen = self.route(x)
        shares = torch.zeros_like(self.gate(x)).scatter(-1, chosen, weights)
        answers = torch.stack([expert(x) for expert in self.experts], dim=-2)
        return torch.einsum("...ew,...e->...w", answers, shares), weights


LOOPS = {each.__name__: each for each in (IndexAdd, OnlyHit, Everything, Stacked)}


class Model(nn.Module):
    def __init__(self, loop: str, spare: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.mixtures = nn.ModuleList(LOOPS[loop]() for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        x, balance = self.embed(ids), 0.0
        for mixture, norm in zip(self.mixtures, self.norms, strict=True):
            mixed, scores = mixture(norm(x))
            x, balance = x + mixed, balance + scores.square().mean()
        return self.head(x), balance


def build_trainer(model: nn.Module, layout: str, dtype: str = "fp32", **settings: Any) -> Any:
    def loss(output: Any, batch: Any) -> tuple[Tensor, Tensor]:
        logits, balance = output
        losses = F.cross_entropy(
            logits.float().flatten(0, 1), batch["ids"].roll(1, 1).flatten(), reduction="sum"
        )
        return losses + 0.01 * balance * batch["ids"].numel(), torch.tensor(float(batch["ids"].numel()))

    return paceline.Trainer(
        model,
        forward=lambda model, batch: model(batch["ids"]),
        loss=loss,
        optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-2),
        layout=layout,
        dtype=dtype,
        microbatch_size=2,
        **settings,
    )


class Ids:
    def __len__(self) -> int:
        return 11

    def __getitem__(self, place: int) -> dict[str, Tensor]:
        return {"ids": torch.randint(0, VOCAB, (8,), generator=torch.Generator().manual_seed(place))}


def refuse_ep(world: Any) -> str:
    with pytest.raises(PacelineError) as caught:
        build_trainer(Model("IndexAdd"), "dp_replicate=2 ep=2")
    return str(caught.value)


def test_ep_refuses_a_list(ranks: Pool) -> None:
    for text in ranks.run(refuse_ep, 2):
        assert "mixtures.0.experts (ModuleList of 4 Expert), mixtures.1.experts" in text
        assert "paceline.models.moe.Experts, or leave ep out" in text
        assert "PL658" in text


class DeepModel(Model):
    """With blocks, at whose ends a pipeline is cut."""

    def __init__(self, loop: str) -> None:
        super().__init__(loop)
        self.blocks = nn.ModuleList(Block(loop) for _ in range(2))
        del self.mixtures, self.norms

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        x, balance = self.embed(ids), torch.zeros(())
        for block in self.blocks:
            x, balance = block(x, balance)
        return self.head(x), balance


class Block(nn.Module):
    def __init__(self, loop: str) -> None:
        super().__init__()
        self.norm, self.mixture = nn.LayerNorm(WIDTH), LOOPS[loop]()
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: Tensor, balance: Tensor) -> tuple[Tensor, Tensor]:
        x = x + self.down(F.gelu(self.up(x)))
        mixed, scores = self.mixture(self.norm(x))
        return x + mixed, balance + scores.square().mean()


def train_deep(world: Any, loop: str, layout: str, dtype: str) -> Any:
    example = {"ids": torch.stack([Ids()[n]["ids"] for n in range(2)])}
    trainer = build_trainer(DeepModel(loop), layout, dtype, clip_norm=0.5, example=example)
    steps = [trainer.step(share) for share in trainer.loader(Ids(), global_batch_size=8)]
    state = trainer.whole_state()
    trainer.close()
    return [(step.loss, step.grad_norm) for step in steps], hash_tensors(state) if world.is_main else ""


@pytest.mark.parametrize("loop", LOOPS)
def test_a_loop_in_stages_has_the_bits_of_one_process(ranks: Pool, loop: str) -> None:
    alone = ranks.run(train_deep, 1, (loop, "", "fp32"))[0]
    for layout, num_ranks in {"pp=2": 2, "pp=2 dp_shard=2": 4}.items():
        assert ranks.run(train_deep, num_ranks, (loop, layout, "fp32"))[0] == alone, layout
    again = ranks.run(train_deep, 1, (loop, "recompute=block", "fp32"))[0]
    assert ranks.run(train_deep, 2, (loop, "pp=2 recompute=block", "fp32"))[0] == again


@pytest.mark.parametrize("loop", LOOPS)
def test_a_loop_beside_tp_has_the_numbers_of_one_process(ranks: Pool, loop: str) -> None:
    alone, _ = ranks.run(train_deep, 1, (loop, "", "fp64"))[0]
    for layout in ("dp_replicate=2 tp=2", "dp_shard=2 tp=2"):
        found, _ = ranks.run(train_deep, 4, (loop, layout, "fp64"))[0]
        for one, other in zip(alone, found, strict=True):
            # Two of the loops take the softmax in fp32.
            assert other == pytest.approx(one, rel=1e-6), layout
