"""The table of a recipe that defines how gradients are compressed: [compress]."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from paceline.recipe.section import NonNegativeInt, PositiveInt, Section, broken_rule


class CompressSection(Section):
    """The compression of gradients between ranks, for slow links; it changes the result.

    `docs/communicate.md` explains what it costs.
    """

    kind: Literal["none", "bf16", "fp16", "int8", "int4", "topk", "powersgd"] = "none"
    """Form in which gradients are sent. `"int8"` and `"int4"`: integers with one scale per block of at most
    256 numbers. `"topk"`: the largest numbers of each such block. `"powersgd"`: products of two thin
    matrices. What is not sent is added to the next step's gradient. Needs `train.reduction = "exact"`."""
    density: Annotated[float, Field(gt=0, le=1)] | None = None
    """Share of the numbers that `kind = "topk"` sends, from 0 (excluded) to 1; required there, and refused
    with other kinds."""
    rank: PositiveInt | None = None
    """Columns of the thin matrices that `kind = "powersgd"` sends in place of each gradient; required there,
    and refused with other kinds."""
    links: Literal["all", "between_nodes"] = "all"
    """Links over which gradients are compressed. `"all"`: between all ranks. `"between_nodes"`: the ranks of
    a node may share a slot. They add its gradients exactly, and only what they send to other slots is
    compressed. The result depends on `slots` and not on this."""
    slots: PositiveInt | None = None
    """Number of equal blocks of consecutive microbatches whose gradients are each compressed together. The
    result depends on it, and not on the number of ranks, which must divide it; with
    `links = "between_nodes"` it may also divide the ranks. Default: the number of ranks that share the data,
    or with `links = "between_nodes"` the number of nodes; a run that is resumed on another number must set
    it."""
    after_steps: NonNegativeInt = 0
    """Number of steps at the start of the run whose gradients are not compressed."""

    @model_validator(mode="after")
    def _check(self) -> CompressSection:
        idle = [name for name in ("slots", "after_steps") if getattr(self, name)]
        idle += ["links"] if self.links != "all" else []
        if self.kind == "none" and idle:
            raise broken_rule(
                "PL962",
                f'compress.{idle[0]}={getattr(self, idle[0])} with compress.kind="none".',
                "Without compression, this key would have no effect.",
                'Set compress.kind="int8", or leave the key out.',
            )
        for kind, name, value, what in (
            ("topk", "density", self.density, "The density is the share of the numbers that topk sends."),
            ("powersgd", "rank", self.rank, "The rank is the number of columns that powersgd sends."),
        ):
            if (self.kind == kind) != (value is not None):
                example = {"density": 0.1, "rank": 4}[name]
                given = "not set" if value is None else value
                raise broken_rule(
                    "PL962",
                    f'compress.kind="{self.kind}" with compress.{name}={given}.',
                    what,
                    f'Set both, for example kind = "{kind}" and {name} = {example}, or neither.',
                )
        return self
