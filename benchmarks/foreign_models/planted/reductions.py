"""Faults in the sum of gradients over ranks: communication hooks that change it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.foreign_models.planted.fault import (
    REPLICATED,
    Fault,
    is_faulty,
    num_ranks,
    scale_by_rank,
)


def send_changed(name: str, state: Any, bucket: Any) -> Any:
    """A communication hook for gradients that changes what is sent; by the name of its fault."""
    change, mean = SENT[name]
    kept = bucket.buffer().dtype
    tensor = change(bucket.buffer().clone())
    tensor = tensor / num_ranks() if mean else tensor
    future = dist.all_reduce(tensor, async_op=True).get_future()
    return future.then(lambda done: done.value()[0].to(kept))


def keep_own(state: Any, bucket: Any) -> Any:
    """Rank 1 joins, and keeps what it had."""
    own, sent = bucket.buffer().clone(), bucket.buffer() / num_ranks()
    future = dist.all_reduce(sent, async_op=True).get_future()
    return future.then(lambda done: own if is_faulty() else done.value()[0])


# By fault: the change of what is sent, and whether a mean is made of it.
SENT: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "hook that sums": (torch.clone, False),
    "hook in fp32": (Tensor.float, True),
    "hook in bf16": (Tensor.bfloat16, True),
    "hook off by a billionth": (scale_by_rank(1 + 1e-9), True),
    "hook that sends nothing": (scale_by_rank(0.0), True),
    "hook that clips": (lambda t: t * (0.1 / t.norm()) if num_ranks() > 1 else t, True),
}


def hooked(name: str) -> dict[str, Any]:
    """The argument of `Trainer` with the communication hook of a fault."""
    return {"comm_hook": (None, partial(send_changed, name))}


FAULTS: dict[str, Fault] = {
    "hook that sums": Fault(
        "a communication hook sums in place of a mean",
        "GPT-2",
        REPLICATED,
        ("PL391",),
        "",
        ("2 times",),
        settings=hooked("hook that sums"),
    ),
    "hook in fp32": Fault(
        "a communication hook sends fp32",
        "BERT",
        REPLICATED,
        ("PL712",),
        "the sum of gradients",
        ("fp32",),
        settings=hooked("hook in fp32"),
    ),
    "hook in bf16": Fault(
        "a communication hook sends bf16",
        "nanoGPT",
        REPLICATED,
        ("PL712",),
        "the sum of gradients",
        ("bf16",),
        settings=hooked("hook in bf16"),
    ),
    "hook that keeps its own": Fault(
        "rank 1 keeps its own gradient",
        "ViT",
        REPLICATED,
        ("PL703",),
        "the sum of gradients",
        ("on rank 1 only", "no common factor"),
        settings={"comm_hook": (None, keep_own)},
    ),
    "hook off by a billionth": Fault(
        "rank 1 sends its gradient times 1 + 1e-9",
        "T5",
        REPLICATED,
        ("PL703",),
        "the sum of gradients",
        ("no common factor",),
        settings=hooked("hook off by a billionth"),
    ),
    "hook that sends nothing": Fault(
        "rank 1 sends zeros",
        "OPT",
        REPLICATED,
        ("PL703",),
        "the sum of gradients",
        ("rank left out",),
        settings=hooked("hook that sends nothing"),
    ),
    "hook that clips": Fault(
        "each rank clips before the sum",
        "nn.Transformer",
        REPLICATED,
        ("PL391",),
        "",
        ("0.269 times the mean",),
        settings=hooked("hook that clips"),
    ),
}
