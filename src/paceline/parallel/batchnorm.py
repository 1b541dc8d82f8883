"""Makes BatchNorm's running statistics independent of the distribution of microbatches over ranks.

The counts of routers' choices travel the same way (`experts/balance.py`).

In training BatchNorm normalises with the statistics of one microbatch, which are the same wherever it is
computed. Its running statistics, however, are a moving average in the order of forwards. One forward maps
them as r -> (1 - m) r + m s. A sequence of c forwards thus maps them as r -> (1 - m)^c r + S, where S is the
result of the sequence from zero. Each microbatch is therefore run from zero. The pairs (S, c) of all
microbatches are part of the step's agreement, and every rank applies them in the order of the microbatches.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.mesh import Axis
from paceline.parallel.experts.balance import Choices
from paceline.torch_seams.modules import BatchNormBase, own_buffers


class RunningStatistics:
    """The running statistics of all BatchNorm layers of some modules, and the choices of their routers.

    Layers in eval mode and layers without running statistics are not changed.

    Usage per step: `begin()`; for each microbatch `start_microbatch()`, forward,
    `read_microbatch()`; then `merge(...)` with the rows of all microbatches, or `restore()`.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = list(modules)
        self.choices = Choices(self._modules)
        self._kept: list[ForwardBuffer] = []
        self._kept_before: list[Tensor] = []
        self._dp: Axis | None = None
        self._num_owned: tuple[int, ...] = ()
        self._made: dict[int, tuple[Tensor, Tensor]] = {}
        self._active: list[BatchNormBase] = []
        self._before: list[tuple[Tensor, Tensor, Tensor]] = []

    @cached_property
    def _layers(self) -> list[BatchNormBase]:
        # Listed at the first step, because laying out a model may replace layers.
        return [
            layer
            for module in self._modules
            for layer in module.modules()
            if isinstance(layer, BatchNormBase)
            and layer.track_running_stats
            and layer.running_mean is not None
        ]

    @property
    def num_values(self) -> int:
        """The count of numbers per microbatch in the rows: means, variances and the count of every layer, and
        those of `choices`."""
        return sum(2 * layer.num_features + 1 for layer in self._layers) + self.choices.num_values

    def keep(self, buffers: list[ForwardBuffer], dp: Axis | None) -> None:
        """Start each microbatch from the same value of these buffers, in addition to those before.

        A forward changes them in the same way for any samples (the power iteration of `spectral_norm`), so
        they change once per step on any number of ranks.

        Args:
            dp: the ranks that run different microbatches, or `None` for one.
        """
        known = {(id(buffer.module), buffer.key) for buffer in self._kept}
        self._kept += [buffer for buffer in buffers if (id(buffer.module), buffer.key) not in known]
        self._dp = dp

    @property
    def keeps_some(self) -> bool:
        """Whether a forward changes buffers other than BatchNorm's."""
        return bool(self._kept)

    def keep_from(self, buffers: list[tuple[ForwardBuffer, Tensor]], dp: Axis | None) -> None:
        """Keep buffers from now on, within a step; each is given with its value before the step."""
        self.keep([buffer for buffer, _ in buffers], dp)
        self._kept_before += [value for _, value in buffers]

    def begin(self, num_owned: tuple[int, ...] = ()) -> None:
        """Save the statistics for one step.

        Args:
            num_owned: per rank, the number of microbatches that it runs in the step.
        """
        self._num_owned, self._made = num_owned, {}
        self._kept_before = [buffer.read() for buffer in self._kept]
        self._active = [layer for layer in self._layers if layer.training]
        self._before = [tuple(buffer.clone() for buffer in _buffers(layer)) for layer in self._active]  # type: ignore[misc]

    def start_microbatch(self) -> None:
        """Start the moving average and the counts from zero."""
        self.choices.start_microbatch()
        for layer in self._active:
            for buffer in _buffers(layer):
                # Hidden from autograd: another microbatch's backward may still follow, whose forward has
                # saved these buffers (and needs none of their values).
                buffer.data.zero_()
        self._note_made()
        self._restore_kept()

    def read_microbatch(self) -> Tensor:
        """Return the microbatch's statistics from zero: float64 of length `num_values`; 0 for idle layers."""
        active = set(map(id, self._active))
        parts = []
        for layer in self._layers:
            if id(layer) in active:
                mean, var, count = _buffers(layer)
                parts += [mean.double(), var.double(), count.double().reshape(1)]
            else:
                device = _buffers(layer)[0].device
                parts.append(torch.zeros(2 * layer.num_features + 1, dtype=torch.float64, device=device))
        if self.choices.num_values or not parts:
            parts.append(self.choices.read_microbatch())
        return torch.cat([part.to(parts[0].device) for part in parts])

    @torch.no_grad()
    def merge(self, rows: Tensor) -> None:
        """Apply the microbatches' statistics in order.

        Args:
            rows: float64 of shape (number of microbatches, `num_values`), the same on every rank.
        """
        self._restore_running()
        self._merge_kept()
        active = set(map(id, self._active))
        start, merged = 0, rows
        if self._active and (device := _buffers(self._active[0])[0].device).type == "cuda":
            merged = rows.pin_memory().to(device, non_blocking=True)  # a plain copy waits for the device
        for layer in self._layers:
            stop = start + 2 * layer.num_features + 1
            if id(layer) in active:
                _merge_layer(layer, merged[:, start:stop], rows[:, stop - 1])
            start = stop
        self.choices.merge(rows[:, start:])

    def _note_made(self) -> None:
        """Note the values that the first forward gave to kept buffers; under pp, stages run in turns.

        A device is not waited for, so whether a value has changed is noted beside it.
        """
        for number, (buffer, before) in enumerate(zip(self._kept, self._kept_before, strict=True)):
            now, known = buffer.read(), self._made.get(number)
            is_made = (now != before).any()
            if known is not None:
                now, is_made = torch.where(known[1], known[0], now), known[1] | is_made
            self._made[number] = now, is_made

    def _merge_kept(self) -> None:
        """Set the kept buffers on every rank to their values after the first microbatch.

        Other microbatches may have used other kernels (in a forward whose operations were counted), and a
        rank may have run none.
        """
        self._note_made()
        for number, (value, _) in self._made.items():
            self._kept[number].tensor.copy_(value)
        if self._dp is None or not self._kept:
            return
        owner = next(rank for rank, owned in enumerate(self._num_owned) if owned)
        flat = torch.cat([buffer.read().reshape(-1).view(torch.uint8) for buffer in self._kept])
        dist.broadcast(flat, group=self._dp.group, group_src=owner)
        start = 0
        for buffer in self._kept:
            stop = start + buffer.tensor.numel() * buffer.tensor.itemsize
            value = flat[start:stop].clone().view(buffer.tensor.dtype)
            buffer.tensor.copy_(value.view(buffer.tensor.shape))
            start = stop

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the statistics that `begin` saved (a skipped step changes nothing)."""
        self._restore_kept()
        self._restore_running()

    @torch.no_grad()
    def _restore_kept(self) -> None:
        for buffer, value in zip(self._kept, self._kept_before, strict=True):
            buffer.tensor.copy_(value)

    def _restore_running(self) -> None:
        for layer, saved in zip(self._active, self._before, strict=True):
            for buffer, value in zip(_buffers(layer), saved, strict=True):
                buffer.copy_(value)


@dataclass(frozen=True)
class ForwardBuffer:
    """A buffer that a forward may change.

    Attributes:
        name: full name.
        module: the module that has it.
        key: its name in the module.
    """

    name: str
    module: nn.Module
    key: str

    @property
    def tensor(self) -> Tensor:
        """The buffer as it is now; a forward may replace it by another tensor."""
        found = own_buffers(self.module)[self.key]
        assert found is not None
        return found

    def read(self) -> Tensor:
        """Return a copy of its value."""
        return self.tensor.detach().clone()


def list_forward_buffers(model: nn.Module) -> list[ForwardBuffer]:
    """Return all buffers of modules in training mode except BatchNorm's running statistics."""
    return [
        ForwardBuffer(f"{prefix}.{key}" if prefix else key, module, key)
        for prefix, module in model.named_modules()
        if module.training and not isinstance(module, BatchNormBase)
        for key, buffer in own_buffers(module).items()
        if buffer is not None and buffer.numel()
    ]


def _buffers(layer: BatchNormBase) -> tuple[Tensor, Tensor, Tensor]:
    assert layer.running_mean is not None
    assert layer.running_var is not None
    assert layer.num_batches_tracked is not None
    return layer.running_mean, layer.running_var, layer.num_batches_tracked


def _merge_layer(layer: BatchNormBase, rows: Tensor, all_calls: Tensor) -> None:
    mean, var, count = _buffers(layer)
    n = layer.num_features
    new_mean, new_var, total = mean.double(), var.double(), count.double()
    for row, calls in zip(rows, all_calls, strict=True):
        if layer.momentum is None:  # torch's cumulative average: every forward counts the same
            old_share = total / (total + calls).clamp(min=1)
            new_share = 1 - old_share
        else:
            old_share = (1 - layer.momentum) ** calls
            new_share = torch.ones_like(calls)
        new_mean = old_share * new_mean + new_share * row[:n]
        new_var = old_share * new_var + new_share * row[n : 2 * n]
        total = total + calls
    mean.copy_(new_mean)
    var.copy_(new_var)
    count.copy_(total)
