"""A run goes on with the settings it was trained with, or says which are others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR, SequentialLR, StepLR
from torch.utils.data import Dataset, IterableDataset

from paceline.errors import PacelineError
from paceline.train.trainer import Trainer
from paceline.world import start
from tests.dist.pool import Pool, RankError

OPTIONS = {"microbatch_size": 2, "clip_norm": 1.0}


class Samples(Dataset[Tensor]):
    def __init__(self, scale: float = 1.0, noise: torch.Generator | None = None) -> None:
        self.scale, self.noise = scale, noise
        self.read: list[int] = []

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Tensor:
        self.read.append(index)
        x = torch.randn(3, generator=torch.Generator().manual_seed(index))
        return x * self.scale if self.noise is None else x + torch.randn(3, generator=self.noise)


def adam(lr: float = 0.1, **options: Any) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda named: torch.optim.AdamW([p for _, p in named], lr=lr, **options)


def build(**settings: Any) -> Trainer:
    torch.manual_seed(0)
    return Trainer(
        **{
            "model": nn.Linear(3, 2),
            "optimizer": adam(),
            "loss": lambda output, batch: (output.square().sum(), len(output)),
            **OPTIONS,
            **settings,
        }
    )


def go(
    folder: Path | str,
    *,
    last: int,
    accept: Any = (),
    data: Any = None,
    track: tuple[str, ...] = (),
    loader_later: bool = False,
    loader: dict[str, Any] | None = None,
    **settings: Any,
) -> Trainer:
    """Run a start of the run, to step `last`, which is saved."""
    trainer = build(**settings)

    def make() -> Any:
        options = {"global_batch_size": 8, "name": "train", **(loader or {})}
        return trainer.loader(Samples() if data is None else data, **options)

    made = None if loader_later else make()
    trainer.resume(folder, accept=accept)
    trainer.track(**{name: nn.Linear(2, 2) for name in track})
    for share in make() if made is None else made:
        if trainer.step_number >= last:
            break
        trainer.step(share)
    trainer.save()
    return trainer


def refused(folder: Path, code: str = "PL515", **changes: Any) -> str:
    with pytest.raises(PacelineError) as caught:
        go(folder, last=4, **changes)
    assert caught.value.code == code
    return str(caught.value)


@pytest.fixture(autouse=True)
def world() -> Any:
    with start(device="cpu", threads_per_rank=1) as world:
        yield world


def schedule(kind: str, **options: Any) -> Callable[[Any], Any]:
    kinds: dict[str, Any] = {
        "step": lambda optimizer: StepLR(optimizer, 1, **{"gamma": 0.5, **options}),
        "cosine": lambda optimizer: CosineAnnealingLR(optimizer, **{"T_max": 10, **options}),
        "cycle": lambda optimizer: OneCycleLR(optimizer, total_steps=10, **{"max_lr": 0.2, **options}),
        "lambda": lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (step + 1)),
        "two": lambda optimizer: SequentialLR(
            optimizer,
            [StepLR(optimizer, 1, 0.5), StepLR(optimizer, 2, options.get("gamma", 0.5))],
            [options.get("milestone", 2)],
        ),
    }
    return kinds[kind]  # type: ignore[no-any-return]


CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any], list[str]]] = {
    "clip_norm": ({}, {"clip_norm": 0.5}, ["clip_norm was 1.0 and is 0.5"]),
    "dtype": ({}, {"dtype": "bf16"}, ["dtype was 'fp32' and is 'bf16'"]),
    "microbatch": ({}, {"microbatch_size": 4}, ["train.microbatch_size was 2 and is 4"]),
    "global batch": (
        {},
        {"loader": {"global_batch_size": 16}},
        ["train.global_batch_size was 8 and is 16"],
    ),
    "drop_last": ({}, {"loader": {"drop_last": True}}, ["train.drop_last was False and is True"]),
    "data": ({}, {"data": Samples(2.0)}, ["the content of train.data is not what it was"]),
    "lr": ({}, {"optimizer": adam(0.3)}, ["optimizer.lr was 0.1 and is 0.3"]),
    "weight decay": (
        {},
        {"optimizer": adam(weight_decay=0.5)},
        ["optimizer.weight_decay was 0.01 and is 0.5"],
    ),
    "schedule dropped": ({"schedule": schedule("step")}, {}, ["schedule was 'StepLR' and is None;"]),
    "schedule added": ({}, {"schedule": schedule("step")}, ["schedule was None and is 'StepLR'"]),
    "length": (
        {"schedule": schedule("cosine")},
        {"schedule": schedule("cosine", T_max=20)},
        ["schedule.T_max was 10 and is 20"],
    ),
    "peak": (
        {"schedule": schedule("cycle")},
        {"schedule": schedule("cycle", max_lr=0.4)},
        ["schedule.max_lr was 0.2 and is 0.4"],
    ),
    "inner schedule": (
        {"schedule": schedule("two")},
        {"schedule": schedule("two", gamma=0.1, milestone=3)},
        ["schedule.1.gamma was 0.5 and is 0.1", "schedule.milestones was [2] and is [3]"],
    ),
    "tracked": ({"track": ("ema",)}, {}, ["ema was tracked and is not"]),
    "loader's name": ({}, {"loader": {"name": "other"}}, ["train was a loader and is not"]),
    "all at once": (
        {"schedule": schedule("step")},
        {"clip_norm": 0.0, "optimizer": adam(0.2), "data": Samples(3.0), "microbatch_size": 8},
        ["clip_norm was", "optimizer.lr was", "schedule was", "train.data is not", "train.microbatch_size"],
    ),
}


@pytest.mark.parametrize("case", CHANGES)
def test_other_settings_are_refused_in_one_message(tmp_path: Path, case: str) -> None:
    before, after, told = CHANGES[case]
    go(tmp_path, last=2, **before)
    message = refused(tmp_path, **after)
    for part in told:
        assert part.rstrip(";") in message
    go(tmp_path, last=3, **before)  # nothing was done to the run


@pytest.mark.parametrize("case", CHANGES)
def test_they_are_accepted_by_name(tmp_path: Path, case: str) -> None:
    before, after, _ = CHANGES[case]
    go(tmp_path, last=2, **before)
    message = refused(tmp_path, **after)
    names = eval(message.partition("accept=")[2].partition(")")[0])
    go(tmp_path, last=3, accept=names, **after)
    go(tmp_path, last=4, **after)  # from here on they are the run's


@pytest.mark.parametrize("case", ["data", "microbatch"])
def test_a_loader_made_after_resuming_is_compared_too(tmp_path: Path, case: str) -> None:
    _, after, told = CHANGES[case]
    go(tmp_path, last=2, loader_later=True)
    assert told[0] in refused(tmp_path, loader_later=True, **after)
    go(tmp_path, last=3, loader_later=True)
    go(tmp_path, last=4, loader_later=True, accept=["train"], **after)


def test_a_position_that_nobody_has_taken_yet_is_saved_again(tmp_path: Path) -> None:
    go(tmp_path, last=2)
    trainer = build()
    trainer.resume(tmp_path)
    trainer.save()
    loader = go(tmp_path, last=3)._loaders["train"]
    assert loader.position[:3] == (0, 3, 24)
    assert "microbatch_size was 2 and is 4" in refused(tmp_path, microbatch_size=4)


def test_an_accepted_rate_takes_effect(tmp_path: Path) -> None:
    go(tmp_path, last=2, schedule=schedule("step"))
    trainer = go(tmp_path, last=3, accept="optimizer.lr", optimizer=adam(0.4), schedule=schedule("step"))
    assert trainer._updates["model"].lr == pytest.approx(0.4 * 0.5**3)
    trainer = go(tmp_path, last=5, optimizer=adam(0.4), schedule=schedule("step"))
    assert trainer._updates["model"].lr == pytest.approx(0.4 * 0.5**5)


@pytest.mark.parametrize("kind", ["step", "cosine", "cycle", "lambda", "two"])
def test_an_accepted_schedule_goes_on_as_if_it_had_been_there_from_the_start(
    tmp_path: Path, kind: str
) -> None:
    go(tmp_path / "changed", last=3, schedule=schedule("cosine", T_max=7))
    trainer = go(
        tmp_path / "changed", last=5, accept=["schedule"], schedule=schedule(kind), optimizer=adam(0.1)
    )
    expected = go(tmp_path / "whole", last=5, schedule=schedule(kind))
    changed, whole = (t._updates["model"].optimizer.param_groups[0] for t in (trainer, expected))
    assert changed["lr"] == pytest.approx(whole["lr"], rel=1e-12)
    assert changed["betas"] == pytest.approx(whole["betas"], rel=1e-12)


def test_other_options_change_alone(tmp_path: Path) -> None:
    go(tmp_path, last=2, schedule=schedule("step"))
    options = {"optimizer": adam(weight_decay=0.5), "schedule": schedule("step")}
    trainer = go(tmp_path, last=3, accept=["optimizer.weight_decay"], **options)
    group = trainer._updates["model"].optimizer.param_groups[0]
    assert (group["weight_decay"], group["lr"]) == (0.5, pytest.approx(0.1 * 0.5**3))


def test_a_seed_can_not_be_accepted(tmp_path: Path) -> None:
    go(tmp_path, last=2)
    message = refused(tmp_path, seed=5, accept=["seed"])
    assert "seed was 0 and is 5" in message
    assert "accept=" not in message


def test_an_unknown_name_is_refused(tmp_path: Path) -> None:
    go(tmp_path, last=2)
    assert "accept='clipnorm'" in refused(tmp_path, "PL517", accept=["clipnorm"])


def test_what_may_change_freely(tmp_path: Path) -> None:
    """Groups in another order, an evaluation's loader, how the optimizer computes."""

    def groups(order: int, **options: Any) -> Callable[[Any], torch.optim.Optimizer]:
        return lambda named: torch.optim.AdamW(
            [{"params": [p], "lr": 0.1 if p.dim() > 1 else 0.2} for _, p in named][::order], **options
        )

    go(tmp_path, last=2, optimizer=groups(1))
    trainer = build(optimizer=groups(-1, foreach=True))
    trainer.loader(Samples(5.0), global_batch_size=4, shuffle=False, name="valid")
    loader = trainer.loader(Samples(), global_batch_size=8, name="train", epochs=3, num_workers=0, prefetch=4)
    assert trainer.resume(tmp_path) == 2
    for share in loader:
        trainer.step(share)
    assert trainer.step_number == 15


