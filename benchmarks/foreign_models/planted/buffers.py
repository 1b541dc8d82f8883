"""Faults in buffers that ranks do not share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.foreign_models.planted.fault import (
    REPLICATED,
    SHARDED,
    Fault,
)
from benchmarks.foreign_models.zoo import SIZE


class RunningCenter(nn.Module):
    """Takes a running average of what it sees, which no rank shares with another."""

    average: Tensor

    def __init__(self, inner: nn.Module, width: int) -> None:
        super().__init__()
        self.inner = inner
        self.register_buffer("average", torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.average.lerp_(x.mean((0, 1)).to(self.average.dtype), 0.1)
        out: Tensor = self.inner(x)
        return out


def add_running_center(model: nn.Module) -> None:
    parts = model.get_submodule("transformer")
    parts["ln_f"] = RunningCenter(parts["ln_f"], SIZE.hidden)  # type: ignore[index,operator]


class Counting(nn.Module):
    """Counts tokens in an integer buffer."""

    seen: Tensor

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.register_buffer("seen", torch.zeros(SIZE.vocab, dtype=torch.int64))

    @property
    def weight(self) -> Any:
        return self.inner.weight

    def forward(self, ids: Tensor) -> Tensor:
        if self.training:
            self.seen += torch.bincount(ids.flatten(), minlength=SIZE.vocab)
        out: Tensor = self.inner(ids)
        return out


def add_counting(model: nn.Module) -> None:
    embeddings = model.get_submodule("distilbert.embeddings")
    embeddings.word_embeddings = Counting(embeddings.word_embeddings)  # type: ignore[arg-type,assignment]


FAULTS: dict[str, Fault] = {
    "running average": Fault(
        "a running average is never shared",
        "nanoGPT",
        REPLICATED,
        ("PL710",),
        "transformer.ln_f.average",
        ("order of the microbatches",),
        add_running_center,
    ),
    "running average of shards": Fault(
        "a running average is never shared",
        "nanoGPT",
        SHARDED,
        ("PL710",),
        "transformer.ln_f.average",
        ("order of the microbatches",),
        add_running_center,
    ),
    "counted tokens": Fault(
        "counts are never shared",
        "DistilBERT",
        REPLICATED,
        ("PL710",),
        "word_embeddings.seen",
        ("buffer",),
        add_counting,
    ),
}
