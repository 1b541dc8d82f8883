"""Finds the module of a parameter, and the parameters that are not finite, once something is wrong.

The script's model is not known before. The garbage collector knows every live module, and those that hold a
parameter lead to the model.
"""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass
from typing import Any

from paceline.memory.live_modules import find_roots
from paceline.torch_seams.saved import is_built, is_part, read_fields, read_local
from paceline.torch_seams.watching import read_values


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
        found = None if module is None else read_fields(module)[0].get(self.name.rpartition(".")[2])
        return found if found is not None and found.requires_grad else None


def find_siblings(torch: Any, parameter: Any) -> tuple[Named, ...]:
    """Return all parameters of the model to which one belongs, in the order of the modules' definition.

    Other kinds of tensors are left out, but not DTensors, of which this rank's parts are read. The result is
    empty if no module holds the parameter.
    """
    modules = [one for one in gc.get_objects() if issubclass(type(one), torch.nn.Module) and is_built(one)]
    roots = find_roots(modules)
    model = next((root for root in roots if any(one is parameter for one in root.parameters())), None)
    if model is None:
        return ()
    plain = (torch.nn.Parameter, torch.Tensor)
    return tuple(
        Named(f"{path}.{own}" if path else own, type(module).__name__, weakref.ref(module))
        for path, module in model.named_modules()
        for own, tensor in module.named_parameters(recurse=False)
        if type(tensor) in plain or is_part(tensor)
    )


def is_finite(tensor: Any) -> bool:
    """Return whether all numbers of a tensor, or of this rank's part, are finite; waits for the device."""
    local = read_local(tensor)
    numbers = read_values(local) if local.is_sparse else local.detach()
    return bool(numbers.isfinite().all().item())


def has_finite_gradient(tensor: Any) -> bool:
    """Return whether a tensor's gradient is finite; True without one."""
    return tensor.grad is None or is_finite(tensor.grad)
