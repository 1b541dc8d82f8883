"""A model, its data or its settings that depend on the rank: `verify` names what does, in users' code.

The faults are in the model and the batches that a user passes, not in the library.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.verifying.check import build_default_optimizer, resolve_layout, verify_subject
from paceline.verifying.subject import UserSubject
from tests.dist.pool import Pool
from tests.verifying.runs import PoolRunner
from tests.verifying.two_steps import TWO_STEPS


def is_second() -> bool:
    return dist.is_initialized() and dist.get_world_size() > 1 and dist.get_rank() == 1


class Router(nn.Module):
    """Two experts, of which a linear router mixes the outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 2)
        self.experts = nn.ModuleList([nn.Linear(16, 16) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(-1)
        return sum(weights[..., n, None] * expert(x) for n, expert in enumerate(self.experts))


class Scaled(nn.Module):
    """A layer whose settings are kept in a dict, a list, a small tensor and an object with a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.options: dict[str, Any] = {"scale": {"out": 1.0}}
        self.powers = [1.0] * 12
        self.gain = torch.ones(())

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.options["scale"]["out"] * self.powers[11] * self.gain


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb, self.head = nn.Embedding(32, 16), nn.Linear(16, 32)
        self.mixture, self.scaled, self.norm = Router(), Scaled(), nn.BatchNorm1d(16)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.scaled(self.mixture(self.emb(ids)))
        return self.head(self.norm(x.flatten(0, 1)).view_as(x))


def shift(_module: nn.Module, _args: Any, output: Tensor) -> Tensor:
    return output + output.new_tensor([0.1, 0.0]) if is_second() else output


def build(fault: str) -> nn.Module:
    model = Model()
    scaled = model.scaled
    if fault == "router's hook":
        model.mixture.gate.register_forward_hook(shift)
    elif is_second() and fault == "momentum":
        model.norm.momentum = 0.3
    elif is_second() and fault == "dict":
        scaled.options["scale"]["out"] = 1.1
    elif is_second() and fault == "list":
        scaled.powers[11] = 1.1
    elif is_second() and fault == "tensor":
        scaled.gain = torch.tensor(1.1)
    return model


def make(step: int, fault: str) -> dict[str, Tensor]:
    ids = torch.randint(0, 32, (8, 8), generator=torch.Generator().manual_seed(step))
    batch = {"ids": ids, "labels": ids.roll(-1, 1), "weights": torch.ones(8, 8), "id": torch.arange(8)}
    if is_second() and fault in ("labels", "weights"):
        batch[fault] = batch[fault].roll(1, 0) + (0.5 if fault == "weights" else 0)
    if fault == "time":  # of no effect, and never twice the same
        batch["id"] = torch.randint(0, 1 << 40, (8,), generator=torch.Generator().manual_seed(id(batch)))
    return batch


def run(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(batch["ids"])


def measure(output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    losses = F.cross_entropy(output.flatten(0, 1), batch["labels"].flatten(), reduction="none")
    weights = batch["weights"].flatten()
    return (losses * weights).sum(), weights.sum()


@pytest.mark.parametrize(
    ("fault", "code", "words"),
    [
        ("labels", "PL716", "batch['labels'] differs on rank 1 only"),
        ("weights", "PL716", "batch['weights'] differs on rank 1 only"),
        ("router's hook", "PL701", "test_named_causes.shift"),
        ("momentum", "PL710", "momentum is 0.3 on rank 1 only, and 0.1 in one process"),
        ("dict", "PL719", "options['scale']['out'] is 1.1 on rank 1 only, and 1.0 in one process"),
        ("list", "PL719", "powers[11] is 1.1 on rank 1 only"),
        ("tensor", "PL719", "gain is 1.1"),
    ],
)
def test_what_depends_on_the_rank_is_named(ranks: Pool, fault: str, code: str, words: str) -> None:
    [result] = verify(ranks, fault)
    assert result.status == "differs"
    [finding] = result.findings
    assert finding.code == code, str(finding)
    assert words in str(finding)


def test_a_part_of_the_batch_that_differs_from_run_to_run_is_not_blamed(ranks: Pool) -> None:
    [result] = verify(ranks, "time")
    assert result.status == "ok", list(map(str, result.findings))


def verify(ranks: Pool, fault: str) -> Any:
    subject = UserSubject(
        model_fn=functools.partial(build, fault),
        batch_fn=functools.partial(make, fault=fault),
        loss=measure,
        forward=run,
        optimizer=build_default_optimizer,
        **TWO_STEPS,
    )
    return verify_subject(subject, [resolve_layout("dp_replicate=2")], run=PoolRunner(ranks)).results
