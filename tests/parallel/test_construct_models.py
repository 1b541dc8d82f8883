"""Models of this repository and of transformers, made tensor by tensor."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import nn

from paceline.models.encoder import Encoder
from paceline.models.gpt import Gpt
from paceline.models.resnet import Resnet
from paceline.parallel.construct.build import construct
from paceline.recipe.schema import EncoderModel, GptModel, ResnetModel
from tests.parallel.test_construct import Factory, check_same_draws, check_statistics

OURS: dict[str, Factory] = {
    "gpt": lambda: Gpt(GptModel(kind="gpt", layers=2, hidden=32, heads=4), 64, 16),
    "encoder": lambda: Encoder(EncoderModel(kind="encoder", layers=2, hidden=32, heads=4), 64, 16),
    "resnet": lambda: Resnet(ResnetModel(kind="resnet"), 3, 10),
}


@pytest.mark.parametrize("name", OURS)
def test_our_models(name: str) -> None:
    check_same_draws(OURS[name])
    check_statistics(OURS[name], num_builds=3)


def build_foreign(name: str) -> nn.Module:
    """Return a small model of transformers, from its configuration."""
    transformers: Any = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    ids = {"bos_token_id": 0, "eos_token_id": 1}
    configs = {
        "LlamaForCausalLM": ("LlamaConfig", {**sizes, "vocab_size": 128, "num_key_value_heads": 2}),
        "GPT2LMHeadModel": (
            "GPT2Config",
            {"vocab_size": 128, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, **ids},
        ),
        "T5ForConditionalGeneration": (
            "T5Config",
            {"vocab_size": 128, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4},
        ),
        "BertForMaskedLM": ("BertConfig", {**sizes, "vocab_size": 128}),
        "ViTForImageClassification": ("ViTConfig", {**sizes, "image_size": 32, "patch_size": 8}),
    }
    config, arguments = configs[name]
    return getattr(transformers, name)(getattr(transformers, config)(**arguments))


FOREIGN = [
    *("LlamaForCausalLM", "GPT2LMHeadModel", "T5ForConditionalGeneration", "BertForMaskedLM"),
    "ViTForImageClassification",
]


@pytest.mark.parametrize("name", FOREIGN)
def test_models_of_transformers(name: str) -> None:
    check_same_draws(lambda: build_foreign(name))
    check_statistics(lambda: build_foreign(name), num_builds=3)


def test_a_model_of_7_billion_parameters_is_constructed_at_once() -> None:
    transformers: Any = pytest.importorskip("transformers")
    sizes = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32}
    config = transformers.LlamaConfig(vocab_size=32000, num_attention_heads=32, **sizes)
    start = time.perf_counter()
    construction = construct(lambda: transformers.LlamaForCausalLM(config), 0)
    assert time.perf_counter() - start < 20  # 0.2 s on an idle machine; eager would take a minute and 27 GB
    assert sum(p.numel() for p in construction.model.parameters()) == 6_738_415_616
    name = "model.layers.31.self_attn.q_proj.weight"
    assert construction.fill(name).std().item() == pytest.approx(0.02, rel=0.01)
    assert construction.fill("model.layers.0.input_layernorm.weight").eq(1).all()


def test_the_model_that_reset_parameters_gets_wrong() -> None:
    """The case that this is for: a parent's initialisation, bare parameters, hidden buffers."""

    class Tail(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(1000, 64)
            self.gain = nn.Parameter(torch.full((64,), 0.5))
            self.register_buffer("table", torch.arange(64.0).sin(), persistent=False)
            self.apply(self._initialise)

        def _initialise(self, module: nn.Module) -> None:
            if isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    with torch.device("meta"):
        naive = Tail()
    naive.to_empty(device="cpu")
    naive.embed.reset_parameters()
    assert naive.embed.weight.std().item() == pytest.approx(1.0, rel=0.1)
    construction = construct(Tail, 0)
    assert construction.fill("embed.weight").std().item() == pytest.approx(0.02, rel=0.02)
    assert construction.fill("gain").eq(0.5).all()
    assert torch.equal(construction.fill("table"), torch.arange(64.0).sin())
