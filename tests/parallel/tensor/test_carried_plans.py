"""If a Hugging Face model carries a `tp_plan`, the plan that is found automatically cuts in the same way."""

from __future__ import annotations

import fnmatch
from typing import Any

import pytest
import torch

from paceline.parallel.tensor.split_plan import SplitPlan, find_plan

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
}
# What a style cuts of a weight [outputs, inputs].
DIMS = {"colwise": 0, "colwise_gather_output": 0, "rowwise": 1, "embedding_rowwise": 0}


def plan_for(name: str) -> tuple[Any, SplitPlan]:
    import transformers

    config = getattr(transformers, f"{name}Config")(**SIZES)
    with torch.device("meta"):
        model = getattr(transformers, f"{name}ForCausalLM")(config)
    ids = torch.zeros(2, 8, dtype=torch.int64)
    model = model.to_empty(device="cpu")
    return model, find_plan(model, lambda module: module(input_ids=ids).logits, 2)


@pytest.mark.parametrize("name", ["Llama", "Mistral", "Qwen2", "Qwen3"])
def test_the_found_plan_is_the_carried_one(name: str) -> None:
    model, plan = plan_for(name)
    compared = 0
    for pattern, style in model.tp_plan.items():
        names = [f"{path}.weight" for path, _ in model.named_modules() if fnmatch.fnmatchcase(path, pattern)]
        assert names, pattern
        if style not in DIMS:
            continue
        for weight in names:
            assert plan.splits[weight].dim == DIMS[style], (weight, style, plan.describe())
            compared += 1
    assert compared >= 2 * 7, "seven projections in each of two layers"
    assert plan.share == 1.0


def test_the_attention_of_a_mixture_is_split() -> None:
    """Without numbers, the product of its experts insists on bf16."""
    import transformers

    sizes = {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2}
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes))
    ids = torch.zeros(2, 8, dtype=torch.int64)
    plan = find_plan(model, lambda module: module(input_ids=ids).logits, 2)
    assert plan.splits["model.layers.0.self_attn.q_proj.weight"].dim == 0
    assert not any(".experts." in name for name in plan.splits)
