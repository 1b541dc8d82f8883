"""A run's layout: how its ranks are divided among the kinds of parallelism, and how each is carried out."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args

from paceline.errors import PacelineError

# The axes that the design names. Those that can't be laid out so far are named too, so that a recipe that
# asks for one gets a clear answer instead of "unknown key".
AXES = ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep")
LAID_OUT = ("dp_replicate", "dp_shard", "tp")
# What the other words of a layout may be: the one list, which the recipe's [layout] takes too.
Zero = Literal[1, 2, 3]
Recompute = Literal["none", "block", "selective"]
Offload = Literal["none", "cpu", "disk"]
CHOICES: dict[str, tuple[Any, ...]] = {
    "zero": get_args(Zero),
    "sequence": (False, True),
    "recompute": get_args(Recompute),
    "offload": get_args(Offload),
}
MOST_RANKS = 1 << 20


@dataclass(frozen=True)
class Layout:
    """The degrees of a run, and how its axes are carried out.

    Attributes:
        dp_replicate: how many full copies of the model train on different microbatches, or `None`
            for "as many as there are ranks left".
        dp_shard: ranks over which each copy's parameters, gradients and optimizer state are sharded; these
            train on different microbatches too.
        tp: ranks that split the matrix products of one copy; they see the same microbatches.
        zero: what dp_shard shards: 1 the optimizer's state, 2 gradients too, 3 parameters too.
        sequence: whether activations between the blocks are split along the sequence over tp.
        recompute: which activations are computed again in backward instead of kept: none, all of each
            block, or (selective) all but matrix products and attention.
        offload: where dp_shard keeps parameters and optimizer state between uses.
    """

    dp_replicate: int | None = None
    dp_shard: int = 1
    tp: int = 1
    zero: Zero = 3
    sequence: bool = False
    recompute: Recompute = "none"
    offload: Offload = "none"

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Reads `"dp_replicate=2 dp_shard=2 tp=2 zero=2"`; an empty string is the default layout.

        `dp_replicate=auto`, or none, is "as many copies as there are ranks left".

        Raises:
            PacelineError: PL110 for text that is not `word=value` or has a word twice, PL111 for an
                axis that this version can't lay out, PL112 for a degree below 1, PL118 for a value that its
                word doesn't take.
        """
        values: dict[str, Any] = {}
        for word in text.replace(",", " ").split():
            name, _, value = word.partition("=")
            if name not in (*AXES, *CHOICES) or not value:
                raise PacelineError(
                    "PL110",
                    saw=f"layout has {word!r}.",
                    rule=f"A layout is word=value pairs with a space between; degrees: {', '.join(AXES)}; "
                    f"settings: {', '.join(CHOICES)}.",
                    fix='Write for example layout = "dp_replicate=2 tp=2".',
                )
            if name in values:
                raise PacelineError(
                    "PL110",
                    saw=f"layout names {name} twice: {text!r}.",
                    rule="Every word has one value.",
                    fix=f"Leave one {name} out.",
                )
            values[name] = _read_degree(name, value) if name in AXES else _read_choice(name, value)
        for axis in AXES:
            if values.get(axis) is not None:
                check_degree(axis, values[axis])
        return cls(**{name: value for name, value in values.items() if name not in AXES or name in LAID_OUT})

    @property
    def num_ranks(self) -> int:
        """The product of the degrees; `dp_replicate` must be known."""
        assert self.dp_replicate is not None
        return self.dp_replicate * self.dp_shard * self.tp

    @property
    def dp(self) -> int:
        """How many ranks train on different microbatches; `dp_replicate` must be known."""
        assert self.dp_replicate is not None
        return self.dp_replicate * self.dp_shard

    def resolve(self, world_size: int) -> Layout:
        """Fills `dp_replicate` from the number of ranks.

        Raises:
            PacelineError: PL113 where the degrees don't multiply to `world_size`.
        """
        inner = self.dp_shard * self.tp
        if self.dp_replicate is None and world_size % inner == 0:
            return replace(self, dp_replicate=world_size // inner)
        if self.dp_replicate is None or self.num_ranks != world_size:
            raise _product_error(self, world_size)
        return self

    def __str__(self) -> str:
        """The words that say something: `dp_replicate`, and whatever is not the default."""
        words = [f"dp_replicate={'auto' if self.dp_replicate is None else self.dp_replicate}"]
        for field in fields(self)[1:]:
            value = getattr(self, field.name)
            if value != field.default:
                words.append(f"{field.name}={str(value).lower()}")
        return " ".join(words)


def check_ranks(world_size: int) -> None:
    """Raises PL126 for more ranks than layouts are looked for; the search goes through all divisors."""
    if world_size > MOST_RANKS:
        raise PacelineError(
            "PL126",
            saw=f"a layout of {world_size} ranks.",
            rule=f"Layouts have at most {MOST_RANKS} ranks.",
            fix="Lower the degrees of the layout, or the number of ranks.",
        )


def check_degree(axis: str, degree: int) -> None:
    """Raises PL112 for a degree below 1 and PL111 for an axis this version can't lay out."""
    if degree < 1:
        raise PacelineError(
            "PL112",
            saw=f"layout.{axis}={degree}.",
            rule="A degree counts ranks, so it is at least 1.",
            fix=f"Set {axis}=1 to leave that axis out.",
        )
    if axis not in LAID_OUT and degree > 1:
        raise PacelineError(
            "PL111",
            saw=f"layout.{axis}={degree}.",
            rule=f"This version lays out {', '.join(LAID_OUT)} only.",
            fix=f"Leave {axis} out and use the other axes for all ranks.",
        )


def _read_degree(axis: str, text: str) -> int | None:
    if axis == "dp_replicate" and text == "auto":
        return None
    if re.fullmatch(r"-?\d{1,18}", text) is None:
        raise PacelineError(
            "PL110",
            saw=f"layout has {f'{axis}={text}'!r}.",
            rule="A degree is a whole number of ranks.",
            fix=f"Write for example {axis}=2.",
        )
    return int(text)


def _read_choice(name: str, text: str) -> Any:
    known = {str(choice).lower(): choice for choice in CHOICES[name]}
    if text.lower() not in known:
        raise PacelineError(
            "PL118",
            saw=f"layout has {name}={text}.",
            rule=f"{name} is one of {', '.join(known)}.",
            fix=f"Leave it out for {name}={str(getattr(Layout, name)).lower()}, or use one of these.",
        )
    return known[text.lower()]


def _product_error(layout: Layout, world_size: int) -> PacelineError:
    inner = layout.dp_shard * layout.tp
    given = " x ".join(
        f"{axis}={degree}"
        for axis in LAID_OUT
        if (degree := getattr(layout, axis)) is not None and (degree > 1 or axis == "dp_replicate")
    )
    if layout.dp_replicate is None:
        near = sorted({world_size // inner * inner or inner, -(-world_size // inner) * inner})
        fix = f"Start {' or '.join(map(str, near))} ranks, or change a degree."
    elif world_size % inner == 0:
        fix = f"Start {layout.num_ranks} ranks, or set dp_replicate={world_size // inner}, or leave it out."
    else:
        fix = f"Start {layout.num_ranks} ranks, or choose degrees with the product {world_size}."
    return PacelineError(
        "PL113",
        saw=f"layout.{given}, but there are {world_size} ranks.",
        rule="The degrees of a layout multiply to the number of ranks.",
        fix=fix,
    )
