"""Blocks and parameters that a microbatch leaves out, under sharding.

Ranks compute different microbatches in the same round. Where a forward leaves blocks out (layers dropped at
random), each rank leaves out others. All ranks must gather and sum the same blocks in the same order all the
same, so a rank takes part in the collectives of the blocks that it leaves out:

- The blocks have an order. When a block is called, those before it that were not called are passed by first:
  torch's hooks run around nothing, on tensors that go into the called block (or come out of the model, for
  the last blocks). So forward gathers them in their place, and backward gathers and sums them in theirs.
- A parameter that backward has not reached joins the sum with -0.0, which changes no bit of anything.

The order is that of the definition. Where the first step calls them in another one, the same in every
microbatch and without leaving any out, it is that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from paceline.errors import PacelineError
from paceline.parallel.shard.gradient_exchange import StepProgress
from paceline.parallel.shard.setup import Unit, prefetch_last
from paceline.parallel.shard.torch_records import act_before_sums, gathered, leave_block, reach_block


class Skipped:
    """Takes part in the collectives of what a rank's microbatch leaves out.

    Args:
        model: sharded.
        units: its blocks, and the model last.
        rounds: of this model.
        ahead: how many blocks ahead are gathered.

    Attributes:
        used: ids of the sharded parameters that a microbatch of this rank has used since `begin`.
    """

    def __init__(self, model: nn.Module, units: list[Unit], rounds: StepProgress, ahead: int) -> None:
        self.used: set[int] = set()
        self._rounds = rounds
        self._units = units
        self._ahead = ahead
        self._blocks = units[:-1]
        self._order: list[int] | None = list(range(len(self._blocks)))
        self._place: int | None = None  # in the order; of a forward that has a backward
        self._calls: list[int] = []
        self._seen: set[tuple[int, ...]] = set()  # calls of whole forwards, until the order is settled
        self._is_ordered = True
        self._is_settled = False
        self._visited: set[int] = set()
        for number, unit in enumerate(units):
            act_before_sums(unit.module, self._completion(number))
        if self._blocks:
            model.register_forward_pre_hook(self._begin_forward)
            model.register_forward_hook(self._end_forward, prepend=True)
        for number, unit in enumerate(self._blocks):
            assert isinstance(unit.module, nn.Module)
            # Before torch's own, which gathers.
            hook = torch.compiler.disable(self._entry(number))  # type: ignore[no-untyped-call]
            unit.module.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)

    def begin(self) -> None:
        """Start a step."""
        self._settle()
        self.used.clear()

    def begin_round(self) -> None:
        """Start a forward and backward."""
        if self._visited:
            self._visited.clear()
            prefetch_last(self._units, self._ahead)

    def _begin_forward(self, _module: nn.Module, _args: Any) -> None:
        self._place = 0 if torch.is_grad_enabled() and self._order is not None else None
        self._calls = []

    def _entry(self, number: int) -> Any:
        def enter(_module: nn.Module, args: Any, kwargs: Any) -> Any:
            # Without a place it is run again in backward, or has no backward.
            if self._place is None or self._order is None:
                return None
            self._calls.append(number)
            if number not in self._order[self._place :]:
                self._is_ordered = False
                if self._is_settled:
                    raise self._order_error()
                return None
            place = self._order.index(number, self._place)
            skipped, self._place = self._order[self._place : place], place + 1
            for block in skipped:
                args, kwargs = self._pass_by(block, (args, kwargs))
            return (args, kwargs) if skipped else None

        return enter

    def _end_forward(self, _module: nn.Module, _args: Any, output: Any) -> Any:
        if self._place is None or self._order is None:
            return None
        rest, self._place = self._order[self._place :], None
        if not self._is_settled:
            self._seen.add(tuple(self._calls))
        for block in rest:
            output = self._pass_by(block, ((output,), {}))[0][0]
        return output if rest else None

    def _pass_by(self, number: int, inputs: tuple[Any, Any]) -> tuple[Any, Any]:
        module = self._blocks[number].module
        args, kwargs = reach_block(module, *inputs)
        leaves, structure = tree_flatten((args, kwargs))
        floats = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        carriers = [place for place in floats if leaves[place].requires_grad] or floats
        if not carriers:
            raise _carriers_error(self._blocks[number].name)
        anchor = torch.empty(0, requires_grad=True)
        passed = _PassBy.apply(anchor, *(leaves[place] for place in carriers))  # type: ignore[no-untyped-call]
        for place, tensor in zip(carriers, passed, strict=True):
            leaves[place] = tensor
        result: tuple[Any, Any] = leave_block(module, args, tree_unflatten(leaves, structure))
        return result

    def _completion(self, number: int) -> Any:
        def complete(records: Sequence[Any], is_summed: bool) -> None:
            """Give the parameters that backward has not reached a gradient that adds nothing."""
            trained = [(record, gathered(record)) for record in records if record.sharded_param.requires_grad]
            reached = [record for record, whole in trained if whole is not None and whole.grad is not None]
            if self._rounds.index is not None:
                self.used |= {id(record.sharded_param) for record in reached}
            if not self._visited:
                # torch repeats that for every output that gets its gradient later (an encoder's, that goes
                # into the decoder too). Where a block was passed by, the output is a copy, and gets none.
                prefetch_last(self._units, 0)
            is_again = number in self._visited
            self._visited.add(number)
            if not is_summed or (is_again and not reached):
                return
            for record, whole in trained:
                if whole is not None and whole.grad is None and record.unsharded_accumulated_grad is None:
                    whole.grad = torch.full_like(whole, -0.0)

        return complete

    def _settle(self) -> None:
        """After the first step: keep the order in which it called the blocks."""
        if self._is_settled or not self._seen:
            return
        self._is_settled = True
        if self._is_ordered:
            return
        if any(len(set(calls)) < len(self._blocks) for calls in self._seen):
            raise self._order_error()
        # Calls that differ without leaving a block out are for the signature to judge.
        self._order = list(next(iter(self._seen))) if len(self._seen) == 1 else None

    def _order_error(self) -> PacelineError:
        names = [self._blocks[number].name for number in self._calls]
        shown = ", ".join(names[:8]) + (" ..." if len(names) > 8 else "")
        return PacelineError(
            "PL443",
            saw=f"a forward leaves blocks out, and their order is not that of the definition: {shown}.",
            rule="Under dp_shard all ranks gather the blocks in one order, those that a rank's microbatch "
            "leaves out included.",
            fix="Define the blocks in the order in which forward calls them, or use dp_shard=1.",
        )


class _PassBy(torch.autograd.Function):
    """Copies tensors; `anchor` makes the copies require a gradient, for torch's hooks to hang on them."""

    @staticmethod
    def forward(ctx: Any, _anchor: Tensor, *tensors: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        return tuple(tensor.clone() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return None, *gradients


def _carriers_error(name: str) -> PacelineError:
    return PacelineError(
        "PL443",
        saw=f"a forward leaves {name} out, and there is no floating-point tensor in its place.",
        rule="Backward reaches a block that was left out through the inputs of the next one, or through the "
        "model's output, in tuples, lists and dicts.",
        fix="Give the next block, or the model's output, as such tensors; or use dp_shard=1.",
    )
