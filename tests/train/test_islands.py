"""Islands: the numbers of a plain loop, the same bits on any number of ranks, over starts, and refusals."""

from __future__ import annotations

import copy
import math
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import paceline
import paceline.train.islands as islands_module
from paceline.errors import PacelineError
from paceline.train.trainer import Trainer
from tests.dist.pool import Pool, RankError

SAMPLES = torch.randn(16 * 12, 40, generator=torch.Generator().manual_seed(7))
SETTINGS: dict[str, Any] = {"count": 4, "every": 3, "warmup_steps": 2, "outer": {"momentum": 0.5}}
NUM_STEPS = 10  # two periods after the warm-up, and two steps


def build_model(*, with_statistics: bool = False) -> nn.Module:
    torch.manual_seed(0)
    middle = nn.BatchNorm1d(64) if with_statistics else nn.Tanh()
    return nn.Sequential(nn.Linear(40, 64), middle, nn.Linear(64, 8))


def loss_of(output: Tensor, batch: Tensor) -> tuple[Tensor, Any]:
    return (output - batch[:, :8]).square().sum(), len(output)


def build_optimizer(named: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for _, p in named], lr=1e-2)


def build(islands: Any = SETTINGS, *, with_statistics: bool = False, **settings: Any) -> Trainer:
    given = {"loss": loss_of, "optimizer": build_optimizer, "microbatch_size": 2, "clip_norm": 5.0} | settings
    return Trainer(build_model(with_statistics=with_statistics), islands=islands, **given)


def whole(trainer: Any) -> list[Tensor]:
    return list(trainer.whole_state().values())


def train(world: Any, layout: str, last: int, settings: Any, folder: str | None = None) -> Any:
    """Return the global weights and the loss of an evaluation; saves at each start's last step."""
    trainer = build(layout=layout if world.world_size > 1 else "", **settings)
    loader = trainer.loader(SAMPLES, global_batch_size=16, shuffle=False, epochs=9)
    if folder is not None:
        trainer.resume(folder)
    for share in loader:
        trainer.step(share)
        if trainer.step_number == last:
            break
    if folder is not None:
        trainer.save(wait=True)
    trainer.synchronize()
    valid = trainer.evaluate(trainer.loader(SAMPLES[:24], global_batch_size=8, shuffle=False))
    return whole(trainer), valid.loss


def train_plainly(
    count: int,
    every: int,
    warmup: int,
    num_steps: int,
    outer: Any,
    skips: tuple[int, int] | None = None,
    schedule: Any = None,
    epoch: int = 12,
) -> list[Tensor]:
    """Train islands by a loop in one process: DiLoCo as its paper has it, after some common steps.

    In the step `skips[0]`, from 0, island `skips[1]` leaves its weights alone. `schedule` is of each inner
    optimizer, and advances in every step. An epoch has so many steps.
    """
    lr, momentum, nesterov = outer
    first = build_model().double()
    models = [copy.deepcopy(first) for _ in range(count)]
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in models]
    schedules = [] if schedule is None else [schedule(optimizer) for optimizer in optimizers]
    common: list[Tensor] = []
    size = 16 // count
    for step in range(num_steps):
        at = step % epoch * 16
        batch = SAMPLES.double()[at : at + 16]
        if step == warmup:
            common = [p.detach().clone().requires_grad_() for p in models[0].parameters()]
            sgd = torch.optim.SGD(common, lr=lr, momentum=momentum, nesterov=nesterov)
        for number, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            if (step, number) == skips:
                continue
            own = batch if step < warmup else batch[number * size : number * size + size]
            optimizer.zero_grad()
            loss_sum, weight = loss_of(model(own), own)
            (loss_sum / weight).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
        for each in schedules:
            each.step()
        if step >= warmup and ((step - warmup + 1) % every == 0 or step == num_steps - 1):
            for number, tensor in enumerate(common):
                now = [list(m.parameters())[number].detach() for m in models]
                tensor.grad = torch.stack([tensor.detach() - each for each in now]).mean(0)
            sgd.step()
            for model in models:
                for p, tensor in zip(model.parameters(), common, strict=True):
                    p.data.copy_(tensor.detach())
    return [tensor.detach() for tensor in common]


