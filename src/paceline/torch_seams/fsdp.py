"""torch's own records of a sharded model: every private name of torch that sharding relies on.

`fully_shard` is public. The record that it keeps of each parameter is private, and its names differ between
torch 2.11, 2.12 and 2.13. Names are checked when a model is sharded, because other layouts work without them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, _common_utils

from paceline.torch_seams.trees import tree_leaves, tree_map

if TYPE_CHECKING:
    from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
else:
    try:
        from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
    except ImportError:
        # Layouts without dp_shard must still work.
        AllGather = ReduceScatter = object

# From torch 2.13 on; they find tensors in data classes too.
_collect: Any = getattr(_common_utils, "collect_grad_tensors", None)
_replace: Any = getattr(_common_utils, "replace_grad_tensors", None)

__all__ = [
    "AllGather",
    "ReduceScatter",
    "act_before_sums",
    "begin_backward",
    "clear_gradients",
    "end_backward",
    "find_trained",
    "forget_iteration",
    "gathered",
    "list_groups",
    "list_records",
    "pass_block",
    "replace_trained",
    "set_input_hook",
    "set_output_hook",
    "unmark",
]


def list_groups(module: FSDPModule) -> list[Any]:
    """Return torch's groups of the parameters that a module gathers.

    Older versions of torch keep one group or None, newer ones a list.
    """
    state: Any = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        only = state._fsdp_param_group
        return [] if only is None else [only]
    return list(groups)


def list_records(module: FSDPModule) -> list[Any]:
    """Return torch's records of the parameters that a module gathers, in the order of its flat vectors.

    Of a record, `sharded_param` is the parameter that users and optimizers see, and
    `padded_sharded_param_size` the shape of every rank's part of it.
    """
    return [record for group in list_groups(module) for record in group.fsdp_params]


def gathered(record: Any) -> nn.Parameter | None:
    """Return the whole parameter that forward and backward use, or None before the first gather.

    torch makes it once and then only fills and frees its memory, so hooks on it stay.
    """
    whole: nn.Parameter | None = getattr(record, "_unsharded_param", None)
    return whole


def clear_gradients(record: Any) -> None:
    """Drop the gradients that an unfinished step has left in a record."""
    record.unsharded_accumulated_grad = None
    whole = gathered(record)
    if whole is not None:
        whole.grad = None


def act_before_sums(module: FSDPModule, act: Callable[[list[Any], bool], None]) -> None:
    """Call `act` before torch sums a module's gradients over the ranks, or sets them aside.

    Args:
        module: sharded.
        act: gets the records, and whether torch sums.
    """
    for group in list_groups(module):
        group.post_backward = _acting(group, group.post_backward, act)


def _acting(
    group: Any, post_backward: Callable[..., None], act: Callable[[list[Any], bool], None]
) -> Callable[..., None]:
    def run(*unused: Any) -> None:
        act(group.fsdp_params, group.reduce_grads)
        post_backward(*unused)

    return run


def set_input_hook(module: FSDPModule, act: Callable[..., tuple[Any, Any]]) -> None:
    """Replace torch's hook on a block's inputs, which ends the block's backward, by `act`.

    Args:
        module: sharded.
        act: gets torch's function, and the call's arguments and keyword arguments; returns the latter two.
    """
    for group in list_groups(module):
        group._register_post_backward_hook = partial(act, group._register_post_backward_hook)


def set_output_hook(module: FSDPModule, act: Callable[..., Any]) -> None:
    """Replace torch's hook on a block's output, which begins the block's backward, by `act`.

    Args:
        module: sharded.
        act: gets torch's function and the output; returns the output.
    """
    state: Any = module._get_fsdp_state()
    state._register_pre_backward_hook = partial(act, state._register_pre_backward_hook)


def pass_block(module: FSDPModule) -> None:
    """Run torch's hooks around a block's forward: gather its parameters, and free them again."""
    state: Any = module._get_fsdp_state()
    state._pre_forward(module, (), {})
    state._post_forward(module, (), None)


def begin_backward(module: FSDPModule) -> None:
    """Run torch's hook before a block's backward: gather its parameters."""
    state: Any = module._get_fsdp_state()
    state._pre_backward(None)


def end_backward(module: FSDPModule, *, sums: bool = True) -> None:
    """Run torch's hook after a block's backward: free its parameters and sum its gradients.

    Args:
        module: sharded.
        sums: whether to sum; if not, the gradients are kept for the next call of this function.
    """
    for group in list_groups(module):
        before = group.reduce_grads
        group.reduce_grads = before and sums
        try:
            group.post_backward()
        finally:
            group.reduce_grads = before


def find_trained(value: Any) -> list[Tensor]:
    """Return the tensors in tuples, lists and dicts that require a gradient."""
    if _collect is not None:
        return list(_collect(value))
    return [leaf for leaf in tree_leaves(value) if _is_trained(leaf)]


def replace_trained(value: Any, tensors: list[Tensor]) -> Any:
    """Return a value with the tensors of `find_trained` replaced by others, in the same order."""
    if _replace is not None:
        return _replace(value, iter(tensors))
    others = iter(tensors)
    return tree_map(lambda leaf: next(others) if _is_trained(leaf) else leaf, value)


def _is_trained(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad


def unmark(module: nn.Module) -> None:
    """Remove torch's mark of sharded modules from a module, if it is marked."""
    if getattr(module, "_is_fsdp_managed_module", False):
        module._is_fsdp_managed_module = False  # type: ignore[assignment]


def forget_iteration(root: FSDPModule) -> None:
    """Drop torch's state of an unfinished forward or backward after an exception, if torch supports it."""
    reset = getattr(root, "reset_iter_state", None)
    if reset is not None:
        with suppress(AttributeError):  # before the first forward there is no such state
            reset()
