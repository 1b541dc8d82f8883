"""Models that others wrote, from their configuration, each with batches, a call and a loss.

No weights are downloaded: `transformers` builds a model with random ones. Dropout is on wherever a model
has any. Everything here can be imported by a rank, and sizes are arguments, so that tests use it small.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batch = dict[str, Tensor]
DROPOUT = 0.1
IGNORED = -100


@dataclass(frozen=True)
class Size:
    """The size of a model and its batches.

    Attributes:
        layers, hidden, heads, vocab: of the model; its feed-forward layers are twice `hidden` wide.
        samples: of a global batch.
        length: of a sequence.
    """

    layers: int
    hidden: int
    heads: int
    vocab: int
    samples: int
    length: int


SMALL = Size(layers=2, hidden=32, heads=4, vocab=64, samples=8, length=8)
REALISTIC = Size(layers=4, hidden=128, heads=4, vocab=512, samples=16, length=32)


@dataclass(frozen=True)
class Foreign:
    """The arguments of `paceline.verify`, by size if they depend on it.

    Attributes:
        build: from a size to the model.
        make_batch: from a size and a step to a global batch.
        forward: (model, batch) to the output.
        loss: (output, batch) to (sum of losses, weight), or a mean over samples.
        share: the least part of the bytes of matrices that must be split at tp=2.
    """

    build: Callable[[Size], nn.Module]
    make_batch: Callable[[Size, int], Batch]
    forward: Callable[[nn.Module, Batch], Any]
    loss: Callable[[Any, Batch], Any]
    share: float = 0.95

    def verify_arguments(self, size: Size) -> dict[str, Any]:
        """Return those of `paceline.verify`, but for the layouts."""
        return {
            "model_fn": partial(self.build, size),
            "batch_fn": partial(self.make_batch, size),
            "loss": self.loss,
            "forward": self.forward,
        }


def _quiet() -> Any:
    import transformers

    transformers.logging.set_verbosity_error()
    return transformers


# ---- models


def build_llama(size: Size) -> nn.Module:
    """Grouped queries: half as many heads of keys and values."""
    hf = _quiet()
    config = hf.LlamaConfig(
        vocab_size=size.vocab,
        hidden_size=size.hidden,
        intermediate_size=2 * size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.heads // 2,
        attention_dropout=DROPOUT,
    )
    model: nn.Module = hf.LlamaForCausalLM(config)
    return model


def build_gpt2(size: Size) -> nn.Module:
    """Packed projections in transposed layers, tied embeddings; three dropouts of its own."""
    hf = _quiet()
    config = hf.GPT2Config(
        vocab_size=size.vocab,
        n_positions=size.length,
        n_embd=size.hidden,
        n_layer=size.layers,
        n_head=size.heads,
        n_inner=2 * size.hidden,
        resid_pdrop=DROPOUT,
        embd_pdrop=DROPOUT,
        attn_pdrop=DROPOUT,
    )
    model: nn.Module = hf.GPT2LMHeadModel(config)
    return model


def build_t5(size: Size) -> nn.Module:
    """Encoder and decoder, biases by relative position, tied embeddings."""
    hf = _quiet()
    config = hf.T5Config(
        vocab_size=size.vocab,
        d_model=size.hidden,
        d_kv=size.hidden // size.heads,
        d_ff=2 * size.hidden,
        num_layers=size.layers,
        num_heads=size.heads,
        dropout_rate=DROPOUT,
    )
    model: nn.Module = hf.T5ForConditionalGeneration(config)
    return model


def build_bert(size: Size) -> nn.Module:
    """Read padding from a mask."""
    hf = _quiet()
    config = hf.BertConfig(
        vocab_size=size.vocab,
        hidden_size=size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        intermediate_size=2 * size.hidden,
        max_position_embeddings=size.length,
        hidden_dropout_prob=DROPOUT,
        attention_probs_dropout_prob=DROPOUT,
    )
    model: nn.Module = hf.BertForMaskedLM(config)
    return model


def build_vit(size: Size) -> nn.Module:
    """Patch of 4 x 4 pixels, and a token for the class."""
    hf = _quiet()
    config = hf.ViTConfig(
        hidden_size=size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        intermediate_size=2 * size.hidden,
        image_size=16,
        patch_size=4,
        num_labels=10,
        hidden_dropout_prob=DROPOUT,
        attention_probs_dropout_prob=DROPOUT,
    )
    model: nn.Module = hf.ViTForImageClassification(config)
    return model


def build_transformer(size: Size) -> nn.Module:
    """torch's own, with packed projections."""
    half = max(1, size.layers // 2)
    return nn.Transformer(
        size.hidden, size.heads, half, half, 2 * size.hidden, dropout=DROPOUT, batch_first=True
    )


class LoraLinear(nn.Module):
    """A frozen linear layer beside two thin trained ones (Hu et al. 2021), as people write it."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.dropout = nn.Dropout(DROPOUT)
        self.a = nn.Linear(base.in_features, rank, bias=False)
        self.b = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.base(x) + 2.0 * self.b(self.a(self.dropout(x)))
        return result


def build_lora(size: Size) -> nn.Module:
    """Return a frozen Llama whose attention's queries, values and outputs are adapted."""
    model = build_llama(size)
    model.requires_grad_(False)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear) and name in ("q_proj", "v_proj", "o_proj"):
                setattr(module, name, LoraLinear(child, 4))
    return model


