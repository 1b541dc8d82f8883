"""Every wrong use of a trainer ends in one message with the value, the rule and the next move."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from paceline.errors import PacelineError
from paceline.train.trainer import Trainer
from paceline.world import start
from tests.dist.pool import Pool, RankError


def sgd(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=0.1)


def adam(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.Adam([p for _, p in named], lr=0.1)


def square(output: Tensor, batch: Any) -> Any:
    return output.square().sum(), len(output)


def build(**settings: Any) -> Trainer:
    return Trainer(**{"model": nn.Linear(3, 2), "optimizer": sgd, "loss": square, **settings})


def build_named(**settings: Any) -> Trainer:
    models = {"student": nn.Linear(3, 2), "teacher": nn.Linear(3, 2)}
    options = {"optimizer": {"student": sgd}, "step": lambda update: update("student", named_loss)}
    return Trainer(models, **{**options, **settings})


def named_loss(models: dict[str, nn.Module], batch: Any) -> Any:
    return models["student"](batch).square().sum(), len(batch)


def data(num_samples: int = 6) -> TensorDataset:
    return TensorDataset(torch.randn(num_samples, 3))


def step_with(loss: Callable[[Tensor, Any], Any]) -> None:
    build(loss=loss).step(torch.randn(4, 3))


def out_of_memory(model: nn.Module, batch: Tensor) -> Tensor:
    raise RuntimeError(
        "[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory: you tried "
        "to allocate 4000000000000 bytes.\nMore of it."
    )


def evaluate_with(metrics: dict[str, Any]) -> None:
    trainer = build(forward=lambda model, batch: model(batch[0]))
    trainer.evaluate(trainer.loader(data(), global_batch_size=2, shuffle=False), metrics)


class Sam(torch.optim.SGD):
    """Like sharpness-aware minimization, which evaluates the loss twice."""

    def step(self, closure: Callable[[], Any]) -> Any:  # type: ignore[override]
        closure()
        return super().step()


def evaluate_nothing() -> None:
    trainer = build(loss=lambda output, batch: (output.sum(), torch.zeros(())), forward=lambda m, b: m(b[0]))
    trainer.evaluate(trainer.loader(data(), global_batch_size=2, shuffle=False))


CASES: dict[str, tuple[str, Callable[[], Any], str]] = {
    # ---- arguments
    "negative clip_norm": (
        "PL400",
        lambda: build(clip_norm=-1.0),
        "clip_norm=-1.0. It is a number of at least 0",
    ),
    "clip_norm nan": ("PL400", lambda: build(clip_norm=float("nan")), "clip_norm=nan."),
    "microbatch_size 0": (
        "PL400",
        lambda: build(microbatch_size=0),
        "microbatch_size=0. It is a number of at least 1",
    ),
    "keep 0": ("PL400", lambda: build(keep=0), "keep=0."),
    "max_skipped 0": ("PL400", lambda: build(max_skipped_in_a_row=0), "max_skipped_in_a_row=0."),
    "negative seed": ("PL400", lambda: build(seed=-3), "seed=-3."),
    "text for a number": ("PL400", lambda: build(clip_norm="1"), "clip_norm='1')."),
    "unknown dtype": ("PL400", lambda: build(dtype="half"), "dtype='half'). dtype takes Literal"),
    "unknown ddp key": ("PL100", lambda: build(ddp={"bucket_cap": 1}), "unknown key ddp.bucket_cap"),
    "ddp value": ("PL101", lambda: build(ddp={"bucket_cap_mb": -1}), "ddp.bucket_cap_mb=-1"),
    "layout of another world": ("PL113", lambda: build(layout="dp_replicate=2"), "there are 1 ranks"),
    "layout not understood": ("PL110", lambda: build(layout="data=2"), "layout has 'data=2'"),
    "experts of a model without any": ("PL653", lambda: build(layout="ep=2"), "layout.ep=2"),
    # ---- models, losses, optimizers
    "trainer.model of several": (
        "PL402",
        lambda: build_named().model,
        "trainer.models[name] with one of student, teacher",
    ),
    "optimizer for nobody": (
        "PL404",
        lambda: build_named(optimizer={"pupil": sgd}),
        "'pupil', which is not one of the models student, teacher",
    ),
    "dict of optimizers for one": (
        "PL404",
        lambda: build(optimizer={"model": sgd}),
        "one model with optimizer=dict",
    ),
    "one optimizer for several": (
        "PL404",
        lambda: build_named(optimizer=sgd),
        "several models with optimizer=function",
    ),
    "update of a frozen model": (
        "PL404",
        lambda: build_named(step=lambda update: update("teacher", named_loss)).step(torch.randn(4, 3)),
        "update('teacher', ...), but only student have an optimizer",
    ),
    "hook on a frozen model": (
        "PL404",
        lambda: build_named().on_gradients(print, "teacher"),
        "model='teacher'",
    ),
    "hook without a name": (
        "PL404",
        lambda: build_named().on_gradients(print),
        "model='model'), but only student",
    ),
    "evaluating several models": (
        "PL405",
        lambda: (t := build_named()).evaluate(t.loader(data(), global_batch_size=2)),
        "has no loss=",
    ),
    "several without step": ("PL406", lambda: build_named(step=None), "several models with no step="),
    "several with a loss": (
        "PL406",
        lambda: build_named(loss=square),
        "forward=, loss= or metrics= together with step=",
    ),
    "one without a loss": ("PL406", lambda: build(loss=None), "one model with no loss="),
    "one with a step": ("PL406", lambda: build(step=lambda update: None), "one model with step="),
    "a step that updates nothing": (
        "PL406",
        lambda: build_named(step=lambda update: None).step(torch.randn(4, 3)),
        "step= returned without an update",
    ),
    "a ready optimizer": (
        "PL400",
        lambda: build(optimizer=torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1.0)),
        "optimizer=SGD(...)). optimizer takes OptimizerFactory",
    ),
    "a name for an optimizer": ("PL400", lambda: build(optimizer="adamw"), "optimizer='adamw')."),
    "an optimizer function without a result": (
        "PL407",
        lambda: build(optimizer=lambda named: None),
        "the optimizer function of model returned None",
    ),
    "LBFGS": (
        "PL407",
        lambda: build(optimizer=lambda named: torch.optim.LBFGS([p for _, p in named])),
        "the optimizer LBFGS of model, whose step() requires a closure",
    ),
    "SAM": (
        "PL407",
        lambda: build(optimizer=lambda named: Sam([p for _, p in named], lr=0.1)),
        "the optimizer Sam of model, whose step() requires a closure",
    ),
    "an optimizer over another model": (
        "PL407",
        lambda: build(optimizer=lambda named: sgd(list(nn.Linear(5, 7).named_parameters()))),
        "2 of the 2 tensors in the optimizer of model are not its parameters (the first has shape [7, 5])",
    ),
    "an optimizer over a tensor too many": (
        "PL407",
        lambda: build(optimizer=lambda named: sgd([*named, ("loss", nn.Parameter(torch.ones(2)))])),
        "1 of the 3 tensors in the optimizer of model",
    ),
    "a schedule that wants a metric": (
        "PL407",
        lambda: build(schedule=torch.optim.lr_scheduler.ReduceLROnPlateau),
        "the schedule of model is ReduceLROnPlateau",
    ),
    "a schedule that is none": (
        "PL407",
        lambda: build(schedule=lambda optimizer: 0.1),
        "the schedule function of model returned a float",
    ),
    "tracking a number": ("PL408", lambda: build().track(best=0.5), "track(best=float)"),
    "nothing to train": (
        "PL420",
        lambda: build(model=nn.Linear(3, 2).requires_grad_(False)),
        "none of the 2 parameters",
    ),
    # ---- batches and losses
    "a loader for data": (
        "PL648",
        lambda: (t := build()).loader(t.loader(data(), global_batch_size=2), global_batch_size=2),
        "a loader of Paceline",
    ),
    "fields of unequal length": (
        "PL211",
        lambda: build(microbatch_size=2).step({"x": torch.randn(8, 3), "y": torch.zeros(6)}),
        "batch['y'] has 6 rows, and the first tensor of the batch has 8",
    ),
    "a metric that is a vector": (
        "PL410",
        lambda: evaluate_with({"accuracy": lambda output, batch: output}),
        "the metric 'accuracy' returned a Tensor of shape (1, 2)",
    ),
    "a batch of numbers": ("PL409", lambda: build().step([1, 2, 3]), "a batch of type list without a tensor"),
    "a batch of scalars": ("PL409", lambda: build().step({"x": torch.tensor(1.0)}), "a batch of type dict"),
    "a vector loss": ("PL410", lambda: step_with(lambda o, b: o.sum(1)), "a Tensor of shape (4,)"),
    "a vector in a pair": ("PL410", lambda: step_with(lambda o, b: (o.sum(1), 4)), "a Tensor of shape (4,)"),
    "no loss": ("PL410", lambda: step_with(lambda o, b: None), "returned a NoneType"),
    "a loss with a dict": (
        "PL410",
        lambda: step_with(lambda o, b: (o.sum(), {"accuracy": 1.0})),
        "returned a tuple",
    ),
    "a loss of three": ("PL410", lambda: step_with(lambda o, b: (o.sum(), 4, 4)), "returned a tuple"),
    "a float loss": ("PL410", lambda: step_with(lambda o, b: 0.5), "returned a float"),
    "evaluating nothing": ("PL411", evaluate_nothing, "evaluating 6 samples with a total weight of 0"),
    "a detached loss": (
        "PL412",
        lambda: step_with(lambda o, b: o.detach().sum()),
        "the loss of microbatch 0",
    ),
    "out of memory": (
        "PL432",
        lambda: build(forward=out_of_memory, microbatch_size=2).step(torch.randn(4, 3)),
        "rank 0 ran out of memory on cpu with microbatches of 2 samples: [enforce fail",
    ),
    # ---- folders
    "saving nowhere": ("PL403", lambda: build().save(), "save() before resume()"),
}


@pytest.mark.parametrize("case", CASES)
def test_wrong_use_is_reported(case: str) -> None:
    code, use, saw = CASES[case]
    with start(device="cpu", threads_per_rank=1), pytest.raises(PacelineError) as caught:
        use()
    assert caught.value.code == code
    assert saw in str(caught.value)
    assert len(caught.value.fix) > 10


def test_a_trainer_needs_a_world() -> None:
    with pytest.raises(PacelineError, match="no world was started"):
        build()


def test_other_errors_pass_as_they_are() -> None:
    def broken(model: nn.Module, batch: Tensor) -> Tensor:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with start(device="cpu", threads_per_rank=1):
        with pytest.raises(RuntimeError, match="mat1 and mat2"):
            build(forward=broken).step(torch.randn(4, 3))
        with pytest.raises(PacelineError, match="PL432"):
            build(forward=lambda model, batch: (_ for _ in ()).throw(MemoryError("no"))).step(
                torch.randn(4, 3)
            )


def test_parameters_that_the_optimizer_leaves_out_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    with start(device="cpu", threads_per_rank=1):
        trainer = build(
            optimizer=lambda named: torch.optim.SGD([p for n, p in named if n == "weight"], lr=0.1)
        )
        assert "1 parameters of model require a gradient" in caplog.text
        assert "bias" in caplog.text
        before = trainer.model.bias.clone()
        for _ in range(2):
            trainer.step(torch.randn(4, 3))
        assert torch.equal(trainer.model.bias, before)


def test_a_batch_larger_than_the_data_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    with start(device="cpu", threads_per_rank=1):
        trainer = build(forward=lambda model, batch: model(batch[0]))
        trainer.loader(data(6), global_batch_size=6)
        trainer.loader(data(6), global_batch_size=8, shuffle=False)  # an evaluation may take all at once
        assert "PL212" not in caplog.text
        trainer.loader(data(6), global_batch_size=10**9, name="train")
    assert caplog.text.count("PL212") == 1
    assert "train: global_batch_size=1000000000, but the data has 6 samples." in caplog.text


def test_the_seed_of_the_world_is_the_trainers_default() -> None:
    def order(of_world: int, **settings: Any) -> list[float]:
        with start(device="cpu", threads_per_rank=1, seed=of_world):
            trainer = build(**settings)
            numbers = TensorDataset(torch.arange(40.0))
            loader = trainer.loader(numbers, global_batch_size=40, epochs=1)
            return [x for share in loader for _, batch in share.microbatches for x in batch[0].tolist()]

    assert order(0) != order(1) == order(0, seed=1)
    assert order(1, seed=0) == order(0) == order(0, seed=None)


# ---- with several ranks


def out_of_step(world: Any) -> None:
    trainer = build(forward=lambda model, batch: model(batch[0]))
    if world.rank == 1:
        trainer.step_number = 5
    for share in trainer.loader(data(), global_batch_size=2):
        trainer.step(share)


def test_ranks_at_different_steps_are_reported(ranks: Pool) -> None:
    with pytest.raises(RankError) as caught:
        ranks.run(out_of_step)
    texts = {rank: str(error) for rank, error in caught.value.causes.items()}
    assert all("rank 0 is at step 1, rank 1 is at step 6." in text for text in texts.values())
    assert all("[PL430]" in text for text in texts.values())


def synchronised(world: Any) -> None:
    build(model=nn.Sequential(nn.Linear(3, 2), nn.SyncBatchNorm(2)))


def test_synchronised_batchnorm_is_refused(ranks: Pool) -> None:
    with pytest.raises(RankError, match=r"1 is an nn.SyncBatchNorm.*PL422"):
        ranks.run(synchronised)


# ---- a run's folder of something else


def save_run(world: Any, folder: str, kind: str) -> int:
    options: dict[str, Any] = {
        "first": {},
        "wider": {"model": nn.Linear(3, 4)},
        "deeper": {"model": nn.Sequential(nn.Linear(3, 2))},
        "adam": {"optimizer": adam},
    }.get(kind, {})
    if kind in ("student", "both"):
        extra = {"optimizer": {"student": sgd, "teacher": sgd}} if kind == "both" else {}
        trainer = build_named(**extra)
    else:
        trainer = build(**options)
    trainer.resume(folder)
    for _ in range(2):
        trainer.step(torch.randn(4, 3))
    trainer.save()
    return trainer.step_number


@pytest.mark.parametrize(
    ("kind", "code", "saw"),
    [
        ("wider", "PL531", "weight is (2, 3) there and (4, 3) here"),
        ("deeper", "PL531", "0.weight is missing"),
        ("adam", "PL511", "it is of the optimizer SGD, and this one is Adam"),
    ],
)
def test_another_model_in_the_folder_is_reported_on_all_ranks(
    ranks: Pool, tmp_path: Path, kind: str, code: str, saw: str
) -> None:
    assert ranks.run(save_run, args=(str(tmp_path), "first")) == [2, 2]
    before = sorted(path for path in tmp_path.rglob("*") if path.is_file())
    with pytest.raises(RankError) as caught:
        ranks.run(save_run, args=(str(tmp_path), kind))
    assert {error.code for error in caught.value.causes.values()} == {code}
    assert saw in str(caught.value)
    assert sorted(path for path in tmp_path.rglob("*") if path.is_file()) == before
    assert ranks.run(save_run, args=(str(tmp_path), "first")) == [4, 4]


def test_another_set_of_optimizers_in_the_folder_is_reported(ranks: Pool, tmp_path: Path) -> None:
    assert ranks.run(save_run, nproc=1, args=(str(tmp_path / "one"), "student")) == [2]
    with pytest.raises(RankError, match=r"teacher(?s:.)*PL511"):
        ranks.run(save_run, nproc=1, args=(str(tmp_path / "one"), "both"))
    assert ranks.run(save_run, nproc=1, args=(str(tmp_path / "two"), "both")) == [2]
    with pytest.raises(RankError, match=r"teacher(?s:.)*PL511"):
        ranks.run(save_run, nproc=1, args=(str(tmp_path / "two"), "student"))
