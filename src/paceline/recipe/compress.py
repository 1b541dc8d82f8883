"""The table of a recipe that defines how gradients are compressed: [compress]."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from paceline.recipe.section import PositiveInt, Section, broken_rule


class CompressSection(Section):
    """The compression of gradients between ranks, for slow links; it changes the result.

    `docs/communicate.md` explains what it costs.
    """

    kind: Literal["none", "bf16", "int8", "int4"] = "none"
    """Form in which gradients are sent. `"int8"` and `"int4"`: integers with one scale per block of at most
    256 numbers. What rounding loses is added to the next step's gradient. Needs
    `train.reduction = "exact"`."""
    slots: PositiveInt | None = None
    """Number of equal blocks of consecutive microbatches whose gradients are each compressed together. The
    result depends on it, and not on the number of ranks, which must divide it. Default: the number of ranks
    that share the data; a run that is resumed on another number must set it."""

    @model_validator(mode="after")
    def _check(self) -> CompressSection:
        if self.kind == "none" and self.slots:
            raise broken_rule(
                "PL962",
                f'compress.slots={self.slots} with compress.kind="none".',
                "Without compression, this key would have no effect.",
                'Set compress.kind="int8", or leave the key out.',
            )
        return self
