"""Marks in backward: the moments at which a block's parameters are gathered and its gradients are summed.

torch puts a node of autograd around the inputs of a block, to detect the end of the block's backward. Such a
node sums the gradient of an input over the block before it passes it on. If several blocks take one tensor
(an encoder's output in all blocks of a decoder, a bias that blocks share), its gradient is then summed in
another order than in one process: `(a + b) + (c + d)` in place of `((a + b) + c) + d`. The last bits differ.

A mark is not on the path of the tensors. It is a node made when the block is called, and its only result is
an empty tensor, its token. All tokens are tied to the model's output and to the loss, so backward knows all
marks from its start. Autograd runs the newest node that is ready. So it runs a mark after the nodes that were
made later, which are the block's, and before those that were made earlier. The tensors in the block are not
changed, and the gradient of each tensor is summed in the order of one process.

A tie sums gradients too. But it is the newest consumer of its tensors, so it sums those that come first in
one process as well. Two ties are needed. Without the one to the output, a loss on another device would start
the marks before the model's backward. Without the one to the loss, a loss that does not depend on the output
would not start them.

A loss may call the model several times. Autograd then computes a parameter's gradient from all calls at once,
so a block's gradients are summed over ranks when the last of its calls ends. A call whose inputs have no
gradient has no mark for its end. The round's first mark, which runs after all other nodes, ends such blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from paceline.errors import PacelineError
from paceline.torch_seams.fsdp import (
    begin_backward,
    end_backward,
    find_trained,
    replace_trained,
    set_input_hook,
    set_output_hook,
)
from paceline.torch_seams.saved import find_order

Register = Callable[..., Any]


class Marks:
    """The marks of a sharded model.

    Args:
        model: sharded.
        blocks: its sharded modules, without the model itself.
        device_type: of the model; the marks run in line with its backward.
        held: those of the blocks that are gathered as long as the model itself; they have no marks.
    """

    def __init__(
        self, model: FSDPModule, blocks: Sequence[FSDPModule], device_type: str, held: Collection[FSDPModule]
    ) -> None:
        self._held = held
        # Makes tokens require a gradient. Tensors of the model would do so too, but then backward would go
        # from the token to them, even if the loss does not depend on them.
        self._anchor = torch.empty(0, device=device_type, requires_grad=True)
        self._tokens: list[Tensor] = []
        self._num_tied = 0  # tokens that are tied to an output
        self._is_needed = False
        self._starts: dict[int, int] = {}  # by id of a block that is being called, its mark's number
        self._num_calls: Counter[FSDPModule] = Counter()  # of this round
        self._num_ended: Counter[FSDPModule] = Counter()  # of these, in its backward
        self._call = _Call()
        self._is_open = self._is_backward = False
        for module in (*blocks, model):
            set_input_hook(module, self._entry(module))
            set_output_hook(module, self._exit(module, is_root=module is model))
        assert isinstance(model, nn.Module)
        opening = torch.compiler.disable(self._open)  # type: ignore[no-untyped-call]
        # Runs before torch's own hook, which calls the entry.
        model.register_forward_pre_hook(opening, prepend=True)

    @property
    def is_open(self) -> bool:
        """Whether a forward of the model runs that has a backward."""
        return self._is_open

    def add(self, act: Callable[[], object], *, is_needed: bool = False) -> int:
        """Set a mark here, and return its number; nodes made later have higher ones.

        Args:
            act: called in backward, after the nodes made from now on and before those made up to now. If
                backward reaches nothing of this call of the model, it is not called.
            is_needed: whether backward must reach the mark even if nothing else has a gradient.
        """
        return self._add(lambda is_reached: act() if is_reached else None, is_needed=is_needed)

    def add_end(self, module: FSDPModule, *, is_needed: bool = False) -> int:
        """Set a mark here for the end of a call of a block in backward, and return its number.

        Args:
            module: the block, or the model.
            is_needed: as for `add`.
        """

        def end(is_reached: bool) -> None:
            self._num_ended[module] += 1
            num_open = self._num_calls[module] - self._num_ended[module]
            if is_reached or (not num_open and self._num_calls[module] > 1):
                end_backward(module, sums=not num_open)

        return self._add(end, is_needed=is_needed)

    def tie_loss(self, loss: Tensor) -> Tensor:
        """Return a loss whose backward knows the marks of all forwards since the last one."""
        self._is_backward = True
        tokens = list(self._tokens) if loss.requires_grad or self._is_needed else []
        self.clear()
        if not tokens:
            return loss
        (tied,) = _Tie.apply(1, loss, *tokens)  # type: ignore[no-untyped-call]
        return tied  # type: ignore[no-any-return]

    def clear(self) -> None:
        """Drop what a forward that raised has left behind."""
        self._tokens.clear()
        self._num_tied = 0
        self._is_needed = False
        self._starts.clear()
        self._is_open = False

    def begin_round(self) -> None:
        """Start a forward and backward."""
        self.clear()
        self._is_backward = False
        self._num_calls.clear()
        self._num_ended.clear()

    def _add(self, act: Callable[[bool], object], *, is_needed: bool) -> int:
        token: Tensor = _Mark.apply(act, self._call, self._anchor)  # type: ignore[no-untyped-call]
        self._tokens.append(token)
        self._is_needed |= is_needed
        return _number(token)

    def _open(self, _module: nn.Module, _args: Any) -> None:
        self._is_open = torch.is_grad_enabled()
        self._call = _Call()
        if self._is_open and not self._num_calls:
            self._add(self._end_rest, is_needed=False)

    def _reaching(self, call: _Call) -> Callable[[Tensor], None]:
        def reach(_gradient: Tensor) -> None:
            if not self._is_backward:
                raise gradient_error("backward runs through a block inside of forward or loss.")
            call.is_reached = True

        return reach

    def _end_rest(self, _is_reached: bool) -> None:
        """End the blocks that were called several times, at least once with inputs that have no gradient."""
        for module, num_calls in self._num_calls.items():
            if num_calls > 1 and self._num_ended[module] < num_calls:
                end_backward(module)

    def _entry(self, module: FSDPModule) -> Callable[[Register, Any, Any], Any]:
        def enter(register: Register, args: Any, kwargs: Any) -> Any:
            if module in self._held:
                return args, kwargs
            if not self._is_open:
                # There is no backward; or one is running, and recomputes the block.
                return register(args, kwargs)
            self._num_calls[module] += 1
            if find_trained((args, kwargs)):
                self._starts[id(module)] = self.add_end(module)
            return args, kwargs

        return enter

    def _exit(self, module: FSDPModule, *, is_root: bool) -> Callable[[Register, Any], Any]:
        def leave(register: Register, output: Any) -> Any:
            if module in self._held:
                return output
            start = self._starts.pop(id(module), None)
            if is_root:
                self._is_open, start = False, None
            if not torch.is_grad_enabled():
                return register(output)
            output = _copy_views(output, start)
            if is_root:
                # Untied tensors do not show in time whether backward passes through here. It mostly does.
                trained = find_trained(output)
                self._call.is_reached = not trained or not all(map(_is_real, trained))
                output = _tie(output, self._tokens[self._num_tied :])
                self._num_tied = len(self._tokens)
            trained = find_trained(output)
            made = trained if is_root else [tensor for tensor in trained if _is_made(tensor, start)]
            for tensor in made:
                tensor.register_hook(self._reaching(self._call))  # type: ignore[no-untyped-call]
            # An input that is passed on gets its gradient long after the block's own backward is over.
            register(made)
            if trained and not made:
                self.add(lambda: begin_backward(module))
            return output

        return leave


class _Call:
    """A call of the model; `is_reached` is set once a backward has reached one of its blocks."""

    def __init__(self) -> None:
        self.is_reached = False


class _Mark(torch.autograd.Function):
    """A node that returns a token in forward; in backward, it acts on whether its call was reached."""

    @staticmethod
    def forward(ctx: Any, act: Callable[[bool], object], call: _Call, anchor: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.act, ctx.call = act, call
        return torch.empty_like(anchor)

    @staticmethod
    def backward(ctx: Any, *_gradients: Any) -> Any:
        ctx.act(ctx.call.is_reached)
        return None, None, None


class _Tie(torch.autograd.Function):
    """A node that passes the first tensors on; the rest are tokens, whose marks follow it in backward."""

    @staticmethod
    def forward(ctx: Any, num_tensors: int, *tensors: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.num_tokens = len(tensors) - num_tensors
        # Not the tensors themselves, because autograd would make views of them, and not copies.
        return tuple(tensor.detach() for tensor in tensors[:num_tensors])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return None, *gradients, *(None,) * ctx.num_tokens


def gradient_error(saw: str) -> PacelineError:
    """Return the error for a gradient that a forward or a loss computes."""
    return PacelineError(
        "PL436",
        saw=saw,
        rule="Under dp_shard a block's parameters are gathered for one backward of the loss, and the ranks "
        "sum gradients in it. A gradient inside of forward or loss (a gradient penalty) would need another.",
        fix="Use dp_replicate, which gives the bits of one process.",
    )


def _tie(value: Any, tokens: list[Tensor]) -> Any:
    """Return the same tensors, whose backward knows the marks."""
    trained = find_trained(value)
    # A tensor that occurs twice stays one, so that its gradient is summed in one place.
    tensors = {id(tensor): tensor for tensor in trained if _is_real(tensor)}
    if not tokens or not tensors:
        return value
    tied = _Tie.apply(len(tensors), *tensors.values(), *tokens)  # type: ignore[no-untyped-call]
    places = dict(zip(tensors, tied, strict=True))
    return replace_trained(value, [places.get(id(tensor), tensor) for tensor in trained])


def _is_real(value: Any) -> bool:
    """Return whether a value is a tensor for autograd; logits cut over tp only appear to be one."""
    return issubclass(type(value), Tensor)


def _number(tensor: Tensor) -> int:
    """Return the sequence number of a tensor's autograd node; -1 for a tensor that is no result."""
    return -1 if tensor.grad_fn is None else find_order(tensor.grad_fn)


def _is_made(tensor: Tensor, start: int | None) -> bool:
    """Return whether a tensor was computed after a mark, if there is one."""
    return start is None or _number(tensor) > start


def _copy_views(output: Any, start: int | None) -> Any:
    """Return a module's output, with the views that were made after a mark as tensors of their own.

    fully_shard registers its gathering for backward on the output. If a view is changed in place (`x += y`),
    it silently drops that hook, and backward would read freed parameters.
    """
    trained = find_trained(output)
    copies = {id(t): t.clone() for t in trained if t._base is not None and _is_made(t, start)}
    return replace_trained(output, [copies.get(id(t), t) for t in trained]) if copies else output
