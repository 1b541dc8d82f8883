"""The tables of a recipe for steps in which ranks do not wait for each other: [islands], [asynchronous]."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat

from paceline.recipe.section import NonNegativeInt, PositiveInt, Section


class OuterSection(Section):
    """The outer optimizer, SGD on the mean of what the islands have changed."""

    lr: PositiveFloat = 0.9
    """Learning rate. 1 with `momentum = 0` averages the islands' weights (LocalSGD)."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.6
    """Momentum."""
    nesterov: bool = True
    """Nesterov's momentum; without effect if `momentum` is 0."""


class IslandsSection(Section):
    """Islands (DiLoCo, https://arxiv.org/abs/2311.08105), for links between nodes that are slow; they change
    the result.

    An island is a block of consecutive microbatches of every global batch, with weights and an optimizer of
    its own. `docs/slow_networks.md` explains what they cost.
    """

    count: PositiveInt = 1
    """Number of islands. The result depends on it, and not on the number of ranks. 1 is plain training."""
    every: PositiveInt = 20
    """Steps between two exchanges, in which the islands' changes are averaged."""
    warmup_steps: NonNegativeInt = 100
    """Steps at the start of the run in which the islands sum gradients instead, as plain training does."""
    outer: OuterSection = OuterSection()
    """Outer optimizer: a table of `lr` (0.9), `momentum` (0.6) and `nesterov` (true).
    `lr = 1` with `momentum = 0` averages weights."""
    codec: Literal["none", "bf16", "int8", "int4"] = "none"
    """Form in which islands send their changes, as `compress.kind`. What rounding loses is added to the next
    exchange."""

    def find_broken(self, num_steps: int) -> tuple[str, str, str, str] | None:
        """Return the parts of an error (code, saw, rule, fix) if a run has no whole period, or `None`."""
        if self.count == 1 or self.warmup_steps + self.every <= num_steps:
            return None
        return (
            "PL673",
            f"islands.warmup_steps={self.warmup_steps} and islands.every={self.every} in a run of "
            f"{num_steps} steps.",
            "The islands exchange at least once, every so many steps after the warm-up.",
            f"Set islands.warmup_steps to {max(0, num_steps - self.every)} or less"
            + (f" and islands.every to {num_steps} or less." if self.every > num_steps else "."),
        )


class AsynchronousSection(Section):
    """Asynchronous data parallelism, for ranks of unequal speed; it changes the result from run to run.

    Each rank computes whole global batches alone. `docs/slow_networks.md` explains what this costs.
    """

    staleness: NonNegativeInt = 0
    """The most updates that may be applied while a rank computes its gradient. 0 is synchronous training."""
