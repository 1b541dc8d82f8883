"""Faults in the modules of a model: settings of one rank, a replaced forward or function of torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.foreign_models.planted.fault import (
    REPLICATED,
    SAME_SETTINGS,
    SHARDED,
    SPLIT,
    Fault,
    on_rank_1,
    set_of,
)


def patch_forward(path: str, factor: float) -> Callable[[nn.Module], None]:
    def change(model: nn.Module) -> None:
        module = model.get_submodule(path)
        right = module.forward
        module.forward = lambda *args, **settings: right(*args, **settings) * factor

    return change


def wrong_layer_norm(x: Tensor, shape: Any, weight: Any = None, bias: Any = None, eps: float = 0.0) -> Tensor:
    return torch.layer_norm(x, shape, weight, bias, 1e-3)


FAULTS: dict[str, Fault] = {
    "eps of a LayerNorm": Fault(
        "rank 1's LayerNorm has eps 1e-3",
        "GPT-2",
        REPLICATED,
        SAME_SETTINGS,
        "transformer.h.1.ln_1",
        ("eps",),
        on_rank_1(set_of("transformer.h.1.ln_1", "eps", 1e-3)),
    ),
    "eps of a RMSNorm": Fault(
        "rank 1's RMSNorm has eps 1e-3",
        "Llama",
        SHARDED,
        SAME_SETTINGS,
        "model.layers.0.input_layernorm",
        ("variance_epsilon",),
        on_rank_1(set_of("model.layers.0.input_layernorm", "variance_epsilon", 1e-3)),
    ),
    "eps under tp": Fault(
        "rank 1 of tp has another eps in a norm",
        "T5",
        SPLIT,
        SAME_SETTINGS,
        "encoder.block.0.layer.0.layer_norm",
        ("variance_epsilon",),
        on_rank_1(set_of("encoder.block.0.layer.0.layer_norm", "variance_epsilon", 1e-2)),
    ),
    "GELU by tanh": Fault(
        "rank 1 approximates GELU by tanh",
        "BERT",
        REPLICATED,
        SAME_SETTINGS,
        "layer.0.intermediate.intermediate_act_fn",
        ("forward",),
        on_rank_1(set_of("bert.encoder.layer.0.intermediate", "intermediate_act_fn", nn.GELU("tanh"))),
    ),
    "patched layer_norm": Fault(
        "torch.nn.functional.layer_norm is replaced on rank 1",
        "nanoGPT",
        REPLICATED,
        SAME_SETTINGS,
        "transformer.h.0.ln_1",
        ("torch.nn.functional.layer_norm", "wrong_layer_norm"),
        patch=(F, "layer_norm", wrong_layer_norm),
    ),
    "dropout rate": Fault(
        "rank 1 drops twice as much",
        "BERT",
        REPLICATED,
        SAME_SETTINGS,
        "bert.embeddings.dropout",
        ("p is 0.2",),
        on_rank_1(set_of("bert.embeddings.dropout", "p", 0.2)),
    ),
    "scale of attention": Fault(
        "rank 1 scales attention otherwise",
        "Llama",
        SHARDED,
        SAME_SETTINGS,
        "model.layers.0.self_attn",
        ("scaling",),
        on_rank_1(set_of("model.layers.0.self_attn", "scaling", 0.3)),
    ),
    "eps of a BatchNorm": Fault(
        "rank 1's BatchNorm has eps 1e-2",
        "ResNet",
        REPLICATED,
        SAME_SETTINGS,
        "embedder.normalization",
        ("eps",),
        on_rank_1(set_of("resnet.embedder.embedder.normalization", "eps", 1e-2)),
    ),
    "rate inside of attention": Fault(
        "rank 1's fused attention drops more",
        "nanoGPT",
        REPLICATED,
        SAME_SETTINGS,
        "transformer.h.0.attn",
        ("dropout is 0.3",),
        on_rank_1(set_of("transformer.h.0.attn", "dropout", 0.3)),
    ),
    "patched forward": Fault(
        "a layer's forward is replaced on rank 1",
        "OPT",
        REPLICATED,
        SAME_SETTINGS,
        "layers.0.fc1",
        ("forward",),
        on_rank_1(patch_forward("model.decoder.layers.0.fc1", 1.001)),
    ),
    "activation of a Whisper layer": Fault(
        "rank 1 has ReLU in place of GELU",
        "Whisper",
        REPLICATED,
        SAME_SETTINGS,
        "encoder.layers.1",
        ("forward", "ReLU"),
        on_rank_1(set_of("model.encoder.layers.1", "activation_fn", nn.ReLU())),
    ),
}
