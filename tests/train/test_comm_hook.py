"""A communication hook with a memory of its own (PowerSGD): skipped steps, saving and resuming."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from paceline.errors import PacelineError
from paceline.parallel.hook_state import HookState
from paceline.train.trainer import Trainer
from tests.dist.pool import Pool, RankError


def build(**settings: Any) -> Trainer:
    torch.manual_seed(0)
    state = settings.pop("state", None) or PowerSGDState(
        None, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=1
    )
    return Trainer(
        nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 8)),
        loss=lambda output, batch: (output.square().sum(), len(output)),
        optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-2),
        reduction="fast",
        comm_hook=(state, powerSGD_hook),
        microbatch_size=4,
        **settings,
    )


def batch(number: int, rank: int) -> Tensor:
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(100 * number + rank))


def take_steps(
    world: Any, first: int, last: int, folder: str | None = None, bad: int = 0, **options: Any
) -> tuple[list[str | None], list[Tensor]]:
    """Take steps `first` to `last`; `bad` has an infinite sample on rank 1."""
    accept = options.pop("accept", ())
    trainer = build(**options)
    if folder is not None:
        assert trainer.resume(folder, accept=accept) == first - 1
    skipped = []
    for number in range(first, last + 1):
        samples = batch(number, world.rank)
        if number == bad and world.rank == 1:
            samples[0, 0] = math.inf
        skipped.append(trainer.step(samples).skipped)
    if folder is not None:
        trainer.save()
    return skipped, [p.detach().clone() for p in trainer.model.parameters()]


def test_a_skipped_step_leaves_nothing_in_the_hook(ranks: Pool) -> None:
    results = ranks.run(take_steps, args=(1, 8, None, 5))
    for skipped, parameters in results:
        assert [reason is not None for reason in skipped] == [number == 5 for number in range(1, 9)]
        assert all(p.isfinite().all() for p in parameters)
    assert all(map(torch.equal, results[0][1], results[1][1]))


def test_a_resumed_run_has_the_bits_of_one_that_was_not_stopped(ranks: Pool, tmp_path: Path) -> None:
    whole = ranks.run(take_steps, args=(1, 8))
    ranks.run(take_steps, args=(1, 4, str(tmp_path)))
    resumed = ranks.run(take_steps, args=(5, 8, str(tmp_path)))
    assert all(map(torch.equal, whole[0][1], resumed[0][1]))
    assert all(map(torch.equal, whole[1][1], resumed[1][1]))


def resume_with(world: Any, folder: str, options: dict[str, Any]) -> Any:
    return take_steps(world, 3, 4, folder, **options)


def test_other_ranks_and_buckets_are_refused(ranks: Pool, tmp_path: Path) -> None:
    ranks.run(take_steps, args=(1, 2, str(tmp_path)))
    with pytest.raises(RankError, match=r"for 2 ranks with ddp.bucket_cap_mb=25; here are 3 with 25.*PL516"):
        ranks.run(resume_with, nproc=3, args=(str(tmp_path), {}))
    other = {"ddp": {"bucket_cap_mb": 0.001}}
    with pytest.raises(RankError, match=r"here are 2 with 0.001.*PL516"):
        ranks.run(resume_with, args=(str(tmp_path), other))
    ranks.run(resume_with, args=(str(tmp_path), {**other, "accept": ["comm_hook"]}))


def build_with_object(world: Any, folder: str) -> None:
    state = PowerSGDState(None, start_powerSGD_iter=2)
    state.batch_tensors_with_same_shape = object()
    trainer = build(state=state)
    trainer.resume(folder)
    trainer.step(batch(1, world.rank))


def test_a_state_that_can_not_be_copied_is_refused(ranks: Pool, tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"has batch_tensors_with_same_shape, a object\.(?s:.)*PL516"):
        ranks.run(build_with_object, args=(str(tmp_path),))


def test_a_state_is_written_back_in_place() -> None:
    residual = torch.ones(3)
    state = {
        "residual": {0: residual},
        "calls": 1,
        "random": np.random.RandomState(1),
        "generator": torch.Generator().manual_seed(2),
        "pair": (1, torch.zeros(2)),
        "function": print,
    }
    hook = HookState(state)
    saved = hook.read()
    assert "function" not in saved
    inner = state["residual"]
    drawn = state["random"].rand(), torch.rand(1, generator=state["generator"])  # type: ignore[attr-defined]
    residual.fill_(math.nan)
    inner[1] = torch.ones(1)  # type: ignore[index]
    state["calls"] = 2
    hook.write(saved, torch.device("cpu"))
    assert state["residual"] is inner
    assert list(inner) == [0]  # type: ignore[call-overload]
    assert inner[0].tolist() == [1, 1, 1]  # type: ignore[index]
    assert state["calls"] == 1
    assert isinstance(state["pair"], tuple)
    again = state["random"].rand(), torch.rand(1, generator=state["generator"])  # type: ignore[attr-defined]
    assert again == drawn


@pytest.mark.parametrize("state", [None, {}, {"wrapped": print}, object()])
def test_hooks_without_memory_have_nothing_to_save(state: Any) -> None:
    assert HookState(state).is_empty


def test_what_is_in_an_object_is_named() -> None:
    with pytest.raises(PacelineError, match=r"has residuals\['a'\]\[1\], a object"):
        HookState({"residuals": {"a": [1, object()]}}).read()
