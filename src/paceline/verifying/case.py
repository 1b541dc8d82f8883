"""A layout that differs, with everything that was observed of it, and the phrases that describe causes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from paceline.recipe import Layout
from paceline.recipe.axes import list_axes
from paceline.verifying.closeness import Difference
from paceline.verifying.layouts import EventDifference, Observed
from paceline.verifying.precision import KINDS_OF_TYPES
from paceline.verifying.reference import Facts, WatchedFacts
from paceline.verifying.settings import SettingDifference, drop_layouts_own


@dataclass(frozen=True)
class Case:
    """A layout that differs.

    Attributes:
        layout: resolved.
        observed: of the watched step, by rank.
    """

    layout: Layout
    dtype: str
    facts: Facts
    differences: Sequence[Difference]
    observed: Sequence[Observed] = ()

    @property
    def watched(self) -> WatchedFacts:
        """The facts about the reference's watched step; none was watched for a difference at the start."""
        assert self.facts.watched is not None
        return self.facts.watched

    @property
    def tied(self) -> set[str]:
        """The names of all parameters that share their storage with another."""
        return {name for group in self.facts.tied for name in group}

    @property
    def step(self) -> int:
        """The first step that has a difference."""
        return first_step(self.differences)

    @property
    def num_microbatches(self) -> int:
        """The number of microbatches of that step."""
        return self.facts.num_microbatches[max(0, self.step - 1)]

    @cached_property
    def first(self) -> list[Difference]:
        """The differences of that step."""
        return [difference for difference in self.differences if difference.step == self.step]

    def of_kind(self, kind: str) -> list[Difference]:
        """Return the differences of one kind, the largest in units of its tolerance first."""
        return sorted((d for d in self.first if d.kind == kind), key=lambda d: -d.ratio)

    def events(self, *, gradient: bool) -> list[EventDifference]:
        """Return all ranks' differing events in order of execution; backward visits the last event first."""
        found = [d for rank in self.observed for d in rank.differences if d.gradient == gradient]
        return sorted(found, key=lambda d: (-d.order if gradient else d.order, d.microbatch, d.rank))

    def settings_of(self, owner: str, ranks: Iterable[int]) -> list[SettingDifference]:
        """Return the differences in the settings of an owner that exactly these ranks have."""
        wanted, found = set(ranks), []
        for difference in self.settings:
            if difference.owner == owner:
                same = {d.rank for d in self.settings if (d.owner, d.name) == (owner, difference.name)}
                found += [difference] if same == wanted else []
        return found

    @cached_property
    def settings(self) -> list[SettingDifference]:
        """All settings that differ, except sizes of a layout's parts."""
        return drop_layouts_own([d for o in self.observed for d in o.settings], self.layout.num_ranks)

    def narrower(self, module: str | None) -> str:
        """Return the type that this layout computes a module in, if one process has a wider one; else "".

        `None` stands for everything outside of forwards: backward and the reductions.
        """
        if self.dtype not in KINDS_OF_TYPES:
            return ""
        expected = self.watched.outside if module is None else self.watched.types
        for observed in self.observed:
            for name, kind in (observed.outside if module is None else observed.types).items():
                is_inside = not module or name == module or name.startswith(f"{module}.")
                wider = expected.get(name, self.dtype)
                if is_inside and KINDS_OF_TYPES.index(kind) > KINDS_OF_TYPES.index(wider):
                    return kind
        return ""

    def name_ranks(self, ranks: Iterable[int]) -> str:
        """Return a phrase such as `on rank 1 only`, `on ranks 2 and 3 of 4`, `on all 4 ranks`."""
        found, total = sorted(set(ranks)), self.layout.num_ranks
        if len(found) == total:
            return f"on all {total} ranks" if total > 1 else "on the only rank"
        if len(found) == 1:
            return f"on rank {found[0]} only"
        return f"on ranks {', '.join(map(str, found[:-1]))} and {found[-1]} of {total}"

    def describe(self, differing: Sequence[Difference | EventDifference]) -> str:
        """Return the ranks that have these differences, and the size of the first one."""
        return f"{self.name_ranks(d.rank for d in differing)}, {show_size(differing[0])}"

    def describe_hooks(self, module: str, whose: str = "It") -> str:
        """Return a sentence on the hooks that users put on a module; empty for none."""
        facts = self.watched.modules.get(module)
        hooks = [] if facts is None else facts.hooks[:3]
        return f" {whose} has hooks that are not Paceline's: {', '.join(hooks)}." if hooks else ""

    def describe_factor(self, factor: float | None, slack: float = 5e-3) -> str:
        """Return a sentence on how many times the reference's a tensor is; empty for once or no factor."""
        if factor is None or near(factor, 1.0, slack):
            return ""
        axis = self.name_degree(factor) or (self.name_degree(1 / factor) if factor else None)
        return f" It is {factor:.6g} times the reference's" + (f": {axis}." if axis else ".")

    def name_degree(self, factor: float) -> str | None:
        """Return the axis whose degree is `factor`, for example `dp_replicate=2`."""
        data = " x ".join(list_axes(shares_data=True))
        degrees = self.layout.degrees | {data: self.layout.dp, "all ranks": self.layout.num_ranks}
        if degrees.pop("pp") > 1:  # stages add nothing up over pp, and so nothing over all ranks
            del degrees["all ranks"]
        for axis, degree in degrees.items():
            if degree > 1 and near(factor, degree):
                return f"{axis}={degree}"
        return None


def first_step(differences: Iterable[Difference]) -> int:
    """Return the first step that has a difference."""
    return min(difference.step for difference in differences)


def near(value: float, wanted: float, slack: float = 5e-3) -> bool:
    """Return whether two factors agree up to the error of a least-squares fit."""
    return abs(value - wanted) <= slack * max(abs(wanted), 1e-3)


def describe_settings(case: Case, differences: Sequence[SettingDifference]) -> str:
    """Describe up to three settings, for example `eps is 0.001 on rank 1 only, and 1e-05 in one process`."""
    by_name: dict[str, list[SettingDifference]] = {}
    for difference in differences:
        by_name.setdefault(difference.name, []).append(difference)
    parts = []
    for name, found in list(by_name.items())[:3]:
        first = found[0]
        here, there = (text or "not there" for text in (first.found, first.expected))
        parts.append(f"{name} is {here} {case.name_ranks(d.rank for d in found)}, and {there} in one process")
    return "; ".join(parts)


def show_size(difference: Difference | EventDifference) -> str:
    """Return a phrase such as `by 3.1e-02, where rounding stays below 1.2e-13`."""
    return f"by {difference.size:.1e}, where rounding stays below {difference.tolerance:.1e}"
