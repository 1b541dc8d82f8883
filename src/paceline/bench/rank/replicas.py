"""Computes a module on parts of a batch in threads of one process, as `nn.DataParallel` does on several GPUs.

On CPU, `nn.DataParallel` calls the module and does nothing else, so this is built from its steps: parameters
are copied to each replica, the batch is cut, replicas compute forward and backward in threads, outputs are
joined, and gradients are added in the first replica, which is the module itself.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any


class Replicas:
    """A module and its copies.

    Args:
        module: on the CPU or on one device.
        num: replicas, with the module itself.

    Attributes:
        moved_bytes: so far, from and to the first replica: parameters, gradients, batches and outputs.
    """

    def __init__(self, torch: Any, module: Any, num: int) -> None:
        self._torch = torch
        self._modules = [module, *(copy.deepcopy(module) for _ in range(num - 1))]
        self._function = _build_function(torch)
        self.moved_bytes = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's output for a batch; every tensor with a dimension is cut along its first."""
        torch, first = self._torch, self._modules[0]
        if not torch.is_grad_enabled():
            return first(*args, **kwargs)
        parts = _scatter(torch, (args, kwargs), len(self._modules))
        with torch.no_grad():
            for replica in self._modules[1 : len(parts)]:
                replica.train(first.training)
                for mine, its in zip(first.parameters(), replica.parameters(), strict=True):
                    its.copy_(mine)
                    self.moved_bytes += mine.numel() * mine.element_size()
        self.moved_bytes += sum(_count_bytes(torch, part) for part in parts[1:])
        outputs: list[Any] = [None] * len(parts)

        def compute(number: int) -> None:
            with torch.enable_grad():
                part, named = parts[number]
                outputs[number] = self._modules[number](*part, **named)

        _run_all(compute, len(parts))
        self.moved_bytes += 2 * sum(_count_bytes(torch, each) for each in outputs[1:])  # and their gradients
        # autograd calls the function's backward only for an input that needs a gradient.
        needs = torch.ones((), requires_grad=True)
        return self._join(outputs, needs)

    def _join(self, outputs: list[Any], needs: Any) -> Any:
        one = outputs[0]
        if isinstance(one, self._torch.Tensor):
            return self._function.apply(self, outputs, needs)
        if isinstance(one, dict):
            values = {key: self._join([each[key] for each in outputs], needs) for key in one}
            return type(one)(**values) if hasattr(one, "to_tuple") else values
        if isinstance(one, (list, tuple)):
            return type(one)(self._join([each[i] for each in outputs], needs) for i in range(len(one)))
        return one

    def add_gradients(self) -> None:
        """Add the gradients of all replicas in the first one."""
        mine = list(self._modules[0].parameters())
        for replica in self._modules[1:]:
            for own, its in zip(mine, replica.parameters(), strict=True):
                if its.grad is not None:
                    self.moved_bytes += its.grad.numel() * its.grad.element_size()
                    own.grad = its.grad.clone() if own.grad is None else own.grad.add_(its.grad)
                    its.grad = None


def _build_function(torch: Any) -> Any:
    class Join(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, replicas: Replicas, outputs: list[Any], needs: Any) -> Any:
            ctx.replicas, ctx.outputs = replicas, outputs
            parts = [each.detach() for each in outputs]
            ctx.is_scalar = not parts[0].dim()
            return torch.stack(parts).mean() if ctx.is_scalar else torch.cat(parts)

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            outputs = ctx.outputs
            cut = (
                [gradient / len(outputs)] * len(outputs)
                if ctx.is_scalar
                else gradient.split([len(each) for each in outputs])
            )

            def compute(number: int) -> None:
                if outputs[number].requires_grad:
                    torch.autograd.backward(outputs[number], cut[number])

            _run_all(compute, len(outputs))
            ctx.replicas.add_gradients()
            return None, None, None

    return Join


def _scatter(torch: Any, value: Any, num: int) -> list[Any]:
    """Return the parts of a nested value; fewer than `num` if a batch has fewer samples."""
    if isinstance(value, torch.Tensor):
        return list(value.chunk(num)) if value.dim() else [value] * num
    if isinstance(value, (dict, list, tuple)):
        keys = list(value) if isinstance(value, dict) else range(len(value))
        parts = [_scatter(torch, value[key], num) for key in keys]
        count = min(map(len, parts), default=num)
        rows = [[part[i] for part in parts] for i in range(count)]
        if isinstance(value, dict):
            return [dict(zip(keys, row, strict=True)) for row in rows]
        return [type(value)(row) for row in rows]
    return [value] * num


def _count_bytes(torch: Any, value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return int(value.numel() * value.element_size())
    values = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return sum(_count_bytes(torch, each) for each in values)


def _run_all(compute: Callable[[int], None], num: int) -> None:
    """Call a function in threads, one per number; raise the first error."""
    errors: list[BaseException] = []

    def run(number: int) -> None:
        try:
            compute(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(num)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
