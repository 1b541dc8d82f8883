"""Models that the tests split, each with a batch and a way to run it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.models.encoder import Encoder
from paceline.models.gpt import Gpt
from paceline.recipe.schema import EncoderModel, GptModel


@dataclass(frozen=True)
class Case:
    """A model with a batch.

    Attributes:
        build: the model, in float64, with random weights; dropout is off.
        batch: what it runs on: four samples.
        run: (model, batch) to the output.
        share: the least part of the bytes of matrices that must be split at tp=2.
    """

    build: Callable[[], nn.Module]
    batch: Callable[[], dict[str, Tensor]]
    run: Callable[[nn.Module, dict[str, Tensor]], Any]
    share: float = 0.95


def _ids(length: int = 12, vocab: int = 96) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "ids": torch.randint(0, vocab, (4, length), generator=generator),
        "targets": torch.randint(0, vocab, (4, length), generator=generator),
    }


def _floats(*shape: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return {"x": torch.randn(*shape, dtype=torch.float64, generator=generator)}


def _gpt(**settings: Any) -> Callable[[], nn.Module]:
    return lambda: Gpt(GptModel(kind="gpt", layers=2, hidden=32, heads=4, **settings), 96, 16)


class LoraLinear(nn.Module):
    """A frozen linear layer beside two thin trained ones (Hu et al. 2021)."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Linear(base.in_features, rank, bias=False)
        self.b = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.base(x) + 2.0 * self.b(self.a(x))
        return result


def _lora() -> nn.Module:
    model = _gpt()()
    model.requires_grad_(False)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear) and name in ("q_proj", "v_proj", "o_proj", "down_proj"):
                setattr(module, name, LoraLinear(child, 4))
    return model


class NanoAttention(nn.Module):
    """Written as people write it: packed projection, sizes worked out from the input's width."""

    def __init__(self) -> None:
        super().__init__()
        self.n_head, self.n_embd = 4, 32
        self.c_attn, self.c_proj = nn.Linear(32, 96), nn.Linear(32, 32)
        self.norm = nn.LayerNorm(32)
        self.register_buffer("mask", torch.tril(torch.ones(16, 16)).view(1, 1, 16, 16))

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()  # noqa: N806
        q, k, v = self.c_attn(self.norm(x)).split(self.n_embd, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        att = (q @ k.transpose(-2, -1)) * (1.0 / k.size(-1) ** 0.5)
        att = att.masked_fill(self.mask[:, :, :T, :T] == 0, float("-inf")).softmax(dim=-1)
        y = (att @ v).transpose(1, 2).contiguous().view(B, T, C)
        result: Tensor = x + self.c_proj(y)
        return result


class NormedHeads(nn.Module):
    """Attention whose queries and keys are normed per head, by one weight that all heads share."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = 4
        self.q, self.k, self.v, self.o = (nn.Linear(32, 32) for _ in range(4))
        self.q_norm, self.k_norm = nn.RMSNorm(8), nn.RMSNorm(8)
        self.out_norm = nn.LayerNorm(32)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        split = lambda y: y.view(batch, length, self.heads, 8).transpose(1, 2)  # noqa: E731
        queries, keys = self.q_norm(split(self.q(x))), self.k_norm(split(self.k(x)))
        attended = F.scaled_dot_product_attention(queries, keys, split(self.v(x)))
        result: Tensor = x + self.out_norm(self.o(attended.transpose(1, 2).reshape(batch, length, 32)))
        return result


class ScaledEmbedding(nn.Embedding):
    """Computes more than its class."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 3.0


class AdaptedLinear(nn.Linear):
    """A linear layer and an adapter in one, as loralib writes it (Hu et al. 2021)."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.down = nn.Parameter(torch.randn(4, inputs) * 0.1)
        self.up = nn.Parameter(torch.randn(outputs, 4) * 0.1)

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight, self.bias) + input @ self.down.T @ self.up.T


class ScaledLinear(nn.Linear):
    """Changes its weight and its result."""

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight * 0.5, self.bias) * 3.0


class Conv1D(nn.Module):
    """Has the name and the weight of GPT-2's layer, and computes something else."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs) * 0.1)
        self.bias = nn.Parameter(torch.randn(outputs) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight)
        return 2.0 * rows.view(*x.shape[:-1], -1)


class OwnForwards(nn.Module):
    """Feed-forwards of layers that are not what their class or name says."""

    def __init__(self) -> None:
        super().__init__()
        self.table = ScaledEmbedding(96, 32, padding_idx=5)
        self.places = nn.Parameter(torch.randn(96, 32))
        self.ups = nn.ModuleList(nn.Linear(32, 64) for _ in range(4))
        self.downs = nn.ModuleList(
            [AdaptedLinear(64, 32), ScaledLinear(64, 32), Conv1D(64, 32), nn.Linear(64, 32)]
        )
        patched = self.downs[3]
        inner = patched.forward
        patched.forward = lambda x: inner(x) * 2.0  # type: ignore[method-assign]
        self.out = nn.Linear(32, 96, bias=False)
        self.out.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids) + F.embedding(ids, self.places, padding_idx=-1)
        for up, down in zip(self.ups, self.downs, strict=True):
            x = x + down(torch.tanh(up(x)))
        result: Tensor = self.out(x)
        return result


