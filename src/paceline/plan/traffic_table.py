"""Computes the bytes that a rank of a recipe sends per step, axis by axis, where the formula is tested.

The rank is the one with the lowest number on every axis, which has the most microbatches. A row without
bytes names the reason. Not counted at all: the agreement of a step, comparisons of copies, and checkpoints.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from paceline.errors import PacelineError
from paceline.plan.memory import Sizes
from paceline.plan.parameters import Parameter, list_parameters
from paceline.plan.traffic import plan_cp_traffic, plan_ep_traffic, plan_tp_traffic, plan_traffic
from paceline.recipe import Layout, Recipe
from paceline.recipe.facts import count_vocab
from paceline.recipe.schema import DecoderFields, MaskedTextData, MoeModel, TextData


@dataclass(frozen=True)
class AxisTraffic:
    """The bytes that a rank sends over one axis in one step.

    Attributes:
        axis: of the layout.
        degree: its number of ranks.
        num_bytes: `None` if no tested formula covers this run.
        what: that is sent, or the reason why it is not counted.
    """

    axis: str
    degree: int
    num_bytes: float | None
    what: str


def plan_recipe_traffic(recipe: Recipe, layout: Layout, vocab_size: int | None = None) -> list[AxisTraffic]:
    """Return a row for each axis of several ranks, in the order of the layout.

    Args:
        recipe: what is trained.
        layout: resolved and legal.
        vocab_size: token ids; needed where a tokenizer file says how many there are.

    Raises:
        PacelineError: PL928 if the number of token ids is not known.
    """
    if isinstance(recipe.data, TextData | MaskedTextData) and vocab_size is None:
        vocab_size = count_vocab(recipe.data)
        if vocab_size is None:
            raise PacelineError(
                "PL928",
                saw=f"data.tokenizer={recipe.data.tokenizer}, which is not read here.",
                rule="The size of the embedding follows from the number of token ids.",
                fix="Give it: --vocab-size 32000.",
            )
    parameters = list_parameters(recipe, vocab_size)
    rows = {
        "dp_replicate": _plan_replicas,
        "dp_shard": _plan_shards,
        "cp": _plan_cp,
        "tp": _plan_tp,
        "ep": _plan_ep,
    }
    found = []
    for axis, degree in layout.list_several().items():
        counted: _Counted = (None, "a rank's part of the model depends on where pp cuts it")
        if layout.pp == 1:
            counted = rows[axis](recipe, layout, parameters)
        found.append(AxisTraffic(axis, degree, *counted))
    return found


_Counted = tuple[float | None, str]


def _count_microbatches(recipe: Recipe, layout: Layout) -> int:
    num_microbatches = -(-recipe.train.global_batch_size // recipe.train.microbatch_size)
    return -(-num_microbatches // layout.dp)


def _count_samples(recipe: Recipe, layout: Layout) -> int:
    """Return the samples of a rank per step."""
    own = _count_microbatches(recipe, layout) * recipe.train.microbatch_size
    return min(own, recipe.train.global_batch_size)


def _plan_dp(recipe: Recipe, layout: Layout, parameters: list[Parameter]) -> dict[str, float]:
    shard, width = recipe.shard, 8 if recipe.train.dtype == "fp64" else 4
    keeps = shard.reshard_after_forward
    sizes = Sizes(
        parameter=width,
        gathered=width if shard.param_dtype == "none" else 2,
        num_microbatches=_count_microbatches(recipe, layout),
        keeps_gathered=None if keeps == "auto" else not keeps,
    )
    return plan_traffic(parameters, layout, sizes)


def _plan_replicas(recipe: Recipe, layout: Layout, parameters: list[Parameter]) -> _Counted:
    if recipe.compress.kind != "none":
        return None, "compressed gradients have no tested formula"
    if recipe.train.reduction == "fast":
        return _plan_dp(recipe, layout, parameters)["dp_replicate"], "gradients, once per step"
    if layout.dp_shard > 1 or layout.ep > 1:
        return None, "exact sums of shards and experts have no tested formula; train.reduction=fast has one"
    # Of the rank's chunks of each subtree, and of the sum, to all others (`comm/exchange.py`).
    num_subtrees = _count_microbatches(recipe, layout).bit_count()
    whole = sum(math.prod(p.divide(layout.tp)) for p in parameters)
    width = 8 if recipe.train.dtype == "fp64" else 4
    sent = (num_subtrees + 1) * (layout.dp - 1) / layout.dp * whole * width
    return sent, "gradients, once per step; by messages (in shared memory: none)"


def _plan_shards(recipe: Recipe, layout: Layout, parameters: list[Parameter]) -> _Counted:
    if recipe.compress.kind != "none":
        return None, "compressed gradients have no tested formula"
    if recipe.train.reduction == "exact":
        return None, "exact sums of shards have no tested formula; train.reduction=fast has one"
    return _plan_dp(recipe, layout, parameters)["dp_shard"], "parameters, and gradients for their shards"


def _plan_tp(recipe: Recipe, layout: Layout, parameters: list[Parameter]) -> _Counted:
    if reason := _doubt(recipe, layout):
        return None, reason
    if recipe.model.kind != "gpt" or layout.cp > 1 or layout.ep > 1:
        return None, "counted for gpt, without cp and ep"
    assert isinstance(recipe.model, DecoderFields)
    assert isinstance(recipe.data, TextData)
    tokens = _count_samples(recipe, layout) * recipe.data.seq_len
    width = tokens * recipe.model.hidden
    blocks = plan_tp_traffic(layout, num_blocks=recipe.model.layers, num_numbers=width)
    # The sum behind the embedding, that of the gradient of the head's input, and three numbers per token of
    # the loss.
    ends = 4 * 2 * (layout.tp - 1) / layout.tp * (2 * width + 3 * tokens)
    what = "activations, forward and backward"
    if layout.sequence:
        what += "; without the gathers at both ends, and norms once per step"
    return blocks + ends, what


def _plan_cp(recipe: Recipe, layout: Layout, parameters: list[Parameter]) -> _Counted:
    if reason := _doubt(recipe, layout):
        return None, reason
    if not isinstance(recipe.model, DecoderFields) or layout.tp > 1:
        return None, "counted for gpt and moe, without tp"
    if layout.cp_by == "auto":
        return None, "counted for a layout.cp_by other than auto"
    assert isinstance(recipe.data, TextData)
    model = recipe.model
    numbers = _count_samples(recipe, layout) * recipe.data.seq_len * model.hidden
    sent = plan_cp_traffic(
        layout,
        num_blocks=model.layers,
        num_numbers=numbers,
        num_keys=numbers // model.heads * (model.kv_heads or model.heads),
        num_mixtures=_count_mixtures(recipe),
    )
    return sent, "activations, keys and values; without the sum of gradients once per step"


def _plan_ep(recipe: Recipe, layout: Layout, parameters: list[Parameter]) -> _Counted:
    assert isinstance(recipe.model, MoeModel)
    assert isinstance(recipe.data, TextData)
    if recipe.train.dtype not in ("fp32", "bf16"):
        return None, "counted for fp32 and bf16"
    sent = plan_ep_traffic(
        layout,
        num_mixtures=_count_mixtures(recipe),
        num_rows=_count_samples(recipe, layout) * recipe.data.seq_len * recipe.model.experts_per_token,
        width=recipe.model.hidden,
        number=2 if recipe.train.dtype == "bf16" else 4,
    )
    return sent, "tokens to experts and back, if all experts are equally full"


def _count_mixtures(recipe: Recipe) -> int:
    model = recipe.model
    return model.layers - model.dense_layers if isinstance(model, MoeModel) else 0


def _doubt(recipe: Recipe, layout: Layout) -> str | None:
    """Return why activations between ranks have no tested formula, if they have none."""
    if recipe.train.dtype != "fp32":
        return "counted for fp32"
    return "counted without recompute, which sends again" if layout.recompute != "none" else None
