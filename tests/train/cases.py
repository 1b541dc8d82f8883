"""Small things to train, and how far two results are apart; for all tests of training."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.checkpoint import hash_tensors
from paceline.data import build_data
from paceline.recipe.load import parse_recipe
from paceline.train.run import build_loader, build_trainer
from paceline.train.trainer import Trainer
from paceline.world import World

MOE = {"kind": "moe", "experts": 4, "expert_hidden": 16, "shared_hidden": 16, "dense_layers": 1}


@dataclass
class Trained:
    """The result of some steps on one rank; weights on rank 0 only, a hash of them everywhere.

    Attributes:
        losses, grad_norms, weights: per step.
        skipped: per step, the reason or `None`.
        hash: of all tensors, buffers included.
        tensors: by full name, on rank 0.
        extra: what a test wants to know besides.
    """

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    skipped: list[str | None] = field(default_factory=list)
    hash: str = ""
    tensors: dict[str, Tensor] = field(default_factory=dict)
    extra: Any = None

    def finish(self, trainer: Trainer) -> Trained:
        """Take the trained tensors over."""
        tensors = {
            f"{name}.{key}": tensor.detach().clone()
            for name, model in trainer.models.items()
            for key, tensor in model.state_dict().items()
        }
        self.hash = hash_tensors(tensors)
        self.tensors = tensors if trainer.world.is_main else {}
        return self


def take_steps(trainer: Trainer, batches: Any, num_steps: int | None = None) -> Trained:
    """Take steps over loaders (epoch after epoch) or a list of batches."""
    trained = Trained()
    while True:
        for batch in batches:
            step = trainer.step(batch)
            trained.losses.append(step.loss)
            trained.grad_norms.append(step.grad_norm)
            trained.weights.append(next(iter(step.updates.values())).weight)
            trained.skipped.append(step.skipped)
            if len(trained.losses) == num_steps:
                return trained.finish(trainer)
        if num_steps is None:
            return trained.finish(trainer)


def train_recipe_table(
    world: World, table: dict[str, Any], settings: Sequence[str], num_steps: int
) -> Trained:
    """Take the first steps of a recipe, by the functions that `paceline train` uses."""
    recipe = parse_recipe(table, settings)
    data = build_data(recipe)
    trainer = build_trainer(recipe, data, num_steps)
    return take_steps(trainer, build_loader(recipe, trainer, data.train, train=True), num_steps)


def apart(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the largest relative difference of two series; NaN equals NaN."""
    assert len(one) == len(other)
    return max(
        (
            abs(a - b) / max(abs(a), abs(b), 1e-300)
            for a, b in zip(one, other, strict=True)
            if not _both_nan(a, b)
        ),
        default=0.0,
    )


def _both_nan(a: float, b: float) -> bool:
    return math.isnan(a) and math.isnan(b)


def tensors_apart(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Return the largest difference of two tensors of a name, relative to the norm of the first."""
    assert one.keys() == other.keys()
    worst = 0.0
    for name, a in one.items():
        b = other[name]
        assert (a.dtype, a.shape) == (b.dtype, b.shape), name
        difference = torch.linalg.vector_norm((a - b).double()).item()
        worst = max(worst, difference / max(torch.linalg.vector_norm(a.double()).item(), 1e-300))
    return worst


def assert_same_run(one: Trained, other: Trained, *, losses: float, tensors: float | None = None) -> None:
    """Two runs gave the same: losses, gradient norms and weights of the loss, and the tensors."""
    assert apart(one.losses, other.losses) <= losses
    assert apart(one.weights, other.weights) == 0.0
    assert one.skipped == other.skipped
    if tensors is not None:
        assert apart(one.grad_norms, other.grad_norms) <= tensors
        assert tensors_apart(one.tensors, other.tensors) <= tensors


def assert_ranks_agree(results: Sequence[Trained]) -> None:
    """Check that all ranks of one run have the same numbers, to the last bit."""
    for trained in results[1:]:
        assert trained.hash == results[0].hash
        assert str(trained.losses) == str(results[0].losses)
        assert str(trained.grad_norms) == str(results[0].grad_norms)


# ---- recipes


def text_recipe(folder: Path, kind: str = "gpt") -> dict[str, Any]:
    """A small gpt, encoder or moe on a module of the standard library; some 93 samples of 32 tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    text = Path(textwrap.__file__).read_text(encoding="utf-8")
    for number, start in enumerate(range(0, 4000, 1000)):
        (folder / f"{number}.txt").write_text(text[start : start + 1000], encoding="utf-8")
    model = {"kind": kind, "layers": 2, "hidden": 16, "heads": 4, "dropout": 0.1}
    return {
        "model": model | MOE if kind == "moe" else model,
        "data": {
            "kind": "masked_text" if kind == "encoder" else "text",
            "files": [str(folder / "*.txt")],
            "seq_len": 32,
            "cache_dir": str(folder / "cache"),
            "valid_fraction": 0.25,
        },
        "train": {"steps": 20, "global_batch_size": 16, "microbatch_size": 5},
        "optimizer": {"kind": "adamw", "lr": 3e-3, "warmup_steps": 3},
        "metrics": {"sinks": []},
    }


def digits_recipe() -> dict[str, Any]:
    """Return a small ResNet with BatchNorm on the digits; an epoch is 14 batches of 100 and one of 38."""
    return {
        "model": {"kind": "resnet", "blocks": [1, 1], "width": 4},
        "data": {"kind": "digits"},
        "train": {"steps": 20, "global_batch_size": 100, "microbatch_size": 20},
        "optimizer": {"kind": "sgd", "lr": 0.1},
        "metrics": {"sinks": []},
    }
