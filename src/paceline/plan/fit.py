"""Reads the fitted numbers of a plan, and turns a predicted time into an interval.

`fitted.json` is made by `benchmarks/plan/evaluate.py --write`: constants of the model of time, and the
residuals of published runs, each predicted by constants that were fitted without its publication. The
interval is conformal: quantiles of these residuals, without any assumption on their distribution (Vovk et al.
2005, "Algorithmic Learning in a Random World"; split by publication as Dunn et al. 2022 split by group).
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection
from dataclasses import dataclass, fields
from functools import lru_cache
from importlib import resources
from typing import Any, Literal

Known = Literal["hardware", "probed", "calibrated"]
# What an interval is wider for each thing that no residual knows.
_WIDER = 1.5


@dataclass(frozen=True)
class Constants:
    """The fitted numbers, each between bounds that physics allows (`benchmarks/plan/evaluate.py`).

    Attributes:
        product: share of the best measured product that products of a model reach.
        half_inner: inner size at which a product reaches half of that.
        narrow: the same of 8-bit products beside 16-bit ones.
        attention: the same share for the attention kernel.
        moved: share of the memory's bandwidth that element-wise work reaches.
        inside, between: shares of the links' bandwidth that collectives reach.
        inside_s, between_s: seconds of a step of a collective.
        call_s: seconds of starting a kernel.
        contention: seconds that a second of hidden communication adds to computing.
        straggle: longer step per doubling of the nodes.
    """

    product: float = 0.85
    half_inner: float = 150.0
    narrow: float = 0.8
    attention: float = 0.6
    moved: float = 0.7
    inside: float = 0.78
    between: float = 0.8
    inside_s: float = 1e-6
    between_s: float = 5e-6
    call_s: float = 4e-6
    contention: float = 0.1
    straggle: float = 0.005

    @property
    def links(self) -> dict[str, float]:
        """The numbers that `read_cluster` needs."""
        return {key: getattr(self, key) for key in ("inside", "between", "inside_s", "between_s", "call_s")}


@dataclass(frozen=True)
class Interval:
    """Predicted seconds, with the ends of the interval.

    Attributes:
        s: the prediction.
        low_s, high_s: that hold the measured time with `level`.
        level: share of unseen publications' rows that such intervals held.
        remarks: why it is wider than usual.
    """

    s: float
    low_s: float
    high_s: float
    level: float
    remarks: tuple[str, ...] = ()


@lru_cache(maxsize=1)
def load_fit() -> dict[str, Any]:
    """Return the file of fitted numbers."""
    with resources.files("paceline.plan").joinpath("fitted.json").open("rb") as file:
        table: dict[str, Any] = json.load(file)
    return table


@lru_cache(maxsize=1)
def load_constants() -> Constants:
    """Return the constants of the shipped fit."""
    table = load_fit()["constants"]
    return Constants(**{field.name: table[field.name] for field in fields(Constants) if field.name in table})


def find_interval(predicted_s: float, known: Known, unknown: Collection[str] = ()) -> Interval:
    """Return a predicted time with its ends.

    Args:
        predicted_s: by the model.
        known: what the prediction is based on.
        unknown: what the data have nothing alike of: each widens the interval by half.
    """
    bars = load_fit()["bars"]
    low, high = bars.get(known, bars["hardware"])["0.8"]
    factor = _WIDER ** len(unknown)
    remarks = tuple(f"{each}: the interval is {_WIDER:g}x as wide" for each in unknown)
    low_s, high_s = (math.exp(end * factor) * predicted_s for end in (low, high))
    return Interval(predicted_s, low_s, high_s, 0.8, remarks)


@lru_cache(maxsize=1)
def find_memory_interval() -> tuple[float, float]:
    """Return the factors of a counted memory that hold 80% of published peaks, by publication left out."""
    low, high = load_fit()["bars"]["memory"]["0.8"]
    return math.exp(low), math.exp(high)