# ---- batches


def make_tokens(size: Size, step: int) -> Batch:
    """Sequences with targets, a quarter of which don't count."""
    generator = torch.Generator().manual_seed(step)
    shape = (size.samples, size.length)
    targets = torch.randint(0, size.vocab, shape, generator=generator)
    targets[torch.rand(shape, generator=generator) < 0.25] = IGNORED
    return {"ids": torch.randint(0, size.vocab, shape, generator=generator), "targets": targets}


def make_padded(size: Size, step: int) -> Batch:
    """Return the same with padding behind half of the samples."""
    batch = make_tokens(size, step)
    mask = torch.ones(size.samples, size.length, dtype=torch.int64)
    mask[1::2, size.length * 3 // 4 :] = 0
    return batch | {"mask": mask, "targets": batch["targets"].masked_fill(mask == 0, IGNORED)}


def make_pairs(size: Size, step: int) -> Batch:
    """Two sequences; the second is three quarters as long."""
    batch = make_tokens(size, step)
    length = size.length * 3 // 4
    generator = torch.Generator().manual_seed(1000 + step)
    second = torch.randint(0, size.vocab, (size.samples, length), generator=generator)
    return batch | {"decoder_ids": second, "targets": batch["targets"][:, :length].contiguous()}


def make_images(size: Size, step: int) -> Batch:
    """Noise with a class each."""
    generator = torch.Generator().manual_seed(step)
    return {
        "x": torch.randn(size.samples, 3, 16, 16, generator=generator),
        "targets": torch.randint(0, 10, (size.samples,), generator=generator),
    }


def make_series(size: Size, step: int) -> Batch:
    """Sequences of numbers, and what is to become of them."""
    generator = torch.Generator().manual_seed(step)
    shapes = {"x": size.length, "y": size.length - 2, "targets": size.length - 2}
    return {
        key: torch.randn(size.samples, length, size.hidden, generator=generator)
        for key, length in shapes.items()
    }


# ---- calls and losses


def call_ids(model: nn.Module, batch: Batch) -> Tensor:
    logits: Tensor = model(input_ids=batch["ids"]).logits
    return logits


def call_padded(model: nn.Module, batch: Batch) -> Tensor:
    logits: Tensor = model(input_ids=batch["ids"], attention_mask=batch["mask"]).logits
    return logits


def call_pairs(model: nn.Module, batch: Batch) -> Tensor:
    logits: Tensor = model(input_ids=batch["ids"], decoder_input_ids=batch["decoder_ids"]).logits
    return logits


def call_images(model: nn.Module, batch: Batch) -> Tensor:
    logits: Tensor = model(pixel_values=batch["x"]).logits
    return logits


def call_series(model: nn.Module, batch: Batch) -> Tensor:
    output: Tensor = model(batch["x"], batch["y"])
    return output


def call_with_labels(model: nn.Module, batch: Batch) -> Tensor:
    """Call a model that computes the loss itself."""
    loss: Tensor = model(input_ids=batch["ids"], labels=batch["targets"]).loss
    return loss


def classify(logits: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Cross-entropy over the targets that count, and how many they are."""
    targets = batch["targets"].flatten()
    losses = F.cross_entropy(logits.flatten(0, -2), targets, reduction="sum", ignore_index=IGNORED)
    return losses, (targets != IGNORED).sum()


def regress(output: Tensor, batch: Batch) -> Tensor:
    return F.mse_loss(output, batch["targets"])


def take_own(output: Tensor, batch: Batch) -> Tensor:
    """Return the loss that the model gave: the mean over its microbatch."""
    return output


MODELS: dict[str, Foreign] = {
    "Llama": Foreign(build_llama, make_tokens, call_ids, classify),
    "GPT-2": Foreign(build_gpt2, make_tokens, call_ids, classify),
    "T5": Foreign(build_t5, make_pairs, call_pairs, classify),
    "BERT": Foreign(build_bert, make_padded, call_padded, classify),
    "ViT": Foreign(build_vit, make_images, call_images, classify),
    "nn.Transformer": Foreign(build_transformer, make_series, call_series, regress),
    "LoRA on Llama": Foreign(build_lora, make_tokens, call_ids, classify),
    "Llama, its own loss": Foreign(build_llama, make_tokens, call_with_labels, take_own, share=0.0),
    "GPT-2, its own loss": Foreign(build_gpt2, make_tokens, call_with_labels, take_own, share=0.0),
}
