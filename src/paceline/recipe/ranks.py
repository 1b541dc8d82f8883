"""The tables of a recipe that define how ranks work together: [layout], [shard] and [ddp]."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, PositiveFloat, create_model, model_validator

from paceline.errors import PacelineError
from paceline.recipe.axes import AXES, OPEN, list_axes
from paceline.recipe.layout import (
    MOST_CHUNKS,
    SCHEDULES,
    Attending,
    Layout,
    Offload,
    Recompute,
    Zero,
    check_degree,
    check_open,
)
from paceline.recipe.section import NonNegativeInt, PositiveInt, Section, broken_rule

if TYPE_CHECKING:
    _DegreesSection = Section
else:
    # One key per axis of the table, so that a new axis needs no line here.
    _DegreesSection = create_model(
        "_DegreesSection",
        __base__=Section,
        **{
            axis.name: (
                PositiveInt | Literal["auto"] if axis.stretches else PositiveInt,
                Field("auto" if axis.name == OPEN else getattr(Layout, axis.name), description=axis.help),
            )
            for axis in AXES
        },
    )


class LayoutSection(_DegreesSection):
    """Numbers of ranks along the axes of parallelism; the product of these degrees is the number of ranks.

    Affects speed and memory, not the result. `docs/layouts.md` explains how to choose.
    """

    zero: Zero = Layout.zero
    """State that `dp_shard` divides: 1 optimizer state, 2 also gradients, 3 also parameters."""
    sequence: bool = Layout.sequence
    """Under `tp`, divide the activations between blocks along the sequence."""
    recompute: Recompute = Layout.recompute
    """Activations that backward recomputes instead of keeping them: `"none"`, `"block"` (all of each block),
    or `"selective"` (all except matrix products and attention)."""
    offload: Offload = Layout.offload
    """Place in which `dp_shard` keeps parameters and optimizer state between uses: `"none"` (the device)
    or `"cpu"` (the CPU's memory)."""
    cp_by: Attending = Layout.cp_by
    """Way in which ranks of `cp` attend to others' positions: `"heads"` (each has whole sequences of some
    heads; any attention code works), `"gather"` (each gathers keys and values for its own positions; `cp`
    may exceed the key and value heads, and attention must be torch's function), or `"auto"` (heads if `cp`
    divides them, else gather)."""
    schedule: str = Layout.schedule
    """The order in which ranks of `pp` run forwards and backwards. `"1f1b"` and `"gpipe"` have one stage per
    rank. `"interleaved"` and `"bfs"` go around the ranks `chunks` times. `"zero_bubble"` and
    `"zbv"` compute the gradients of weights apart. `paceline plan schedule` draws them all."""
    chunks: Annotated[PositiveInt, Field(le=MOST_CHUNKS)] = Layout.chunks
    """Stages of the model that each rank of `pp` holds; 2 or more for schedules that go around the ranks."""

    stages: str = Layout.stages
    """Cuts of the model: the names of the modules that all stages but the first begin with, joined by `+`
    (`"blocks.2+blocks.5"`). `""`: the cut is found from the operations of a trial forward."""

    @model_validator(mode="before")
    @classmethod
    def _close_copies(cls, table: Any) -> Any:
        """Leave only `dp_shard` open where a recipe does: copies that it does not mention are then closed."""
        if not isinstance(table, dict) or table.get("dp_shard") != "auto":
            return table
        if OPEN in table or not isinstance(table.get("ep", 1), int):
            return table
        return {**table, OPEN: Layout(dp_shard=None, ep=table.get("ep", 1)).dp_replicate}  # type: ignore[arg-type]

    @model_validator(mode="after")
    def _check(self) -> LayoutSection:
        if self.schedule not in SCHEDULES:
            raise broken_rule(
                "PL118",
                f"layout.schedule={self.schedule} was given.",
                f"schedule is one of {', '.join(SCHEDULES)}.",
                "Leave it out for schedule=1f1b, or use one of these.",
            )
        try:
            check_open([axis for axis in list_axes(stretches=True) if getattr(self, axis) == "auto"])
            for axis in list_axes():
                degree = getattr(self, axis)
                check_degree(axis, 1 if degree == "auto" else degree)
        except PacelineError as error:
            raise broken_rule(error.code, error.saw, error.rule, error.fix) from None
        return self

    def to_layout(self) -> Layout:
        """Return the `Layout`; a degree of `"auto"` becomes `None` until the number of ranks is known."""
        given = {field.name: getattr(self, field.name) for field in fields(Layout)}
        is_open = {name: getattr(self, name) == "auto" for name in list_axes(stretches=True)}
        values: dict[str, Any] = {name: None if is_open.get(name) else value for name, value in given.items()}
        return Layout(**values)

    @classmethod
    def of(cls, layout: Layout) -> LayoutSection:
        """Return the section for a layout, the inverse of `to_layout`."""
        given = {field.name: getattr(layout, field.name) for field in fields(layout)}
        values: dict[str, Any] = {name: "auto" if value is None else value for name, value in given.items()}
        return cls(**values)


class ShardSection(Section):
    """The settings of `dp_shard` (torch's `fully_shard`); refused if `layout.dp_shard` is 1.

    They affect speed and memory. Only `param_dtype` and `reduce_dtype` affect the result.
    """

    prefetch: NonNegativeInt = 1
    """Number of blocks whose parameters are gathered ahead, in forward and in backward. Each costs the memory
    of one gathered block."""
    param_dtype: Literal["none", "bf16", "fp16"] = "none"
    """Type in which parameters are gathered and used, which halves the bytes; must be `train.dtype`. The
    optimizer still updates them in the type in which they are stored. `"none"`: the stored type."""
    reduce_dtype: Literal["auto", "fp32"] = "auto"
    """Type in which gradients are summed over ranks. `"auto"`: fp32 if `param_dtype` is narrower, otherwise
    the type of the stored parameters."""


class DdpSection(Section):
    """The settings of `torch.nn.parallel.DistributedDataParallel`; they affect speed, not the result."""

    bucket_cap_mb: PositiveFloat = 25.0
    """Size in MiB of the buckets in which gradients are reduced."""
    find_unused_parameters: bool = False
    """Search the graph of every step for parameters without a gradient, so that their sums start during
    backward and not after it. Steps may leave parameters unused without this setting too."""
    gradient_as_bucket_view: bool = True
    """Let gradients be views of the buckets, which saves a copy of them."""
