"""Metrics of all samples (F1, AUC, mAP), and the exchange that shows all of them to every rank, in order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from operator import itemgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.one_tensor import gather_objects
from paceline.errors import PacelineError
from paceline.mesh import Mesh
from paceline.torch_seams.trees import tree_map_only
from paceline.train.batches import weigh

Metric = Callable[[Any, Any], Any] | tuple[Any, Callable[[Any, Any], Any]]


def share_results(results: Sequence[tuple[int, Any]], mesh: Mesh | None) -> list[Any]:
    """Return the results of all microbatches of a global batch, in their order; collective.

    Tensors are on the CPU: they are counted and not computed with.

    Args:
        results: of this rank's microbatches, with their numbers; none where another rank of pp has them.
        mesh: the ranks, or `None` for one.
    """
    own: list[Any] = tree_map_only(Tensor, lambda each: each.detach().cpu(), list(results))
    if mesh is None:
        return [each for _, each in own]
    found = gather_objects(own, mesh.dp.group)
    joined = [[each for _, each in sorted(chain.from_iterable(found), key=itemgetter(0))]]
    if mesh.pp.size > 1:
        dist.broadcast_object_list(joined, group=mesh.pp.group, group_src=mesh.homes[-1])
    return joined[0]


class WholeMetric:
    """A metric that is computed once, from all samples; every rank computes it from the same numbers.

    Args:
        metric: an object with `reset`, `update` and `compute`, as of torchmetrics, or a function of tensors
            that have a row per sample.
        select: from (output, batch) of a microbatch to the arguments of `update`, or of the function.
    """

    def __init__(self, name: str, metric: Any, select: Callable[[Any, Any], Any]) -> None:
        self.select = select
        self._name, self._metric, self._parts = name, metric, list[tuple[Any, ...]]()
        self._has_state = all(
            callable(getattr(metric, each, None)) for each in ("reset", "update", "compute")
        )
        if not callable(select) or not (self._has_state or callable(metric)):
            raise _metric_error(
                f"metrics={{{name!r}: ({type(metric).__name__}, {type(select).__name__})}}.",
                'Pass for example {"f1": (BinaryF1Score(), lambda output, batch: (output, batch["label"]))}.',
            )
        if self._has_state:
            metric.reset()

    def update(self, selected: Any) -> None:
        """Take what `select` returned for the next microbatch of all ranks'."""
        arguments = selected if isinstance(selected, tuple) else (selected,)
        if not self._has_state:
            self._parts.append(arguments)
            return
        with _alone(self._metric):
            self._metric.update(*arguments)

    def compute(self) -> dict[str, float]:
        """Return the metric by its name; several numbers by `name_key`."""
        if self._has_state:
            with _alone(self._metric):
                found = self._metric.compute()
        else:
            found = self._metric(*map(self._join, zip(*self._parts, strict=True)))
        named = found if isinstance(found, Mapping) else {"": found}
        try:
            return {"_".join(filter(None, (self._name, str(key)))): float(x) for key, x in named.items()}
        except (TypeError, ValueError, RuntimeError):
            raise _metric_error(
                f"the metric {self._name!r} returned a {type(found).__name__} that is not a number.",
                "Return one number, or a dict of numbers by name.",
            ) from None

    def _join(self, parts: Sequence[Any]) -> Any:
        if not all(isinstance(part, Tensor) and part.dim() for part in parts):
            raise _metric_error(
                f"the function of the metric {self._name!r} gets {type(parts[0]).__name__} per microbatch.",
                "Let the second function return tensors with a row per sample.",
            )
        shapes = sorted({tuple(part.shape[1:]) for part in parts})
        if len(shapes) > 1:
            raise _metric_error(
                f"the metric {self._name!r} gets rows of the shapes {', '.join(map(str, shapes))}.",
                "Flatten or pad them in the second function.",
            )
        return torch.cat(list(parts))


@contextmanager
def _alone(metric: Any) -> Any:
    """Keep torchmetrics from joining the ranks' states: each rank has all samples."""
    modules = list(metric.modules()) if callable(getattr(metric, "modules", None)) else []
    found = [
        (each, each.distributed_available_fn) for each in modules if hasattr(each, "distributed_available_fn")
    ]
    for each, _ in found:
        each.distributed_available_fn = lambda: False
    try:
        yield
    finally:
        for each, before in found:
            each.distributed_available_fn = before


def measure_means(means: Mapping[str, Any], output: Any, batch: Any, samples: Any) -> list[Tensor]:
    """Return the sum and the weight of each metric over a microbatch, in turn."""
    pairs = [weigh(each(output, batch), samples, by=f"the metric {name!r}") for name, each in means.items()]
    return [value for pair in pairs for value in pair]


def stack_numbers(numbers: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return numbers as a row in float64; one of the host is not copied, which would wait for the device."""
    doubles = [number.double() for number in numbers]
    return torch.stack([n.new_full((), n.item(), device=device) if n.is_cpu else n for n in doubles])


def split_metrics(metrics: Mapping[str, Metric]) -> tuple[dict[str, Any], list[WholeMetric]]:
    """Return the metrics that are means over samples, by name, and those of all samples."""
    means = {name: each for name, each in metrics.items() if not isinstance(each, tuple)}
    wholes = []
    for name, each in metrics.items():
        if isinstance(each, tuple):
            metric, select = each if len(each) == 2 else (each, None)
            wholes.append(WholeMetric(name, metric, select))
        elif not callable(each) or hasattr(each, "compute") or name == "loss":
            raise _metric_error(
                f"metrics={{{name!r}: {type(each).__name__}}}.",
                "Pass a function from (output, batch) to (sum, weight), or a pair of a metric of all samples "
                "and a function from (output, batch) to its arguments.",
            )
    return means, wholes


def _metric_error(saw: str, fix: str) -> PacelineError:
    return PacelineError(
        "PL735",
        saw=saw,
        rule="A metric is a mean over samples, or a pair: a metric of all samples, and what selects its "
        "arguments from a microbatch.",
        fix=fix,
    )
