"""Makes `ModelCosts` of a recipe by arithmetic, without torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from paceline.errors import PacelineError
from paceline.plan.cluster import check_number
from paceline.plan.costs import Kept, ModelCosts, ModelPart, Product, Transformer, of_transformer
from paceline.plan.model_state import read_sizes
from paceline.plan.parameters import Parameter, list_parameters
from paceline.recipe import Recipe
from paceline.recipe.facts import NUM_CLASSES, count_vocab
from paceline.recipe.hf_model import HfModel
from paceline.recipe.own_sections import OwnModel
from paceline.recipe.schema import (
    DecoderFields,
    MaskedTextData,
    MoeModel,
    ResnetModel,
    TextData,
    default_ffn_hidden,
)

_BEFORE = ("embed_tokens", "tokens", "positions", "stem")


def of_recipe(recipe: Recipe, vocab_size: int | None = None) -> ModelCosts:
    """Return the costs of a recipe.

    Args:
        recipe: what is trained.
        vocab_size: token ids; needed where a tokenizer file says how many there are.

    Raises:
        PacelineError: PL928 if the number of token ids is not known.
    """
    train, number = recipe.train, {"fp64": 8, "fp32": 4}.get(recipe.train.dtype, 2)
    residual = 8 if number == 8 else 4
    narrow = number == 2
    vocab_size = find_vocab(recipe, vocab_size)
    parameters: dict[str, list[Parameter]] = {"before": [], "after": []}
    for parameter in list_parameters(recipe, vocab_size):
        outside = "before" if parameter.name.split(".")[0].startswith(_BEFORE) else "after"
        parameters.setdefault(parameter.block or outside, []).append(parameter)
    tokens, loss = 1, 0.0
    if isinstance(recipe.model, ResnetModel):
        parts = tuple(_list_images(recipe.model, recipe, parameters, number))
    else:
        assert isinstance(recipe.data, TextData | MaskedTextData)
        assert vocab_size is not None
        tokens = recipe.data.seq_len
        parts = of_transformer(_read_sizes(recipe, vocab_size, residual, number), parameters)
        loss = tokens * vocab_size * (number + 2 * residual)
    return ModelCosts(
        name=recipe.model.kind,
        before=parts[0],
        blocks=parts[1:-1],
        after=parts[-1],
        tied=tuple(parameters["before"]) if getattr(recipe.model, "tie_embeddings", False) else (),
        loss_bytes=loss,
        sizes=read_sizes(recipe),
        dtype_bytes=number,
        global_batch=train.global_batch_size,
        microbatch=train.microbatch_size,
        tokens=tokens,
        clips=train.clip_norm > 0,
        bucket_bytes=max(1, int(recipe.ddp.bucket_cap_mb * (1 << 20))),
        prefetch=recipe.shard.prefetch,
        copies_weights=narrow and recipe.shard.param_dtype == "none",
        eager=not train.compile,
        remarks=tuple(_list_remarks(recipe)),
        is_transformer=not isinstance(recipe.model, ResnetModel),
    )


def _list_remarks(recipe: Recipe) -> Iterator[str]:
    if recipe.compress.kind != "none":
        kind = recipe.compress.kind
        yield f"compress.kind={kind} is planned as whole gradients: sums take less time, and memory more"
    if recipe.islands.count > 1:
        count, every = recipe.islands.count, recipe.islands.every
        yield f"{count} islands are planned as plain training: they sum every {every} steps, and need memory"
    if recipe.asynchronous.staleness:
        yield "asynchronous updates are planned as synchronous steps, which wait for the slowest rank"
    if recipe.train.reduction == "exact":
        yield "the exact reduction is planned as two sums; no published run has it"
    if isinstance(recipe.model, MoeModel):
        yield "experts are planned as equally full: with ep, ranks of fuller ones need more memory and time"
    if recipe.optimizer.kind == "muon":
        yield "muon's products are not planned: its update takes longer"


def find_vocab(recipe: Recipe, vocab_size: int | None) -> int | None:
    """Return the token ids of a recipe's text, `None` for images.

    Raises:
        PacelineError: PL928 if only a tokenizer file says how many there are, PL932 for a number below 1.
    """
    data = recipe.data
    if vocab_size is not None:
        check_number("--vocab-size", vocab_size)
    if not isinstance(data, TextData | MaskedTextData) or vocab_size is not None:
        return vocab_size
    found = count_vocab(data)
    if found is None:
        raise PacelineError(
            "PL928",
            saw=f"data.tokenizer={data.tokenizer}, which is not read here.",
            rule="The size of the embedding follows from the number of token ids.",
            fix="Give it: --vocab-size 32000.",
        )
    return found


def _read_sizes(recipe: Recipe, vocab_size: int, residual: int, number: int) -> Transformer:
    model, data = recipe.model, recipe.data
    assert isinstance(data, TextData | MaskedTextData)
    assert not isinstance(model, ResnetModel | HfModel | OwnModel)
    drops = model.dropout > 0
    # torch's attention with dropout is one kernel on GPUs only.
    fused = not (drops and recipe.train.device == "cpu")
    if not isinstance(model, DecoderFields):
        inner = model.ffn_hidden or 4 * model.hidden
        return Transformer(
            model.layers, model.hidden, model.heads, model.heads, inner, vocab_size, data.seq_len,
            gated=False, causal=False, rms=False, drops=drops, fused=fused, residual=residual, number=number,
        )  # fmt: skip
    inner = model.ffn_hidden or default_ffn_hidden(model.hidden)
    sizes = Transformer(
        model.layers, model.hidden, model.heads, model.kv_heads or model.heads, inner, vocab_size,
        data.seq_len, drops=drops, fused=fused, residual=residual, number=number,
        plain=recipe.train.device == "cpu",
    )  # fmt: skip
    if not isinstance(model, MoeModel):
        return sizes
    return replace(
        sizes,
        expert_inner=model.expert_hidden or default_ffn_hidden(model.hidden),
        experts=model.experts,
        per_token=model.experts_per_token,
        shared=model.shared_hidden or 0,
        dense=model.dense_layers,
    )


def _list_images(
    model: ResnetModel, recipe: Recipe, parameters: dict[str, list[Parameter]], number: int
) -> Iterator[ModelPart]:
    side, channels, width = 8, 1, model.width
    made: dict[tuple[int, int, int], ModelPart] = {}

    def convolve(side: int, inputs: int, outputs: int, count: int, name: str) -> ModelPart:
        """Return a part of convolutions: the first of so many inputs, the others of outputs."""
        pixels = side * side
        products = [Product(pixels, 9 * inputs, outputs)]
        products += [Product(pixels, 9 * outputs, outputs)] * (count - 1)
        kept = pixels * number * (inputs + (2 * count - 1) * outputs)
        return ModelPart(
            tuple(products),
            moved_whole=pixels * outputs * number * 6 * count,
            calls=4 * count,
            kept=Kept(whole=kept),
            kept_selective=Kept(whole=pixels * number * (inputs + count * outputs)),
            input_bytes=pixels * number * inputs,
            work_bytes=2 * pixels * number * outputs,
            width_bytes=pixels * number * outputs,
            parameters=tuple(parameters[name]),
        )

    yield convolve(side, channels, width, 1, "before")
    at = 0
    for stage, count in enumerate(model.blocks):
        for place in range(count):
            inputs = width
            if stage > 0 and place == 0:
                width, side = 2 * width, -(-side // 2)
            part = convolve(side, inputs, width, 2, f"blocks.{at}")
            same = made.setdefault((side, inputs, width), part)
            yield replace(part, products=same.products)
            at += 1
    yield ModelPart((Product(1, width, NUM_CLASSES),), calls=6, parameters=tuple(parameters["after"]))