@pytest.mark.parametrize("outer", [(0.9, 0.5, True), (1.0, 0.0, False), (0.7, 0.9, False)])
def test_islands_have_the_numbers_of_a_plain_loop(ranks: Pool, outer: Any) -> None:
    truth = train_plainly(4, 3, 2, NUM_STEPS, outer)
    table = dict(zip(("lr", "momentum", "nesterov"), outer, strict=True))
    settings = {"islands": SETTINGS | {"outer": table}, "dtype": "fp64"}
    [(found, _)] = ranks.run(train, nproc=1, args=("", NUM_STEPS, settings))
    for own, expected in zip(found, truth, strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-12, atol=1e-13)


def fall(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


def train_over_epochs(world: Any) -> list[Tensor]:
    """Train for two epochs of seven steps, of which the first ends inside of a period."""
    trainer = build(dtype="fp64", schedule=fall)
    for share in trainer.loader(SAMPLES[: 7 * 16], global_batch_size=16, shuffle=False, epochs=2):
        trainer.step(share)
    assert trainer.step_number == 14
    return whole(trainer)  # the run's last step has ended the last period


def test_a_schedule_advances_in_every_step_and_periods_go_on_over_epochs(ranks: Pool) -> None:
    truth = train_plainly(4, 3, 2, 14, (0.9, 0.5, True), schedule=fall, epoch=7)
    for own, expected in zip(ranks.run(train_over_epochs, nproc=2)[0], truth, strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-12, atol=1e-13)


def train_with_a_bad_sample(world: Any) -> list[Tensor]:
    trainer = build(dtype="fp64")
    samples = SAMPLES.clone()
    samples[4 * 16 + 9] = math.nan  # of step 5, island 2
    for share in trainer.loader(samples, global_batch_size=16, shuffle=False):
        trainer.step(share)
        if trainer.step_number == NUM_STEPS:
            break
    trainer.synchronize()
    return whole(trainer)


def test_an_island_skips_a_step_alone(ranks: Pool) -> None:
    truth = train_plainly(4, 3, 2, NUM_STEPS, (0.9, 0.5, True), skips=(4, 2))
    for own, expected in zip(ranks.run(train_with_a_bad_sample, nproc=2)[0], truth, strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-12, atol=1e-13)


def stop(world: Any, folder: str) -> tuple[int, int]:
    """Train, with a signal to the last rank inside of a period; return the last step and the saved one."""
    trainer = build()
    trainer.resume(folder)
    try:
        for share in trainer.loader(SAMPLES, global_batch_size=16, shuffle=False):
            trainer.step(share)
            if trainer.step_number == 3 and world.rank == world.world_size - 1:
                os.kill(os.getpid(), signal.SIGTERM)
    except paceline.Stopped as stopped:
        return trainer.step_number, int(str(stopped.saved)[-8:])
    raise AssertionError("not stopped")


def test_a_signal_takes_effect_at_the_next_exchange(ranks: Pool, tmp_path: Path) -> None:
    assert ranks.run(stop, nproc=2, args=(str(tmp_path),)) == [(5, 5), (5, 5)]


class Branches(nn.Module):
    """Two layers, of which a batch uses the second only if its first number is large."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.rarely = nn.Linear(40, 8), nn.Linear(8, 8)

    def forward(self, batch: Tensor) -> Tensor:
        found: Tensor = self.always(batch)
        return self.rarely(found) if batch[0, 0] > 50 else found


def use_different_parameters(world: Any) -> None:
    torch.manual_seed(0)
    trainer = Trainer(
        Branches(), islands=SETTINGS, loss=loss_of, optimizer=build_optimizer, microbatch_size=2
    )
    samples = SAMPLES.clone()
    samples[4:8, 0] = 99.0  # of the second island
    trainer.step(next(iter(trainer.loader(samples, global_batch_size=16, shuffle=False))))


@pytest.mark.parametrize("nproc", [1, 2])
def test_islands_with_different_parameters_are_refused(ranks: Pool, nproc: int) -> None:
    with pytest.raises(RankError, match="PL675"):
        ranks.run(use_different_parameters, nproc=nproc)


def lack_memory(world: Any) -> str:
    """Train with turns in a memory that is full but for 1,000 bytes after the warm-up."""
    use = SimpleNamespace(limit=10_001_000, used=10_000_000)
    patched = SimpleNamespace(read_fullest=lambda: use)
    before, islands_module.Gauge = islands_module.Gauge, lambda: patched  # type: ignore[misc, assignment]
    try:
        trainer = build()
        for share in trainer.loader(SAMPLES, global_batch_size=16, shuffle=False):
            trainer.step(share)
    except PacelineError as error:
        return f"{trainer.step_number} {error}"
    finally:
        islands_module.Gauge = before  # type: ignore[misc]
    return ""


def test_islands_in_turns_need_memory(ranks: Pool) -> None:
    [message] = ranks.run(lack_memory, nproc=1)
    assert "PL674" in message
    assert message.startswith("3 4 islands in turns on this rank")
    assert ranks.run(lack_memory, nproc=4) == [""] * 4  # nothing waits for its turn


@pytest.mark.parametrize("codec", ["none", "int4"])
def test_the_number_of_ranks_changes_no_bit(ranks: Pool, codec: str) -> None:
    settings = {"islands": SETTINGS | {"codec": codec}, "with_statistics": True}
    first, *others = (ranks.run(train, nproc=nproc, args=("", NUM_STEPS, settings))[0] for nproc in (1, 2, 4))
    for weights, loss in others:
        assert loss == first[1]
        assert all(map(torch.equal, weights, first[0]))
    settings["islands"] = settings["islands"] | {"count": 2}
    alone, inside, sharded = (
        ranks.run(train, nproc=nproc, args=(layout, NUM_STEPS, settings))[0]
        for nproc, layout in ((1, ""), (4, "dp_replicate=4"), (4, "dp_replicate=2 dp_shard=2"))
    )
    for weights, loss in (inside, sharded):
        assert loss == alone[1]
        assert all(map(torch.equal, weights, alone[0]))
    assert any(not torch.equal(a, b) for a, b in zip(alone[0], first[0], strict=True))


def test_tensor_parallel_ranks_share_an_island(ranks: Pool) -> None:
    settings = {"islands": SETTINGS | {"count": 2}, "dtype": "fp64", "example": SAMPLES[:2]}
    [(alone, _)] = ranks.run(train, nproc=1, args=("", NUM_STEPS, settings))
    found, _ = ranks.run(train, nproc=4, args=("dp_replicate=2 tp=2", NUM_STEPS, settings))[0]
    for own, expected in zip(found, alone, strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-9, atol=1e-11)


def test_one_island_is_plain_training(ranks: Pool) -> None:
    [(one, _)] = ranks.run(train, nproc=1, args=("", 4, {"islands": SETTINGS | {"count": 1}}))
    [(none, _)] = ranks.run(train, nproc=1, args=("", 4, {"islands": None}))
    assert all(map(torch.equal, one, none))


def test_a_run_goes_on_inside_of_a_period_on_other_ranks(ranks: Pool, tmp_path: Path) -> None:
    settings = {"islands": SETTINGS | {"codec": "int8"}, "with_statistics": True}
    [expected] = ranks.run(train, nproc=1, args=("", NUM_STEPS, settings))
    for number, (at, first, then) in enumerate([(6, 4, 1), (4, 1, 2), (2, 2, 4)]):
        folder = str(tmp_path / str(number))
        if at == 2:  # the end of the warm-up
            ranks.run(train, nproc=first, args=("", at, settings, folder))
        else:
            ranks.run(train_and_save, nproc=first, args=(at, settings, folder))
        found = ranks.run(train, nproc=then, args=("", NUM_STEPS, settings, folder))[0]
        assert found[1] == expected[1], (at, first, then)
        assert all(map(torch.equal, found[0], expected[0]))


def train_and_save(world: Any, at: int, settings: Any, folder: str) -> None:
    trainer = build(**settings)
    trainer.resume(folder)
    for share in trainer.loader(SAMPLES, global_batch_size=16, shuffle=False, epochs=9):
        trainer.step(share)
        if trainer.step_number == at:
            trainer.save(wait=True)
            return


def loop(world: Any, layout: str, count: int) -> list[Tensor]:
    """Train islands in a loop of one's own."""
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    own = paceline.Loop(
        model, optimizer, islands=SETTINGS | {"count": count}, layout=layout, microbatch_size=2, dtype="fp64"
    )
    for step in own.loader(SAMPLES, global_batch_size=16, shuffle=False, epochs=1):
        for batch in step:
            loss_sum, weight = loss_of(model(batch), batch)
            (loss_sum / weight).backward()
        step.clip_grad_norm_(5.0)
        optimizer.step()
        optimizer.zero_grad()
        if step.number == NUM_STEPS:
            break
    own.end_step()
    own.synchronize()
    state = own.whole_state()
    return [p.full_tensor() if isinstance(p, DTensor) else p for p in state.values()]


@pytest.mark.parametrize("layout", ["dp_replicate=4", "dp_replicate=2 dp_shard=2"])
def test_a_loop_of_ones_own_has_islands(ranks: Pool, layout: str) -> None:
    truth = train_plainly(2, 3, 2, NUM_STEPS, (0.9, 0.5, True))
    found = ranks.run(loop, nproc=4, args=(layout, 2))[0]
    for own, expected in zip(found, truth, strict=True):
        torch.testing.assert_close(own.double(), expected, rtol=1e-9, atol=1e-11)


def refuse(world: Any, settings: dict[str, Any]) -> None:
    build(**settings)


@pytest.mark.parametrize(
    ("nproc", "settings", "code", "words"),
    [
        (2, {"islands": {"count": 3}}, "PL670", "dp_replicate to 3 or a multiple"),
        (2, {"layout": "dp_shard=2"}, "PL670", "dp_replicate to 4"),
        (2, {"layout": "cp=2"}, "PL670", "cp=1"),
        (1, {"ema": 0.9}, "PL671", "ema"),
        (1, {"checkpoint_mode": "sharded"}, "PL671", "checkpoint_mode"),
        (1, {"asynchronous_saves": True}, "PL671", "asynchronous_saves"),
        (1, {"compress": {"kind": "int8", "slots": 4}, "reduction": "exact"}, "PL671", "compress"),
        (1, {"loss_over": "global_batch"}, "PL671", "global_batch"),
        (1, {"islands": {"count": 0}}, "PL101", "count"),
        (1, {"islands": {"warmup_steps": -1}}, "PL101", "warmup_steps"),
        (1, {"islands": {"codec": "int2"}}, "PL101", "codec"),
        (1, {"islands": {"fragments": 2}}, "PL100", "fragments"),
        (1, {"islands": SETTINGS | {"codec": "int8"}, "dtype": "fp64"}, "PL671", "fp32"),
        (1, {"islands": {"every": 0}}, "PL101", "every"),
        (1, {"islands": {"outer": {"lr": 0.0}}}, "PL101", "lr"),
        (1, {"islands": {"outer": {"momentum": 1.0}}}, "PL101", "momentum"),
    ],
)
def test_what_islands_cannot_have_is_refused(
    ranks: Pool, nproc: int, settings: Any, code: str, words: str
) -> None:
    with pytest.raises(RankError) as raised:
        ranks.run(refuse, nproc=nproc, args=(settings,))
    assert code in str(raised.value)
    assert words in str(raised.value)


def test_batches_that_islands_cannot_share_are_refused(ranks: Pool) -> None:
    ranks.run(refuse_batches, nproc=1)


def refuse_batches(world: Any) -> None:
    trainer = build()
    for size, epochs in ((12, None), (4, None), (16, 1)):  # 4: fewer microbatches than islands
        with pytest.raises(PacelineError, match="PL672"):
            trainer.loader(SAMPLES[:20], global_batch_size=size, epochs=epochs)
    with pytest.raises(PacelineError, match="PL672"):
        trainer.step(SAMPLES[:16])
    with pytest.raises(PacelineError, match="PL672"):
        trainer.loader(SAMPLES, global_batch_size=16, shard="mine")


def test_another_number_of_islands_is_refused_on_resume(ranks: Pool, tmp_path: Path) -> None:
    folder = str(tmp_path)
    ranks.run(train_and_save, nproc=1, args=(6, {}, folder))
    with pytest.raises(RankError, match="PL676"):
        ranks.run(resume, nproc=1, args=(2, folder))
    assert ranks.run(resume, nproc=1, args=(1, folder)) == [7]


@pytest.mark.parametrize("changed", [{"every": 4}, {"codec": "int8"}, {"outer": {"lr": 0.7}}])
def test_other_islands_are_refused_on_resume_unless_accepted(
    ranks: Pool, tmp_path: Path, changed: dict[str, Any]
) -> None:
    folder = str(tmp_path)
    ranks.run(train_and_save, nproc=1, args=(6, {}, folder))
    with pytest.raises(RankError, match="PL515") as raised:
        ranks.run(resume, nproc=1, args=(4, folder, changed, []))
    assert f"islands.{next(iter(changed))}" in str(raised.value)
    assert ranks.run(resume, nproc=1, args=(4, folder, changed)) == [7]


def resume(world: Any, count: int, folder: str, changed: Any = None, accept: Any = ("islands",)) -> int:
    trainer = build(SETTINGS | {"count": count} | (changed or {}))
    trainer.resume(folder, accept=list(accept))
    trainer.step(next(iter(trainer.loader(SAMPLES, global_batch_size=16, shuffle=False, epochs=9))))
    return trainer.step_number
