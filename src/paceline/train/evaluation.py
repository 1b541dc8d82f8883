"""Evaluates a model over a whole data set, with the same means on every layout."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.data.share import Share
from paceline.errors import PacelineError
from paceline.generators import preserved_generators
from paceline.mesh import Mesh
from paceline.parallel.objective import Objective
from paceline.seeds import derive_seed
from paceline.train.batches import weigh
from paceline.train.global_loss import GlobalLoss, make_whole
from paceline.train.island_ranks import IslandRanks
from paceline.train.loaders import TrainerLoader
from paceline.train.precision import Precision
from paceline.train.runners.runner import Runner
from paceline.train.same_settings import all_ranks, check_same_samples
from paceline.train.stopping import StopChecks, StopRequests
from paceline.train.whole_metrics import Metric, measure_means, share_results, split_metrics, stack_numbers


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

    __repr__ = __str__


@dataclass(frozen=True)
class Pass:
    """A pass of one model over data, in eval mode.

    Attributes:
        model: that is evaluated.
        runner: of the model.
        forward: from (model, batch) to the output.
        mesh: the ranks, or `None` in a world of one.
        precision: dtype and device.
        seed: of the generators.
        requests: signals that this rank received.
        islands: of the run; the runner is then that of a block of ranks.
    """

    model: nn.Module
    runner: Runner
    forward: Callable[[Any, Any], Any]
    mesh: Mesh | None
    precision: Precision
    seed: int
    requests: StopRequests
    islands: IslandRanks | None = None

    def run(
        self, loader: TrainerLoader[Any], objective: Objective[Any]
    ) -> Iterator[tuple[int, Share, list[Any]]]:
        """Run an objective on all samples; collective. The caller's modes and generators are kept between.

        Yields:
            The number of microbatches before, this rank's share of a global batch, and its results.

        Raises:
            AskedToStopError: on all ranks before the same batch.
        """
        if self.mesh is not None:
            loader.check_same()
        asked = StopChecks(self.requests, self.precision.device, is_alone=self.mesh is None)
        first = 0
        for share in loader.iterate_once():
            asked.check()
            if self.mesh is not None and share.digests and not first:
                check_same_samples(loader, share, all_ranks())
            with torch.no_grad(), _evaluating(self.model), preserved_generators(self.precision.device):
                own = share if self.islands is None else self.islands.within(share)
                results = self.runner.evaluate(objective, own, partial(_derive_seed_of, self.seed, first))
            yield first, share, results
            first += share.num_microbatches


def predict(run: Pass, loader: TrainerLoader[Any]) -> Iterator[tuple[Any, Any]]:
    """Yield (output, batch) of every microbatch on every rank, in order; collective."""
    objective: Objective[Any] = Objective(
        lambda batch: run.forward(run.model, batch), lambda output, batch: (make_whole(output), batch)
    )
    for _, share, results in run.run(loader, objective):
        yield from share_results(_number(share, results), run.mesh)


@torch.no_grad()
def evaluate(
    run: Pass,
    loader: TrainerLoader[Any],
    *,
    loss: Callable[[Any, Any], Any],
    metrics: Mapping[str, Metric],
    global_loss: GlobalLoss | None = None,
) -> Evaluation:
    """Run the model in eval mode over all samples of a loader; collective.

    Every rank runs its microbatches. One collective at the end gives each microbatch's sums a slot of their
    own, so they are added in the same order on every layout. With a global loss, loss and metrics are those
    of whole global batches. Metrics of all samples cost one more collective per global batch. About once a
    second, one tells whether some rank was asked to stop.

    Raises:
        PacelineError: PL411 for a loader without samples, or whose samples have no weight; PL735 for a
            metric of another form.
        AskedToStopError: on all ranks before the same batch.
    """
    mesh, precision, runner = run.mesh, run.precision, run.runner
    means, wholes = split_metrics(metrics)

    def measure(output: Any, batch: Any, samples: Any = None) -> tuple[Tensor, list[Any]]:
        samples = batch if samples is None else samples
        sums = [*weigh(loss(output, batch), samples), *measure_means(means, output, batch, samples)]
        row = stack_numbers(sums, precision.device)
        whole = make_whole(output) if wholes else output
        return row, [each.select(whole, batch) for each in wholes]

    objective: Objective[Any] = Objective(lambda batch: run.forward(run.model, batch), measure)
    if global_loss is not None:
        objective = Objective(global_loss.run, lambda output, batch: output)
    rows: list[tuple[int, Tensor]] = []
    num_microbatches = num_samples = 0
    for first, share, results in run.run(loader, objective):
        selected: list[Any] = []
        if global_loss is not None and runner.has_outputs:
            whole, batch = global_loss.join(results, share)
            with precision.autocast():
                row, picked = measure(whole, batch, torch.empty(share.num_samples))
            selected = [(0, picked)] if mesh is None or mesh.dp.rank == 0 else []
            if runner.reports and (mesh is None or mesh.dp.rank == 0):
                rows.append((first, row))
        elif global_loss is None:
            selected = _number(share, [picked for _, picked in results])
            if runner.reports:
                numbers = (first + index for index, _ in share.microbatches)
                rows += zip(numbers, (row for row, _ in results), strict=True)
        for chosen in share_results(selected, mesh) if wholes else ():
            for each, arguments in zip(wholes, chosen, strict=True):
                each.update(arguments)
        num_microbatches += share.num_microbatches
        num_samples += share.num_samples
    table = torch.zeros(num_microbatches, 2 * (1 + len(means)), dtype=torch.float64, device=precision.device)
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
    found = [total / weight if weight else math.nan for total, weight in pairs]
    values = dict(zip(means, found[1:], strict=True))
    for each in wholes:
        values |= each.compute()
    return Evaluation(found[0], columns[1], num_samples, values)


def _number(share: Share, results: Sequence[Any]) -> list[tuple[int, Any]]:
    """Return results with the numbers of their microbatches; none where another rank of pp has them."""
    return list(zip((number for number, _ in share.microbatches), results, strict=False)) if results else []


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    was_training = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in was_training:
            module.training = training


def check_in_order(loader: TrainerLoader[Any]) -> None:
    """Raise PL736 for a loader that would not give each sample once and in order."""
    wrong = [word for word in ("shuffle", "drop_last") if getattr(loader, word)]
    if wrong:
        raise PacelineError(
            "PL736",
            saw=f"predict over {loader.name} with {wrong[0]}=True.",
            rule="Predictions are those of each sample once, in the order of the data.",
            fix=f"Make a loader for them: trainer.loader(data, global_batch_size={loader.global_batch_size}, "
            "shuffle=False).",
        )


def _derive_seed_of(seed: int, first: int, index: int) -> int:
    """Return the seed of a microbatch from its number among those of all global batches."""
    return derive_seed(seed, first + index)
