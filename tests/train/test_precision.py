"""fp64, fp32, bf16 and fp16; the gradient scaler; clipping."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from paceline.parallel import replicate
from paceline.parallel.replicate import sum_bucket
from paceline.train.precision import Precision
from paceline.train.trainer import Trainer
from tests.dist.pool import Pool
from tests.train.cases import Trained, apart, assert_ranks_agree, take_steps, tensors_apart

CPU = torch.device("cpu")


def data(num_samples: int, *, big: int | None = None) -> TensorDataset:
    """Make data in which one sample may have values too large for fp16."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(num_samples, 12, generator=generator)
    if big is not None:
        inputs[big] = 1e5
    return TensorDataset(inputs, torch.randn(num_samples, 3, generator=generator))


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 3))


def loss(output: Tensor, batch: list[Tensor]) -> tuple[Tensor, Tensor]:
    losses = (output.to(batch[1].dtype) - batch[1]).square()
    return 0.1 * losses.sum(), torch.tensor(float(len(output)))


def build_trainer(dtype: str, **settings: Any) -> Trainer:
    return Trainer(
        build_model(),
        dtype=dtype,
        microbatch_size=2,
        **{
            "loss": loss,
            "forward": lambda model, batch: model(batch[0]),
            "optimizer": lambda named: torch.optim.AdamW([p for _, p in named], lr=0.01),
            **settings,
        },
    )


def scale_of(trainer: Trainer) -> float:
    return trainer._updates["model"].state_dict()["scaler"]["scale"]


# ---- what a dtype means


def look_inside(world: Any, dtype: str) -> dict[str, Any]:
    seen: dict[str, Any] = {}

    def forward(model: nn.Module, batch: list[Tensor]) -> Tensor:
        seen["batch"] = [t.dtype for t in batch]
        output = model(batch[0])
        seen["output"] = output.dtype
        return output

    trainer = build_trainer(dtype, forward=forward)
    trainer.on_gradients(lambda named: seen.update(gradients={g.dtype for g in named.values()}))
    dataset = TensorDataset(*data(8).tensors, torch.arange(8))
    for share in trainer.loader(dataset, global_batch_size=8):
        trainer.step(share)
    seen["weights"] = {p.dtype for p in trainer.model.parameters()}
    state = trainer._updates["model"].optimizer.state
    seen["moments"] = {t.dtype for s in state.values() for n, t in s.items() if n != "step"}
    evaluation = trainer.evaluate(trainer.loader(dataset, global_batch_size=4, shuffle=False))
    return {
        **seen,
        "scaler": trainer._updates["model"].state_dict()["scaler"] is not None,
        "loss": evaluation.loss,
    }


@pytest.mark.parametrize(
    ("dtype", "storage", "compute"),
    [
        ("fp64", torch.float64, torch.float64),
        ("fp32", torch.float32, torch.float32),
        ("bf16", torch.float32, torch.bfloat16),
        ("fp16", torch.float32, torch.float16),
    ],
)
def test_a_dtype_holds_where_it_should(
    ranks: Pool, dtype: str, storage: torch.dtype, compute: torch.dtype
) -> None:
    for seen in ranks.run(look_inside, args=(dtype,)):
        assert seen["batch"] == [storage, storage, torch.int64]
        assert seen["output"] == compute
        assert seen["gradients"] == seen["weights"] == seen["moments"] == {storage}
        assert seen["scaler"] == (dtype == "fp16")
        assert seen["loss"] > 0


def test_models_are_placed_whole() -> None:
    model = nn.BatchNorm1d(3)
    Precision("fp64", CPU).place_model(model)
    assert model.running_mean.dtype == torch.float64
    assert model.num_batches_tracked.dtype == torch.int64
    low = nn.Linear(2, 2).to(torch.bfloat16)
    Precision("fp32", CPU).place_model(low)
    assert low.weight.dtype == torch.float32


# ---- the same on every number of ranks


def train(world: Any, dtype: str, size: int, settings: dict[str, Any]) -> Trained:
    trainer = build_trainer(dtype, **settings)
    return take_steps(trainer, trainer.loader(data(2 * size + 1), global_batch_size=size), 6)


@pytest.mark.parametrize(("dtype", "distance"), [("bf16", 1e-2), ("fp16", 1e-3)])
def test_low_precision_is_near_on_all_ranks_idle_ones_included(
    ranks: Pool, dtype: str, distance: float
) -> None:
    for size in (8, 2):
        one = ranks.run(train, nproc=1, args=(dtype, size, {}))[0]
        exact = ranks.run(train, nproc=1, args=("fp64", size, {}))[0]
        assert apart(exact.losses, one.losses) < 3 * distance
        for nproc in (2, 3):
            results = ranks.run(train, nproc=nproc, args=(dtype, size, {}))
            assert_ranks_agree(results)
            # Microbatches are computed alike; only the sums of gradients are in another order.
            assert apart(one.losses[:1], results[0].losses[:1]) <= 1e-12
            assert apart(one.losses, results[0].losses) < distance
            assert results[0].skipped == [None] * 6


# ---- fp16's scaler


def train_with_overflow(world: Any, folder: str | None, first: int, last: int) -> Any:
    """Sample 9 overflows, so every third step is skipped and halves the scale."""
    trainer = build_trainer("fp16", max_skipped_in_a_row=100)
    loader = trainer.loader(data(12, big=9), global_batch_size=4, shuffle=False)
    if folder is not None:
        assert trainer.resume(folder) == first
    trained = Trained(extra=[])
    while trainer.step_number < last:
        for share in loader:
            step = trainer.step(share)
            trained.losses.append(step.loss)
            trained.skipped.append(step.skipped)
            trained.extra.append(scale_of(trainer))
            if trainer.step_number == last:
                break
    if folder is not None:
        trainer.save()
    return trained.finish(trainer)


