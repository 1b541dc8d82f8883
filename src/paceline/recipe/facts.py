"""The facts about a model and a run that the rules of `legal.py` use, whatever their source."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.recipe.hf_model import HfModel
from paceline.recipe.own_sections import OwnModel
from paceline.recipe.schema import (
    DdpSection,
    DecoderFields,
    EncoderModel,
    MaskedTextData,
    MoeModel,
    Recipe,
    ResnetModel,
    ShardSection,
    TextData,
    default_ffn_hidden,
)

NUM_CLASSES = 10  # of digits
NUM_BYTES = 256


@dataclass(frozen=True)
class ModelFacts:
    """The sizes of a model that limit its layouts. `None` is unknown: rules that need the number are skipped.

    Attributes:
        splits: whether it has matrix products that tp can divide.
        heads: query heads of its attention.
        kv_heads: key and value heads.
        inner: widths that tp would divide besides the heads, each with the name that messages call it by.
        vocab_size: token ids of the embedding and of the logits.
        seq_len: tokens of a sample.
        max_rows: the largest first dimension among its parameters: dp_shard divides these.
        num_blocks: repeated blocks, which recompute works on.
        num_cuts: places at which pp can cut it, each before the call of a block.
        num_experts: of each mixture, or their greatest common divisor; 0 for a model without mixtures.
        has_router: whether it sorts the tokens of a microbatch, among all positions.
    """

    splits: bool = True
    heads: int | None = None
    kv_heads: int | None = None
    inner: tuple[tuple[str, int], ...] = ()
    vocab_size: int | None = None
    seq_len: int | None = None
    max_rows: int | None = None
    num_blocks: int | None = None
    num_cuts: int | None = None
    num_experts: int | None = None
    has_router: bool | None = None


@dataclass(frozen=True)
class RunFacts:
    """The other properties of a run with which a layout must be compatible.

    Attributes:
        dtype: of the training, as `train.dtype`.
        device: as `train.device`; `"auto"` is "not known".
        num_microbatches: of a global batch that ranks share out, if known.
        ddp: settings of the replication.
        shard: settings of the sharding.
    """

    dtype: str = "fp32"
    reduction: str = "exact"
    device: str = "auto"
    num_microbatches: int | None = None
    ddp: DdpSection = field(default_factory=DdpSection)
    shard: ShardSection = field(default_factory=ShardSection)
    compile: bool = False


def read_facts(recipe: Recipe) -> tuple[ModelFacts, RunFacts]:
    """Return the facts of a recipe; nothing is built or read from disk.

    The vocabulary of a tokenizer file is not known here.
    """
    train = recipe.train
    run = RunFacts(
        dtype=train.dtype,
        reduction=train.reduction,
        device=train.device,
        num_microbatches=None
        if recipe.asynchronous.staleness  # each rank computes a whole one
        else -(-train.global_batch_size // train.microbatch_size),
        ddp=recipe.ddp,
        shard=recipe.shard,
        compile=train.compile,
    )
    if isinstance(recipe.model, HfModel | OwnModel):
        return ModelFacts(), run  # the model itself tells, once it is built
    if isinstance(recipe.model, ResnetModel):
        return _read_resnet(recipe.model), run
    assert isinstance(recipe.data, TextData | MaskedTextData)
    return _read_transformer(recipe.model, recipe.data), run


def count_vocab(data: TextData | MaskedTextData) -> int | None:
    """Return the token ids of a text, the mask token included; `None` if a tokenizer file defines them."""
    of_text = {"bytes": NUM_BYTES, "bpe": data.vocab_size}.get(data.tokenizer)
    return of_text if of_text is None else of_text + isinstance(data, MaskedTextData)


def _read_transformer(model: DecoderFields | EncoderModel, data: TextData | MaskedTextData) -> ModelFacts:
    vocab_size = count_vocab(data)
    if isinstance(model, DecoderFields):
        ffn_hidden = model.ffn_hidden or default_ffn_hidden(model.hidden)
        kv_heads, rows = model.kv_heads or model.heads, [model.hidden, ffn_hidden]
    else:
        ffn_hidden = model.ffn_hidden or 4 * model.hidden
        kv_heads, rows = model.heads, [3 * model.hidden, ffn_hidden, data.seq_len]
    inner = [("model.ffn_hidden", ffn_hidden)]
    if isinstance(model, MoeModel):
        # Experts stay whole under tp.
        inner = inner if model.dense_layers else []
        rows = [model.hidden, model.experts, *(size for _, size in inner), *_list_shared(model)]
        inner += [("model.shared_hidden", size) for size in _list_shared(model)]
    return ModelFacts(
        heads=model.heads,
        kv_heads=kv_heads,
        inner=tuple(inner),
        vocab_size=vocab_size,
        seq_len=data.seq_len,
        max_rows=None if vocab_size is None else max(vocab_size, *rows),
        num_blocks=model.layers,
        num_cuts=model.layers,
        num_experts=model.experts if isinstance(model, MoeModel) else 0,
        has_router=isinstance(model, MoeModel),
    )


def _list_shared(model: MoeModel) -> list[int]:
    return [] if model.shared_hidden is None else [model.shared_hidden]


def _read_resnet(model: ResnetModel) -> ModelFacts:
    return ModelFacts(
        splits=False,
        max_rows=max(NUM_CLASSES, model.width * 2 ** (len(model.blocks) - 1)),
        num_blocks=sum(model.blocks),
        num_cuts=sum(model.blocks),
        num_experts=0,
    )
