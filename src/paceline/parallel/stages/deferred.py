"""Keeps back the gradients of weights, so that a backward can be divided into two actions.

A linear layer or a convolution runs as one operation of the outer graph, with a small graph of its own. The
backward of the outer graph asks the small one for the gradient of the input alone. Later, the small graphs of
a stage and microbatch are asked for the gradients of the weights. Both are autograd's own kernels on the same
numbers, so their bits are those of one backward.

Every other operation gives all of its gradients in the first half. So does a weight that the forward also
uses elsewhere: its gradients must be added in autograd's order.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function

from paceline.torch_seams.dispatch import without_functions
from paceline.torch_seams.modules import own_parameters

# By type of module, the name of the function of torch that its forward calls.
_FUNCTIONS: dict[type[nn.Module], str] = {
    nn.Linear: "linear",
    nn.Conv1d: "conv1d",
    nn.Conv2d: "conv2d",
    nn.Conv3d: "conv3d",
}


class WeightGradients:
    """The gradients of weights that the backward of one stage and microbatch has kept back.

    Args:
        readers: by the id of a parameter, the full names of the modules that compute with it.
        excluded: ids of parameters whose gradients other stages wait for.
    """

    def __init__(self, readers: Mapping[int, set[str]], excluded: Collection[int]) -> None:
        self._readers = readers
        self._excluded = excluded
        self._edges: list[Any] = []
        self._gradients: list[Tensor] = []
        self._parameters: dict[int, nn.Parameter] = {}

    def accepts(self, module: nn.Module, name: str) -> bool:
        """Return whether the weights of a module are used by it alone, and are trained."""
        own = [p for p in own_parameters(module).values() if p is not None]
        return any(p.requires_grad for p in own) and all(
            self._readers.get(id(p)) == {name} and id(p) not in self._excluded for p in own
        )

    def keep(self, edge: Any, gradient: Tensor, module: nn.Module) -> None:
        """Keep one operation's gradient of its output, which those of its weights follow from."""
        self._edges.append(edge)
        self._gradients.append(gradient)
        for parameter in own_parameters(module).values():
            if parameter is not None and parameter.requires_grad:
                self._parameters[id(parameter)] = parameter

    def compute(self) -> None:
        """Add the gradients to the parameters', and release what was kept."""
        if self._edges:
            torch.autograd.backward(self._edges, self._gradients, inputs=list(self._parameters.values()))
        self._edges, self._gradients, self._parameters = [], [], {}


class _Deferred(torch.autograd.Function):
    """Calls a module; its backward gives the gradient of the input, and keeps back those of the weights.

    A tensor that needs a gradient is passed beside the input, so that the operation has a backward even if
    its input needs none.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, _: Tensor, module: nn.Module, sink: WeightGradients) -> Tensor:
        with torch.enable_grad():
            own = x.detach().requires_grad_(ctx.needs_input_grad[0])
            output: Tensor = type(module).forward(module, own)
        ctx.set_materialize_grads(False)
        ctx.edge = torch.autograd.graph.get_gradient_edge(output)
        ctx.own = torch.autograd.graph.get_gradient_edge(own) if own.requires_grad else None
        ctx.module, ctx.sink = module, sink
        return output.detach()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        [gradient] = gradients
        if gradient is None:
            return None, None, None, None
        of_input = None
        if ctx.own is not None:
            [of_input] = torch.autograd.grad([ctx.edge], [ctx.own], [gradient], retain_graph=True)
        ctx.sink.keep(ctx.edge, gradient, ctx.module)
        return of_input, None, None, None


def list_deferrable(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules whose gradients of weights may be computed apart, by full name."""
    return {
        name: module
        for name, module in model.named_modules()
        if type(module) in _FUNCTIONS
        and getattr(module, "padding_mode", "zeros") == "zeros"
        and own_parameters(module).get("weight") is not None
    }


@contextmanager
def deferring(
    modules: Mapping[str, nn.Module], find_sink: Callable[[], WeightGradients | None]
) -> Iterator[None]:
    """Keep back the gradients of these modules' weights in backwards of forwards inside the context.

    Args:
        modules: from `list_deferrable`.
        find_sink: returns what keeps them for the forward that runs, or `None` to keep back none.
    """
    spark = torch.zeros((), requires_grad=True)
    replaced = [(name, module) for name, module in modules.items() if "forward" not in vars(module)]
    for name, module in replaced:
        module.__dict__["forward"] = partial(_call, module, name, spark, find_sink)
    try:
        yield
    finally:
        for _, module in replaced:
            del module.__dict__["forward"]


def _call(
    module: nn.Module, name: str, spark: Tensor, find_sink: Callable[[], WeightGradients | None], x: Tensor
) -> Tensor:
    sink = find_sink()
    if sink is None or not torch.is_grad_enabled() or not sink.accepts(module, name):
        found: Tensor = type(module).forward(module, x)
        return found
    run = _Operation(_FUNCTIONS[type(module)], partial(_Deferred.apply, x, spark, module, sink))
    if has_torch_function((x,)):
        # A mode follows the forward: it sees the one function that the module's own forward calls.
        found = handle_torch_function(run, (x,), x, module.weight, module.bias)
    else:
        found = run()
    return found


class _Operation:
    """A function with the name of one of torch's, for modes that follow it by name."""

    def __init__(self, name: str, run: Callable[[], Tensor]) -> None:
        self.__name__ = name
        self._run = run

    def __call__(self, *_: Any) -> Tensor:
        with without_functions():
            return self._run()