def test_an_overflow_skips_and_halves_the_scale(ranks: Pool, tmp_path: Path) -> None:
    for nproc in (1, 2, 3):
        results = ranks.run(train_with_overflow, nproc=nproc, args=(None, 0, 7))
        assert_ranks_agree(results)
        whole = results[0]
        full = 65536.0
        assert whole.extra == [full, full, full / 2, full / 2, full / 2, full / 4, full / 4]
        assert [reason is not None for reason in whole.skipped] == [False, False, True] * 2 + [False]
        # The scaler's scale is part of the checkpoint, so resuming gives the same bits.
        folder = str(tmp_path / str(nproc))
        ranks.run(train_with_overflow, nproc=nproc, args=(folder, 0, 4))
        resumed = ranks.run(train_with_overflow, nproc=nproc, args=(folder, 4, 7))[0]
        assert resumed.extra == whole.extra[4:]
        assert resumed.hash == whole.hash


def scales_seen(world: Any, folder: str, last: int) -> list[float]:
    """Return the size of the gradients that are summed over ranks, with samples that weigh 100 each."""
    seen: list[float] = []

    def watch(bucket: Any, group: Any) -> Any:
        seen.append(bucket.buffer().norm().item())
        return sum_bucket(bucket, group)

    trainer = build_trainer(
        "fp32",
        reduction="fast",
        loss=lambda output, batch: (100 * output.square().sum(), 100 * len(output)),
    )
    loader = trainer.loader(data(16), global_batch_size=4, shuffle=False)
    trainer.resume(folder)
    with mock.patch.object(replicate, "sum_bucket", watch):
        for share in loader:
            if trainer.step(share).number == last:
                break
    trainer.save()
    return seen


def test_the_scale_of_gradients_is_settled_after_a_step_and_survives_resuming(
    ranks: Pool, tmp_path: Path
) -> None:
    """Residuals of a compression want it steady."""
    whole, _ = ranks.run(scales_seen, args=(str(tmp_path / "whole"), 4))
    assert whole[0] > 20 * whole[1], "a guess at first"
    assert max(whole[1:]) < 3 * min(whole[1:])
    first, _ = ranks.run(scales_seen, args=(str(tmp_path / "parts"), 2))
    rest, _ = ranks.run(scales_seen, args=(str(tmp_path / "parts"), 4))
    assert first + rest == whole


# ---- clipping


def clipped_steps(world: Any, dtype: str, clip_norm: float) -> tuple[list[dict[str, Tensor]], list[float]]:
    """With plain SGD at rate 1, the change of the weights is the clipped gradient."""
    trainer = build_trainer(
        dtype, clip_norm=clip_norm, optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=1.0)
    )
    changes, norms = [], []
    for share in trainer.loader(data(12), global_batch_size=4, shuffle=False):
        before = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
        norms.append(trainer.step(share).grad_norm)
        changes.append({n: before[n] - p.detach() for n, p in trainer.model.named_parameters()})
    return changes, norms


def clipped_by_torch(dtype: str, clip_norm: float) -> tuple[list[dict[str, Tensor]], list[float]]:
    """Compute the expected result: one process with torch's own clipping, after torch's own unscaling."""
    model = build_model()
    if dtype == "fp64":
        model.double()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = torch.amp.GradScaler("cpu", enabled=dtype == "fp16")
    changes, norms = [], []
    for start in (0, 4, 8):
        optimizer.zero_grad()
        for first in (start, start + 2):
            batch = [t[first : first + 2] for t in data(12).tensors]
            batch = [t.double() for t in batch] if dtype == "fp64" else batch
            with torch.autocast("cpu", torch.float16, enabled=dtype == "fp16"):
                total = loss(model(batch[0]), batch)[0]
            scaler.scale(total / 4).backward()
        scaler.unscale_(optimizer)
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm).item())
        before = copy.deepcopy(dict(model.named_parameters()))
        scaler.step(optimizer)
        scaler.update()
        changes.append({n: (before[n] - p).detach() for n, p in model.named_parameters()})
    return changes, norms


@pytest.mark.parametrize(("dtype", "distance"), [("fp64", 1e-13), ("fp32", 1e-6), ("fp16", 1e-3)])
@pytest.mark.parametrize("nproc", [1, 2, 3])
def test_clipping_is_torchs_on_the_global_norm(ranks: Pool, dtype: str, distance: float, nproc: int) -> None:
    expected, norms = clipped_by_torch(dtype, 0.1)
    results = ranks.run(clipped_steps, nproc=nproc, args=(dtype, 0.1))
    for changes, found in results:
        assert apart(norms, found) < distance
        assert min(norms) > 0.1, "all are clipped"
        for change, wanted in zip(changes, expected, strict=True):
            assert tensors_apart(wanted, change) < 10 * distance


def test_small_gradients_are_not_clipped(ranks: Pool) -> None:
    large, plain = (ranks.run(clipped_steps, nproc=2, args=("fp64", norm))[0] for norm in (1e6, 0.0))
    assert large[1] == plain[1]
    for one, other in zip(large[0], plain[0], strict=True):
        assert tensors_apart(one, other) == 0.0
