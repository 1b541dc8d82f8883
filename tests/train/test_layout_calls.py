"""A loss that calls the model several times in one microbatch, under layouts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import paceline
from paceline.checkpoint import hash_tensors
from tests.dist.pool import Pool

STEPS = 3
WIDTH = 12
# Microbatches of 2, the last one of 1: seven per step, so that ranks own different numbers of them.
GLOBAL_BATCH = 13


class Pairs(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Pairs of random points."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, place: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(place)
        return {name: torch.randn(WIDTH, generator=generator) for name in ("one", "other")}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 3 * WIDTH)
        self.down = nn.Linear(3 * WIDTH, WIDTH)
        self.bias = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor, extra: bool) -> Tensor:
        x = x + self.down(F.dropout(F.gelu(self.up(self.norm(x))), 0.1, self.training))
        # Of several calls only some use this one.
        return x + self.bias if extra else x


class Encoder(nn.Module):
    """Blocks, all or some of them called, with a number that is not cut."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor, extra: bool = False, drops: bool = False, times: int = 1) -> Tensor:
        x = self.first(x)
        for number, block in enumerate([*self.blocks] * times):
            if not (drops and number == 1):
                x = block(x, extra)
        return F.normalize(x, dim=-1) * self.scale


def siamese(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    one, other = model(batch["one"]), model(batch["other"], extra=True)
    return ((one - other) ** 2).sum(), len(one)


def triplet(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    """Three calls, of which one leaves out a block and one has a loss that reaches nothing."""
    one, other = model(batch["one"], drops=True), model(batch["other"])
    unused = model(batch["one"] + batch["other"], extra=True)
    return F.softplus((one * other).sum(-1)).sum() + 0.0 * float(unused.detach().sum()), len(one)


def by_sample(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    """Compute a loss in which the samples decide which call uses a parameter."""
    first = bool(batch["one"][0, 0] > 0)
    one, other = model(batch["one"], extra=first), model(batch["other"], extra=not first)
    return ((one - other) ** 2).sum(), len(one)


def repeated(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    """Call in which blocks are called twice each."""
    one, other = model(batch["one"], times=2), model(batch["other"], extra=True, times=2)
    return ((one - other) ** 2).sum(), len(one)


def teacher(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    """Compute a loss with a call without a graph between two with one."""
    one = model(batch["one"])
    with torch.no_grad():
        target = model(batch["other"])
    other = model(batch["other"], extra=True)
    return ((one - target) ** 2).sum() + (one * other).sum(), len(one)


def penalty(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    """Compute a loss that includes the norm of the gradient for the inputs (WGAN-GP)."""
    x = batch["one"].detach().requires_grad_()
    y = model(x, extra=True).sum(-1)
    (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return F.softplus(y).sum() + ((gradient.norm(dim=-1) - 1) ** 2).sum(), len(x)


def penalty_of_parameters(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    """Compute a loss that includes the norm of the gradient for the parameters."""
    loss = model(batch["one"], extra=True).sum()
    gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    return loss + sum((gradient**2).sum() for gradient in gradients), len(batch["one"])


PENALTIES = {"penalty": penalty, "penalty of parameters": penalty_of_parameters}
LOSSES = {
    "siamese": siamese,
    "triplet": triplet,
    "by sample": by_sample,
    "repeated": repeated,
    "teacher": teacher,
}


def train_all(world: Any, layouts: list[str], kinds: list[str]) -> dict[tuple[str, str], Any]:
    return {(layout, kind): train(layout, kind) for layout in layouts for kind in kinds}


def train(layout: str, kind: str) -> Any:
    trainer = paceline.Trainer(
        Encoder,
        forward={**LOSSES, **PENALTIES}[kind],
        loss=lambda output, batch: (output[0], torch.tensor(float(output[1]))),
        optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-2),
        layout=layout,
        example={name: torch.zeros(2, WIDTH) for name in ("one", "other")},
        microbatch_size=2,
        clip_norm=0.5,
    )
    found = []
    for share in trainer.loader(Pairs(), global_batch_size=GLOBAL_BATCH):
        step = trainer.step(share)
        found.append((step.loss, step.grad_norm))
        if step.number == STEPS:
            break
    weights = trainer.whole_state()
    trainer.close()
    return found, hash_tensors(weights) if weights else ""


SHARDED = {
    2: ["dp_shard=2 zero=1", "dp_shard=2 zero=2", "dp_shard=2", "dp_shard=2 recompute=block"],
    4: ["dp_replicate=2 dp_shard=2", "dp_shard=4"],
}


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_model_called_several_times_has_the_bits_of_one_process(ranks: Pool, num_ranks: int) -> None:
    kinds = list(LOSSES)
    (one,) = ranks.run(train_all, nproc=1, args=([""], kinds))
    many = ranks.run(train_all, nproc=num_ranks, args=(SHARDED[num_ranks], kinds), timeout_s=100)
    for layout in SHARDED[num_ranks]:
        for kind in kinds:
            steps, weights = one["", kind]
            assert many[0][layout, kind] == (steps, weights), (layout, kind)
            assert all(other[layout, kind][0] == steps for other in many), (layout, kind)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_gradient_penalty_has_the_bits_of_one_process(ranks: Pool, num_ranks: int) -> None:
    kinds = list(PENALTIES)
    (one,) = ranks.run(train_all, nproc=1, args=([""], kinds))
    layout = f"dp_replicate={num_ranks}"
    many = ranks.run(train_all, nproc=num_ranks, args=([layout], kinds))
    for kind in kinds:
        assert len({steps[1] for steps in one["", kind][0]}) == STEPS
        assert many[0][layout, kind] == one["", kind], kind
        assert all(other[layout, kind][0] == one["", kind][0] for other in many), kind


def refusals(world: Any, layout: str) -> dict[str, str]:
    codes = {}
    for kind in PENALTIES:
        with pytest.raises(paceline.PacelineError) as raised:
            train(layout, kind)
        codes[kind] = raised.value.code
    return codes


@pytest.mark.parametrize(
    ("layout", "code"),
    [("dp_shard=2", "PL436"), ("dp_shard=2 zero=1", "PL436"), ("tp=2", "PL436")],
)
def test_a_gradient_penalty_is_refused_where_parameters_are_divided(
    ranks: Pool, layout: str, code: str
) -> None:
    assert ranks.run(refusals, args=(layout,)) == [dict.fromkeys(PENALTIES, code)] * 2


def penalize_in_loss(world: Any) -> str:
    """Train a model whose forward can be traced; only the loss asks for a gradient."""
    trainer = paceline.Trainer(
        Encoder,
        forward=lambda model, batch: model(batch["one"].requires_grad_(), extra=True),
        loss=_penalty_of_output,
        optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=1e-2),
        layout="tp=2",
        example={name: torch.zeros(2, WIDTH) for name in ("one", "other")},
        microbatch_size=2,
    )
    with pytest.raises(paceline.PacelineError) as raised:
        trainer.step(next(iter(trainer.loader(Pairs(), global_batch_size=4))))
    trainer.close()
    return raised.value.code


def _penalty_of_output(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    (gradient,) = torch.autograd.grad(output.sum(), batch["one"], create_graph=True)
    return output.mean() + (gradient**2).sum()


def test_a_gradient_penalty_in_the_loss_is_refused_under_tp(ranks: Pool) -> None:
    assert ranks.run(penalize_in_loss) == ["PL436"] * 2
