"""Lists the collectives of a recipe's step and the bytes that a rank sends, by axis, where tests count them.

The rank is the one with the lowest number on every axis, which has the most microbatches. A row without
bytes names the reason. Not counted at all: the agreement of a step, comparisons of copies, and checkpoints.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from paceline.errors import PacelineError
from paceline.plan.calls import StepCall, all_gather, all_reduce, count_sent
from paceline.plan.memory import Sizes, count_own
from paceline.plan.parameters import Parameter, list_parameters
from paceline.plan.traffic import (
    list_cp_calls,
    list_data_calls,
    list_ep_calls,
    list_exact_calls,
    list_tp_calls,
)
from paceline.recipe import Layout, Recipe
from paceline.recipe.facts import count_vocab
from paceline.recipe.schema import DecoderFields, MaskedTextData, MoeModel, TextData


@dataclass(frozen=True)
class AxisTraffic:
    """The collectives over one axis in one step.

    Attributes:
        axis: of the layout.
        degree: its number of ranks.
        num_bytes: that a rank sends; `None` if no tested formula covers this run.
        what: that is sent, or the reason why it is not counted.
        calls: that send the bytes.
    """

    axis: str
    degree: int
    num_bytes: float | None
    what: str
    calls: tuple[StepCall, ...] = ()


_Listed = tuple[list[StepCall] | None, str]


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
        "dp_replicate": _list_replicas,
        "dp_shard": _list_shards,
        "cp": _list_cp,
        "tp": _list_tp,
        "ep": _list_ep,
    }
    found = []
    for axis, degree in layout.list_several().items():
        listed: _Listed = (None, "a rank's part of the model depends on where pp cuts it")
        if layout.pp == 1:
            listed = rows[axis](recipe, layout, parameters)
        calls, what = listed
        num_bytes = None if calls is None else count_sent(calls)
        found.append(AxisTraffic(axis, degree, num_bytes, what, tuple(calls or ())))
    return found


def _count_microbatches(recipe: Recipe) -> int:
    """Return the microbatches of a global batch."""
    return -(-recipe.train.global_batch_size // recipe.train.microbatch_size)


def _count_own_microbatches(recipe: Recipe, layout: Layout) -> int:
    return -(-_count_microbatches(recipe) // layout.dp)


def _count_subtrees(stop: int, num_leaves: int) -> int:
    """Return the whole subtrees in the first microbatches, as `comm/tree.py` divides them.

    Args:
        stop: number of these.
        num_leaves: microbatches of the whole tree.
    """
    return 1 if stop >= num_leaves else stop.bit_count()


def _list_samples(recipe: Recipe, layout: Layout) -> dict[int, int]:
    """Return the sizes of the rank's microbatches in samples, and how many have each size."""
    size, left = recipe.train.microbatch_size, recipe.train.global_batch_size
    own = range(_count_own_microbatches(recipe, layout))
    return Counter(min(size, left - number * size) for number in own)


def _number_bytes(recipe: Recipe) -> int:
    """Return the bytes of a number of a parameter or gradient."""
    return 8 if recipe.train.dtype == "fp64" else 4


def _bucket_bytes(recipe: Recipe) -> int:
    return max(1, int(recipe.ddp.bucket_cap_mb * (1 << 20)))


def _list_data(recipe: Recipe, layout: Layout, parameters: list[Parameter]) -> dict[str, list[StepCall]]:
    shard, number = recipe.shard, _number_bytes(recipe)
    keeps = shard.reshard_after_forward
    sizes = Sizes(
        parameter=number,
        gathered=number if shard.param_dtype == "none" else 2,
        num_microbatches=_count_own_microbatches(recipe, layout),
        keeps_gathered=None if keeps == "auto" else not keeps,
    )
    return list_data_calls(parameters, layout, sizes, _bucket_bytes(recipe))


def _list_replicas(recipe: Recipe, layout: Layout, parameters: list[Parameter]) -> _Listed:
    if recipe.compress.kind != "none":
        return None, "compressed gradients have no tested formula"
    if recipe.train.reduction == "fast":
        return _list_data(recipe, layout, parameters)["dp_replicate"], "gradients, once per step"
    if layout.dp_shard > 1 or layout.ep > 1:
        return None, "exact sums of shards and experts have no tested formula; train.reduction=fast has one"
    num_leaves = _count_microbatches(recipe)
    calls = list_exact_calls(
        parameters,
        layout,
        num_subtrees=_count_subtrees(_count_own_microbatches(recipe, layout), num_leaves),
        number=_number_bytes(recipe),
        bucket_bytes=_bucket_bytes(recipe),
    )
    return calls, "gradients, once per step; in the order of a tree"


