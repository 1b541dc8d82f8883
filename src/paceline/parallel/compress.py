"""Compressed reduction: the gradients of slots are summed in fewer bytes.

It is an exact reduction in which slots, not microbatches, are what is added over ranks: see `comm/slots.py`
for the protocol. Microbatches of a slot are added on its rank, in the order of a tree of their own.

Residuals have the units of the gradient of the sum of losses: before encoding, gradients are multiplied by
the unit and divided by the loss scale, both powers of two, which change from step to step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from paceline.comm.residuals import Residuals
from paceline.comm.slots import list_own_slots
from paceline.comm.tree import OwnBlocks
from paceline.data.share import count_owned, owned_microbatches
from paceline.errors import PacelineError


@dataclass(frozen=True)
class CompressSettings:
    """The settings of the compression; the recipe's `[compress]` explains each."""

    kind: str
    slots: int


class Compression:
    """The compression of one model's gradients on this rank.

    Attributes:
        factor: by which the gradients of the current step are multiplied before they are encoded: it turns
            them into those of the sum of losses, and is a power of two.
    """

    def __init__(self, settings: CompressSettings, model: nn.Module) -> None:
        self.settings = settings
        self.residuals = Residuals()
        self.factor = 1.0
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and parameter.dtype != torch.float32:
                raise PacelineError(
                    "PL961",
                    saw=f'compress.kind="{settings.kind}" for {name}, a parameter of {parameter.dtype}.',
                    rule="Codecs encode gradients of fp32 parameters.",
                    fix='Use dtype "fp32", "bf16" or "fp16", which all keep fp32 parameters, or '
                    'compress.kind="none".',
                )

    def cut(self, num_owned: tuple[int, ...], rank: int) -> OwnBlocks:
        """Return the slots of a rank.

        Args:
            num_owned: per rank, the number of microbatches that it computes.
        """
        num_slots, num_ranks = self.settings.slots, len(num_owned)
        expected = count_owned(sum(num_owned), num_ranks, num_slots)
        if num_owned != expected:
            raise PacelineError(
                "PL963",
                saw=f"{sum(num_owned)} microbatches, of which the ranks have {list(num_owned)}, and "
                f"compress.slots={num_slots}.",
                rule="Slots are equal blocks of consecutive microbatches, and each rank has the microbatches "
                f"of its slots: here {list(expected)}.",
                fix="Use trainer.loader(), or give every rank the same number of microbatches per slot.",
                on_every_rank=True,
            )
        slots = list_own_slots(num_slots, num_ranks, rank)
        return OwnBlocks(tuple(owned_microbatches(sum(num_owned), num_slots, slot) for slot in slots))
