"""A planted fault, and the changes that several kinds of faults use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

REPLICATED, SHARDED, SPLIT = "dp_replicate=2", "dp_shard=2", "tp=2"
SAME_SETTINGS = ("PL719",)


def num_ranks() -> int:
    """The world size; 1 in the reference."""
    return dist.get_world_size() if dist.is_initialized() else 1


def is_faulty() -> bool:
    """Whether this is rank 1 of a layout."""
    return num_ranks() > 1 and dist.get_rank() == 1


@dataclass(frozen=True)
class Fault:
    """A planted fault, and the finding that verify must report.

    Attributes:
        what: the fault, in words.
        model: of the zoo.
        layout: that is tried.
        codes: of which the finding must have one.
        place: that must be in the finding's `where`.
        words: that must be in its text.
        change: of the built model.
        wrap: what is in place of the batches, the forward, the loss or the optimizer, by argument's name.
        settings: further arguments of `Trainer`.
        patch: in force on rank 1 while a layout trains: target and what to put there.
        everywhere: whether the patch is in force on all ranks of the layout.
    """

    what: str
    model: str
    layout: str
    codes: tuple[str, ...]
    place: str
    words: tuple[str, ...]
    change: Callable[[nn.Module], None] | None = None
    wrap: dict[str, Callable[..., Any]] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    patch: tuple[Any, str, Any] | None = None
    everywhere: bool = False


def on_rank_1(change: Callable[[nn.Module], None]) -> Callable[[nn.Module], None]:
    """The change, on rank 1 of a layout only."""

    def apply(model: nn.Module) -> None:
        if is_faulty():
            change(model)

    return apply


def set_of(path: str, name: str, value: Any) -> Callable[[nn.Module], None]:
    """Set an attribute of a module."""

    def change(model: nn.Module) -> None:
        setattr(model.get_submodule(path), name, value)

    return change


def hook_output(path: str, hook: Callable[[Tensor], Tensor]) -> Callable[[nn.Module], None]:
    """A forward hook on a module, in one process too."""

    def change_output(module: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (hook(output[0]), *output[1:])
        return hook(output)

    def change(model: nn.Module) -> None:
        model.get_submodule(path).register_forward_hook(change_output)

    return change


def scale_by_rank(factor: float) -> Callable[[Tensor], Tensor]:
    return lambda tensor: tensor * factor if is_faulty() else tensor
