"""The tables of a recipe that define how ranks work together: [layout], [shard] and [ddp]."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, PositiveFloat, create_model, model_validator

from paceline.errors import PacelineError
from paceline.recipe.axes import AXES, OPEN, PLANNED, list_axes
from paceline.recipe.layout import Layout, Offload, Recompute, Zero, check_degree
from paceline.recipe.section import NonNegativeInt, PositiveInt, Section, broken_rule

if TYPE_CHECKING:
    _DegreesSection = Section
else:
    # One key per axis of the table, so that a new axis needs no line here.
    _DegreesSection = create_model(
        "_DegreesSection",
        __base__=Section,
        **{
            axis.name: (PositiveInt | Literal["auto"], Field("auto", description=axis.help))
            if axis.name == OPEN
            else (PositiveInt, Field(getattr(Layout, axis.name), description=axis.help))
            for axis in AXES
        },
        **{name: (PositiveInt, Field(1, description=text)) for name, text in PLANNED.items()},
    )


class LayoutSection(_DegreesSection):
    """The division of ranks among the axes of parallelism; the degrees multiply to their number.

    Changes speed and memory, not the result; `docs/layouts.md` says how to choose.
    """

    zero: Zero = Layout.zero
    """The state that `dp_shard` divides: 1 the optimizer's state, 2 gradients too, 3 parameters too."""
    sequence: bool = Layout.sequence
    """Split the activations between the blocks along the sequence over `tp`."""
    recompute: Recompute = Layout.recompute
    """Activations that backward computes again instead of keeping them: none, all of each block, or
    (`"selective"`) all but matrix products and attention."""
    offload: Offload = Layout.offload
    """Storage of `dp_shard` for parameters and optimizer state between uses: the device (`"none"`), the CPU's
    memory, or memory-mapped files (`shard.offload_folder`)."""

    @model_validator(mode="after")
    def _check(self) -> LayoutSection:
        for axis in (*list_axes(), *PLANNED):
            degree = getattr(self, axis)
            try:
                check_degree(axis, 1 if degree == "auto" else degree)
            except PacelineError as error:
                raise broken_rule(error.code, error.saw, error.rule, error.fix) from None
        return self

    def to_layout(self) -> Layout:
        """Return the same as a `Layout`; `"auto"` copies are `None` there until the number of ranks is known.
        known."""
        values: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(Layout)}
        if values[OPEN] == "auto":
            values[OPEN] = None
        return Layout(**values)

    @classmethod
    def of(cls, layout: Layout) -> LayoutSection:
        """Return the section for a layout, the inverse of `to_layout`."""
        values: dict[str, Any] = {field.name: getattr(layout, field.name) for field in fields(layout)}
        if values[OPEN] is None:
            values[OPEN] = "auto"
        return cls(**values)


class ShardSection(Section):
    """The settings of `dp_shard` (torch's `fully_shard`); refused if `layout.dp_shard` is 1.

    Changes speed and memory, not the result, but for `param_dtype` and `reduce_dtype`.
    """

    reshard_after_forward: bool | Literal["auto"] = "auto"
    """Free a block's gathered parameters after its forward and gather them again for its backward. `"auto"`:
    with `layout.zero = 3`; with 1 and 2 they stay from a step's first forward to its last backward, and
    `true` is refused."""
    prefetch: NonNegativeInt = 1
    """How many blocks ahead parameters are gathered, in forward and in backward; each costs the memory of one
    gathered block."""
    param_dtype: Literal["none", "bf16", "fp16"] = "none"
    """Gather parameters and compute in this type, for half the bytes; must be `train.dtype`. The optimizer
    updates them in the type that they are stored in. `"none"`: gather them in that type."""
    reduce_dtype: Literal["auto", "fp32"] = "auto"
    """Type in which gradients are summed over ranks. `"auto"`: fp32 where `param_dtype` is narrower, else
    that of the stored parameters."""
    offload_folder: str | None = None
    """Where `layout.offload = "disk"` keeps its files, on a disk and not in memory. Default: a folder of its
    own under the system's temporary folder. Removed at the end of the run."""


class DdpSection(Section):
    """Settings of `torch.nn.parallel.DistributedDataParallel`; change speed, not the result."""

    bucket_cap_mb: PositiveFloat = 25.0
    """Gradients are reduced in buckets of about so many MiB."""
    static_graph: bool = False
    """Promise that every step uses the same parameters in the same way; lets DDP skip searches."""
    find_unused_parameters: bool = False
    """Search the graph of every step for parameters without a gradient, so that their sums start during
    backward and not after it. Steps may leave parameters out without it too."""
    broadcast_buffers: bool = False
    """Copy rank 0's buffers to all ranks before every forward. BatchNorm's running statistics are
    merged over all microbatches in any case and do not need it."""
    gradient_as_bucket_view: bool = True
    """Let gradients be views of the buckets, which saves a copy of them."""

    @model_validator(mode="after")
    def _check(self) -> DdpSection:
        if self.static_graph and self.find_unused_parameters:
            raise broken_rule(
                "PL115",
                "ddp.static_graph=true with ddp.find_unused_parameters=true.",
                "With a static graph, DDP does not search for unused parameters.",
                "Set one of them.",
            )
        return self
