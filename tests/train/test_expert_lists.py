"""Experts in a list, which the user's code calls in a loop: shared over ep, with the bits of one process."""

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

REPLICAS = {"dp_replicate=2 ep=2": 2, "dp_replicate=4 ep=2": 4, "dp_replicate=4 ep=4": 4}
SHARDS = {"dp_shard=2 ep=2": 2, "dp_replicate=2 dp_shard=2 ep=4": 4}
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


def train(world: Any, loop: str, layout: str, dtype: str) -> Any:
    """Take steps over two epochs, whose last global batch leaves some ranks without a microbatch."""
    trainer = build_trainer(Model(loop), layout, dtype, clip_norm=0.5)
    numbers = []
    for _ in range(2):
        for share in trainer.loader(Ids(), global_batch_size=8):
            step = trainer.step(share)
            numbers.append((step.loss, step.grad_norm))
    held = sum(p.numel() for name, p in trainer.model.named_parameters() if ".experts." in name)
    state = trainer.whole_state()
    trainer.close()
    return numbers, hash_tensors(state) if world.is_main else "", held


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("loop", LOOPS)
def test_a_loop_has_the_bits_of_one_process(ranks: Pool, loop: str, dtype: str) -> None:
    numbers, weights, held = ranks.run(train, 1, (loop, "", dtype))[0]
    for layout, num_ranks in (REPLICAS | SHARDS).items():
        found = ranks.run(train, num_ranks, (loop, layout, dtype))
        assert found[0][:2] == (numbers, weights), layout
        degree = int(layout.rpartition("=")[2])
        assert {own for _, _, own in found} == {held // degree}, layout


class NoLoop(Mixture):
    """Blocks of a stack, named like experts."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for expert in self.experts:
            x = expert(x)
        return x, self.gate(x)


class Again(Mixture):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.experts[0](x) + self.experts[0](2 * x), self.gate(x)


class Decides(Mixture):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        found = self.experts[0](x)
        if found.abs().max() > 1e6:
            found = found + self.experts[1](x)
        return found, self.gate(x)


class WithWeight(Mixture):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.gate(x)
        return self.experts[0](x, scores[..., :1]), scores


class Overwrites(Mixture):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        share = self.gate(x).detach()
        found = self.experts[0](x) * share[..., :1]
        share.zero_()
        return found, self.gate(x)


class Sums(Expert):
    """An expert whose answer is not one per token."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).sum(1)


class Summed(Everything):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Sums() for _ in range(NUM_EXPERTS))


class Unequal(Everything):
    def __init__(self) -> None:
        super().__init__()
        self.experts[1].up = nn.Linear(WIDTH, 24, bias=False)


class Drops(Everything):
    def __init__(self) -> None:
        super().__init__()
        for expert in self.experts:
            expert.drop = nn.Dropout(0.1)


class Buffered(Everything):
    def __init__(self) -> None:
        super().__init__()
        for expert in self.experts:
            expert.register_buffer("count", torch.zeros(()))


class Mixed(Everything):
    def __init__(self) -> None:
        super().__init__()
        self.experts[2] = nn.Linear(WIDTH, WIDTH)


class TwoLists(Everything):
    def __init__(self) -> None:
        super().__init__()
        self.more_experts = nn.ModuleList(Expert() for _ in range(2))


class Odd(Everything):
    def __init__(self) -> None:
        super().__init__()
        self.experts.append(Expert())


BAD: dict[type[nn.Module], tuple[str, str]] = {
    NoLoop: ("PL662", "expert 1 is called with another expert's output"),
    Again: ("PL662", "expert 0 is called twice"),
    Decides: ("PL662", "depends on the values of an expert's output"),
    WithWeight: ("PL662", "expert 0 is called with more than one tensor"),
    Overwrites: ("PL662", "changed in place"),
    Summed: ("PL662", "returns (2, 16) for an input (2, 8, 16)"),
    Unequal: ("PL658", "experts (ModuleList of 4 Expert, whose parameters have different shapes)"),
    Drops: ("PL658", "with dropout"),
    Buffered: ("PL658", "with buffers"),
    Mixed: ("PL658", "ModuleList of 4 Expert, Linear, of several classes"),
    TwoLists: ("PL658", "more_experts (ModuleList of 2 Expert, beside another list of experts)"),
    Odd: ("PL655", "does not divide 5 experts"),
}


def step_once(world: Any, kind: str) -> str:
    LOOPS[kind] = next(each for each in BAD if each.__name__ == kind)
    batch = {"ids": torch.stack([Ids()[n]["ids"] for n in range(4)])}
    with pytest.raises(PacelineError) as caught:
        build_trainer(Model(kind), "dp_replicate=2 ep=2").step(batch)
    return str(caught.value)


@pytest.mark.parametrize("kind", BAD)
def test_what_is_no_such_loop_is_refused(ranks: Pool, kind: type[nn.Module]) -> None:
    code, words = BAD[kind]
    for text in ranks.run(step_once, 2, (kind.__name__,)):
        assert code in text
        assert words in text


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
    for layout, num_ranks in {"pp=2": 2, "pp=2 dp_replicate=2 ep=2": 4}.items():
        assert ranks.run(train_deep, num_ranks, (loop, layout, "fp32"))[0] == alone, layout
    again = ranks.run(train_deep, 1, (loop, "recompute=block", "fp32"))[0]
    assert ranks.run(train_deep, 2, (loop, "dp_replicate=2 ep=2 recompute=block", "fp32"))[0] == again


@pytest.mark.parametrize("loop", LOOPS)
def test_a_loop_beside_tp_has_the_numbers_of_one_process(ranks: Pool, loop: str) -> None:
    alone, _ = ranks.run(train_deep, 1, (loop, "", "fp64"))[0]
    for layout in ("dp_replicate=2 ep=2 tp=2", "dp_shard=2 ep=2 tp=2"):
        found, _ = ranks.run(train_deep, 4, (loop, layout, "fp64"))[0]
        for one, other in zip(alone, found, strict=True):
            # Two of the loops take the softmax in fp32.
            assert other == pytest.approx(one, rel=1e-6), layout
