"""Gives whole parameters to code outside of a model: to `forward=` and to the loss.

Inside of the model, tp has changed the code to compute with parts of parameters, and the gradients of some
whole parameters are summed over ranks afterwards. A penalty of the weights (L2, EWC, orthogonality) or a
product with a tied table is computed outside of the model, by every rank for itself. So such a read gets the
whole parameter. In backward each rank keeps its part of the gradient; of a gradient that is summed over
ranks, one rank keeps it. Parameters that no rank could use whole are refused by name.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from paceline.errors import PacelineError
from paceline.mesh import Mesh
from paceline.own_code import describe_place
from paceline.parallel.objective import Objective, Result
from paceline.parallel.placement import Placement
from paceline.parallel.shard.marks import gradient_error
from paceline.parallel.stages.walk import Walker, name_function
from paceline.parallel.tensor.calls import find_line
from paceline.parallel.tensor.differentiable import keep_once
from paceline.parallel.tensor.trace import words
from paceline.parallel.tensor.vocabulary import join_parts
from paceline.torch_seams.dispatch import is_innermost
from paceline.torch_seams.modules import CALL

# Functions that need no number and no shape of a tensor.
_PLAIN = frozenset(
    words(
        "grad.__set__ __hash__ requires_grad_ register_hook register_post_accumulate_grad_hook dim data_ptr "
        "untyped_storage element_size is_floating_point is_complex"
    )
)
# Properties that need them.
_SHOWING = frozenset(f"{name}.__get__" for name in words("T mT H mH data real imag shape"))


class ParameterReads(TorchFunctionMode):
    """A mode that is active while code outside of a model runs.

    Args:
        model: laid out.
        mesh: the ranks, or `None` for a world of one.
    """

    def __init__(self, model: nn.Module, placement: Placement, mesh: Mesh | None) -> None:
        super().__init__()
        self._modules = {id(module) for module in model.modules()}
        self._whole: dict[int, Tensor] = {}
        self._ways: dict[int, Callable[[Tensor], Tensor]] = {}
        self._before_backward: Callable[[Tensor, Mapping[str, Any]], Tensor] | None = None
        self._has_computed = False
        self._is_sharded = any(isinstance(parameter, DTensor) for parameter in model.parameters())
        if mesh is not None:
            for name, parameter in model.named_parameters():
                way = self._find_way(name, parameter, placement, mesh)
                if way is not None:
                    self._ways[id(parameter)] = way
        if self._ways:
            self._left: list[bool] = []
            model.register_forward_pre_hook(self._leave, prepend=True)
            model.register_forward_hook(self._return, always_call=True)

    def watch(self, objective: Objective[Result]) -> Objective[Result]:
        """Return an objective whose code outside of the model sees whole parameters."""
        if not self._ways:
            return objective

        def loss(output: Any, batch: Any) -> Result:
            with self._outside():
                return objective.loss(output, batch)

        def forward(batch: Any) -> Any:
            with self._outside():
                return objective.forward(batch)

        def measure(output: Any, batch: Any) -> Tensor:
            assert objective.measure is not None
            with self._outside():
                return objective.measure(output, batch)

        watched = None if objective.measure is None else measure
        return replace(objective, forward=forward, loss=loss, measure=watched)

    @contextmanager
    def own_code(self, before_backward: Callable[[Tensor, Mapping[str, Any]], Tensor]) -> Iterator[None]:
        """Wrap a forward and backward of the user's own, which see whole parameters.

        Args:
            before_backward: gets each loss whose `backward` is called, with the keywords; returns the loss to
                use. Only called if the layout divides parameters.
        """
        if not self._ways:
            yield
            return
        self._before_backward, self._has_computed = before_backward, False
        try:
            with self._outside():
                yield
        finally:
            self._before_backward = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.backward and self._before_backward is not None:
            loss = self._before_backward(args[0], kwargs)
            self._has_computed = True
            return loss.backward(*args[1:], **kwargs)  # type: ignore[no-untyped-call]
        name = name_function(func)
        if name == "grad.__get__" and self._has_computed and self._is_sharded and id(args[0]) in self._ways:
            raise _early_error()
        if name in _SHOWING or (name not in _PLAIN and not name.endswith(".__get__")):
            found = self._ways.keys() & set(map(id, _flatten((*args, *kwargs.values()))))
            # PL436 says more about a gradient inside of the loss.
            if func is torch.autograd.grad and (self._is_sharded or kwargs.get("create_graph")):
                if found and self._is_sharded and self._before_backward is not None:
                    raise gradient_error("torch.autograd.grad of parameters.")
                found = set()
            if found and not self._is_inside():
                if func is torch.autograd.grad or (name.endswith("_") and not name.endswith("__")):
                    raise _read_error(f"{name} outside of the model takes a parameter", "a divided layout")
                args, kwargs = self._give(args), {key: self._give(value) for key, value in kwargs.items()}
        return func(*args, **kwargs)

    def _give(self, value: Any) -> Any:
        if type(value) in (list, tuple):
            return type(value)(map(self._give, value))
        way = self._ways.get(id(value))
        if way is None:
            return value
        if id(value) not in self._whole:
            self._whole[id(value)] = way(value)
        return self._whole[id(value)]

    def _find_way(
        self, name: str, parameter: Tensor, placement: Placement, mesh: Mesh
    ) -> Callable[[Tensor], Tensor] | None:
        """Return what makes a parameter whole for a read; `None` if each rank may use it as it is."""
        split = placement.splits.get(name)
        if isinstance(parameter, DTensor):
            # `shard/held.py` gathers what is read as a module's attribute, but not `model.parameters()`.
            return partial(self._refuse, name, "layout.dp_shard")
        if split is not None and split.axis == "ep":
            return partial(self._refuse, name, "layout.ep")
        if not placement.holds(name):
            # A stage follows forward= and skips what others run. The loss itself runs on the last one.
            return lambda part: self._refuse(name, "layout.pp", part) if Walker.current is None else part
        added = [mesh.axes[axis] for axis in placement.partial.get(name, ())]
        if split is None and not added:
            return None

        def way(tensor: Tensor) -> Tensor:
            for axis in added:
                tensor = keep_once(tensor, axis)
            return tensor if split is None else join_parts(tensor, split, mesh.axes[split.axis])

        return way

    def _refuse(self, name: str, where: str, _: Tensor) -> Tensor:
        raise _read_error(f"code outside of the model reads {name}", where)

    def _is_inside(self) -> bool:
        """Return whether a module of the model is being called."""
        frame: FrameType | None = sys._getframe(2)
        while frame is not None:
            is_call = frame.f_code is CALL or frame.f_code.co_name == "forward"
            if is_call and id(frame.f_locals.get("self")) in self._modules:
                return True
            frame = frame.f_back
        return False

    @contextmanager
    def _outside(self) -> Iterator[None]:
        self.__enter__()  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            if not any(self._left):  # a stage ends inside of the model
                self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._left.clear()
            self._whole.clear()

    def _leave(self, *_: Any) -> None:
        """Leave the mode until the model returns, unless another mode was entered since."""
        self._left.append(is_innermost(self))
        if self._left[-1]:
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def _return(self, *_: Any) -> None:
        if self._left.pop():
            self.__enter__()  # type: ignore[no-untyped-call]


def _flatten(values: Any) -> Iterator[Any]:
    for value in values:
        if type(value) in (list, tuple):
            yield from _flatten(value)
        else:
            yield value


def _early_error() -> PacelineError:
    """Return PL644, for a gradient that a loop of the user's own reads before it is summed."""
    return PacelineError(
        "PL644",
        saw="the loop over a step's microbatches reads p.grad after a backward (to clip, log or drop it).",
        rule="Under dp_shard gradients are summed and cut at the end of that loop, and not there before.",
        fix="Do it after the inner loop; for clipping call step.clip_grad_norm_.",
    )


def _read_error(saw: str, where: str) -> PacelineError:
    """Return the error for a parameter that code outside of the model cannot use on this layout."""
    line = find_line()
    place = "" if line is None else f" ({describe_place(*line)})"
    return PacelineError(
        "PL642",
        saw=f"{saw} with {where}{place}.",
        rule="Code in forward= and the loss runs on every rank for itself, and each rank has only a part of "
        "this parameter, or none of it.",
        fix="Use the optimizer's weight decay for L2, compute the value in the forward of the module that "
        "owns the parameter and return it, or use a layout without it.",
    )
