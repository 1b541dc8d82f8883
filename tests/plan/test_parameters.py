"""The listed parameters are those of the models, one for one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from paceline.models.encoder import Encoder
from paceline.models.gpt import Gpt
from paceline.models.moe import MoeGpt
from paceline.models.resnet import Resnet
from paceline.parallel.blocks import separable_blocks
from paceline.plan.parameters import Parameter, count_parameters, list_parameters
from paceline.recipe import Recipe, parse_recipe
from paceline.recipe.facts import read_facts

MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gpt": ({"kind": "gpt"}, {"kind": "text"}),
    "gpt with all its own": (
        {
            "kind": "gpt",
            "layers": 3,
            "hidden": 96,
            "heads": 6,
            "kv_heads": 2,
            "ffn_hidden": 200,
            "tie_embeddings": False,
        },
        {"kind": "text", "tokenizer": "bpe", "vocab_size": 1000},
    ),
    "moe": ({"kind": "moe"}, {"kind": "text"}),
    "moe with all its own": (
        {
            "kind": "moe",
            "layers": 3,
            "experts": 300,
            "expert_hidden": 48,
            "shared_hidden": 40,
            "dense_layers": 1,
        },
        {"kind": "text"},
    ),
    "encoder": ({"kind": "encoder"}, {"kind": "masked_text", "seq_len": 64}),
    "narrow encoder": ({"kind": "encoder", "layers": 1, "ffn_hidden": 96}, {"kind": "masked_text"}),
    "resnet": ({"kind": "resnet"}, {"kind": "digits"}),
    "ResNet-20": ({"kind": "resnet", "blocks": [3, 3, 3]}, {"kind": "digits"}),
}


def build_on_meta(recipe: Recipe) -> nn.Module:
    model, (facts, _) = recipe.model, read_facts(recipe)
    with torch.device("meta"):
        if model.kind == "resnet":
            return Resnet(model, 1, 10)
        assert facts.vocab_size is not None
        assert facts.seq_len is not None
        if model.kind == "gpt":
            return Gpt(model, facts.vocab_size, facts.seq_len)
        if model.kind == "moe":
            return MoeGpt(model, facts.vocab_size, facts.seq_len)
        return Encoder(model, facts.vocab_size, facts.seq_len)


@pytest.mark.parametrize(("model", "data"), MODELS.values(), ids=MODELS.keys())
def test_names_shapes_and_units(model: dict[str, Any], data: dict[str, Any]) -> None:
    recipe = parse_recipe({"model": model, "data": data, "train": {"steps": 1}})
    built, listed = build_on_meta(recipe), list_parameters(recipe)
    assert [(p.name, p.shape) for p in listed] == [(n, tuple(p.shape)) for n, p in built.named_parameters()]
    assert count_parameters(listed) == sum(p.numel() for p in built.parameters())
    blocks = {
        f"{block}.{name}": block
        for block, module in separable_blocks(built)
        for name, _ in module.named_parameters()
    }
    assert {p.name: p.block for p in listed} == {p.name: blocks.get(p.name, "") for p in listed}
    assert read_facts(recipe)[0].max_rows == max(p.shape[0] for p in listed)


def test_parts_of_tp() -> None:
    assert Parameter("q", (128, 64), tp_dim=0).divide(4) == (32, 64)
    assert Parameter("o", (128, 64), tp_dim=1).divide(4) == (128, 16)
    assert Parameter("norm", (128,)).divide(4) == (128,)
    assert Parameter("tokens", (257, 64), tp_dim=0).divide(2) == (257, 64), "can't be split in two"