def _list_shards(recipe: Recipe, layout: Layout, parameters: list[Parameter]) -> _Listed:
    if recipe.compress.kind != "none":
        return None, "compressed gradients have no tested formula"
    if recipe.train.reduction == "exact":
        return None, "exact sums of shards have no tested formula; train.reduction=fast has one"
    return _list_data(recipe, layout, parameters)["dp_shard"], "parameters, and gradients for their shards"


def _list_tp(recipe: Recipe, layout: Layout, parameters: list[Parameter]) -> _Listed:
    if reason := _doubt(recipe, layout):
        return None, reason
    if recipe.model.kind != "gpt" or layout.cp > 1 or layout.ep > 1:
        return None, "counted for gpt, without cp and ep"
    assert isinstance(recipe.model, DecoderFields)
    assert isinstance(recipe.data, TextData)
    n, calls = layout.tp, list[StepCall]()
    for num_samples, times in _list_samples(recipe, layout).items():
        tokens = num_samples * recipe.data.seq_len
        width = tokens * recipe.model.hidden
        calls += list_tp_calls(
            layout, num_blocks=recipe.model.layers, num_numbers=width, num_microbatches=times
        )
        # The sum behind the embedding, and that of the gradient of the head's input.
        calls.append(all_reduce(4 * width, "tp", n, 2 * times))
        # Of the loss: the largest number of each token, then the sum of its weights and the chosen one.
        calls += [all_reduce(4 * numbers * tokens, "tp", n, times) for numbers in (1, 2)]
        if layout.sequence:
            calls.append(all_gather(4 * width, "tp", n, 2 * times))
    if layout.sequence:
        # Each rank has the gradients of its part of the sequence.
        norms = [p for p in parameters if p.block and p.tp_dim is None]
        calls.append(all_reduce(_own_bytes(norms, layout), "tp", n))
    return calls, "activations, forward and backward"


def _list_cp(recipe: Recipe, layout: Layout, parameters: list[Parameter]) -> _Listed:
    if reason := _doubt(recipe, layout):
        return None, reason
    if not isinstance(recipe.model, DecoderFields) or layout.tp > 1:
        return None, "counted for gpt and moe, without tp"
    assert isinstance(recipe.data, TextData)
    model, calls = recipe.model, list[StepCall]()
    if layout.cp_by == "auto":
        divides = not model.heads % layout.cp and not (model.kv_heads or model.heads) % layout.cp
        layout = replace(layout, cp_by="heads" if divides else "gather")
    for num_samples, times in _list_samples(recipe, layout).items():
        numbers = num_samples * recipe.data.seq_len * model.hidden
        calls += list_cp_calls(
            layout,
            num_blocks=model.layers,
            num_numbers=numbers,
            num_keys=numbers // model.heads * (model.kv_heads or model.heads),
            num_mixtures=len(_list_mixtures(recipe)),
            num_microbatches=times,
        )
    # Each rank has the gradients of its part of the sequence, except in a mixture, which gets whole ones.
    mixtures = tuple(f"layers.{number}.mlp." for number in _list_mixtures(recipe))
    partial = [p for p in parameters if p.block and not p.name.startswith(mixtures)]
    calls.append(all_reduce(_own_bytes(partial, layout), "cp", layout.cp))
    return calls, "activations, keys and values; gradients once per step"


def _list_ep(recipe: Recipe, layout: Layout, parameters: list[Parameter]) -> _Listed:
    assert isinstance(recipe.model, MoeModel)
    assert isinstance(recipe.data, TextData)
    if recipe.train.dtype not in ("fp32", "bf16"):
        return None, "counted for fp32 and bf16"
    calls = list[StepCall]()
    for num_samples, times in _list_samples(recipe, layout).items():
        calls += list_ep_calls(
            layout,
            num_mixtures=len(_list_mixtures(recipe)),
            num_rows=num_samples * recipe.data.seq_len * recipe.model.experts_per_token,
            width=recipe.model.hidden,
            num_experts=recipe.model.experts,
            num_microbatches=times,
            number=2 if recipe.train.dtype == "bf16" else 4,
        )
    return calls, "tokens to experts and back, if all experts are equally full"


def _own_bytes(parameters: list[Parameter], layout: Layout) -> int:
    """Return the bytes of the rank's part of parameters in fp32."""
    return 4 * sum(count_own(p.divide(layout.tp), layout.dp_shard) for p in parameters)


def _list_mixtures(recipe: Recipe) -> range:
    """Return the numbers of the blocks that have a mixture."""
    model = recipe.model
    return range(model.dense_layers, model.layers) if isinstance(model, MoeModel) else range(0)


def _doubt(recipe: Recipe, layout: Layout) -> str | None:
    """Return why activations between ranks have no tested formula, if they have none."""
    if recipe.train.dtype != "fp32":
        return "counted for fp32"
    return "counted without recompute, which sends again" if layout.recompute != "none" else None