def test_raw_batches_have_the_trainers_microbatch(tmp_path: Path) -> None:
    def raw(**settings: Any) -> None:
        trainer = build(**settings)
        trainer.resume(tmp_path)
        trainer.step(torch.randn(4, 3))
        trainer.save()

    raw()
    raw()
    with pytest.raises(PacelineError, match=r"microbatch_size was 2 and is 4.*PL515"):
        raw(microbatch_size=4)


def test_data_that_differ_at_each_reading_are_not_compared(tmp_path: Path) -> None:
    go(tmp_path, last=2, data=Samples(noise=torch.Generator().manual_seed(1)))
    go(tmp_path, last=3, data=Samples(noise=torch.Generator().manual_seed(2)))


def test_few_samples_are_read_and_no_number_is_drawn(tmp_path: Path) -> None:
    trainer, data = build(), Samples()
    loader = trainer.loader(data, global_batch_size=8)
    before = torch.default_generator.get_state()
    assert loader.content_hash == loader.content_hash is not None
    assert data.read == 2 * [0, 5, 11, 16, 22, 27, 33, 39]
    assert torch.equal(before, torch.default_generator.get_state())
    with_worker = trainer.loader(Samples(), global_batch_size=8, num_workers=1)
    assert with_worker.content_hash == loader.content_hash
    assert torch.equal(before, torch.default_generator.get_state())


def test_a_stream_is_not_read_for_it() -> None:
    class Stream(IterableDataset[Tensor]):
        def __iter__(self) -> Any:
            raise AssertionError("read")

    assert build().loader(Stream(), global_batch_size=4).content_hash is None


def test_a_new_tracked_object_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    go(tmp_path, last=2, track=("ema",))
    assert "PL518" not in caplog.text
    go(tmp_path, last=3, track=("ema", "best"))
    assert "best: the checkpoint has no state for it." in caplog.text


# ---- on several ranks


def go_on_rank(world: Any, folder: str, scale: float, later: bool) -> list[str]:
    trainer = go(folder, last=2 + (scale != 1.0), data=Samples(scale), loader_later=later)
    return [p.sum().item().hex() for p in trainer.model.parameters()]


@pytest.mark.parametrize("later", [False, True])
def test_all_ranks_refuse_together(ranks: Pool, tmp_path: Path, later: bool) -> None:
    ranks.run(go_on_rank, args=(str(tmp_path), 1.0, later))
    with pytest.raises(RankError) as caught:
        ranks.run(go_on_rank, nproc=3, args=(str(tmp_path), 2.0, later))
    assert [error.code for error in caught.value.causes.values()] == ["PL515"] * 3
