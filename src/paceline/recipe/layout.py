"""A run's layout: how its ranks are divided among the kinds of parallelism."""

from __future__ import annotations

import re
from dataclasses import dataclass

from paceline.errors import PacelineError

# The axes that the design names. Only dp_replicate can be laid out so far; naming the others here
# lets a recipe that asks for one get a clear answer instead of "unknown key".
AXES = ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep")
_LAID_OUT = ("dp_replicate",)


@dataclass(frozen=True)
class Layout:
    """The degrees of a run.

    Attributes:
        dp_replicate: how many full copies of the model train on different microbatches, or `None`
            for "as many as there are ranks".
    """

    dp_replicate: int | None = None

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Reads `"dp_replicate=2"`; an empty string is the default layout.

        Raises:
            PacelineError: PL110 for text that is not `axis=degree` or has an axis twice, PL111 for an
                axis that this version can't lay out, PL112 for a degree below 1.
        """
        degrees: dict[str, int] = {}
        for word in text.replace(",", " ").split():
            match = re.fullmatch(r"(\w+)=(-?\d+)", word)
            if match is None or match[1] not in AXES:
                raise PacelineError(
                    "PL110",
                    saw=f"layout has {word!r}.",
                    rule=f"A layout is axis=degree pairs with a space between; axes: {', '.join(AXES)}.",
                    fix='Write for example layout = "dp_replicate=2".',
                )
            if match[1] in degrees:
                raise PacelineError(
                    "PL110",
                    saw=f"layout names {match[1]} twice: {text!r}.",
                    rule="Every axis has one degree.",
                    fix=f"Leave one {match[1]} out.",
                )
            degrees[match[1]] = int(match[2])
        for axis, degree in degrees.items():
            check_degree(axis, degree)
        return cls(dp_replicate=degrees.get("dp_replicate"))

    def resolve(self, world_size: int) -> Layout:
        """Fills `dp_replicate` from the number of ranks.

        Raises:
            PacelineError: PL113 where the degrees don't multiply to `world_size`.
        """
        if self.dp_replicate is None:
            return Layout(dp_replicate=world_size)
        if self.dp_replicate != world_size:
            raise PacelineError(
                "PL113",
                saw=f"layout.dp_replicate={self.dp_replicate}, but there are {world_size} ranks.",
                rule="The degrees of a layout multiply to the number of ranks.",
                fix=f'Start {self.dp_replicate} ranks, or set dp_replicate={world_size}, or leave it "auto".',
            )
        return self

    def __str__(self) -> str:
        return f"dp_replicate={'auto' if self.dp_replicate is None else self.dp_replicate}"


def check_degree(axis: str, degree: int) -> None:
    """Raises PL112 for a degree below 1 and PL111 for an axis this version can't lay out."""
    if degree < 1:
        raise PacelineError(
            "PL112",
            saw=f"layout.{axis}={degree}.",
            rule="A degree counts ranks, so it is at least 1.",
            fix=f"Set {axis}=1 to leave that axis out.",
        )
    if axis not in _LAID_OUT and degree > 1:
        raise PacelineError(
            "PL111",
            saw=f"layout.{axis}={degree}.",
            rule=f"This version lays out {', '.join(_LAID_OUT)} only.",
            fix=f"Leave {axis} out and use dp_replicate for all ranks.",
        )
