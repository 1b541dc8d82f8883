"""Units that stay gathered from the beginning of the model's forward to the end of its backward.

A block is gathered when it is called. A model may use a block's weights at another time: it calls a module in
the block (`block.modulate(c)`), or reads a weight (`self.tables[-1].weight.T`). The first step detects this,
gathers the block at this point, and holds it from then on. Its gradient is summed when backward is over.

Large tables outside of the blocks are held too, each as a unit: if they were gathered with the model itself,
one message would have all of them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from paceline.phrases import name_some
from paceline.torch_seams.modules import own_parameters, read_compiled_call, set_own_parameters

log = logging.getLogger(__name__)


class HeldUnits(set[FSDPModule]):
    """The modules of units that are held."""

    def gather(self, units: list[FSDPModule]) -> None:
        """Gather those of `units` that are held, in this order; collective."""
        for module in units:
            if module in self:
                module.unshard()


class Reads:
    """Detects reads of a block's weights outside of its calls, from one step to the next.

    Args:
        blocks: by full name.
        act: gets the name of a block whose weight is about to be read outside of its calls; returns whether
            it has gathered the block.
    """

    def __init__(self, blocks: list[tuple[str, nn.Module]], act: Callable[[str], bool]) -> None:
        self._act = act
        self._called: list[str] = []
        self._found: list[str] = []
        self._watched = [
            (module, own_parameters(module)) for name, block in blocks for module in self._watch(name, block)
        ]
        self._handles = [
            handle
            for name, block in blocks
            for handle in (
                block.register_forward_pre_hook(self._enter(name), prepend=True),
                block.register_forward_hook(self._leave, always_call=True),
            )
        ]

    def begin_round(self) -> None:
        """Start a forward: forget what one that raised has left behind."""
        self._called.clear()

    def end(self) -> None:
        """Stop, and log what was found."""
        for handle in self._handles:
            handle.remove()
        for module, watched in self._watched:
            set_own_parameters(module, dict(watched))
        if self._found:
            log.warning(
                "shard: weights of %s are used outside of these blocks' own calls, so they stay gathered for "
                "a whole forward and backward. Use them in the block's own forward to save memory.",
                name_some(self._found, 4),
            )

    def _watch(self, name: str, block: nn.Module) -> Iterator[nn.Module]:
        if read_compiled_call(block) is not None:
            return  # the compiler would see the change
        for module in block.modules():
            if own_parameters(module) and not isinstance(module, torch.jit.ScriptModule):
                set_own_parameters(module, _Watched(own_parameters(module), lambda: self._read(name)))
                yield module

    def _read(self, name: str) -> None:
        if name not in self._called and name not in self._found:
            self._found.append(name)  # first: gathering reads too
            if not self._act(name):
                self._found.remove(name)

    def _enter(self, name: str) -> Callable[..., None]:
        return lambda *_: self._called.append(name)

    def _leave(self, *_: Any) -> None:
        self._called.pop()


class _Watched(dict[str, Any]):
    """The parameters of a module, which note that one is read as an attribute."""

    def __init__(self, parameters: dict[str, Any], note: Callable[[], None]) -> None:
        super().__init__(parameters)
        self._note = note

    def __getitem__(self, name: str) -> Any:
        self._note()
        return super().__getitem__(name)
