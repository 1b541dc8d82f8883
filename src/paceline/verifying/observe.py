"""Reads a trainer for `verify`: its tensors by full name, and this rank's part of a whole one.

It is the only file of `verify` that reads a trainer's internals, so a change of the trainer is a change here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from paceline.parallel.placement import local
from paceline.parallel.tensor.differentiable import sums_gradient
from paceline.pipeline.under_way import UNDER_WAY
from paceline.torch_seams.autograd import is_view
from paceline.torch_seams.modules import own_buffers, own_parameters
from paceline.train.trainer import Trainer

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_PLAIN = (torch.float64, torch.float32, torch.float16, torch.bfloat16, *_INTEGERS)


def list_tensors(trainer: Trainer) -> Iterator[tuple[str, str, Tensor]]:
    """Yield this rank's parts of all parameters and buffers: (kind, full name, tensor).

    Tied parameters are yielded under each of their names, so that copies that drift apart are detected.
    Buffers that are not saved are left out: they may be scratch, such as a cache that each forward fills. One
    that matters shows in the outputs. Of islands that are apart, these are the global weights and statistics.
    """
    islands = trainer._islands
    shared = islands.global_buffers if islands is not None and islands.is_split else None
    with trainer._whole_islands():
        for name, parameter in trainer.model.named_parameters(remove_duplicate=False):
            if holds(trainer, name):
                yield "weight", name, take_local(parameter)
        saved = trainer.model.state_dict(keep_vars=True).keys()
        for name, buffer in trainer.model.named_buffers(remove_duplicate=False):
            is_shared = shared is None or id(buffer) in shared
            if name in saved and holds(trainer, name) and is_shared:
                yield "buffer", name, take_local(buffer)


def are_apart(trainer: Trainer) -> bool:
    """Return whether the trainer has islands whose weights differ, so that ranks hold different numbers."""
    return trainer._islands is not None and trainer._islands.is_split


def list_optimizer_state(trainer: Trainer) -> Iterator[tuple[str, str, Tensor]]:
    """Yield this rank's parts of the optimizer's state: (parameter's full name, state's name, tensor)."""
    names = {id(parameter): name for name, parameter in trainer.model.named_parameters()}
    optimizer = trainer._updates["model"].optimizer
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    yield names[id(parameter)], key, take_local(value)


def list_optimizer_settings(trainer: Trainer) -> dict[str, str]:
    """Return the settings of the optimizer by parameter's full name, as text."""
    names = {id(parameter): name for name, parameter in trainer.model.named_parameters()}
    optimizer = trainer._updates["model"].optimizer
    found: dict[str, str] = {}
    for group in optimizer.param_groups:
        plain = {key: value for key, value in group.items() if isinstance(value, bool | int | float | tuple)}
        text = ", ".join(f"{key}={value!r}" for key, value in sorted(plain.items()))
        found |= {names[id(p)]: f"{type(optimizer).__name__} {text}" for p in group["params"]}
    return found


def take_part(trainer: Trainer, name: str, whole: Tensor) -> Tensor:
    """Return this rank's part of a whole tensor laid out as parameter or buffer `name`; not collective."""
    placement = _find_placement(trainer)
    if placement is None:
        return whole
    prefix, _, key = name.rpartition(".")
    module = trainer.model.get_submodule(prefix)
    parameters = own_parameters(module)
    owner = parameters[key] if key in parameters else own_buffers(module)[key]
    part: Tensor = placement.part(name, whole, owner)
    return part.cpu()


def holds(trainer: Trainer, name: str) -> bool:
    """Return whether this rank has a part of a parameter or buffer; under pp, it is of one of its stages."""
    placement = _find_placement(trainer)
    return placement is None or bool(placement.holds(name))


def is_elsewhere(trainer: Trainer, module: str) -> bool:
    """Return whether a module has parameters, and all of them are on other stages."""
    found = [parameter.is_meta for parameter in trainer.model.get_submodule(module).parameters()]
    return bool(found) and all(found)


def _find_placement(trainer: Trainer) -> Any:
    """Return the placement of the model's parts, or `None` if every rank has the whole model."""
    return getattr(trainer._updates["model"], "placement", None)


def has_part_of_gradient(tensor: Tensor) -> bool:
    """Return whether a rank of tp correctly gets only a part of this activation's gradient.

    That is so behind the place where backward sums a gradient over tp, as long as the tensor is only viewed
    or transposed in between.
    """
    node: Any = tensor.grad_fn
    while node is not None:
        if sums_gradient(node):
            return True
        if not is_view(node):
            return False
        node = node.next_functions[0][0]
    return False


def take_local(tensor: Tensor) -> Tensor:
    """Return the numbers of a tensor on the CPU; of a DTensor, this rank's part. Copies only if needed."""
    return as_numbers(local(tensor.detach())).cpu()


def as_numbers(tensor: Tensor) -> Tensor:
    """Return a tensor of any kind as a dense one of real numbers, which arithmetic and safetensors support.

    A complex one gets a last dimension of 2.
    """
    if tensor.is_nested:
        tensor = torch.cat([each.reshape(-1) for each in tensor.unbind()])
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if tensor.dtype == torch.bool:
        tensor = tensor.to(torch.uint8)
    elif tensor.dtype in (torch.uint16, torch.uint32, torch.uint64):
        tensor = tensor.to(torch.int64)
    elif tensor.dtype not in _PLAIN:  # the types of 8 bits and less
        tensor = tensor.to(torch.float32)
    return tensor.resolve_neg()


def digest(tensors: Iterable[Tensor]) -> str:
    """Return a digest of tensors with their types and shapes, as text."""
    found = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        found.update(f"{list(tensor.shape)} {tensor.dtype} ".encode())
        found.update(take_local(tensor).contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def wrap_functions(
    trainer: Trainer,
    forward: Callable[[Callable[..., Any], Any, Any], Any],
    loss: Callable[[Callable[..., Any], Any, Any], Any],
) -> None:
    """Call `forward(inner, model, batch)` and `loss(inner, output, batch)` instead of the user's."""
    inner_forward, inner_loss = trainer._forward, trainer._loss
    assert inner_loss is not None
    trainer._forward = lambda model, batch: forward(inner_forward, model, batch)
    trainer._loss = lambda output, batch: loss(inner_loss, output, batch)


def is_trial(trainer: Trainer) -> bool:
    """Return whether the running forward is a trial: the trainer finds out how the model treats a batch."""
    return trainer._updates["model"].runner.is_trying


def find_running(trainer: Trainer) -> int | None:
    """Return the microbatch that a stage runs, by its place in the share; `None` without stages."""
    if not trainer._updates["model"].runner.is_staged:
        return None
    assert UNDER_WAY.action is not None
    return UNDER_WAY.action.microbatch


def place_batch(trainer: Trainer, batch: Any) -> Any:
    """Return the batch as the model gets it: on the device, in the training dtype."""
    return trainer._precision.place_batch(batch)


def move_last_bits(model: nn.Module, step: float, seed: int) -> None:
    """Move every weight by a relative `step`, up or down at random, as rounding elsewhere might do."""
    generator = torch.Generator().manual_seed(seed)
    seen: set[int] = set()
    with torch.no_grad():
        for parameter in model.parameters():
            is_moved = parameter.is_floating_point() or parameter.is_complex()
            if is_moved and id(parameter) not in seen:
                seen.add(id(parameter))
                signs = torch.randint(0, 2, parameter.shape, generator=generator).mul_(2).sub_(1)
                parameter.mul_(1 + step * signs.to(device=parameter.device, dtype=parameter.dtype))
