"""Hands the values of a construction out to all ranks, tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.torch_seams.modules import own_buffers, own_parameters
from paceline.torch_seams.tensors import read_accumulate_hooks, read_hooks, set_hooks

# A value, or what reads it when it is needed: its rows from one to before another if it has a method `rows`.
Value = Tensor | Callable[[], Tensor]
_BLOCK_BYTES = 4_000_000
# From a full name and the whole value to the part that this rank keeps.
Cut = Callable[[str, Tensor], Tensor]


@dataclass
class Construction:
    """A model on the meta device, and on rank 0 its values or what reads them.

    Attributes:
        model: complete except for values: names, ties, dtypes, hooks and attributes are the factory's.
        windows: by full name of a parameter or buffer, a number for the bytes that it shows; in named order,
            parameters first.
    """

    model: nn.Module
    windows: Mapping[str, int]
    _group: dist.ProcessGroup | None
    _values: dict[int, Value] = field(repr=False)
    _shapes: dict[int, Tensor] = field(repr=False)

    def hand_out(
        self, device: torch.device | str, in_rows: Collection[str] = ()
    ) -> Iterator[tuple[list[str], int, Tensor]]:
        """Yield names that show the same bytes, a row's number, and values from there on; once, collective.

        Rank 0 reads values if they are in a file, broadcasts them and drops them.

        Args:
            device: of the values that are yielded, which are in memory of their own.
            in_rows: names whose values are yielded in blocks of rows; of others, whole and from row 0.
        """
        names: dict[int, list[str]] = {}
        for name, number in self.windows.items():
            names.setdefault(number, []).append(name)
        for number, shape in self._shapes.items():
            value = self._values.pop(number, None)
            if shape.numel() and shape.is_contiguous() and all(name in in_rows for name in names[number]):
                by_rows = hasattr(value, "rows")
                if callable(value) and not by_rows:
                    value = value()
                num_rows = max(1, _BLOCK_BYTES * len(shape) // (shape.numel() * shape.itemsize))
                for first in range(0, len(shape), num_rows):
                    last = min(first + num_rows, len(shape))
                    rows = _take(value, first, last)
                    yield names[number], first, self._send(rows, shape[first:last], device, is_read=by_rows)
                continue
            whole = self._send(value() if callable(value) else value, shape, device, is_read=callable(value))
            del value
            yield names[number], 0, whole
            del whole  # before the next one is made

    def _send(
        self, value: Tensor | None, shape: Tensor, device: torch.device | str, *, is_read: bool = False
    ) -> Tensor:
        """Return rank 0's value on every rank, in memory of its own; collective."""
        whole = None if value is None or not is_read else _keep_alone(value).to(device, shape.dtype)
        if whole is None or whole.stride() != shape.stride():
            whole = torch.empty_like(shape, device=device)
            if value is not None:
                whole.copy_(value)
        del value
        if self._group is not None and whole.numel():
            # All of its memory, since its strides are the same on every rank.
            memory = torch.empty(0, dtype=torch.uint8, device=device).set_(whole.untyped_storage())
            dist.broadcast(memory, group=self._group, group_src=0)
        return whole


def _take(value: Value | None, first: int, last: int) -> Tensor | None:
    """Return rows of a value, if this rank has it."""
    if value is None or isinstance(value, Tensor):
        return value if value is None else value[first:last]
    rows: Tensor = value.rows(first, last)  # type: ignore[attr-defined]
    return rows


def place_values(
    construction: Construction, device: torch.device | str = "cpu", cut: Cut | None = None
) -> nn.Module:
    """Fill every parameter and buffer on the meta device with its value, in place; collective.

    `Module.to_empty` would untie tied parameters. Here the tensors stay the same objects, so ties, lists of
    weights (`nn.LSTM`), attributes and hooks of parameters stay as the factory left them. If one parameter is
    all of another's memory, the two share it again. Other overlaps (a buffer that is a row of a parameter)
    get memory of their own, as with `Module.to`.

    Memory: one whole tensor, besides the kept parts of earlier ones.

    Args:
        construction: its model may have been laid out since, as long as names are unchanged.
        cut: returns the part that this rank keeps; all by default. If it returns a view smaller than its
            argument, the view is copied, because it would keep the whole tensor alive.

    Returns:
        The construction's model.
    """
    model = construction.model
    tensors: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    tensors |= dict(model.named_buffers(remove_duplicate=False))
    for names, _, whole in construction.hand_out(device):
        empty = {id(tensors[name]): name for name in reversed(names) if tensors[name].is_meta}
        value: Tensor | None = None
        for name in reversed(empty.values()):
            if value is None:
                value = whole if cut is None else _keep_alone(cut(name, whole))
            give(model, tensors[name], value)
        del whole, value
    return model


def _keep_alone(value: Tensor) -> Tensor:
    """Return the value without memory that it does not show."""
    too_much = value.untyped_storage().nbytes() > value.numel() * value.element_size()
    return value.clone() if too_much else value


def give(model: nn.Module, tensor: Tensor, value: Tensor) -> None:
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
