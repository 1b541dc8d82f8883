"""Evaluates a model over a whole data set, with the same means on every layout."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.errors import PacelineError
from paceline.mesh import Mesh
from paceline.parallel.objective import Objective
from paceline.seeds import derive_seed
from paceline.train.batches import weigh
from paceline.train.global_loss import GlobalLoss
from paceline.train.loaders import TrainerLoader
from paceline.train.precision import Precision
from paceline.train.runners.runner import Runner
from paceline.train.same_settings import all_ranks, check_same_samples
from paceline.train.stopping import StopChecks, StopRequests

Metric = Callable[[Any, Any], Any]


@dataclass(frozen=True)
class Evaluation:
    """The result of `Trainer.evaluate`; the same on every rank.

    Attributes:
        loss: sum of losses over sum of weights.
        weight: that sum of weights, for example the number of target tokens.
        num_samples: the number of samples used.
        metrics: the other means by name.
    """

    loss: float
    weight: float
    num_samples: int
    metrics: dict[str, float] = field(default_factory=dict)

    def values(self) -> dict[str, float]:
        """Return loss and metrics by name."""
        return {"loss": self.loss, **self.metrics}

    def __str__(self) -> str:
        shown = ", ".join(f"{name} {value:.4f}" for name, value in self.values().items())
        return f"{shown} over {self.num_samples} samples"


@torch.no_grad()
def evaluate(
    model: nn.Module,
    runner: Runner,
    loader: TrainerLoader,
    *,
    forward: Callable[[Any, Any], Any],
    loss: Callable[[Any, Any], Any],
    metrics: dict[str, Metric],
    mesh: Mesh | None,
    precision: Precision,
    seed: int,
    requests: StopRequests,
    global_loss: GlobalLoss | None = None,
) -> Evaluation:
    """Run the model in eval mode over all samples of a loader; collective.

    Every rank runs its microbatches. One collective at the end gives each microbatch's sums a slot of their
    own, so they are added in the same order on every layout. With a global loss, loss and metrics are those
    of whole global batches. About once a second, one more tells whether some rank was asked to stop.

    Raises:
        PacelineError: PL411 for a loader without samples, or whose samples have no weight.
        AskedToStopError: on all ranks before the same batch.
    """

    def measure(output: Any, batch: Any, samples: Any = None) -> Tensor:
        samples = batch if samples is None else samples
        sums = [weigh(loss(output, batch), samples)]
        sums += [
            weigh(metric(output, batch), samples, by=f"the metric {name!r}")
            for name, metric in metrics.items()
        ]
        return torch.stack([value.double().to(precision.device) for pair in sums for value in pair])

    objective: Objective[Any] = Objective(lambda batch: forward(model, batch), measure)
    if global_loss is not None:
        objective = Objective(global_loss.run, lambda output, batch: output)
    if mesh is not None:
        loader.check_same()
    was_training = [(module, module.training) for module in model.modules()]
    model.eval()
    rows: list[tuple[int, Tensor]] = []
    num_microbatches = num_samples = 0
    try:
        asked = StopChecks(requests, precision.device, is_alone=mesh is None)
        for share in loader.iterate_once():
            asked.check()
            if mesh is not None and share.digests and not num_samples:
                check_same_samples(loader, share, all_ranks())
            first = num_microbatches
            results = runner.evaluate(objective, share, partial(_derive_seed_of, seed, first))
            if global_loss is not None and runner.has_outputs:
                whole, batch = global_loss.join(results, share)
                with precision.autocast():
                    row = measure(whole, batch, torch.empty(share.num_samples))
                if runner.reports and (mesh is None or mesh.dp.rank == 0):
                    rows.append((first, row))
            elif global_loss is None and runner.reports:
                numbers = (first + index for index, _ in share.microbatches)
                rows += zip(numbers, results, strict=True)
            num_microbatches += share.num_microbatches
            num_samples += share.num_samples
    finally:
        for module, training in was_training:
            module.training = training
    table = torch.zeros(
        num_microbatches, 2 * (1 + len(metrics)), dtype=torch.float64, device=precision.device
    )
    for index, row in rows:
        table[index] = row
    if mesh is not None and num_microbatches:
        dist.all_reduce(table)
    columns = [math.fsum(column) for column in table.T.tolist()]
    if not num_samples or not columns[1]:
        raise PacelineError(
            "PL411",
            saw=f"evaluating {num_samples} samples with a total weight of {columns[1] if columns else 0:g}.",
            rule="A mean needs at least one target.",
            fix="Pass a loader over a data set that is not empty.",
        )
    pairs = zip(columns[::2], columns[1::2], strict=True)
    means = [total / weight if weight else math.nan for total, weight in pairs]
    return Evaluation(means[0], columns[1], num_samples, dict(zip(metrics, means[1:], strict=True)))


def _derive_seed_of(seed: int, first: int, index: int) -> int:
    """Return the seed of a microbatch from its number among those of all global batches."""
    return derive_seed(seed, first + index)
