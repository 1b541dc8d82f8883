"""The table of axes: the degrees of a layout, and the properties of the ranks along each axis.

`Degrees` is the table, and its order is the order in the rank number. Everything that iterates over axes
reads it: layouts and their text, candidates and the nearest legal ones, the mesh, [layout] of a recipe,
`verify` and messages. To add an axis, add a field here.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any


@dataclass(frozen=True)
class AxisKind:
    """A row of the table: the properties of the ranks along an axis.

    Attributes:
        name: the field of `Degrees`, and the word in a layout, a recipe and a message.
        help: one line for the recipe's documentation.
        shares_data: its ranks train on different microbatches; along any other axis they see the same
            ones.
        divides_model: its ranks hold different parts of the parameters, gradients or optimizer state.
        divides_sample: its ranks each do a part of the work on one sample; along any other axis a rank does
            all of it.
        keeps_bits: with the exact reduction, weights have the same bits under any of its degrees.
        change_cost: how far a layout moves from the requested one, per factor of 2 in this degree.
        within: the axes whose ranks this one counts a second time, in groups of neighbours; neighbours in the
            table. Empty for an axis of ranks of its own.
        stretches: its degree may be open ("auto"): it then follows from the number of ranks.
    """

    name: str
    help: str
    shares_data: bool = False
    divides_model: bool = False
    divides_sample: bool = False
    keeps_bits: bool = True
    change_cost: float = 1.5
    within: tuple[str, ...] = ()
    stretches: bool = False

    @property
    def multiplies(self) -> bool:
        """Whether the degree is a factor of the number of ranks."""
        return not self.within


def _ranks(help_text: str, *, default: int | None = 1, kw_only: bool = False, **facts: Any) -> Any:
    """Make a row of the table; see `AxisKind`."""
    return field(default=default, kw_only=kw_only, metadata={"help": help_text, **facts})


@dataclass(frozen=True)
class Degrees:
    """The ranks along each axis, the outermost axis of the rank number first.

    The ranks of the last axis are neighbours, on one node if its degree allows it, because it sends most.
    """

    # Stages send least: one activation per microbatch. So they may be farthest apart.
    pp: int = _ranks(
        "Ranks that each hold some of the blocks, one behind the other; any model is cut, and weights keep "
        "their bits.",
        kw_only=True,
        divides_model=True,
        divides_sample=True,
        change_cost=1.75,
    )
    # Replication is the easiest to change: it moves no memory and nothing inside the model.
    dp_replicate: int | None = _ranks(
        'Copies of the model, each training on its share of the global batch; `"auto"`: as many as there are '
        "ranks left.",
        default=None,
        shares_data=True,
        change_cost=1.0,
        stretches=True,
    )
    # Copies of the experts are fewer than copies of the rest. Neighbours share them, because each token is
    # sent to its experts and back.
    ep: int = _ranks(
        "Neighbouring ranks of `dp_replicate` x `dp_shard` x `cp` that share the experts of a mixture among "
        "them; must divide both numbers.",
        kw_only=True,
        shares_data=True,
        divides_model=True,
        change_cost=1.25,
        within=("dp_replicate", "dp_shard", "cp"),
    )
    # It may be None until `resolve`. It is typed as a number because only a resolved layout is computed with.
    dp_shard: int = _ranks(
        "Ranks over which each copy is sharded; these too train on their shares of the global batch. "
        '`"auto"`: as many as there are ranks left.',
        shares_data=True,
        divides_model=True,
        change_cost=1.25,
        stretches=True,
    )
    # A sequence is exchanged twice per attention: less than tp sends, more than shards do.
    cp: int = _ranks(
        "Ranks that each hold a part of every sequence, between the first block and the head; any attention "
        "code works.",
        kw_only=True,
        divides_sample=True,
        keeps_bits=False,  # The gradients of weights are sums over the sequence.
        change_cost=1.5,
    )
    tp: int = _ranks(
        "Ranks that split the matrix products of one copy; must divide the heads.",
        divides_model=True,
        divides_sample=True,
        keeps_bits=False,  # A split matrix product adds in another order.
        change_cost=1.5,
    )


# The axis whose degree is open by default: it gets the ranks that the others leave.
OPEN = "dp_replicate"
AXES = tuple(AxisKind(row.name, **row.metadata) for row in fields(Degrees))


def list_axes(**facts: bool) -> tuple[str, ...]:
    """Return the names of the axes with these properties, outermost first.

    Example: `list_axes(shares_data=True, divides_model=False)`. With `multiplies=True` these are axes of the
    mesh, whose degrees multiply to the number of ranks.
    """
    return _list_axes(tuple(facts.items()))


@cache
def _list_axes(facts: tuple[tuple[str, bool], ...]) -> tuple[str, ...]:
    return tuple(axis.name for axis in AXES if all(getattr(axis, fact) == value for fact, value in facts))
