"""`Trainer(metrics=)`: means of the user's own in every step, those of one process on every layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from paceline import PacelineError, Trainer
from tests.dist.pool import Pool

BATCH, STEPS = 50, 4


def build() -> tuple[nn.Module, TensorDataset]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4), nn.Identity()
    )
    x = torch.randn(BATCH * STEPS, 20)
    return model, TensorDataset(x, x[:, :4].argmax(1))


def right(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    return (output.argmax(1) == batch[1]).sum(), len(output)


def size(output: Tensor, batch: Any) -> Tensor:
    return output.square().mean()


def make(layout: str, **settings: Any) -> tuple[Trainer, TensorDataset]:
    model, data = build()
    example = None if layout.startswith("dp") else data[:2]
    trainer = Trainer(
        model,
        forward=lambda model, batch: model(batch[0]),
        loss=lambda output, batch: functional.cross_entropy(output, batch[1]),
        metrics={"accuracy": right, "size": size},
        optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.5),
        layout=layout,
        example=example,
        microbatch_size=8,
        dtype="fp64",
        **settings,
    )
    return trainer, data


def train(world: Any, layout: str, folder: str) -> list[tuple[dict[str, float], dict[str, float]]]:
    trainer, data = make(layout)
    loader = trainer.loader(data, global_batch_size=BATCH, shuffle=False, epochs=1)
    held_out = trainer.loader(data, global_batch_size=BATCH, shuffle=False)
    trainer.resume(folder)
    found = []
    for batch in loader:
        step = trainer.step(batch)
        assert repr(step).endswith(f"size {step.metrics['size']:.4g}")
        found.append((step.metrics, trainer.evaluate(held_out).metrics))
    return found


def truth() -> list[tuple[dict[str, float], dict[str, float]]]:
    model, data = build()
    model.double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    x, y = data.tensors[0].double(), data.tensors[1]
    found = []

    def measure(x: Tensor, y: Tensor) -> tuple[Tensor, dict[str, float]]:
        output = model(x)
        accuracy = (output.argmax(1) == y).double().mean().item()
        return output, {"accuracy": accuracy, "size": output.square().mean().item()}

    for batch_x, batch_y in zip(x.split(BATCH), y.split(BATCH), strict=True):
        output, in_step = measure(batch_x, batch_y)
        optimizer.zero_grad()
        functional.cross_entropy(output, batch_y).backward()
        optimizer.step()
        found.append((in_step, measure(x, y)[1]))
    return found


@pytest.mark.parametrize(
    ("nproc", "layout"),
    [(1, "dp_replicate=1"), (3, "dp_replicate=3"), (2, "dp_shard=2"), (2, "tp=2"), (2, "pp=2")],
)
def test_a_steps_metrics_are_those_of_one_process(
    ranks: Pool, tmp_path: Path, nproc: int, layout: str
) -> None:
    expected = truth()
    for found in ranks.run(train, nproc=nproc, args=(layout, str(tmp_path))):
        for pair, wanted in zip(found, expected, strict=True):
            assert pair == tuple(map(pytest.approx, wanted))
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["accuracy"] for row in rows] == pytest.approx([each["accuracy"] for each, _ in expected])


def refuse(world: Any) -> list[str]:
    def message(**settings: Any) -> str:
        with pytest.raises(PacelineError) as caught:
            make("dp_replicate=1", **settings)
        return str(caught.value)

    model = nn.Linear(2, 1)
    found = [message(loss_over="global_batch")]
    with pytest.raises(PacelineError) as caught:
        Trainer(
            {"a": model},
            optimizer={"a": lambda named: torch.optim.SGD([p for _, p in named])},
            step=lambda update: None,
            metrics={"size": size},
        )
    found.append(str(caught.value))
    trainer = Trainer(
        model,
        loss=lambda output, batch: output.mean(),
        optimizer=lambda named: torch.optim.SGD([p for _, p in named]),
    )
    with pytest.raises(PacelineError) as caught:
        trainer.step((torch.ones(4, 2), torch.ones(4)))
    found.append(str(caught.value))
    return found


def test_what_has_no_metrics_and_what_needs_a_forward_is_refused_by_name(ranks: Pool) -> None:
    [[whole, several, forward]] = ranks.run(refuse, nproc=1)
    assert "metrics=" in whole
    assert whole.endswith("[PL415]")
    assert "metrics=" in several
    assert several.endswith("[PL406]")
    assert "a Linear that does not take the batch" in forward
    assert "forward=lambda model, batch: model(batch[0])" in forward
