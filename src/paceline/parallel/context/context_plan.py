"""The plan of cp: where the sequence of a model is divided, and what is exchanged where."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from paceline.parallel.split import Split
from paceline.parallel.tensor.calls import CallSite, Site


@dataclass(frozen=True)
class Stretch:
    """A run of blocks that pass on rows.

    Attributes:
        first: the module whose input is cut.
        keys: the arguments of its call that are the stream.
        last: the module whose output is joined.
        dim: the dimension of the sequence, 1, or 0 in models that have the sequence first.
    """

    first: str
    keys: tuple[int | str, ...]
    last: str
    dim: int = 1


@dataclass(frozen=True)
class Crossing:
    """A place where a tensor changes between rows and heads.

    Attributes:
        module: full name.
        kind: `"to_heads"`: its output, rows before; `"take_heads"`: its output, computed whole on every rank
            before; `"to_rows"`: its input.
        spot: the call in the module's own forward that is meant, in place of the module.
        keys: the arguments of the module's call that are the tensor it takes.
        dim: the dimension of the sequence in the crossing tensor.
        split: how the heads are cut.
        stretch: number of the stretch.
        sums: whether backward sums the gradient of the whole tensor that it takes.
    """

    module: str
    kind: str
    spot: CallSite | None
    keys: tuple[int | str, ...]
    dim: int
    split: Split
    stretch: int
    sums: bool = False


@dataclass(frozen=True)
class Entering:
    """A tensor besides the stream that a block gets.

    Attributes:
        module: full name of the block.
        path: of the tensor among the arguments of its call (`tensor/hooks.py`).
        dim: the dimension whose rows the block uses, this rank's only; `None` for another sequence, to which
        it
            attends: it stays whole, and backward sums its gradient over the ranks.
        stretch: number of the stretch.
    """

    module: str
    path: tuple[int | str, ...]
    dim: int | None
    stretch: int


@dataclass(frozen=True)
class Attending:
    """A call of attention with this rank's rows of the queries.

    Attributes:
        module: full name.
        spot: the call in its forward.
        stretch: number of the stretch.
        gathers: whether the keys are rows too, which are exchanged; if not, they are of a whole sequence.
        is_causal: whether the trial's call was.
    """

    module: str
    spot: CallSite
    stretch: int
    gathers: bool
    is_causal: bool


@dataclass(frozen=True)
class WholeModule:
    """A module between the blocks' own code that gets whole sequences: a mixture of experts.

    Attributes:
        module: full name.
        takes: the tensors among the arguments of its call that are joined, by path (`tensor/hooks.py`), each
            with the dimension of the positions, and whether samples share it.
        gives: the same of the tensors that it returns and that are cut, by number.
        stretch: number of the stretch.
    """

    module: str
    takes: dict[tuple[int | str, ...], tuple[int, bool]]
    gives: dict[int, tuple[int, bool]]
    stretch: int


@dataclass(frozen=True)
class SizeChange:
    """A size that a call in a module's forward is given and that is another one on a rank.

    Attributes:
        dim: of the call's result.
        kind: `"heads"`: it counts all heads; `"whole"`: it is the length of the rows where that of the whole
            sequence is needed.
    """

    dim: int
    kind: str


@dataclass
class ContextPlan:
    """The plan for running one model on a part of the sequence.

    Attributes:
        num_ranks: degree of cp.
        by: how ranks attend: `"heads"` or `"gather"`.
        stretches: runs of blocks.
        crossings: places where rows and heads are exchanged.
        entering: tensors besides the streams that blocks get and use in rows, or whole.
        attending: calls of attention by rows. By heads there are crossings, by gather these two.
        whole: modules that get whole sequences.
        sizes: by module, the calls that get changed sizes, and the stretch that these belong to.
        sites: by module, the places in the source where its forward makes changed calls, each with the number
            of calls that the trial made there.
        stretch_of: by module with changed calls, the number of its stretch.
        partial: names of parameters that get a part of their gradient on each rank.
        draws: by key of a dropout (`dropout/masks.py`) that sees rows or heads: the dimension of the rows, or
            the split of the heads, with the number of the stretch.
    """

    num_ranks: int
    by: str = "heads"
    stretches: list[Stretch] = field(default_factory=list)
    crossings: list[Crossing] = field(default_factory=list)
    entering: list[Entering] = field(default_factory=list)
    attending: list[Attending] = field(default_factory=list)
    whole: list[WholeModule] = field(default_factory=list)
    sizes: dict[str, dict[CallSite, list[SizeChange]]] = field(default_factory=dict)
    sites: dict[str, dict[Site, int]] = field(default_factory=dict)
    stretch_of: dict[str, int] = field(default_factory=dict)
    partial: set[str] = field(default_factory=set)
    draws: dict[str, tuple[int, int | Split]] = field(default_factory=dict)

    def is_causal(self, stretch: int) -> bool:
        """Return whether a stretch has a causal attention by rows, whose work zigzag balances."""
        return any(call.is_causal and call.gathers for call in self.attending if call.stretch == stretch)

    def describe(self) -> str:
        """Return the plan as text: a line per stretch, then one per kind of module."""
        lines = [f"cp={self.num_ranks}: sequences are divided over {self.num_ranks} ranks"]
        for index, stretch in enumerate(self.stretches):
            way = ", in zigzag" if self.is_causal(index) else ""
            lines.append(f"  rows{way}: from {stretch.first} to {stretch.last}")
        counted: dict[str, int] = defaultdict(int)
        words = {
            "to_heads": "rows to heads, after",
            "take_heads": "whole to heads, after",
            "to_rows": "heads to rows, before",
        }
        for crossing in self.crossings:
            name = _shorten(crossing.module)
            counted[f"{words[crossing.kind]} {name}"] += 1
        for entering in self.entering:
            where = "".join(f"[{part!r}]" for part in entering.path)
            what = "whole, gradient summed" if entering.dim is None else "rows"
            counted[f"argument {where} of {_shorten(entering.module)}: {what}"] += 1
        for call in self.attending:
            keys = "gathered" if call.gathers else "whole"
            counted[f"attention by rows, keys {keys}: {_shorten(call.module)}"] += 1
        for mixture in self.whole:
            counted[f"whole sequences: {_shorten(mixture.module)}"] += 1
        lines += [f"  {text} ({count})" for text, count in counted.items()]
        return "\n".join(lines)


def _shorten(name: str) -> str:
    """Return a module's name with stars in place of numbers."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))
