"""Dropout in models of transformers, which nobody wrote for us, in train mode with dropout on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.parallel.dropout.random_draws import find_random
from paceline.parallel.dropout.replacements import apply_dropout

BATCH, SEQ, VOCAB = 4, 12, 64


def build_gpt2(**options: Any) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=VOCAB, n_positions=16, n_embd=32, n_layer=2, n_head=4, **options)
    return GPT2LMHeadModel(config)


def build_llama(**options: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attention_dropout=0.2,
        **options,
    )
    return LlamaForCausalLM(config)


def build_bert(**options: Any) -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=16,
        **options,
    )
    return BertForMaskedLM(config)


def build_t5(**options: Any) -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=VOCAB, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    return T5ForConditionalGeneration(config)


def build_vit(**options: Any) -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(
        ViTConfig(
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=64,
            image_size=16,
            patch_size=4,
            hidden_dropout_prob=0.1,
            attention_probs_dropout_prob=0.1,
            **options,
        )
    )


def call(model: nn.Module, ids: Tensor) -> Tensor:
    name = type(model).__name__
    if name.startswith("T5"):
        return model(input_ids=ids, labels=ids).logits
    if name.startswith("ViT"):
        images = ids[:, :3, None, None] / VOCAB * torch.linspace(-1, 1, 256, dtype=torch.float64).view(16, 16)
        return model(pixel_values=images).logits
    return model(input_ids=ids).logits


MODELS: dict[str, tuple[Callable[..., nn.Module], dict[str, Any], list[str]]] = {
    "gpt2, sdpa": (
        build_gpt2,
        {"attn_implementation": "sdpa"},
        [
            "transformer.h.1.attn/sdpa#0",
            "transformer.h.1.mlp.dropout/dropout#0",
            "transformer.drop/dropout#0",
        ],
    ),
    "gpt2, eager": (build_gpt2, {"attn_implementation": "eager"}, ["transformer.h.1.attn/dropout#0"]),
    "llama, sdpa": (build_llama, {"attn_implementation": "sdpa"}, ["model.layers.1.self_attn/sdpa#0"]),
    "llama, eager": (build_llama, {"attn_implementation": "eager"}, ["model.layers.1.self_attn/dropout#0"]),
    "bert": (build_bert, {}, ["bert.encoder.layer.1.attention.self/sdpa#0"]),
    "t5": (build_t5, {}, ["decoder.dropout/dropout#0", "encoder.block.1.layer.0.dropout/dropout#0"]),
    "vit": (build_vit, {}, ["vit.embeddings.dropout/dropout#0"]),
}


@pytest.mark.parametrize("name", MODELS)
def test_transformers(name: str) -> None:
    build, options, some_keys = MODELS[name]
    torch.manual_seed(0)
    model = build(**options).double().train()
    ids = torch.randint(1, VOCAB, (BATCH, SEQ))
    masks, keys = apply_dropout(model), set()
    masks.on_draw = lambda key, _x, _y: keys.add(key)

    def run(size: int) -> Tensor:
        parts = []
        for start in range(0, BATCH, size):
            with masks.drawing(3, range(start, start + size)):
                parts.append(call(model, ids[start : start + size]))
        return torch.cat(parts)

    whole = run(BATCH)
    assert keys.issuperset(some_keys), sorted(keys)
    for size in (1, 2):
        torch.testing.assert_close(run(size), whole, rtol=1e-9, atol=1e-10)
    assert masks.unsafe == []
    assert find_random(model, lambda: run(BATCH)) == []
    assert {finding.code for finding in find_random(model, lambda: call(model, ids))} == {"PL450"}
    model.eval()
    assert not torch.allclose(call(model, ids), whole)


def test_their_recompute_draws_the_same() -> None:
    torch.manual_seed(0)
    model = build_gpt2().double().train()
    ids = torch.randint(1, VOCAB, (BATCH, SEQ))
    masks, grads = apply_dropout(model), []
    for recompute in (False, True):
        if recompute:
            enable = getattr(model, "activation_checkpointing_enable", None)
            enable = enable or model.gradient_checkpointing_enable  # its name before
            enable({"use_reentrant": False})
        model.zero_grad()
        with masks.drawing(3, range(BATCH)):
            call(model, ids).square().sum().backward()
        grads.append([p.grad for p in model.parameters()])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)  # the tied weight is summed in another order
