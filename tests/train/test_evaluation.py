"""Evaluation: the same mean on any number of ranks, and no trace of it in the training."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset, IterableDataset

from paceline.train.evaluation import Evaluation
from paceline.train.trainer import Trainer
from tests.dist.pool import Pool
from tests.train.cases import apart

IGNORED = -100


class Samples(Dataset[dict[str, Tensor]]):
    """Some have no target at all; augmented by the global generator."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        targets = torch.randint(4, (3,), generator=generator)
        targets[: index % 4] = IGNORED
        return {
            "x": torch.randn(5, generator=generator) + 0.1 * torch.randn(5),
            "targets": targets,
        }


class Stream(IterableDataset[dict[str, Tensor]]):
    def __iter__(self) -> Any:
        return (Samples(11)[index] for index in range(11))


class Net(nn.Module):
    """Draws random numbers even in eval mode, as sampling models do."""

    def __init__(self, noisy: bool = True) -> None:
        super().__init__()
        self.noisy = noisy
        self.body = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3))
        self.head = nn.Linear(8, 12)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(x)
        if self.noisy:
            hidden = hidden + 0.01 * (torch.randn(()) + random.random() + float(np.random.rand()))
        return self.head(hidden).view(-1, 3, 4)


def token_loss(output: Tensor, batch: dict[str, Tensor]) -> Any:
    losses = functional.cross_entropy(
        output.flatten(0, 1), batch["targets"].flatten(), ignore_index=IGNORED, reduction="sum"
    )
    return losses, (batch["targets"] != IGNORED).sum()


def accuracy(output: Tensor, batch: dict[str, Tensor]) -> Any:
    counted = batch["targets"] != IGNORED
    return ((output.argmax(-1) == batch["targets"]) & counted).sum(), counted.sum()


def mean_logit(output: Tensor, batch: dict[str, Tensor]) -> Any:
    """Return a scalar: the mean over samples."""
    return output.mean((1, 2)).mean()


METRICS = {"accuracy": accuracy, "mean_logit": mean_logit}


def build(dtype: str = "fp64", *, noisy: bool = True) -> Trainer:
    return Trainer(
        lambda: Net(noisy),
        forward=lambda model, batch: model(batch["x"]),
        loss=token_loss,
        optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=0.02),
        dtype=dtype,
        microbatch_size=2,
    )


def evaluate_twice(world: Any, num_samples: int) -> list[Evaluation]:
    trainer = build()
    loader = trainer.loader(Samples(num_samples), global_batch_size=5, shuffle=False)
    assert trainer.model.training
    return [trainer.evaluate(loader, METRICS) for _ in range(2)]


@pytest.mark.parametrize("num_samples", [23, 5, 2])
def test_the_mean_is_the_same_on_any_number_of_ranks(ranks: Pool, num_samples: int) -> None:
    one, again = ranks.run(evaluate_twice, nproc=1, args=(num_samples,))[0]
    assert one == again, "each pass is the same"
    assert one.num_samples == num_samples
    assert one.weight == sum(3 - index % 4 for index in range(num_samples))
    assert one.metrics.keys() == METRICS.keys()
    for nproc in (2, 3, 4):
        for found, _ in ranks.run(evaluate_twice, nproc=nproc, args=(num_samples,)):
            # Microbatches are computed alike and summed exactly.
            assert found == one


def by_hand(world: Any) -> tuple[Evaluation, float, float]:
    """Compute the expected result: all samples in one batch, in eval mode."""
    trainer = build(noisy=False)
    model = trainer.model
    found = trainer.evaluate(trainer.loader(Fixed(), global_batch_size=6, shuffle=False), METRICS)
    model.eval()
    rows = [Fixed()[index] for index in range(len(Fixed()))]
    batch = {key: torch.stack([row[key] for row in rows]) for key in rows[0]}
    with torch.no_grad():
        output = model.head(model.body(batch["x"].double())).view(-1, 3, 4)
        total, weight = token_loss(output, batch)
        right, _ = accuracy(output, batch)
    return found, float(total) / int(weight), int(right) / int(weight)


class Fixed(Samples):
    def __init__(self) -> None:
        super().__init__(17)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        targets = torch.randint(4, (3,), generator=generator)
        return {"x": torch.randn(5, generator=generator), "targets": targets}


