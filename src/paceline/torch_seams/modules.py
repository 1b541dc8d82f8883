"""Accesses private parts of torch's modules."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from types import CodeType
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from paceline.torch_seams.installed import checked, set_existing

with checked("modules"):
    from torch.nn.modules.batchnorm import _BatchNorm as BatchNormBase
    from torch.nn.modules.batchnorm import _NormBase as NormBase
    from torch.nn.modules.dropout import _DropoutNd as DropoutBase

# The code of the frame in which a module's hooks and its forward are called.
CALL: CodeType = nn.Module._call_impl.__code__
# The attributes in which a module itself keeps parameters, buffers and modules.
STORES = ("_parameters", "_buffers", "_modules")
# The attribute of a module with the ids of the forward hooks that run first.
_FIRST = "_paceline_first_hooks"

__all__ = [
    "CALL",
    "STORES",
    "BatchNormBase",
    "DropoutBase",
    "NormBase",
    "convert_tensors",
    "copy_frame",
    "find_call",
    "find_compiled",
    "hide_from_ddp",
    "list_forward_hooks",
    "list_hooks",
    "own_buffers",
    "own_modules",
    "own_parameters",
    "register_before_users",
    "set_compiled_call",
    "set_own_parameters",
]


def own_parameters(module: nn.Module) -> dict[str, Any]:
    """Return the dict in which a module itself keeps its parameters, those that are None included."""
    return module._parameters


def set_own_parameters(module: nn.Module, parameters: dict[str, Any]) -> None:
    """Replace the dict in which a module itself keeps its parameters."""
    module._parameters = parameters


def own_buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """Return the dict in which a module itself keeps its buffers, those that are None included."""
    return module._buffers


def convert_tensors(module: nn.Module, convert: Callable[[Tensor], Tensor]) -> None:
    """Replace every parameter and buffer of a module and those in it, in place; tied ones stay tied."""
    module._apply(convert)  # type: ignore[no-untyped-call]


def own_modules(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return the dict in which a module itself keeps its modules, those that are None included."""
    return module._modules


def register_before_users(module: nn.Module, hook: Callable[..., Any]) -> RemovableHandle:
    """Register a forward hook behind others registered so, and before all others."""
    handle = module.register_forward_hook(hook)
    module.__dict__.setdefault(_FIRST, set()).add(handle.id)
    hooks = module._forward_hooks
    for key in [key for key in hooks if key not in module.__dict__[_FIRST]]:
        hooks[key] = hooks.pop(key)
    return handle


def copy_frame(module: nn.Module) -> nn.Module:
    """Return a copy of a module with copies of its children, which share its parameters and buffers."""
    twin = copy(module)
    twin._modules = {name: copy(child) for name, child in module.named_children()}
    return twin


def hide_from_ddp(module: nn.Module, names: list[str]) -> None:
    """Make a later `DistributedDataParallel(module)` ignore these parameters and buffers."""
    if names:
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(  # type: ignore[no-untyped-call]
            module, names
        )


def list_forward_hooks(module: nn.Module) -> tuple[dict[Any, Any], dict[Any, Any], dict[Any, Any]]:
    """Return the dicts of hooks before and after the forward, and of those called even after an exception.

    torch's own keys are integers, so Paceline's keys are strings. A copy of the module has them too.
    """
    return module._forward_pre_hooks, module._forward_hooks, module._forward_hooks_always_called


def list_hooks(module: nn.Module) -> list[Any]:
    """Return a module's hooks on forward and backward."""
    before, after, _ = list_forward_hooks(module)
    dicts = before, after, module._backward_pre_hooks, module._backward_hooks
    return [hook for hooks in dicts for hook in hooks.values()]


def find_call(module: nn.Module) -> Callable[..., Any]:
    """Return the function that calls a module's hooks and its forward, uncompiled."""
    call: Callable[..., Any] = module._call_impl
    return call


def read_compiled_call(module: nn.Module) -> Callable[..., Any] | None:
    """Return what a module's calls run, if `set_compiled_call` or `Module.compile` has set it."""
    found: Callable[..., Any] | None = module._compiled_call_impl
    return found


def find_compiled(model: nn.Module) -> tuple[str, nn.Module] | None:
    """Return the name of the first module that `torch.compile` has wrapped, and the module inside."""
    for name, module in model.named_modules(remove_duplicate=False):
        inside = getattr(module, "_orig_mod", None)
        if isinstance(inside, nn.Module):
            return name, inside
    return None


def set_compiled_call(module: nn.Module, call: Callable[..., Any]) -> None:
    """Make a module's calls run a function, as `Module.compile` does with the compiled one."""
    set_existing(module, "_compiled_call_impl", call)
