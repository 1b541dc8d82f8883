"""Faults in the sum of gradients over ranks: sums that are changed before or after they are sent."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor

from benchmarks.foreign_models.planted.fault import (
    REPLICATED,
    Fault,
    is_faulty,
    scale_by_rank,
)
from paceline.parallel import replicate


def send_changed(change: Callable[[Tensor], Tensor], bucket: Any, group: Any) -> Any:
    """Sum what `change` makes of a bucket of gradients."""
    kept = bucket.buffer().dtype
    future = dist.all_reduce(change(bucket.buffer().clone()), group=group, async_op=True).get_future()
    return future.then(lambda done: done.value()[0].to(kept))


def keep_own(bucket: Any, group: Any) -> Any:
    """Rank 1 joins, and keeps what it had."""
    own = bucket.buffer().clone()
    future = dist.all_reduce(bucket.buffer(), group=group, async_op=True).get_future()
    return future.then(lambda done: own if is_faulty() else done.value()[0])


# By fault: the change of what is sent.
SENT: dict[str, Callable[[Tensor], Tensor]] = {
    "sum counted twice": lambda t: 2 * t,
    "sum in fp32": Tensor.float,
    "sum in bf16": Tensor.bfloat16,
    "sum off by a billionth": scale_by_rank(1 + 1e-9),
    "sum without a rank": scale_by_rank(0.0),
    "sum of clipped": lambda t: t * (0.1 / t.norm()),
}


def summed(name: str) -> dict[str, Any]:
    """Return the words of a fault that changes the sum of a bucket on all ranks."""
    return {"patch": (replicate, "sum_bucket", partial(send_changed, SENT[name])), "everywhere": True}


FAULTS: dict[str, Fault] = {
    "sum counted twice": Fault(
        "gradients are counted twice",
        "GPT-2",
        REPLICATED,
        ("PL703",),
        "the sum of gradients",
        ("2 times", "again"),
        **summed("sum counted twice"),
    ),
    "sum in fp32": Fault(
        "gradients are sent in fp32",
        "BERT",
        REPLICATED,
        ("PL712",),
        "the sum of gradients",
        ("fp32",),
        **summed("sum in fp32"),
    ),
    "sum in bf16": Fault(
        "gradients are sent in bf16",
        "nanoGPT",
        REPLICATED,
        ("PL712",),
        "the sum of gradients",
        ("bf16",),
        **summed("sum in bf16"),
    ),
    "sum that a rank drops": Fault(
        "rank 1 keeps its own gradient",
        "ViT",
        REPLICATED,
        ("PL703",),
        "the sum of gradients",
        ("on rank 1 only", "no common factor"),
        patch=(replicate, "sum_bucket", keep_own),
        everywhere=True,
    ),
    "sum off by a billionth": Fault(
        "rank 1 sends its gradient times 1 + 1e-9",
        "T5",
        REPLICATED,
        ("PL703",),
        "the sum of gradients",
        ("no common factor",),
        **summed("sum off by a billionth"),
    ),
    "sum without a rank": Fault(
        "rank 1 sends zeros",
        "OPT",
        REPLICATED,
        ("PL703",),
        "the sum of gradients",
        ("rank left out",),
        **summed("sum without a rank"),
    ),
    "sum of clipped": Fault(
        "each rank clips before the sum",
        "nn.Transformer",
        REPLICATED,
        ("PL703",),
        "the sum of gradients",
        ("no common factor", "clipped before"),
        **summed("sum of clipped"),
    ),
}
