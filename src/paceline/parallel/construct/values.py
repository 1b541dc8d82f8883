"""Puts the values of a construction into its model, tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from paceline.parallel.construct.build import Construction
from paceline.parallel.construct.record import StorageWindow
from paceline.torch_seams.modules import own_buffers, own_parameters
from paceline.torch_seams.tensors import read_accumulate_hooks, read_hooks, set_hooks

# From a full name and the whole value to the part that this rank keeps.
Cut = Callable[[str, Tensor], Tensor]


def place_values(
    construction: Construction, device: torch.device | str = "cpu", cut: Cut | None = None
) -> nn.Module:
    """Fill every parameter and buffer on the meta device with its value, in place.

    `Module.to_empty` would untie tied parameters. Here the tensors stay the same objects, so ties, lists of
    weights (`nn.LSTM`), attributes and hooks of parameters stay as the factory left them. If one parameter is
    all of another's memory, the two share it again. Other overlaps (a buffer that is a row of a parameter)
    get memory of their own, as with `Module.to`.

    Not collective. Memory: one whole tensor, besides the kept parts of earlier ones.

    Args:
        construction: its model may have been laid out since, as long as names are unchanged.
        device: the device of the values.
        cut: returns the part that this rank keeps; all by default. If it returns a view smaller than its
            argument, the view is copied, because it would keep the whole tensor alive.

    Returns:
        The construction's model.
    """
    model = construction.model
    tensors: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    tensors |= dict(model.named_buffers(remove_duplicate=False))
    done: set[int] = set()
    values: dict[StorageWindow, Tensor] = {}
    shared = _count(construction, tensors)
    for name, tensor in tensors.items():
        if tensor.device.type != "meta" or id(tensor) in done:
            continue
        done.add(id(tensor))
        window = construction.windows[name]
        value = values.get(window)
        if value is None:
            value = construction.fill(name, device)
            if cut is not None:
                value = _keep_alone(cut(name, value))
        if shared[window] > 1:
            values[window] = value
        _give(model, tensor, value)
    return model


def _count(construction: Construction, tensors: dict[str, Tensor]) -> dict[StorageWindow, int]:
    """Count the different tensors that show the same bytes."""
    owners: dict[StorageWindow, set[int]] = {}
    for name, tensor in tensors.items():
        owners.setdefault(construction.windows[name], set()).add(id(tensor))
    return {window: len(ids) for window, ids in owners.items()}


def _keep_alone(value: Tensor) -> Tensor:
    """Return the value without memory that it does not show."""
    too_much = value.untyped_storage().nbytes() > value.numel() * value.element_size()
    return value.clone() if too_much else value


def _give(model: nn.Module, tensor: Tensor, value: Tensor) -> None:
    """Turn a tensor on the meta device into the one with the value."""
    if isinstance(tensor, nn.Parameter):
        real: Tensor = nn.Parameter(value, requires_grad=tensor.requires_grad)
    else:
        real = value.detach().requires_grad_(tensor.requires_grad)
    # The dictionary itself is kept, so that handles still remove hooks and the layout can keep later ones.
    set_hooks(real, read_hooks(tensor))
    for hook in read_accumulate_hooks(tensor).values():
        real.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    real.__dict__.update(tensor.__dict__)
    try:
        torch.utils.swap_tensors(tensor, real)  # type: ignore[no-untyped-call]
    except RuntimeError:
        # Another object holds a weak reference to it, as nn.LSTM does. The modules then get another object by
        # setattr, from which an LSTM updates its list of weights.
        for module in model.modules():
            for held in (own_parameters(module), own_buffers(module)):
                for key in [key for key, item in held.items() if item is tensor]:
                    setattr(module, key, real)