class AdaptedBlock(nn.Module):
    """A feed-forward whose second layer adds up in the middle of its own forward."""

    def __init__(self, last: nn.Module) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), last

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.down(torch.tanh(self.up(self.norm(x))))
        return result


class RelatedHeads(nn.Module):
    """Attention whose queries and keys are of a table too (DeBERTa), so that tp divides the values alone."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(32, 32) for _ in range(3))
        self.table, self.dropout = nn.Parameter(torch.randn(24, 32)), nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        def cut(tensor: Tensor) -> Tensor:
            return tensor.unflatten(-1, (4, 8)).transpose(1, 2)

        query, key, value = (cut(layer(x)) for layer in (self.query, self.key, self.value))
        places = torch.arange(x.shape[1])
        places = (places[:, None] - places).add(12).expand(query.shape[0], 4, -1, -1)
        related = query @ cut(self.key(self.table)[None]).transpose(2, 3)
        scores = query @ key.transpose(2, 3) + related.gather(3, places)
        return (self.dropout(scores.softmax(3)) @ value).transpose(1, 2).flatten(2)


class Residual(nn.Module):
    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.norm, self.first, self.second = nn.LayerNorm(32), *parts

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.first(self.norm(x))
        result: Tensor = x + self.second(x)
        return result


class Summed(nn.Module):
    """What tp cannot divide, and what mixes positions."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(32))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.scale).cumsum(1)


class Beside(nn.Module):
    """Two parts of a block that read the same tensor, of which tp divides one (Falcon with one key head)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.whole, self.divided = nn.LayerNorm(32), Summed(), _feed()

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        result: Tensor = x + self.whole(normed) + self.divided(normed)
        return result


class Alternating(nn.Module):
    """Layers whose residuals are outside of them."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.embedding, self.layers = nn.Embedding(96, 32), nn.ModuleList(layers)
        self.norms = nn.ModuleList(nn.LayerNorm(32) for _ in layers)
        self.head = nn.Linear(32, 96, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + layer(norm(x))
        result: Tensor = self.head(x)
        return result


def _stack(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(
        nn.Embedding(96, 32), nn.Sequential(build(), build()), nn.Linear(32, 96, bias=False)
    )


def _feed() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))


def _own_blocks() -> nn.Module:
    blocks = [AdaptedBlock(kind(64, 32)) for kind in (AdaptedLinear, ScaledLinear)]
    return nn.Sequential(ScaledEmbedding(96, 32), nn.Sequential(*blocks), nn.Linear(32, 96, bias=False))


def _normed() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), NormedHeads(), NormedHeads(), nn.Linear(32, 8))


def _nano() -> nn.Module:
    return nn.Sequential(
        nn.Embedding(96, 32), NanoAttention(), NanoAttention(), nn.Linear(32, 96, bias=False)
    )


def _encoder() -> nn.Module:
    section = EncoderModel(kind="encoder", layers=2, hidden=32, heads=4, dropout=0.0)
    return Encoder(section, 96, 16)


def _transformer() -> nn.Module:
    return nn.Transformer(32, 4, 2, 2, 64, dropout=0.0, batch_first=True)


def _seq_first() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about nested tensors, which it does not use
        return nn.Transformer(32, 4, 1, 1, 64, dropout=0.0)


