"""Computes the bytes of model state on a rank under a layout, at named instants of an optimizer step.

State is what training keeps whatever the batch: parameters, gradients and optimizer state. With n = dp_shard,
zero = 1 divides the optimizer state by n, 2 the gradients too, 3 the parameters too (Rajbhandari et al. 2020,
"ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", section 3 and figure 1). tp divides
what it splits, and dp_replicate nothing. ep divides the experts, which dp_shard then leaves whole. The
paper's single number depends on the instant, because sharded parameters are gathered before use (torch's
`fully_shard`): hence the instants.

Not counted: activations, the batch, buffers of collectives in progress and the libraries' own memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from paceline.plan.parameters import Parameter, list_parameters
from paceline.recipe import Layout, Recipe

Instant = Literal["at_rest", "between", "after_forward", "after_backward", "after_step"]
# The numbers that an optimizer keeps for every number of a parameter, in the same type.
NUM_MOMENTS = {"adamw": 2, "muon": 2, "sgd with momentum": 1, "sgd": 0}


@dataclass(frozen=True)
class Memory:
    """The bytes on the rank with the lowest number on every axis, which never has less than another rank.

    Attributes:
        parameters: the rank's own: all, or its shards.
        gathered: whole parameters, gathered from the shards of all ranks for their use.
        gradients: of the parameters.
        set_aside: gradients of single microbatches that wait to be added in the exact order.
        optimizer: its state.
        offloaded: the part of all these that is in CPU memory or on disk.
    """

    parameters: int = 0
    gathered: int = 0
    gradients: int = 0
    set_aside: int = 0
    optimizer: int = 0
    offloaded: int = 0

    @property
    def total(self) -> int:
        """The sum, wherever it is stored."""
        return self.parameters + self.gathered + self.gradients + self.set_aside + self.optimizer

    @property
    def on_device(self) -> int:
        """The part that is on the device."""
        return self.total - self.offloaded


@dataclass(frozen=True)
class Sizes:
    """The sizes of numbers, and the properties of a step that memory depends on.

    Attributes:
        parameter: bytes of a stored number; gradients and moments have the same size.
        gathered: bytes of a gathered number.
        num_moments: numbers of optimizer state per parameter number.
        num_in_blocks: those of matrices in blocks, if they differ.
        num_microbatches: those that the rank computes per step.
        exact: whether gradients are added in the exact order.
        gradient: bytes of a number of a gradient, if they differ from the parameter's.
    """

    parameter: int = 4
    gathered: int = 4
    num_moments: int = 2
    num_in_blocks: int | None = None
    num_microbatches: int = 1
    exact: bool = False
    gradient: int | None = None

    @property
    def gradient_bytes(self) -> int:
        """Bytes of a number of a gradient."""
        return self.parameter if self.gradient is None else self.gradient


def plan_memory(
    parameters: Sequence[Parameter], layout: Layout, sizes: Sizes | None = None
) -> dict[Instant, Memory]:
    """Return what a rank holds from the second step on, when the optimizer has its state.

    Instants: `at_rest`, before a step, its gradients cleared; `between`, after the backward of the second to
    last microbatch (as at rest if there is only one); `after_forward` and `after_backward` of the last
    microbatch; `after_step`, while gradients are still held.

    Args:
        parameters: that are trained, whole.
        layout: resolved.
        sizes: of numbers; by default fp32 and AdamW, one microbatch per rank and step, the fast reduction.
    """
    sizes = sizes or Sizes()
    num_shards = layout.dp_shard
    shared = [p for p in parameters if layout.ep > 1 and p.is_expert]
    cut = [p for p in parameters if p not in shared]
    own = sum(count_own(p.divide(layout.tp), num_shards) for p in cut)
    padded = sum(count_padded(p.divide(layout.tp), num_shards) for p in cut)
    experts = sum(math.prod(p.divide(layout.tp, layout.ep)) for p in shared)
    # Of each source of tokens apart: together as much as for all experts, unless ranks of cp share them.
    apart = padded + experts * layout.ep_data
    root = sum(count_padded(p.divide(layout.tp), num_shards) for p in cut if p.block == "")
    shards = (padded // num_shards + experts) * sizes.parameter
    optimizer = (own + experts) * sizes.parameter * sizes.num_moments
    if sizes.num_in_blocks is not None:
        matrices = sum(count_own(p.divide(layout.tp), num_shards) for p in cut if p.is_matrix_in_block)
        fewer = sizes.num_moments - sizes.num_in_blocks
        optimizer -= (matrices + experts) * sizes.parameter * fewer
    keeps = layout.zero < 3
    accumulates = sizes.num_microbatches > 1
    held = _count_held(layout, sizes) * (padded // num_shards) * sizes.gradient_bytes
    if sizes.num_microbatches > 1 and not sizes.exact:
        held += experts * sizes.gradient_bytes
    aside = 0
    if sizes.exact:
        sends_rows = layout.count_turns(is_exact=True) > 1
        kept = padded // num_shards if sends_rows else apart
        # A tree has added up pairs, as a binary counter carries (`comm/tree.py`).
        aside = (sizes.num_microbatches - 1).bit_count() * kept * sizes.gradient_bytes

    def memory(*, gathered: int = 0, gradients: int = 0, set_aside: int = 0) -> Memory:
        offloaded = shards + optimizer + gradients if layout.offload != "none" else 0
        return Memory(shards, gathered * sizes.gathered, gradients, set_aside, optimizer, offloaded)

    done = memory(gradients=shards // sizes.parameter * sizes.gradient_bytes)
    # Gradients are views of DDP's buckets, which stay from step to step.
    at_rest = memory(gradients=_count_buckets(parameters, layout) * sizes.gradient_bytes)
    if num_shards == 1:
        # Sums of earlier microbatches are not in DDP's buckets yet.
        between = after_forward = memory(gradients=held + at_rest.gradients, set_aside=aside)
    else:
        stays = padded if layout.zero < 3 and accumulates else 0
        between = memory(gathered=stays, gradients=held, set_aside=aside)
        after_forward = memory(gathered=padded if keeps else root, gradients=held, set_aside=aside)
    return {
        "at_rest": at_rest,
        "between": between,
        "after_forward": after_forward,
        "after_backward": done,
        "after_step": done,
    }


def _count_buckets(parameters: Sequence[Parameter], layout: Layout) -> int:
    if layout.dp_shard > 1 or layout.num_replicas == 1 or layout.pp > 1:
        return 0
    # Experts that ranks share are in none.
    replicated = [p for p in parameters if layout.ep == 1 or not p.is_expert]
    return sum(math.prod(p.divide(layout.tp)) for p in replicated)


def _count_held(layout: Layout, sizes: Sizes) -> int:
    """Return how many times this rank's part of the gradients is held for a step's earlier microbatches."""
    if sizes.num_microbatches == 1 or (sizes.exact and layout.dp_shard == 1):
        return 0  # none, or set aside
    if layout.zero == 1 and layout.pp == 1 and not sizes.exact:
        return layout.dp_shard  # they add up whole
    # With replicas, the sum over dp_shard waits in its own memory for the sum over dp_replicate.
    waits = layout.dp_shard > 1 and layout.num_replicas > 1 and not sizes.exact
    return 2 if waits else 1


def plan_recipe_memory(
    recipe: Recipe, layout: Layout, vocab_size: int | None = None
) -> dict[Instant, Memory]:
    """Return `plan_memory` of a recipe's model, optimizer, types and microbatches, for rank 0.

    Args:
        recipe: what is trained.
        layout: resolved.
        vocab_size: as for `list_parameters`.
    """
    num_microbatches = -(-recipe.train.global_batch_size // recipe.train.microbatch_size)
    sizes = replace(read_sizes(recipe), num_microbatches=-(-num_microbatches // layout.dp))
    return plan_memory(list_parameters(recipe, vocab_size), layout, sizes)


def read_sizes(recipe: Recipe) -> Sizes:
    """Return the sizes of a recipe's numbers; microbatches follow from the layout."""
    train, shard = recipe.train, recipe.shard
    width = 8 if train.dtype == "fp64" else 4
    kind: str = recipe.optimizer.kind
    if recipe.optimizer.kind == "sgd" and recipe.optimizer.momentum:
        kind = "sgd with momentum"
    return Sizes(
        parameter=width,
        gathered=width if shard.param_dtype == "none" else 2,
        num_moments=NUM_MOMENTS[kind],
        num_in_blocks=1 if kind == "muon" else None,
        exact=train.reduction == "exact",
    )


def count_padded(shape: Iterable[int], num_shards: int) -> int:
    """Return the stored size of a parameter, with its rows padded to a multiple of the shards."""
    rows, *rest = shape
    return -(-rows // num_shards) * num_shards * math.prod(rest)


def count_own(shape: Iterable[int], num_shards: int) -> int:
    """Return the size of a parameter's first shard, the largest."""
    return count_padded(shape, num_shards) // num_shards
