"""Faults in batches, in the loss and in random numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.foreign_models.models import Batch
from benchmarks.foreign_models.planted.fault import (
    REPLICATED,
    SHARDED,
    Fault,
    hook_output,
    is_faulty,
    num_ranks,
)


def change_batch(key: str, change: Callable[[Tensor], Tensor]) -> Callable[..., Batch]:
    def make(right: Any, step: int) -> Batch:
        batch: Batch = right(step)
        return batch | {key: change(batch[key])} if is_faulty() else batch

    return make


def duplicate(right: Any, step: int) -> Batch:
    batch: Batch = right(step)
    if num_ranks() == 1:
        return batch
    return {key: torch.cat([t[: len(t) // 2], t[: len(t) // 2]]) for key, t in batch.items()}


def divide_loss(right: Any, output: Any, batch: Batch) -> Any:
    total, weight = right(output, batch)
    return total / num_ranks(), weight


def weigh_all(right: Any, output: Any, batch: Batch) -> Any:
    total, weight = right(output, batch)
    return total, torch.tensor(batch["targets"].numel()) if is_faulty() else weight


def smooth(right: Any, output: Any, batch: Batch) -> Any:
    return F.cross_entropy(output, batch["targets"], label_smoothing=0.1 if num_ranks() > 1 else 0.0)


def draw_by_rank(tensor: Tensor) -> Tensor:
    """A mask of its own generator, seeded by the rank; on rank 0 as in one process."""
    generator = torch.Generator().manual_seed(1 if is_faulty() else 0)
    mask = torch.rand(tensor.shape, generator=generator) > 0.1
    return tensor * mask.to(tensor.dtype)


FAULTS: dict[str, Fault] = {
    # data
    "shifted tokens": Fault(
        "rank 1 sees tokens shifted by one",
        "BERT",
        REPLICATED,
        ("PL716",),
        "the batch",
        ("on rank 1 only",),
        wrap={"make_batch": change_batch("ids", lambda t: t.roll(1, 1))},
    ),
    "brighter images": Fault(
        "rank 1 scales its images",
        "ViT",
        SHARDED,
        ("PL716",),
        "the batch",
        ("on rank 1 only",),
        wrap={"make_batch": change_batch("x", lambda t: t * 1.0001)},
    ),
    "samples twice": Fault(
        "both ranks train on the first half of the batch",
        "GPT-2",
        REPLICATED,
        ("PL716",),
        "the batch",
        ("on rank 1 only",),
        wrap={"make_batch": duplicate},
    ),
    # loss
    "loss over the world size": Fault(
        "the loss is divided by the number of ranks",
        "GPT-2",
        REPLICATED,
        ("PL718",),
        "the loss",
        ("result of the loss function", "all 2 ranks"),
        wrap={"loss": divide_loss},
    ),
    "padding weighed": Fault(
        "rank 1 counts targets that don't count",
        "BERT",
        REPLICATED,
        ("PL718",),
        "the loss",
        ("result of the loss function",),
        wrap={"loss": weigh_all},
    ),
    "smoothed labels": Fault(
        "layouts smooth labels",
        "ViT",
        SHARDED,
        ("PL718",),
        "the loss",
        ("result of the loss function",),
        wrap={"loss": smooth},
    ),
    # random numbers
    "a generator by rank": Fault(
        "a mask is drawn from a generator seeded by the rank",
        "OPT",
        REPLICATED,
        ("PL702",),
        "embed_tokens",
        ("random numbers",),
        hook_output("model.decoder.embed_tokens", draw_by_rank),
    ),
}