def _quiet() -> Any:
    import transformers

    transformers.logging.set_verbosity_error()
    return transformers


def _llama() -> nn.Module:
    hf = _quiet()
    config = hf.LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model: nn.Module = hf.LlamaForCausalLM(config)
    return model


def _gpt2() -> nn.Module:
    hf = _quiet()
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    model: nn.Module = hf.GPT2LMHeadModel(
        hf.GPT2Config(vocab_size=96, n_positions=32, n_embd=32, n_layer=2, n_head=4, **dropout)
    )
    return model


def _t5() -> nn.Module:
    hf = _quiet()
    model: nn.Module = hf.T5ForConditionalGeneration(
        hf.T5Config(vocab_size=96, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, dropout_rate=0.0)
    )
    return model


def _bert() -> nn.Module:
    hf = _quiet()
    model: nn.Module = hf.BertForMaskedLM(
        hf.BertConfig(
            vocab_size=96,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=64,
            max_position_embeddings=32,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )
    return model


def _vit() -> nn.Module:
    hf = _quiet()
    model: nn.Module = hf.ViTForImageClassification(
        hf.ViTConfig(
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=64,
            image_size=16,
            patch_size=4,
            num_labels=10,
        )
    )
    return model


def _images() -> dict[str, Tensor]:
    return _floats(4, 3, 16, 16) | {"targets": torch.tensor([0, 3, 5, 9])}


def _run_ids(model: nn.Module, batch: dict[str, Tensor]) -> Any:
    return model(batch["ids"])


def _run_hf(model: nn.Module, batch: dict[str, Tensor]) -> Any:
    return model(input_ids=batch["ids"]).logits


CASES: dict[str, Case] = {
    "gpt": Case(_gpt(), _ids, _run_ids),
    "gpt-grouped": Case(_gpt(kv_heads=2), _ids, _run_ids),
    "gpt-untied": Case(_gpt(tie_embeddings=False), _ids, _run_ids),
    "lora": Case(_lora, _ids, _run_ids, share=0.9),
    "normed": Case(_normed, lambda: _floats(4, 6, 16), lambda m, b: m(b["x"]), share=0.9),
    "nano": Case(_nano, _ids, _run_ids),
    "own-forwards": Case(OwnForwards, _ids, _run_ids),
    "own-blocks": Case(_own_blocks, _ids, _run_ids),
    "related": Case(
        _stack(lambda: Residual(nn.Sequential(RelatedHeads(), nn.Linear(32, 32)), _feed())),
        _ids,
        _run_ids,
        share=0.6,
    ),
    "beside": Case(_stack(Beside), _ids, _run_ids),
    "alternating": Case(lambda: Alternating(_feed(), _feed(), _feed()), _ids, _run_ids),
    "encoder": Case(_encoder, _ids, _run_ids),
    "transformer": Case(
        _transformer, lambda: _floats(4, 6, 32), lambda m, b: m(b["x"], b["x"][:, :5].flip(0)), share=0.95
    ),
    "seq-first": Case(_seq_first, lambda: _floats(6, 4, 32), lambda m, b: m(b["x"], b["x"][:5].flip(0))),
    "llama": Case(_llama, _ids, _run_hf),
    "gpt2": Case(_gpt2, _ids, _run_hf),
    "t5": Case(_t5, _ids, lambda m, b: m(input_ids=b["ids"], decoder_input_ids=b["targets"][:, :7]).logits),
    "bert": Case(_bert, _ids, _run_hf),
    "vit": Case(_vit, _images, lambda m, b: m(pixel_values=b["x"]).logits),
}


def build(name: str) -> nn.Module:
    """Return the case's model in float64, in training mode, the same on every rank."""
    torch.manual_seed(0)
    return CASES[name].build().double().train()


def compute_loss(name: str, model: nn.Module) -> Tensor:
    """Return the case's loss."""
    case = CASES[name]
    batch = case.batch()
    output = case.run(model, batch)
    if "targets" not in batch or output.shape[:-1].numel() != batch["targets"].numel():
        target = torch.linspace(-1, 1, output.numel(), dtype=torch.float64).view(output.shape)
        return ((output - target) ** 2).sum()
    return F.cross_entropy(output.flatten(0, -2), batch["targets"].flatten(), reduction="sum")
