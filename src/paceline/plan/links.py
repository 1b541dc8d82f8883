"""Predicts the step over one slow link between nodes: whole gradients, codecs, and islands."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.errors import PacelineError

_LINK = re.compile(r"(?P<rate>\d+(?:\.\d+)?)\s*(?P<unit>[kmg])bit(?:/s)?\s*,\s*(?P<trip>\d+(?:\.\d+)?)\s*ms")
# Share of a link's rate that messages had, and seconds of a codec per parameter on a CPU (both of 2 nodes,
# 100 Mbit/s and 50 ms: benchmarks/islands/link.jsonl).
_SHARE, _CODEC_S = 0.88, 1.2e-8
# Bytes of a parameter, with the scales of its block.
_BYTES = {"none": 4.0, "bf16": 2.0, "int8": 1.02, "int4": 0.52}
_EVERY = (10, 20, 50, 100, 200)
ENOUGH = 0.9


@dataclass(frozen=True)
class Choice:
    """A way to train over the link.

    Attributes:
        name: for people.
        settings: of a recipe.
        step_s: predicted, on average.
        share: of the speed without communication.
    """

    name: str
    settings: dict[str, str | int]
    step_s: float
    share: float


def read_link(words: str) -> tuple[float, float]:
    """Return bytes per second and the seconds of a round trip of "100mbit,50ms".

    Raises:
        PacelineError: PL930 for other words.
    """
    found = _LINK.fullmatch(words.strip().lower())
    if found is None or not float(found["rate"]):
        raise PacelineError(
            "PL930",
            saw=f"--link {words!r}.",
            rule="A link has a rate and the time of a round trip.",
            fix='Write for example --link "100mbit,50ms".',
        )
    unit = {"k": 1e3, "m": 1e6, "g": 1e9}[found["unit"]]
    return float(found["rate"]) * unit / 8, float(found["trip"]) / 1e3


def list_choices(
    num_parameters: int,
    nodes: int,
    step_s: float,
    link: tuple[float, float],
    periods: Sequence[int] = _EVERY,
) -> list[Choice]:
    """Return the ways to train in the order of what they cost in loss, the gentlest first.

    Args:
        num_parameters: of the model.
        nodes: each of which sends the whole model once: one rank, or ranks that divide it.
        step_s: seconds of a step without communication between nodes.
        link: as `read_link` returns it.
        periods: steps between two exchanges of islands.
    """
    rate, trip_s = link

    def choose(name: str, codec: str, every: int, settings: dict[str, str | int]) -> Choice:
        sent = 2 * (nodes - 1) / nodes * num_parameters * _BYTES[codec]
        exchange_s = 2 * trip_s * (nodes > 1) + sent / (_SHARE * rate)
        exchange_s += num_parameters * _CODEC_S * (codec != "none")
        total_s = step_s + exchange_s / every
        return Choice(name, settings, total_s, step_s / total_s)

    found = [choose("plain", "none", 1, {})]
    for kind in ("bf16", "int8", "int4"):
        found.append(choose(f"compress {kind}", kind, 1, {"compress.kind": kind}))
    for every in periods:
        for codec in ("none", "int8", "int4"):
            settings = {"islands.count": nodes, "islands.every": every, "islands.codec": codec}
            name = f"islands every={every} {codec}".removesuffix(" none")
            found.append(choose(name, codec, every, settings))
    return found


def pick(choices: list[Choice]) -> Choice:
    """Return the gentlest way that reaches `ENOUGH` of the speed without communication, else the fastest."""
    enough = (choice for choice in choices if choice.share >= ENOUGH)
    return next(enough, max(choices, key=lambda choice: choice.share))