def test_the_mean_is_that_of_one_full_batch(ranks: Pool) -> None:
    for found, loss, share in ranks.run(by_hand):
        assert apart([loss, share], [found.loss, found.metrics["accuracy"]]) <= 1e-12
        assert str(found).startswith(f"loss {loss:.4f}, accuracy {share:.4f}, mean_logit ")
        assert str(found).endswith(" over 17 samples")


def test_modes_are_restored_as_they_were(ranks: Pool) -> None:
    for before, after, inside in ranks.run(modes):
        assert before == after
        assert set(inside) == {False}
        assert set(before) == {True, False}


def modes(world: Any) -> list[list[bool]]:
    inside: list[bool] = []

    def forward(model: nn.Module, batch: Any) -> Tensor:
        inside.extend(module.training for module in model.modules())
        assert not torch.is_grad_enabled()
        return model(batch["x"])

    trainer = Trainer(
        Net,
        forward=forward,
        loss=token_loss,
        optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1),
    )
    trainer.model.body[1].eval()
    before = [module.training for module in trainer.model.modules()]
    trainer.evaluate(trainer.loader(Samples(6), global_batch_size=4, shuffle=False))
    return [before, [module.training for module in trainer.model.modules()], inside]


def broken_evaluation(world: Any) -> list[bool]:
    trainer = build()
    loader = trainer.loader(Samples(6), global_batch_size=4, shuffle=False)
    with pytest.raises(ZeroDivisionError):
        trainer.evaluate(loader, {"broken": lambda output, batch: 1 / 0})
    return [module.training for module in trainer.model.modules()]


def test_modes_are_restored_after_an_error(ranks: Pool) -> None:
    assert set(ranks.run(broken_evaluation, nproc=1)[0]) == {True}


def train(world: Any, folder: str, every: int) -> Any:
    """Return losses, and all state at the end, with an evaluation every so many steps."""
    trainer = build("fp32")
    loader = trainer.loader(Samples(22), global_batch_size=6)
    valid = trainer.loader(Samples(9), global_batch_size=6, shuffle=False)
    trainer.resume(folder)
    losses, drawn = [], []
    for _ in range(2):
        for share in loader:
            step = trainer.step(share)
            losses.append(step.loss)
            if every and step.number % every == 0:
                trainer.evaluate(valid, METRICS)
            drawn.append((random.random(), float(np.random.rand()), float(torch.rand(()))))
    state = {n: t.clone() for n, t in trainer.model.state_dict().items()}
    return losses, drawn, {name: tensor.tolist() for name, tensor in state.items()}, loader.position


def test_evaluating_between_steps_changes_no_bit_of_the_training(ranks: Pool, tmp_path: Path) -> None:
    plain = ranks.run(train, args=(str(tmp_path / "plain"), 0))
    evaluated = ranks.run(train, args=(str(tmp_path / "evaluated"), 3))
    assert plain == evaluated
    assert not (tmp_path / "plain" / "evaluations.jsonl").read_text()
    rows = [
        json.loads(line) for line in (tmp_path / "evaluated" / "evaluations.jsonl").read_text().splitlines()
    ]
    assert [row["step"] for row in rows] == [3, 6]
    assert [list(row) for row in rows] == [["step", "loss", "accuracy", "mean_logit"]] * 2


def evaluate_inside_an_epoch(world: Any) -> list[int]:
    """Evaluating on the very data that is trained on doesn't move the training's position."""
    trainer = build()
    data = Samples(12)
    loader = trainer.loader(data, global_batch_size=4)
    other = trainer.loader(data, global_batch_size=4, shuffle=False)
    sizes = []
    for share in loader:
        trainer.step(share)
        sizes.append(trainer.evaluate(other).num_samples)
    return sizes


def test_a_loader_is_evaluated_whole_in_the_middle_of_an_epoch(ranks: Pool) -> None:
    assert ranks.run(evaluate_inside_an_epoch) == [[12, 12, 12]] * 2


def evaluate_stream(world: Any) -> list[Evaluation]:
    trainer = build()
    loader = trainer.loader(Stream(), global_batch_size=4)
    return [trainer.evaluate(loader) for _ in range(2)]


def test_streams_are_evaluated_too(ranks: Pool) -> None:
    one = ranks.run(evaluate_stream, nproc=1)[0]
    assert one[0].num_samples == 11
    for found in ranks.run(evaluate_stream, nproc=3):
        assert found == one
