"""Describes a layout: how ranks are divided among the axes of parallelism, and the settings of these."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields, replace
from math import gcd, prod
from typing import Any, Literal, get_args

from paceline.errors import PacelineError
from paceline.recipe.axes import AXES, OPEN, AxisKind, Degrees, list_axes

# The values of a layout's other words: the only list, which the recipe's [layout] uses too.
Zero = Literal[1, 2, 3]
Recompute = Literal["none", "block", "selective"]
Offload = Literal["none", "cpu"]
Attending = Literal["heads", "gather", "auto"]
SCHEDULES = ("1f1b", "gpipe", "interleaved", "bfs", "zero_bubble", "zbv")
# Schedules that go around the ranks several times; and the one with two stages per rank, placed as a V.
LOOPING = ("interleaved", "bfs")
AS_V = ("zbv",)
# Schedules that compute the gradients of weights apart.
DIVIDED = ("zero_bubble", *AS_V)
MOST_CHUNKS = 16
CHOICES: dict[str, tuple[Any, ...]] = {
    "zero": get_args(Zero),
    "sequence": (False, True),
    "recompute": get_args(Recompute),
    "offload": get_args(Offload),
    "cp_by": get_args(Attending),
    "schedule": SCHEDULES,
    "chunks": tuple(range(1, MOST_CHUNKS + 1)),
    "stages": ("",),  # or any list
}
MOST_RANKS = 1 << 20


@dataclass(frozen=True)
class Layout(Degrees):
    """The degrees of a run, and the settings of its axes.

    The degrees are the rows of the table in `axes.py`, which explains each. One of `dp_replicate` and
    `dp_shard` may be open (`None`): as many as there are ranks left. With an open `dp_shard`, copies that are
    not given are one.

    Attributes:
        zero: what dp_shard shards: 1 the optimizer's state, 2 gradients too, 3 parameters too.
        sequence: whether activations between the blocks are split along the sequence over tp.
        recompute: which activations are computed again in backward instead of kept: none, all of each
            block, or (selective) all but matrix products and attention.
        offload: where dp_shard keeps parameters and optimizer state between uses.
        cp_by: how the ranks of cp attend to each other's positions: each has whole sequences of some heads;
            or gathers the keys and values for its own positions. `"auto"` is heads if cp divides them, else
            gather.
        schedule: the order in which ranks of pp run forwards and backwards, see `pipeline/orders.py`.
        chunks: stages of the model that each rank of pp holds.
        stages: where the model is cut: the names of the modules that all stages but the first begin with,
            joined by "+"; "" to cut by counted operations.
    """

    zero: Zero = 3
    sequence: bool = False
    recompute: Recompute = "none"
    offload: Offload = "none"
    cp_by: Attending = "auto"
    schedule: str = "1f1b"
    chunks: int = 1
    stages: str = ""

    def __post_init__(self) -> None:
        if all(getattr(self, axis) is None for axis in list_axes(stretches=True)):
            object.__setattr__(self, OPEN, self._find_least(OPEN))

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Read `"dp_replicate=2 dp_shard=2 tp=2 zero=2"`; an empty string is the default layout.

        `dp_replicate=auto` means as many copies as there are ranks left, and so does a text without
        `dp_replicate`; `dp_shard=auto` means as many shards.

        Raises:
            PacelineError: PL110 for text that is not `word=value` or has a word twice, PL112 for a degree
                below 1, PL118 for a value that its word does not take, PL127 for two open degrees.
        """
        values: dict[str, Any] = {}
        known = list_axes()
        for word in text.replace(",", " ").split():
            name, _, value = word.partition("=")
            if name not in (*known, *CHOICES) or not value:
                raise PacelineError(
                    "PL110",
                    saw=f"layout has {word!r}.",
                    rule=f"A layout is word=value pairs separated by spaces; degrees: {', '.join(known)}; "
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
            values[name] = _read_degree(name, value) if name in known else _read_choice(name, value)
        check_open([name for name, value in values.items() if value is None])
        for axis in known:
            if values.get(axis) is not None:
                check_degree(axis, values[axis])
        return cls(**values)

    @property
    def degrees(self) -> dict[str, int]:
        """The degree of every axis of the mesh, outermost first; none may be open."""
        degrees = {axis.name: getattr(self, axis.name) for axis in AXES if axis.multiplies}
        assert None not in degrees.values()
        return degrees

    def list_several(self, **facts: bool) -> dict[str, int]:
        """Return the axes with these properties and more than one rank, with their degrees."""
        return {axis: getattr(self, axis) for axis in list_axes(**facts) if getattr(self, axis) > 1}

    @property
    def num_ranks(self) -> int:
        """The product of the degrees; none may be open."""
        return prod(self.degrees.values())

    @property
    def fewest_ranks(self) -> int:
        """The product of the degrees, an open one as small as possible."""
        return self.close().num_ranks

    @property
    def dp(self) -> int:
        """The number of ranks that train on different microbatches; no degree may be open."""
        return self._multiply(shares_data=True, multiplies=True)

    @property
    def num_replicas(self) -> int:
        """The number of model copies that train on different microbatches; no degree may be open."""
        return self._multiply(shares_data=True, divides_model=False)

    def count_turns(self, *, is_exact: bool) -> int:
        """Return how many neighbouring data ranks take microbatches in turns, see `data.share.list_numbers`.

        The ranks of dp_shard do where an exact sum is sent microbatch by microbatch: what one round brings is
        then added at once, and little is kept. With zero=1 whole gradients are kept, and sent once per step;
        also where ranks of another axis that shares data stand between those of dp_shard.
        """
        innermost = [*self.list_several(shares_data=True, multiplies=True)][-1:]
        sends_rows = is_exact and self.pp == self.ep == 1 and self.zero > 1 and innermost == ["dp_shard"]
        return self.dp_shard if sends_rows else 1

    @property
    def ep_data(self) -> int:
        """The number of data ranks that share one copy of the experts; those of cp share it before them."""
        return max(1, self.ep // self.cp)

    @property
    def ep_cp(self) -> int:
        """The number of ranks of cp that share one copy of the experts, and take their rows in turns."""
        return self.ep // self.ep_data

    @property
    def num_sample_parts(self) -> int:
        """The number of ranks among which the work on one sample is divided."""
        return self._multiply(divides_sample=True)

    @property
    def num_stages(self) -> int:
        """The number of stages of the model."""
        return self.pp * (2 if self.schedule in AS_V else self.chunks)

    @property
    def stages_by_hand(self) -> list[str]:
        """The parts of `stages`: names of modules; none if the cut is found."""
        return self.stages.split("+") if self.stages else []

    @property
    def divides_model(self) -> bool:
        """Whether ranks hold different parts of the model."""
        return self._multiply(divides_model=True) > 1

    @property
    def keeps_bits(self) -> bool:
        """Whether the degrees leave every bit of the weights unchanged, with the exact reduction."""
        return self._multiply(keeps_bits=False) == 1

    def find_place(self, rank: int) -> dict[str, int]:
        """Return a rank's number along every axis."""
        place = self.degrees
        for axis in reversed(place):
            rank, place[axis] = divmod(rank, place[axis])
        for kind in AXES:
            if kind.within:
                place[kind.name] = self._number_within(kind, place) % getattr(self, kind.name)
        return place

    def _number_within(self, kind: AxisKind, place: Mapping[str, int]) -> int:
        """Return a rank's number among the ranks of the axes around an axis."""
        number = 0
        for axis in kind.within:
            number = number * self.degrees[axis] + place[axis]
        return number

    def find_dp_rank(self, rank: int) -> int:
        """Return a rank's number among those that train on different microbatches."""
        place, number = self.find_place(rank), 0
        for axis in list_axes(shares_data=True, multiplies=True):
            number = number * self.degrees[axis] + place[axis]
        return number

    def list_groups(self, axes: Collection[str]) -> list[list[int]]:
        """Return all ranks in groups: steps along these axes connect those of a group.

        A step changes a rank's number along one axis. With an axis but not the one within it, ranks at
        different places of the inner one are apart; a step then may change all axes around that one.
        """
        groups = {rank: [rank] for rank in range(self.num_ranks)}
        places = [self.find_place(rank) for rank in groups]
        for kept in self._list_steps(axes):
            first: dict[tuple[int, ...], int] = {}
            for rank, place in enumerate(places):
                other = groups[first.setdefault(kept(place), rank)]
                if other is not groups[rank]:
                    other += groups[rank]
                    groups.update(dict.fromkeys(groups[rank], other))
        different = {id(group): sorted(group) for group in groups.values()}
        return sorted(different.values())

    def group_by(self, axes: Collection[str]) -> list[list[int]]:
        """Return all ranks in groups: those of a group have the same numbers along these axes."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.num_ranks):
            place = self.find_place(rank)
            groups.setdefault(tuple(place[axis] for axis in axes), []).append(rank)
        return list(groups.values())

    def _list_steps(self, axes: Collection[str]) -> list[Callable[[Mapping[str, int]], tuple[int, ...]]]:
        """Return, for each kind of step, a function from a rank's place to what the step does not change."""

        def keep(*changed: str, also: str = "") -> Callable[[Mapping[str, int]], tuple[int, ...]]:
            kept = [axis for axis in self.degrees if axis not in changed] + [also] * bool(also)
            return lambda place: tuple(place[axis] for axis in kept)

        def keep_neighbours(kind: AxisKind) -> Callable[[Mapping[str, int]], tuple[int, ...]]:
            others = keep(*kind.within)
            degree = getattr(self, kind.name)
            return lambda place: (*others(place), self._number_within(kind, place) // degree)

        steps = []
        alone = {axis for axis in axes if axis in self.degrees}
        for kind in AXES:
            around = [axis for axis in kind.within if axis in axes]
            if kind.within and kind.name in axes:
                steps.append(keep_neighbours(kind))
            elif around:
                steps.append(keep(*around, also=kind.name))
                alone -= set(around)
        return steps + [keep(axis) for axis in self.degrees if axis in alone]

    @property
    def open_axis(self) -> str | None:
        """The axis whose degree is open, if one is."""
        return next((axis for axis in list_axes(stretches=True) if getattr(self, axis) is None), None)

    def awaits_shards(self, resolved: Layout) -> bool:
        """Return whether the number of ranks left an open `dp_shard` at 1 in the resolved layout."""
        return self.open_axis == "dp_shard" and resolved.dp_shard == 1

    def close(self) -> Layout:
        """Return the layout with an open degree as small as the axes within it allow."""
        axis = self.open_axis
        return self if axis is None else self._set(axis, self._find_least(axis))

    def resolve(self, world_size: int) -> Layout:
        """Fill in an open degree from the number of ranks.

        If one rank is left for an open `dp_shard`, `zero` and `offload` have nothing to work on and return to
        their defaults.
        """
        axis = self.open_axis
        if axis is None and self.num_ranks == world_size:
            return self
        inner = 0 if axis is None else self._set(axis, 1).num_ranks
        if axis is None or world_size < inner or world_size % inner:
            raise _product_error(self, world_size)
        return self._set(axis, world_size // inner)

    def _set(self, axis: str, degree: int) -> Layout:
        """Return the layout with this degree of the axis that is open."""
        changed: dict[str, Any] = {axis: degree}
        if axis == "dp_shard" and degree == 1:
            changed |= {"zero": Layout.zero, "offload": Layout.offload}
        return replace(self, **changed)

    def _find_least(self, axis: str) -> int:
        least = 1
        for kind in AXES:
            around = [getattr(self, each) for each in kind.within if each != axis]
            if axis in kind.within and None not in around:
                degree = getattr(self, kind.name)
                least = max(least, degree // gcd(degree, prod(around)))
        return least

    def _multiply(self, **facts: bool) -> int:
        return prod(getattr(self, axis) for axis in list_axes(**facts))

    def __str__(self) -> str:
        """Return the open axis, and every word that is not at its default."""
        words = []
        for field in fields(self):
            value = getattr(self, field.name)
            if value != field.default or field.name == OPEN:
                words.append(f"{field.name}={'auto' if value is None else str(value).lower()}")
        return " ".join(words)


def check_open(axes: Collection[str]) -> None:
    """Raise PL127 for more than one open degree; `axes` are those that a user has left open."""
    if len(axes) > 1:
        first, second = sorted(axes, key=list_axes().index)[:2]
        raise PacelineError(
            "PL127",
            saw=f'layout.{first}="auto" with layout.{second}="auto".',
            rule="The number of ranks determines one degree; it can be divided between two in many ways.",
            fix=f'Give {first} a number, for example 1, or leave it out: with {second}="auto" it is 1.',
        )


def check_ranks(world_size: int) -> None:
    """Raise PL126 for more ranks than the search, which tries all divisors, supports."""
    if world_size > MOST_RANKS:
        raise PacelineError(
            "PL126",
            saw=f"a layout of {world_size} ranks.",
            rule=f"Layouts have at most {MOST_RANKS} ranks.",
            fix="Lower the degrees of the layout, or the number of ranks.",
        )


def check_degree(axis: str, degree: int) -> None:
    """Raise PL112 for a degree below 1."""
    if degree < 1:
        raise PacelineError(
            "PL112",
            saw=f"layout.{axis}={degree}.",
            rule="A degree counts ranks, so it is at least 1.",
            fix=f"Set {axis}=1 to leave that axis out.",
        )


def _read_degree(axis: str, text: str) -> int | None:
    if text == "auto" and axis in list_axes(stretches=True):
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
    if name == "stages":
        return text
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
    given = " x ".join(
        f"{axis}={degree}"
        for axis in list_axes(multiplies=True)
        if (degree := getattr(layout, axis)) is not None and (degree > 1 or axis == OPEN)
    )
    inner = layout.fewest_ranks
    if layout.open_axis is not None:
        near = sorted({world_size // inner * inner or inner, -(-world_size // inner) * inner})
        fix = f"Start {' or '.join(map(str, near))} ranks, or change a degree."
    elif world_size % (inner := layout.num_ranks // getattr(layout, OPEN)) == 0:
        fix = f"Start {layout.num_ranks} ranks, or set {OPEN}={world_size // inner}, or leave it out."
    else:
        fix = f"Start {layout.num_ranks} ranks, or choose degrees whose product is {world_size}."
    return PacelineError(
        "PL113",
        saw=f"layout.{given}, but there are {world_size} ranks.",
        rule="The product of a layout's degrees must equal the number of ranks.",
        fix=fix,
    )
