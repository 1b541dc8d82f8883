"""Handles blocks and parameters that a microbatch leaves out, under sharding.

Ranks compute different microbatches in the same round. If a forward leaves blocks out (layers dropped at
random), each rank leaves out others. Still all ranks must gather and sum the same blocks in the same order.
So a rank takes part in the collectives of the blocks that it leaves out:

- The blocks have an order. When a block is called, those before it that were not called are passed by first.
  The last blocks are passed by when the model returns. Forward gathers them in their place. Two marks, see
  `marks.py`, make backward gather and sum them in theirs.
- A parameter that backward has not reached joins the sum with -0.0, which changes no bit.

The order is that of the definition. If the first step calls all blocks in another order, the same in every
microbatch, that order is used. In the first step each rank writes the next block to the store before it
gathers it. If the orders differ, the second rank finds another block there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn

from paceline.comm.tree_exchange import nothing_like
from paceline.errors import PacelineError
from paceline.parallel.shard.gradient_exchange import StepProgress
from paceline.parallel.shard.held import HeldUnits
from paceline.parallel.shard.marks import Marks
from paceline.parallel.shard.setup import Unit, prefetch_last
from paceline.torch_seams.fsdp import (
    act_before_sums,
    begin_backward,
    gathered,
    pass_block,
)
from paceline.torch_seams.groups import find_store

_num_models: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()


class Skipped:
    """A participant in the collectives of the blocks that a rank's microbatch leaves out.

    Args:
        model: sharded.
        units: its blocks, and the model last.
        ahead: number of blocks that are gathered ahead.
        held: its units that are gathered as long as the model itself; these are left out here.

    Attributes:
        used: ids of the sharded parameters that a microbatch of this rank has used since `begin`.
    """

    def __init__(
        self,
        model: nn.Module,
        units: list[Unit],
        progress: StepProgress,
        ahead: int,
        marks: Marks,
        held: HeldUnits,
    ) -> None:
        self.used: set[int] = set()
        self._progress = progress
        self._units = units
        self._ahead = ahead
        self._marks = marks
        self._held = held
        self._blocks = units[:-1]
        self._order: list[int] | None = self._leave_held(range(len(self._blocks)))
        self._place: int | None = None  # in the order; of a forward that has a backward
        self._calls: list[int] = []
        self._seen: set[tuple[int, ...]] = set()  # calls of whole forwards, until the order is settled
        self._is_ordered = True
        self._is_settled = False
        self._has_ended = False  # whether the backward of some block has ended in this round
        self._summed: set[int] = set()  # the units whose gradients were summed in this round
        self._notes = _Notes()
        for number, unit in enumerate(units):
            act_before_sums(unit.module, self._completion(number))
        if self._blocks:
            model.register_forward_pre_hook(self._begin_forward)
            model.register_forward_hook(self._end_forward, prepend=True)
        for number, unit in enumerate(self._blocks):
            assert isinstance(unit.module, nn.Module)
            # Runs before torch's own hook, which gathers.
            hook = torch.compiler.disable(self._entry(number))  # type: ignore[no-untyped-call]
            unit.module.register_forward_pre_hook(hook, prepend=True)

    def begin(self) -> None:
        """Start a step."""
        self._settle()
        self.used.clear()

    def begin_round(self) -> None:
        """Start a forward and backward."""
        self._summed.clear()
        if self._has_ended:
            self._has_ended = False
            prefetch_last(self._units, self._ahead)

    def _begin_forward(self, _module: nn.Module, _args: Any) -> None:
        self._place = 0 if torch.is_grad_enabled() and self._order is not None else None
        self._calls = []
        self._notes.begin()

    def _entry(self, number: int) -> Any:
        def enter(_module: nn.Module, _args: Any) -> None:
            # Without a place, the block is recomputed in backward, or has no backward.
            if self._place is None or self._order is None or self._blocks[number].module in self._held:
                return
            self._calls.append(number)
            if number not in self._order[self._place :]:
                self._is_ordered = False
                if self._is_settled:
                    raise self._order_error()
                self._compare(number)
                return
            place = self._order.index(number, self._place)
            skipped, self._place = self._order[self._place : place], place + 1
            for block in self._leave_held(skipped):
                self._pass_by(block)
            self._compare(number)

        return enter

    def hold(self, number: int) -> None:
        """Gather a block, and keep it gathered in each forward and backward from here on."""
        self._compare(number)
        module = self._blocks[number].module
        self._held.add(module)
        module.set_reshard_after_forward(False, recurse=False)
        module.unshard()

    def _leave_held(self, numbers: Iterable[int]) -> list[int]:
        return [number for number in numbers if self._blocks[number].module not in self._held]

    def _compare(self, number: int) -> None:
        """Raise if another rank gathers another block now; in the first step only."""
        if self._is_settled or self._progress.silent:
            return
        other = self._notes.compare(number)
        if other == number:
            return
        raise PacelineError(
            "PL443",
            saw=f"this rank goes on to {self._name(number)} where another one goes on to "
            f"{self._name(other)}.",
            rule="Under dp_shard all ranks gather the blocks in one order.",
            fix="If the model leaves blocks out, define them in the order in which it calls them. If not, "
            "look for what depends on the rank in its forward. Or use dp_shard=1.",
        )

    def _name(self, number: int) -> str:
        return self._blocks[number].name if number < len(self._blocks) else "the end of the model"

    def _end_forward(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        if self._place is None or self._order is None:
            return
        rest, self._place = self._order[self._place :], None
        if not self._is_settled:
            self._seen.add(tuple(self._calls))
        for block in self._leave_held(rest):
            self._pass_by(block)
        self._compare(len(self._blocks))

    def _pass_by(self, number: int) -> None:
        module = self._blocks[number].module
        self._compare(number)
        pass_block(module)
        # Backward reaches the second one first.
        self._marks.add_end(module, is_needed=True)
        self._marks.add(lambda: begin_backward(module), is_needed=True)

    def _completion(self, number: int) -> Any:
        def complete(records: Sequence[Any], is_summed: bool) -> None:
            """Add zero gradients for the parameters that backward has not reached."""
            trained = [(record, gathered(record)) for record in records if record.sharded_param.requires_grad]
            reached = [record for record, whole in trained if whole is not None and whole.grad is not None]
            if self._progress.index is not None:
                self.used |= {id(record.sharded_param) for record in reached}
            if not self._has_ended:
                # torch repeats the prefetch for every output of the model that gets its gradient later, which
                # may happen on some ranks only.
                self._has_ended = True
                prefetch_last(self._units, 0)
            if not is_summed or (number in self._summed and not reached):
                return
            self._summed.add(number)
            for record, whole in trained:
                if whole is not None and whole.grad is None and record.unsharded_accumulated_grad is None:
                    whole.grad = nothing_like(whole)

        return complete

    def _settle(self) -> None:
        """Keep the order in which the first step called the blocks, after that step."""
        if self._is_settled or not self._seen:
            return
        self._is_settled = True
        if self._is_ordered:
            return
        seen = {tuple(self._leave_held(calls)) for calls in self._seen}
        if any(len(set(calls)) < len(self._leave_held(range(len(self._blocks)))) for calls in seen):
            raise self._order_error()
        # Calls that differ without leaving a block out are checked by the signature.
        self._order = list(next(iter(seen))) if len(seen) == 1 else None

    def _order_error(self) -> PacelineError:
        names = [self._blocks[number].name for number in self._calls]
        shown = ", ".join(names[:8]) + (" ..." if len(names) > 8 else "")
        return PacelineError(
            "PL443",
            saw="a forward leaves blocks out, and they are not defined in the order of their calls: "
            f"{shown}.",
            rule="Under dp_shard, all ranks gather the blocks in one order, including blocks that a rank's "
            "microbatch leaves out.",
            fix="Define the blocks in the order in which forward calls them, or use dp_shard=1.",
        )


class _Notes:
    """The next block of the ranks at each point, written to their store by the first rank that gets there."""

    def __init__(self) -> None:
        world = dist.group.WORLD
        assert world is not None
        self._store = find_store()
        # Every rank builds the same models in the same order.
        self._model = _num_models[world] = _num_models.get(world, 0) + 1
        self._forward = self._at = 0

    def begin(self) -> None:
        """Start a forward."""
        self._forward, self._at = self._forward + 1, 0

    def compare(self, number: int) -> int:
        """Return the number that the first rank gave at this point of the forward."""
        self._at += 1
        key = f"paceline/blocks/{self._model}/{self._forward}/{self._at}"
        return int(self._store.compare_set(key, "", str(number)))
