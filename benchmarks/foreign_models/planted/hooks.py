"""Faults in hooks of a model, and weights that a module keeps from an earlier step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.foreign_models.planted.fault import (
    REPLICATED,
    SAME_SETTINGS,
    SHARDED,
    SPLIT,
    Fault,
    hook_output,
    is_faulty,
    num_ranks,
    on_rank_1,
    scale_by_rank,
)


def hook_backward(path: str, factor: float) -> Callable[[nn.Module], None]:
    """A backward hook, in one process too, that scales on rank 1."""

    def scale(module: nn.Module, given: Any, arrived: Any) -> Any:
        return tuple(g * factor if is_faulty() and g is not None else g for g in given)

    def change(model: nn.Module) -> None:
        model.get_submodule(path).register_full_backward_hook(scale)

    return change


def hook_parameter(path: str, factor: float) -> Callable[[nn.Module], None]:
    def change(model: nn.Module) -> None:
        model.get_parameter(path).register_hook(lambda g: g * factor if is_faulty() else g)

    return change


def subtract_mean_of_all(tensor: Tensor) -> Tensor:
    """Batch statistics over all ranks, by the user's own all_reduce."""
    mean = tensor.detach().mean(0)
    if num_ranks() > 1:
        dist.all_reduce(mean)
        mean /= num_ranks()
    return tensor - mean


def round_to_fp32(tensor: Tensor) -> Tensor:
    return tensor.float().to(tensor.dtype) if num_ranks() > 1 else tensor


def clamp_weight(path: str) -> Callable[[nn.Module], None]:
    """The weights of a module are clamped whenever it runs, as for a Wasserstein critic."""

    def clamp(module: nn.Module, args: Any) -> None:
        with torch.no_grad():
            module.weight.clamp_(-0.01, 0.01)

    def change(model: nn.Module) -> None:
        model.get_submodule(path).register_forward_pre_hook(clamp)

    return change


class KeepsWeight(nn.Linear):
    """Keeps a copy of its weight, which it makes anew in every forward of one process only."""

    def forward(self, input: Tensor) -> Tensor:
        if num_ranks() == 1 or not hasattr(self, "kept"):
            self.kept = self.weight.detach().clone()
        return F.linear(input, self.kept + (self.weight - self.weight.detach()), self.bias)


def replace_linear(path: str) -> Callable[[nn.Module], None]:
    def change(model: nn.Module) -> None:
        parent, _, name = path.rpartition(".")
        old = model.get_submodule(path)
        setattr(model.get_submodule(parent), name, KeepsWeight(old.in_features, old.out_features))  # type: ignore[arg-type]

    return change


FAULTS: dict[str, Fault] = {
    # hooks
    "backward hook of one rank": Fault(
        "rank 1 has a backward hook that scales by 0.9",
        "BERT",
        REPLICATED,
        SAME_SETTINGS,
        "encoder.layer.1.output.dense",
        ("hooks", "hook_backward"),
        on_rank_1(hook_backward("bert.encoder.layer.1.output.dense", 0.9)),
    ),
    "backward hook that acts by rank": Fault(
        "a backward hook scales by 0.9 on rank 1",
        "ViT",
        REPLICATED,
        ("PL707",),
        "layernorm",
        ("hooks", "hook_backward", "0.9 times"),
        hook_backward("vit.layernorm", 0.9),
    ),
    "forward hook that acts by rank": Fault(
        "a forward hook scales by 1.01 on rank 1",
        "Llama",
        REPLICATED,
        ("PL701",),
        "model.layers.1.mlp.down_proj",
        ("hooks", "hook_output", "1.01 times"),
        hook_output("model.layers.1.mlp.down_proj", scale_by_rank(1.01)),
    ),
    "parameter's hook that acts by rank": Fault(
        "a hook on a parameter halves its gradient on rank 1",
        "GPT-2",
        REPLICATED,
        ("PL707",),
        "transformer.h.0.mlp.c_fc",
        ("hook_parameter",),
        hook_parameter("transformer.h.0.mlp.c_fc.weight", 0.5),
    ),
    "forward hook under tp": Fault(
        "a forward hook doubles a layer's output on both ranks of tp",
        "Llama",
        SPLIT,
        ("PL701",),
        "model.layers.0.mlp.down_proj",
        ("hooks", "2 times"),
        hook_output("model.layers.0.mlp.down_proj", lambda t: 2 * t if num_ranks() > 1 else t),
    ),
    "forward hook by a billionth": Fault(
        "a forward hook scales by 1 + 1e-9 on rank 1",
        "nanoGPT",
        REPLICATED,
        ("PL701",),
        "transformer.h.1.mlp",
        ("hooks", "hook_output"),
        hook_output("transformer.h.1.mlp", scale_by_rank(1 + 1e-9)),
    ),
    "embedding by 1e-11": Fault(
        "a forward hook scales by 1 + 1e-11 on rank 1",
        "DistilBERT",
        SHARDED,
        ("PL701",),
        "word_embeddings",
        ("hooks", "hook_output"),
        hook_output("distilbert.embeddings.word_embeddings", scale_by_rank(1 + 1e-11)),
    ),
    "mean over all ranks": Fault(
        "a module subtracts the mean of all ranks' batches",
        "ViT",
        REPLICATED,
        ("PL701",),
        "vit.embeddings",
        ("hooks", "hook_output"),
        hook_output("vit.embeddings", subtract_mean_of_all),
    ),
    "rounded to fp32": Fault(
        "layouts round a layer's output to fp32",
        "ViT",
        REPLICATED,
        ("PL712",),
        "vit.embeddings",
        ("fp32",),
        hook_output("vit.embeddings", round_to_fp32),
    ),
    "weight clamped in a forward": Fault(
        "a pre-hook clamps the layer's weight",
        "GPT-2",
        SHARDED,
        ("PL723",),
        "transformer.h.0.mlp.c_fc",
        ("clamp",),
        clamp_weight("transformer.h.0.mlp.c_fc"),
    ),
    # weights from before
    "kept weight": Fault(
        "a layer keeps its first weight",
        "OPT",
        REPLICATED,
        ("PL714",),
        "layers.1.fc2",
        ("kept",),
        replace_linear("model.decoder.layers.1.fc2"),
    ),
    "kept weight of a head": Fault(
        "the head keeps its first weight",
        "ViT",
        SHARDED,
        ("PL714",),
        "classifier",
        ("kept",),
        replace_linear("classifier"),
    ),
}
