"""The repeated blocks are found in models of all kinds, without being told."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import transformers
from torch import nn

from paceline.models.gpt import Gpt
from paceline.models.resnet import Resnet
from paceline.parallel.blocks import find_blocks, separable_blocks
from paceline.recipe.schema import GptModel, ResnetModel

SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}


def swin() -> nn.Module:
    config = transformers.SwinConfig(embed_dim=8, depths=[1, 1, 2], num_heads=[1, 2, 4])
    return transformers.SwinForImageClassification(config)


def mixtral() -> nn.Module:
    config = transformers.MixtralConfig(**SMALL, num_key_value_heads=2, vocab_size=50)
    return transformers.MixtralForCausalLM(config)


def albert() -> nn.Module:
    return transformers.AlbertForMaskedLM(transformers.AlbertConfig(**SMALL, embedding_size=8))


def t5() -> nn.Module:
    config = transformers.T5Config(d_model=16, num_layers=2, num_heads=2, d_ff=32, d_kv=8)
    return transformers.T5ForConditionalGeneration(config)


class Experts(nn.Module):
    """A block whose parameters are nearly all in a list of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 3)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 9), nn.ReLU(), nn.Linear(9, 4)) for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + sum(expert(x) for expert in self.experts) * self.gate(x).mean()


class WithHeads(nn.Module):
    """Blocks, and a list of small heads."""

    def __init__(self, num_layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Experts() for _ in range(num_layers))
        self.heads = nn.ModuleList(nn.Linear(4, 1) for _ in range(2))


def held_parts() -> nn.Module:
    """Blocks that only hold their parts, of which the model calls each."""
    return nn.ModuleList(
        nn.ModuleDict(
            {
                "norm": nn.LayerNorm(16),
                "mlp": nn.ModuleDict({"up": nn.Linear(16, 64), "down": nn.Linear(64, 16)}),
                "scales": nn.ParameterList([torch.ones(16)]),
            }
        )
        for _ in range(2)
    )


def in_dict(build: Callable[[], nn.Module]) -> nn.ModuleDict:
    return nn.ModuleDict({str(number): build() for number in range(2)})


CASES: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "gpt": (lambda: Gpt(GptModel(kind="gpt", layers=2, hidden=16, heads=2), 64, 8), ["layers.0", "layers.1"]),
    "resnet": (
        lambda: Resnet(ResnetModel(kind="resnet", blocks=[1, 2], width=8), 3, 10),
        ["blocks.0", "blocks.1", "blocks.2"],
    ),
    "llama": (
        lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, vocab_size=5000)),
        ["model.layers.0", "model.layers.1"],
    ),
    "gpt2": (
        lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2)),
        ["transformer.h.0", "transformer.h.1"],
    ),
    "t5": (t5, ["encoder.block.0", "encoder.block.1", "decoder.block.0", "decoder.block.1"]),
    "bert": (
        lambda: transformers.BertForMaskedLM(transformers.BertConfig(**SMALL)),
        ["bert.encoder.layer.0", "bert.encoder.layer.1"],
    ),
    "vit": (
        lambda: transformers.ViTForImageClassification(transformers.ViTConfig(**SMALL)),
        ["vit.layers.0", "vit.layers.1"],
    ),
    "swin: blocks in stages": (
        swin,
        [f"swin.encoder.layers.{at}" for at in ("0.blocks.0", "1.blocks.0", "2.blocks.0", "2.blocks.1")],
    ),
    "mixtral: experts are no blocks": (mixtral, ["model.layers.0", "model.layers.1"]),
    "albert: one block, run again and again": (
        albert,
        ["albert.encoder.albert_layer_groups.0.albert_layers.0"],
    ),
    "encoder and decoder": (
        lambda: nn.Transformer(16, 2, 2, 2, 32, batch_first=True),
        ["encoder.layers.0", "encoder.layers.1", "decoder.layers.0", "decoder.layers.1"],
    ),
    "lists of small heads": (WithHeads, ["layers.0", "layers.1", "layers.2"]),
    "one block": (lambda: WithHeads(1), ["layers.0"]),
    "layers of one kind": (lambda: nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))), ["0", "1", "2"]),
    "blocks that only hold their parts": (held_parts, ["0.mlp.up", "0.mlp.down", "1.mlp.up", "1.mlp.down"]),
    "blocks in a dict, as in torchtitan": (
        lambda: nn.ModuleDict({"embedding": nn.Embedding(9, 4), "layers": in_dict(Experts)}),
        ["layers.0", "layers.1"],
    ),
    "two towers in a dict": (
        lambda: in_dict(lambda: nn.Transformer(16, 2, 1, 1, 32)),
        [f"{tower}.{half}.layers.0" for tower in "01" for half in ("encoder", "decoder")],
    ),
    "a dict of plain layers": (lambda: in_dict(lambda: nn.Linear(4, 4)), [""]),
    "none": (lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), [""]),
    "no lists": (lambda: nn.Linear(4, 4), [""]),
}


@pytest.mark.parametrize("case", CASES)
def test_blocks(case: str) -> None:
    build, names = CASES[case]
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = build()
    blocks = find_blocks(model)
    assert [name for name, _ in blocks] == names
    assert all(model.get_submodule(name) is block for name, block in blocks)
    assert separable_blocks(model) == [(name, block) for name, block in blocks if name]


def test_blocks_that_share_parameters_stay_with_the_root() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(4)))
    model[2][0].weight = model[0][0].weight
    assert len(find_blocks(model)) == 4
    assert [name for name, _ in separable_blocks(model)] == ["1", "3"]
