"""Hooks that replace a module's input or output tensor by another one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from paceline.torch_seams.modules import register_before_users
from paceline.torch_seams.trees import tree_flatten, tree_unflatten

Change = Callable[[Tensor], Tensor]
# Of a tensor among the arguments of a call: the argument, and for one in a tuple or list its index there.
Path = tuple[int | str, ...]


def change_input(
    module: nn.Module, keys: tuple[int | str, ...], change: Change, *, prepend: bool = False
) -> RemovableHandle:
    """Change one tensor, which a call may get under several names (query, key, value of self-attention).

    Args:
        keys: places or keywords of the arguments.
        change: returns the tensor to use instead.
        prepend: whether to run before all present hooks.
    """

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given: dict[int | str, Any] = dict(enumerate(args))
        given.update((key, value) for key, value in kwargs.items())
        changed = change(given[keys[0]])
        given.update(dict.fromkeys(keys, changed))
        return tuple(given[place] for place in range(len(args))), {key: given[key] for key in kwargs}

    return module.register_forward_pre_hook(hook, with_kwargs=True, prepend=prepend)


def find_tensors(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[Path, Tensor]:
    """Return the tensors among the arguments of a call, and those in tuples and lists there, by path."""
    found: dict[Path, Tensor] = {}
    given: dict[int | str, Any] = dict(enumerate(args))
    for key, value in (given | dict(kwargs)).items():
        if isinstance(value, Tensor):
            found[(key,)] = value
        elif isinstance(value, (tuple, list)):
            found |= {(key, n): each for n, each in enumerate(value) if isinstance(each, Tensor)}
    return found


def change_argument(
    module: nn.Module, path: Path, change: Change, *, prepend: bool = False
) -> RemovableHandle:
    """Change one tensor among the arguments of a module's calls, which may be in a tuple or list there.

    Args:
        path: as in `find_tensors`; a call without a tensor there is not changed.
        change: returns the tensor to use instead.
        prepend: whether to run before all present hooks.
    """

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensor = find_tensors(args, kwargs).get(path)
        if tensor is None:
            return args, kwargs
        key, changed = path[0], change(tensor)
        given: dict[int | str, Any] = dict(enumerate(args)) | dict(kwargs.items())
        if len(path) == 1:
            given[key] = changed
        else:
            items = [changed if n == path[1] else each for n, each in enumerate(given[key])]
            given[key] = items if isinstance(given[key], list) else tuple(items)
        return tuple(given[place] for place in range(len(args))), {key: given[key] for key in kwargs}

    return module.register_forward_pre_hook(hook, with_kwargs=True, prepend=prepend)


def change_output(module: nn.Module, change: Change, number: int = 0) -> RemovableHandle:
    """Change one of the tensors that a module returns: the first, or the one with a number from 0.

    Hooks that the user has registered see the changed tensor.
    """

    def hook(_module: nn.Module, _args: Any, result: Any) -> Any:
        leaves, structure = tree_flatten(result)
        place = [n for n, leaf in enumerate(leaves) if isinstance(leaf, Tensor)][number]
        leaves[place] = change(leaves[place])
        return tree_unflatten(leaves, structure)

    return register_before_users(module, hook)
