"""Reads a finished run, to compare a plan with it and to narrow the next plan's interval."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.errors import PacelineError
from paceline.plan.cluster import Cluster
from paceline.plan.costs import ModelCosts
from paceline.plan.fit import Constants
from paceline.plan.recipe_costs import of_recipe
from paceline.plan.step import StepModel, StepTime
from paceline.recipe import Layout, load_recipe
from paceline.units import format_seconds

# Steps at the beginning load, compile and allocate.
_WARM_UP = 3
_FEWEST = 5


@dataclass(frozen=True)
class Calibration:
    """A run beside its prediction.

    Attributes:
        layout: of the run.
        measured_s, quartiles_s: median step, and the quartiles.
        waited_s: median of a step's seconds in communication, by the run's own clock.
        predicted: term by term.
    """

    layout: Layout
    measured_s: float
    quartiles_s: tuple[float, float]
    waited_s: float | None
    predicted: StepTime

    @property
    def factor(self) -> float:
        """Measured over predicted."""
        return self.measured_s / self.predicted.total

    def describe(self) -> Iterator[str]:
        """Yield the comparison, and the term that it speaks against most."""
        low, high = self.quartiles_s
        yield (
            f"run under {self.layout}: measured {format_seconds(self.measured_s)} per step (quartiles "
            f"{format_seconds(low)} to {format_seconds(high)}), predicted "
            f"{format_seconds(self.predicted.total)}; all times are multiplied by {self.factor:.2f}"
        )
        if high > 1.3 * low:
            yield "  its steps differ by more than 30%: the machine was busy, and the factor is as uncertain"
        if self.waited_s is not None:
            waits, rest = self.predicted.communication, self.predicted.total - self.predicted.communication
            measured_rest = max(0.0, self.measured_s - self.waited_s)
            wrong = "communication" if abs(self.waited_s - waits) > abs(measured_rest - rest) else "computing"
            yield (
                f"  communication: measured {format_seconds(self.waited_s)}, predicted "
                f"{format_seconds(waits)}; all else: {format_seconds(measured_rest)}, "
                f"{format_seconds(rest)}. "
                f"Most of the error is in {wrong}."
            )


def calibrate(run: Path, costs: ModelCosts, cluster: Cluster, fit: Constants) -> Calibration:
    """Return a run's measured step beside the prediction for it.

    Args:
        run: the folder.
        costs: of the model that is planned, which must be the run's.
        cluster: that the run was on; it may have used a part of it.
        fit: constants of the model of time.

    Raises:
        PacelineError: PL935 for a folder without enough steps, or of another model.
    """
    try:
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise _refuse(run, f"metrics.jsonl cannot be read ({error})") from None
    rows = [row for row in rows if isinstance(row, dict) and _is_time(row.get("step_s"))][_WARM_UP:]
    if len(rows) < _FEWEST:
        raise _refuse(run, f"it has {len(rows)} steps after the first {_WARM_UP}; {_FEWEST} are needed")
    recipe = load_recipe(run / "recipe.toml", [])
    own = of_recipe(recipe) if recipe is not None else costs
    if own.num_parameters != costs.num_parameters or own.tokens != costs.tokens:
        raise _refuse(
            run,
            f"its model has {own.num_parameters} parameters and samples of {own.tokens} tokens, the planned "
            f"one {costs.num_parameters} and {costs.tokens}",
        )
    if own.dtype_bytes != costs.dtype_bytes:
        raise _refuse(
            run, f"it computes in numbers of {own.dtype_bytes} bytes, the plan of {costs.dtype_bytes}"
        )
    layout = recipe.layout.to_layout()
    layout = layout.close() if layout.open_axis is not None else layout
    ranks = layout.num_ranks
    if ranks > cluster.num_ranks:
        raise _refuse(run, f"it had {ranks} ranks, and the cluster has {cluster.num_ranks}")
    nodes = -(-ranks // cluster.ranks_per_node)
    used = replace(cluster, nodes=nodes, ranks_per_node=min(ranks, cluster.ranks_per_node))
    times = [float(row["step_s"]) for row in rows]
    waits = [float(row["comm_s"]) for row in rows if _is_time(row.get("comm_s"))]
    quartiles = statistics.quantiles(times, n=4)
    return Calibration(
        layout,
        statistics.median(times),
        (quartiles[0], quartiles[2]),
        statistics.median(waits) if waits else None,
        StepModel(own, used, fit).time(layout),
    )


def _is_time(value: object) -> bool:
    return isinstance(value, int | float) and 0 < value < math.inf


def _refuse(run: Path, what: str) -> PacelineError:
    return PacelineError(
        "PL935",
        saw=f"--calibrate {run}: {what}.",
        rule="A plan is calibrated by measured steps of the same model, on the cluster or a part of it.",
        fix="Train the planned recipe for 20 steps there, and give its folder.",
    )
