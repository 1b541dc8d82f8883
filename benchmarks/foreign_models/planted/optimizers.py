"""Faults in the optimizer: other settings, another class or parameters that it lacks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.foreign_models.planted.fault import (
    REPLICATED,
    SHARDED,
    Fault,
    is_faulty,
    num_ranks,
)


def build_optimizer(_right: Any, named: Any, *, kind: Any = torch.optim.AdamW, **settings: Any) -> Any:
    changed = {key: value() for key, value in settings.items()}
    return kind([p for _, p in named if p.requires_grad], **{"lr": 1e-3, **changed})


def leave_out(name: str) -> Callable[..., Any]:
    def build(right: Any, named: Any) -> Any:
        return right([pair for pair in named if not (is_faulty() and pair[0] == name)])

    return build


def switch_class(_right: Any, named: Any) -> Any:
    kind = torch.optim.Adam if num_ranks() > 1 else torch.optim.AdamW
    return build_optimizer(None, named, kind=kind)


FAULTS: dict[str, Fault] = {
    "learning rate by rank": Fault(
        "rank 1 has twice the learning rate",
        "BERT",
        REPLICATED,
        ("PL709",),
        "",
        ("lr=0.002",),
        wrap={"optimizer": partial(build_optimizer, lr=lambda: 2e-3 if is_faulty() else 1e-3)},
    ),
    "no weight decay": Fault(
        "layouts train without weight decay",
        "ViT",
        SHARDED,
        ("PL709",),
        "vit",
        ("weight_decay=0.0",),
        wrap={"optimizer": partial(build_optimizer, weight_decay=lambda: 0.0 if num_ranks() > 1 else 0.1)},
    ),
    "betas by rank": Fault(
        "rank 1 has other betas",
        "T5",
        REPLICATED,
        ("PL709",),
        "",
        ("betas=(0.8",),
        wrap={"optimizer": partial(build_optimizer, betas=lambda: (0.8 if is_faulty() else 0.9, 0.999))},
    ),
    "a bias left out": Fault(
        "rank 1's optimizer has no bias of the last norm",
        "GPT-2",
        REPLICATED,
        ("PL709",),
        "transformer.ln_f.bias",
        ("does not have", "on rank 1 only"),
        wrap={"optimizer": leave_out("transformer.ln_f.bias")},
    ),
    "another optimizer": Fault(
        "layouts train with Adam in place of AdamW",
        "nn.Transformer",
        REPLICATED,
        ("PL709",),
        "",
        ("is Adam ", "AdamW"),
        wrap={"optimizer": switch_class},
    ),
}
