"""Finds the module of a parameter, and the parameters that are not finite, once something is wrong.

The script's model is not known before. The garbage collector knows every live module, and those that hold a
parameter lead to the model.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from paceline.torch_seams.watching import read_module, read_values

# Modules that wrap a model without being part of it: DistributedDataParallel, DataParallel, torch.compile.
_WRAPPED = {"module", "_orig_mod"}


@dataclass(frozen=True)
class Named:
    """A parameter of a model.

    Attributes:
        name: as in `named_parameters`, without the prefixes of wrappers.
        kind: the class of its module.
    """

    name: str
    kind: str
    # No reference to the parameter itself: one with a weak reference cannot be swapped
    # (`torch.utils.swap_tensors`).
    _module: weakref.ref[Any]

    def find(self) -> Any | None:
        """Return the parameter, if it still exists and is trained."""
        module = self._module()
        found = None if module is None else read_module(module)[0].get(self.name.rpartition(".")[2])
        return found if found is not None and found.requires_grad else None


def find_siblings(torch: Any, parameter: Any) -> tuple[Named, ...]:
    """Return all parameters of the model to which one belongs, in the order of the modules' definition.

    Other kinds of tensors (DTensor) are left out, because reading them may take a collective. The result is
    empty if no module holds the parameter.
    """
    modules = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.nn.Module)]
    models = [_unwrap(root) for root in _find_roots(modules, parameter)]
    if not models:
        return ()
    model = max(models, key=lambda model: (not _is_traced(model), sum(1 for _ in model.parameters())))
    plain = (torch.nn.Parameter, torch.Tensor)
    return tuple(
        Named(f"{path}.{own}" if path else own, type(module).__name__, weakref.ref(module))
        for path, module in model.named_modules()
        for own, tensor in module.named_parameters(recurse=False)
        if type(tensor) in plain
    )


def _find_roots(modules: Iterable[Any], parameter: Any) -> list[Any]:
    parents: dict[int, list[Any]] = {}
    here: list[Any] = []
    for module in modules:
        parameters, children = read_module(module)
        if any(own is parameter for own in parameters.values()):
            here.append(module)
        for child in children.values():
            parents.setdefault(id(child), []).append(module)
    met: set[int] = set()
    roots = []
    while here:
        module = here.pop()
        if id(module) in met:
            continue
        met.add(id(module))
        if id(module) not in parents:
            roots.append(module)
        here += parents.get(id(module), [])
    return roots


def _is_traced(model: Any) -> bool:
    """Return whether a model is a compiler's trace of another one, with other names."""
    return any(kind.__name__ == "GraphModule" for kind in type(model).__mro__)


def _unwrap(model: Any) -> Any:
    while True:
        parameters, children = read_module(model)
        if len(children) != 1 or parameters or not children.keys() <= _WRAPPED:
            return model
        (model,) = children.values()


def is_finite(tensor: Any) -> bool:
    """Return whether all numbers of a tensor are finite; waits for the device."""
    numbers = read_values(tensor) if tensor.is_sparse else tensor.detach()
    return bool(numbers.isfinite().all().item())


def has_finite_gradient(tensor: Any) -> bool:
    """Return whether a tensor's gradient is finite; True without one."""
    return tensor.grad is None or is_finite(tensor.grad)
