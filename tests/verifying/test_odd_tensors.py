"""`verify` compares tensors of every type and kind, also where it must find the place of a difference."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.errors import PacelineError
from paceline.train.trainer import Trainer
from paceline.verifying.check import build_default_optimizer, resolve_layout, verify_subject
from paceline.verifying.observe import as_numbers
from paceline.verifying.subject import UserSubject
from paceline.world import World
from tests.dist.pool import Pool, RankError
from tests.verifying.runs import PoolRunner
from tests.verifying.two_steps import TWO_STEPS

TYPES = (
    torch.bool,
    torch.uint8,
    torch.int16,
    torch.uint16,
    torch.uint64,
    torch.float8_e4m3fn,
    torch.complex64,
)


class Block(nn.Module):
    """Mixes positions by masks of many types, and passes on a bool tensor beside its output."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(16), nn.Linear(16, 16)
        for place, dtype in enumerate(TYPES):
            self.register_buffer(f"mask{place}", torch.ones(8, 8).tril().to(dtype))

    def forward(self, x: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
        mask = sum(as_numbers(each).to(x.dtype).reshape(8, 8, -1).sum(-1) for each in self.buffers())
        x = x + (mask / mask.sum(-1, keepdim=True)) @ self.linear(self.norm(x))
        return x * keep[..., None], keep & (x.detach().abs().amax(-1) < 1e9)


class Masked(nn.Module):
    """A model with such blocks, which may add a fault on one of two ranks."""

    def __init__(self, *, is_faulty: bool = False) -> None:
        super().__init__()
        self.emb, self.head = nn.Embedding(32, 16), nn.Linear(16, 32)
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.is_faulty = is_faulty

    def forward(self, ids: Tensor) -> Tensor:
        keep, x = ids > 3, self.emb(ids)
        if self.is_faulty and dist.is_initialized() and dist.get_world_size() > 1:
            keep = keep ^ (ids == 7 + dist.get_rank())
        for block in self.blocks:
            x, keep = block(x, keep)
        return self.head(x)


class Sparse(nn.Module):
    """A model with a sparse buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("graph", torch.eye(4).to_sparse())


class Scratch(nn.Module):
    """Keeps a cache that each forward fills, and angles that the first one makes; neither is saved."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(32, 8), nn.Linear(8, 32)
        self.register_buffer("cache", torch.zeros(8, 8, 8), persistent=False)
        self.register_buffer("angles", None, persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        if self.angles is None:
            self.angles = torch.arange(8.0).cos().to(x)
        self.cache[: len(x)] = x.detach()
        return self.head(x * self.angles)


def make(step: int) -> dict[str, Tensor]:
    return {"ids": torch.randint(0, 32, (8, 8), generator=torch.Generator().manual_seed(step))}


def run(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(batch["ids"])


def measure(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), batch["ids"].flatten())


def build_faulty() -> nn.Module:
    return Masked(is_faulty=True)


def test_buffers_of_every_type_are_compared(ranks: Pool) -> None:
    subject = UserSubject(
        model_fn=Masked,
        batch_fn=make,
        loss=measure,
        forward=run,
        optimizer=build_default_optimizer,
        **TWO_STEPS,
    )
    layouts = [resolve_layout(each) for each in ("dp_replicate=2", "dp_shard=2", "tp=2", "pp=2")]
    verified = verify_subject(subject, layouts, run=PoolRunner(ranks))
    assert verified.ok, list(map(str, verified.findings))
    assert sum("mask" in key for key in verified.tolerances) == 3 * 2 * len(TYPES)


def test_scratch_is_no_difference(ranks: Pool) -> None:
    subject = UserSubject(
        model_fn=Scratch,
        batch_fn=make,
        loss=measure,
        forward=run,
        optimizer=build_default_optimizer,
        **TWO_STEPS,
    )
    layouts = [resolve_layout(each) for each in ("dp_replicate=2", "dp_shard=2")]
    verified = verify_subject(subject, layouts, run=PoolRunner(ranks))
    assert verified.ok, list(map(str, verified.findings))


def test_a_difference_in_a_bool_tensor_is_located(ranks: Pool) -> None:
    subject = UserSubject(
        model_fn=build_faulty,
        batch_fn=make,
        loss=measure,
        forward=run,
        optimizer=build_default_optimizer,
        **TWO_STEPS,
    )
    verified = verify_subject(subject, [resolve_layout("dp_replicate=2")], run=PoolRunner(ranks))
    [result] = verified.results
    assert result.status == "differs"
    assert "before blocks.0" in str(result.findings[0])


def build_sparse(world: World) -> None:
    Trainer(Sparse(), loss=measure, optimizer=build_default_optimizer)


def test_a_tensor_that_has_no_bytes_is_refused_by_name(ranks: Pool) -> None:
    try:
        ranks.run(build_sparse, 2)
    except RankError as caught:
        [error, *_] = caught.causes.values()
        assert isinstance(error, PacelineError)
        assert error.code == "PL727"
        assert "graph" in str(error)
    else:
        raise AssertionError("nothing was refused")
