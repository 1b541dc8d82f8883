"""Lists the parameters of a recipe's model by name and shape, without building it.

They are in the order and under the names of `named_parameters()`. tp divides them as Megatron-LM does
(Shoeybi et al. 2019, section 3): a matrix into heads or the inner width by its outputs, a matrix out of them
by its inputs, the vocabulary by its rows. Norms, positions and the biases after a sum stay whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from paceline.errors import PacelineError
from paceline.recipe import Recipe
from paceline.recipe.facts import NUM_CLASSES, count_vocab
from paceline.recipe.hf_model import HfModel
from paceline.recipe.own_sections import OwnModel
from paceline.recipe.schema import (
    DecoderFields,
    EncoderModel,
    MaskedTextData,
    MoeModel,
    ResnetModel,
    TextData,
    default_ffn_hidden,
)


@dataclass(frozen=True)
class Parameter:
    """The name and whole shape of one parameter.

    Attributes:
        name: full name.
        shape: on one rank alone.
        block: the block that it is gathered with under dp_shard; "" for what is outside of all blocks.
        tp_dim: the dimension that tp divides, if it divides any.
        is_expert: whether ep divides its first dimension, the experts.
    """

    name: str
    shape: tuple[int, ...]
    block: str = ""
    tp_dim: int | None = None
    is_expert: bool = False

    @property
    def is_matrix_in_block(self) -> bool:
        """Whether Muon updates it in recipes."""
        return self.block != "" and len(self.shape) > 1

    def divide(self, tp: int, ep: int = 1) -> tuple[int, ...]:
        """Return the shape of a rank's part; a dimension that tp does not divide stays whole."""
        if self.is_expert:
            return self.shape[0] // ep, *self.shape[1:]
        if self.tp_dim is None or self.shape[self.tp_dim] % tp != 0:
            return self.shape
        return tuple(size // tp if dim == self.tp_dim else size for dim, size in enumerate(self.shape))


def list_parameters(recipe: Recipe, vocab_size: int | None = None) -> list[Parameter]:
    """Return all parameters of a recipe's model, tied ones once.

    Args:
        recipe: what is trained.
        vocab_size: token ids; needed where a tokenizer file of the user's says how many there are.
    """
    model, data = recipe.model, recipe.data
    if isinstance(model, ResnetModel):
        return list(_list_resnet(model))
    if isinstance(model, HfModel | OwnModel):
        raise PacelineError(
            "PL934",
            saw=f"a recipe with model.kind={model.kind!r}.",
            rule="Plans know the parameters of recipes' own models; of others, they read a recording.",
            fix="Train it from a script and record some steps: paceline profile --nproc-per-node 2 "
            "train.py, then paceline plan train.py --recorded profile-1 --cluster ...",
        )
    assert isinstance(data, TextData | MaskedTextData)
    vocab_size = count_vocab(data) if vocab_size is None else vocab_size
    assert vocab_size is not None, "a tokenizer file: give vocab_size"
    if isinstance(model, DecoderFields):
        return list(_list_decoder(model, vocab_size))
    return list(_list_encoder(model, vocab_size, data.seq_len))


def count_parameters(parameters: list[Parameter]) -> int:
    """Return the total number of elements in parameters."""
    return sum(math.prod(parameter.shape) for parameter in parameters)


def _list_decoder(model: DecoderFields, vocab_size: int) -> Iterator[Parameter]:
    hidden, inner = model.hidden, model.ffn_hidden or default_ffn_hidden(model.hidden)
    kv = hidden // model.heads * (model.kv_heads or model.heads)
    yield Parameter("embed_tokens.weight", (vocab_size, hidden), tp_dim=0)
    for number in range(model.layers):
        block = f"layers.{number}"
        for name, shape, tp_dim in (
            ("input_layernorm", (hidden,), None),
            ("self_attn.q_proj", (hidden, hidden), 0),
            ("self_attn.k_proj", (kv, hidden), 0),
            ("self_attn.v_proj", (kv, hidden), 0),
            ("self_attn.o_proj", (hidden, hidden), 1),
            ("post_attention_layernorm", (hidden,), None),
        ):
            yield Parameter(f"{block}.{name}.weight", shape, block, tp_dim)
        if isinstance(model, MoeModel) and number >= model.dense_layers:
            yield from _list_mixture(model, block)
        else:
            yield from _list_feed_forward(f"{block}.mlp", hidden, inner, block)
    yield Parameter("norm.weight", (hidden,))
    if not model.tie_embeddings:
        yield Parameter("lm_head.weight", (vocab_size, hidden), tp_dim=0)


def _list_feed_forward(name: str, hidden: int, inner: int, block: str) -> Iterator[Parameter]:
    yield Parameter(f"{name}.gate_proj.weight", (inner, hidden), block, 0)
    yield Parameter(f"{name}.up_proj.weight", (inner, hidden), block, 0)
    yield Parameter(f"{name}.down_proj.weight", (hidden, inner), block, 1)


def _list_mixture(model: MoeModel, block: str) -> Iterator[Parameter]:
    """Yield router and experts, which tp leaves whole, and the shared expert."""
    hidden, name = model.hidden, f"{block}.mlp"
    inner = model.expert_hidden or default_ffn_hidden(hidden)
    yield Parameter(f"{name}.gate.weight", (model.experts, hidden), block)
    yield Parameter(f"{name}.experts.gate_up_proj", (model.experts, 2 * inner, hidden), block, None, True)
    yield Parameter(f"{name}.experts.down_proj", (model.experts, hidden, inner), block, None, True)
    if model.shared_hidden is not None:
        yield from _list_feed_forward(f"{name}.shared", hidden, model.shared_hidden, block)


def _list_encoder(model: EncoderModel, vocab_size: int, seq_len: int) -> Iterator[Parameter]:
    hidden, inner = model.hidden, model.ffn_hidden or 4 * model.hidden
    yield Parameter("tokens.weight", (vocab_size, hidden), tp_dim=0)
    yield Parameter("positions.weight", (seq_len, hidden))
    for number in range(model.layers):
        block = f"encoder.layers.{number}"
        for name, shape, tp_dim in (
            ("self_attn.in_proj_weight", (3 * hidden, hidden), 0),
            ("self_attn.in_proj_bias", (3 * hidden,), 0),
            ("self_attn.out_proj.weight", (hidden, hidden), 1),
            ("self_attn.out_proj.bias", (hidden,), None),
            ("linear1.weight", (inner, hidden), 0),
            ("linear1.bias", (inner,), 0),
            ("linear2.weight", (hidden, inner), 1),
            ("linear2.bias", (hidden,), None),
            ("norm1.weight", (hidden,), None),
            ("norm1.bias", (hidden,), None),
            ("norm2.weight", (hidden,), None),
            ("norm2.bias", (hidden,), None),
        ):
            yield Parameter(f"{block}.{name}", shape, block, tp_dim)
    yield Parameter("norm.weight", (hidden,))
    yield Parameter("norm.bias", (hidden,))
    yield Parameter("head.weight", (vocab_size, hidden), tp_dim=0)
    yield Parameter("head.bias", (vocab_size,), tp_dim=0)


def _list_resnet(model: ResnetModel) -> Iterator[Parameter]:
    width = model.width
    yield Parameter("stem.weight", (width, 1, 3, 3))
    yield Parameter("stem_norm.weight", (width,))
    yield Parameter("stem_norm.bias", (width,))
    number = 0
    for stage, num_blocks in enumerate(model.blocks):
        for place in range(num_blocks):
            num_in = width
            width *= 2 if stage > 0 and place == 0 else 1
            block = f"blocks.{number}"
            for name, shape in (
                ("conv1.weight", (width, num_in, 3, 3)),
                ("norm1.weight", (width,)),
                ("norm1.bias", (width,)),
                ("conv2.weight", (width, width, 3, 3)),
                ("norm2.weight", (width,)),
                ("norm2.bias", (width,)),
            ):
                yield Parameter(f"{block}.{name}", shape, block)
            number += 1
    yield Parameter("head.weight", (NUM_CLASSES, width))
    yield Parameter("head.bias", (NUM_CLASSES,))
