"""Reads the state of a script's training where torch has no hook for it; imports nothing of torch.

As in `watching`, a missing name turns off a part of the watch.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from operator import attrgetter
from types import FrameType
from typing import Any

from paceline.torch_seams.watching import find_world, hide_from_compiler

_MEAN_LOSSES = ("NllLoss", "MseLoss", "SmoothL1", "HuberLoss", "BinaryCrossEntropy", "KlDiv")
_SCALES = ("MulBackward", "DivBackward")
_MEAN = 1  # torch's number for reduction="mean"
_MANY_FRAMES = 64
_OBSERVED = (
    ("forward", "nn.parallel.DistributedDataParallel", "_pre_forward"),
    ("sharded_forward", "distributed.fsdp._fully_shard._fsdp_state.FSDPState", "_root_pre_forward"),
    ("batch", "utils.data.dataloader._BaseDataLoaderIter", "__next__"),
    ("order", "utils.data.distributed.DistributedSampler", "__iter__"),
    ("save", "serialization._open_zipfile_writer_file", "__init__"),
    ("load", "serialization._open_file", "__init__"),
    ("random_state", "random", "set_rng_state"),
)


def observe(
    torch: Any,
    place: tuple[Any, str],
    before: Callable[..., None] | None = None,
    after: Callable[..., None] | None = None,
) -> Callable[[], None]:
    """Call functions around each call of a method, and return what ends this.

    The method keeps its results, its errors and their tracebacks.

    Args:
        place: the method's owner, a class or module, and its name there.
        before: gets the method's arguments; must not raise.
        after: gets its result and its arguments; must not raise.
    """
    owner, name = place
    original = getattr(owner, name)
    is_compiling = torch.compiler.is_compiling

    @functools.wraps(original)
    def observed(*args: Any, **kwargs: Any) -> Any:
        is_seen = not is_compiling()
        if is_seen and before is not None:
            before(*args, **kwargs)
        try:
            result = original(*args, **kwargs)
        except BaseException as error:
            # A bare `raise` adds no frame, so this one is in no traceback.
            error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next
            raise
        if is_seen and after is not None:
            after(result, *args, **kwargs)
        return result

    def restore() -> None:
        if getattr(owner, name) is observed:
            setattr(owner, name, original)

    hide_from_compiler(torch, observed)
    setattr(owner, name, observed)
    return restore


def find_gathering() -> tuple[Any, str] | None:
    """Return the method by which `fully_shard` makes a whole parameter; None before it is imported."""
    records = sys.modules.get("torch.distributed.fsdp._fully_shard._fsdp_param")
    owner = getattr(records, "FSDPParam", None)
    return (owner, "init_unsharded_param") if hasattr(owner, "init_unsharded_param") else None


def find_sample_ranks(state: Any) -> tuple[int, ...]:
    """Return the ranks that must have samples of their own in this forward of a model of `fully_shard`.

    These are all ranks, if each of its parameters is sharded over (or copied on) all of them. None are
    returned where another axis may give ranks the same samples, and for modules inside of the model.
    """
    context, group = state._state_ctx, read_default_group()
    if context.iter_forward_root is not state or group is None:
        return ()
    groups = [each for one in context.all_states for each in _list_groups(one)]
    sizes = {each.mesh_info.mesh.size() for each in groups}
    return group[1] if sizes == {len(group[1])} else ()


def _list_groups(state: Any) -> list[Any]:
    groups = getattr(state, "_fsdp_param_groups", None)
    return [state._fsdp_param_group] * (state._fsdp_param_group is not None) if groups is None else groups


def list_replicated(ddp: Any) -> list[Any]:
    """Return the parameters that a DDP module keeps equal on its ranks."""
    return [parameter for parameter in ddp._module_parameters if parameter.requires_grad]


def has_exchange(ddp: Any) -> bool:
    """Return whether the backward of a DDP module's last forward sums gradients."""
    return bool(ddp.require_forward_param_sync)


def has_own_exchange(ddp: Any) -> bool:
    """Return whether the script has registered a communication hook."""
    return bool(ddp._comm_hooks)


def read_group(group: Any) -> tuple[str, tuple[int, ...], int]:
    """Return a process group's name, its ranks, and how many collectives this rank has issued in it."""
    world = find_world()
    ranks = world.pg_group_ranks[group]  # type: ignore[union-attr]
    number = group._get_sequence_number_for_group()
    return world.pg_names[group], tuple(sorted(ranks, key=ranks.__getitem__)), number  # type: ignore[union-attr]


def read_default_group() -> tuple[str, tuple[int, ...], int] | None:
    """Return the default process group as `read_group` does; None without one."""
    group = getattr(find_world(), "default_pg", None)
    return None if group is None else read_group(group)


def is_mean(frame: FrameType | None) -> bool:
    """Return whether the running backward starts at one unweighted mean: its gradient is that of the mean."""
    for _ in range(_MANY_FRAMES):
        if frame is None or frame.f_code.co_name == "_engine_run_backward":
            break
        frame = frame.f_back
    if frame is None or frame.f_back is None or frame.f_back.f_locals.get("grad_tensors") is not None:
        return False
    outputs: Sequence[Any] = frame.f_locals.get("t_outputs", ())
    node = getattr(outputs[0], "grad_fn", None) if len(outputs) == 1 else None
    kind = type(node).__name__
    if kind.startswith("MeanBackward"):
        inner = type(node.next_functions[0][0]).__name__  # type: ignore[union-attr]
        return not inner.startswith(_SCALES)
    return kind.startswith(_MEAN_LOSSES) and getattr(node, "_saved_reduction", None) == _MEAN


def has_other_hooks(parameter: Any) -> bool:
    """Return whether more than the watch's own hook changes or reads a parameter's gradient."""
    return len(parameter._backward_hooks or ()) > 1


def list_observed(torch: Any) -> dict[str, tuple[Any, str]]:
    """Return the methods that are observed, each by its subject, as its owner and its name there."""
    places: dict[str, tuple[Any, str]] = {"random": (torch, "set_rng_state")}
    for subject, owner, name in _OBSERVED:
        with suppress(AttributeError):
            places[subject] = attrgetter(owner)(torch), name
    return places
