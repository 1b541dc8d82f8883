"""Checks that copies of weights and optimizer state have the same bits on all ranks that hold them.

Ranks along an axis that does not divide the model, such as dp_replicate, hold copies of all they have. Ranks
of tp hold copies of those parameters that tp does not divide. By construction copies are the same to the bit:
each rank applies the same arithmetic to the same reduced gradients. They differ where a rank does something
else, or where memory or a processor fails.

A digest of what a rank holds travels with what ranks agree on, so it costs no message. It is taken before
the forward, of the state that the step starts from. It is a sum of the bits as numbers of 64 bits, modulo
2**64; in large tensors each 4 KiB count with a factor of their own. Any change of one number changes it.

What is read when, on the CPU:

- all weights, in every step: a difference ends the run in the step that would use it.
- a quarter of the optimizer's state, by parameter: within four steps. What changes a weight shows before.

Of tensors on another device up to 32 parameters are read in a step, because each starts kernels of its own.
Saving reads everything (`check_all`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.errors import PacelineError
from paceline.mesh import Mesh
from paceline.parallel.placement import Placement, local
from paceline.phrases import name_ranks
from paceline.recipe.axes import list_axes
from paceline.torch_seams.modules import BatchNormBase
from paceline.train.agreement import NUM_COPIES, Numbers
from paceline.train.same_settings import is_comparing

# Digests of one step, in the order in which they travel. Optimizer state is compared as what tp divides is.
_WHOLE, _CUT, _STATE = range(NUM_COPIES)
_STATE_TURNS = 4
_MAX_ON_DEVICE = 32
# Numbers of 64 bits in a row that has a factor of its own, and from which length on there are such rows.
_ROW, _LONG = 512, 1 << 15
_MASK = (1 << 64) - 1
_MAX_SHOWN = 4

Words = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class _View:
    """The bits of a tensor on the CPU, as long as it stays where it is."""

    pointer: int
    rows: Words | None
    words: Words
    tail: bytes | memoryview = b""

    def digest(self) -> int:
        total = int(np.add.reduce(self.words))
        if self.rows is not None:
            total += int(np.dot(np.add.reduce(self.rows, axis=1), _row_factors(len(self.rows))))
        return total + int.from_bytes(self.tail, "little") if self.tail else total


class Copies:
    """What one model's copies hold.

    Args:
        name: of the model, for messages.
        model: laid out.
        optimizer: over its parameters.
        placement: of the model.
        mesh: the ranks, or `None` in a world of one.
    """

    def __init__(
        self, name: str, model: nn.Module, optimizer: Optimizer, placement: Placement, mesh: Mesh | None
    ) -> None:
        self._name = name
        self._optimizer = optimizer
        self._views: dict[str, _View] = {}
        self._parameters = list(model.named_parameters())
        self._cut = {n for n, _ in self._parameters if n in placement.splits}
        self._statistics = [
            (f"{own}.{key}", buffer)
            for own, module in model.named_modules()
            if isinstance(module, BatchNormBase) and not isinstance(module, nn.SyncBatchNorm)
            for key, buffer in module.named_buffers(recurse=False)
        ]
        self._mesh = mesh
        self._has_copies = mesh is not None and any(len(ranks) > 1 for ranks in self._holders(is_cut=False))

    def give_up(self) -> None:
        """Compare nothing from here on: the ranks go apart on purpose."""
        self._has_copies = False

    def digest(self, step: int) -> list[int] | Tensor:
        """Digests of what this rank holds before a step, to be told to the others.

        Returns:
            `NUM_COPIES` numbers of 64 bits; on a device a tensor of them that nobody has waited for.
        """
        if not self._has_copies:
            return [0] * NUM_COPIES
        parts: list[list[int | Tensor]] = [[] for _ in range(NUM_COPIES)]
        num_turns = -(-len(self._parameters) // _MAX_ON_DEVICE)
        for number, (name, parameter) in enumerate(self._parameters):
            is_on_device = parameter.device.type != "cpu"
            if is_on_device and (number - step) % num_turns:
                continue
            parts[name in self._cut].append(self._read(name, parameter))
            if is_on_device or (number - step) % _STATE_TURNS == 0:
                parts[_STATE] += [self._read(key, value) for key, value in self._state_of(name, parameter)]
        parts[_WHOLE] += [self._read(name, buffer) for name, buffer in self._statistics]
        digests = [_join(part) for part in parts]
        on_device = [digest for digest in digests if isinstance(digest, Tensor)]
        if not on_device:
            return digests  # type: ignore[return-value]
        device = on_device[0].device
        return torch.stack([torch.as_tensor(_signed(digest), device=device) for digest in digests])

    def check(self, digests: Numbers) -> None:
        """Compare the digests of all ranks; collective only where they differ.

        Args:
            digests: per rank a row, two numbers per digest, in the order of `digest`.

        Raises:
            PacelineError: PL418, on every rank.
        """
        if not self._has_copies or not is_comparing() or bool((digests == digests[0]).all()):
            return
        if any(len(set(rows)) > 1 for kind in range(NUM_COPIES) for rows in self._group(digests, kind)):
            self.check_all()

    def check_all(self) -> None:
        """Compare everything, tensor by tensor; collective.

        Raises:
            PacelineError: PL418, on every rank, naming the tensors and the ranks.
        """
        if not self._has_copies or not is_comparing():
            return
        assert self._mesh is not None
        held = [*self._parameters, *self._statistics]
        for name, parameter in self._parameters:
            held += self._state_of(name, parameter)
        own = {name: int(self._read(name, tensor)) & _MASK for name, tensor in held}
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, own)
        differing = []
        for name in dict.fromkeys(name for each in gathered for name in each):
            for ranks in self._holders(name.partition("/")[0] in self._cut):
                values = [gathered[rank].get(name) for rank in ranks]
                if values.count(values[0]) < len(values):
                    differing.append((name, ranks, values))
        if differing:
            raise self._refuse(differing)

    def _group(self, digests: Numbers, kind: int) -> list[list[tuple[float, ...]]]:
        pairs = digests[:, 2 * kind : 2 * kind + 2].tolist()
        return [[tuple(pairs[rank]) for rank in ranks] for ranks in self._holders(kind != _WHOLE)]

    def _holders(self, is_cut: bool) -> list[list[int]]:
        """The groups of ranks that hold the same: of what tp divides, or of what it leaves whole."""
        assert self._mesh is not None
        axes = list_axes(divides_model=False)
        return self._mesh.layout.list_groups(axes if is_cut else (*axes, "tp"))

    def _state_of(self, name: str, parameter: Tensor) -> list[tuple[str, Tensor]]:
        state = self._optimizer.state.get(parameter)
        if not state:
            return []
        return [(f"{name}/{key}", value) for key, value in state.items() if isinstance(value, Tensor)]

    def _read(self, name: str, tensor: Tensor) -> int | Tensor:
        tensor = local(tensor)
        view = self._views.get(name)
        if view is None or view.pointer != tensor.data_ptr():
            tensor = tensor.detach()
            if tensor.device.type != "cpu":
                return _digest_on_device(tensor)
            view = _view(tensor)
            if view is None:  # with gaps, or without numbers of its own: read as a copy each time
                return _view_contiguous(tensor.resolve_conj().resolve_neg().contiguous()).digest()
            self._views[name] = view
        return view.digest()

    def _refuse(self, differing: Sequence[tuple[str, list[int], list[int | None]]]) -> PacelineError:
        described = [_describe_difference(*each) for each in differing[:_MAX_SHOWN]]
        more = f"; and {len(differing) - _MAX_SHOWN} more tensors" if len(differing) > _MAX_SHOWN else ""
        error = PacelineError(
            "PL418",
            saw=f"copies of {self._name} differ between ranks: {'; '.join(described)}{more}.",
            rule="Ranks that hold the same tensor apply the same update to it, so all have the same bits.",
            fix="Look for code that changes weights, gradients or optimizer state on some ranks only: a "
            "hook, an in-place change between steps, another version of a library. If there is none, check "
            "the memory and the processor of that rank's machine. Resume from the newest checkpoint.",
        )
        error.on_every_rank = True
        return error


def _describe_difference(name: str, ranks: list[int], values: list[int | None]) -> str:
    shown = " of ".join(reversed(name.split("/")))
    members: dict[int | None, list[int]] = {}
    for rank, value in zip(ranks, values, strict=True):
        members.setdefault(value, []).append(rank)
    groups = sorted(members.values(), key=len)
    if len(groups) == 2 and len(groups[0]) < len(groups[1]):
        return f"{shown} on {name_ranks(groups[0])} differs from {name_ranks(groups[1])}"
    return f"{shown} differs between " + " and ".join(
        name_ranks(group) for group in sorted(groups)[:_MAX_SHOWN]
    )


def _view(tensor: Tensor) -> _View | None:
    """The bits of a tensor where they are, in the order in which they are; `None` where that can't be had."""
    if not tensor.numel():
        return _View(tensor.data_ptr(), None, np.zeros(0, np.int64))
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    if span != tensor.numel() or tensor.is_neg() or tensor.is_conj():
        return None
    return _view_contiguous(tensor.as_strided((tensor.numel(),), (1,)))


def _view_contiguous(tensor: Tensor) -> _View:
    flat = tensor.reshape(-1).view(torch.uint8).numpy()
    whole = len(flat) // 8 * 8
    words = flat[:whole].view(np.int64)
    num_rows = len(words) // _ROW if len(words) >= _LONG else 0
    return _View(
        tensor.data_ptr(),
        words[: num_rows * _ROW].reshape(num_rows, _ROW) if num_rows else None,
        words[num_rows * _ROW :],
        flat[whole:].data if whole < len(flat) else b"",
    )


@lru_cache(maxsize=64)
def _row_factors(num_rows: int) -> Words:
    return 2 * np.arange(num_rows, dtype=np.int64) + 1


def _digest_on_device(tensor: Tensor) -> Tensor:
    flat = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    whole = flat.numel() // 8 * 8
    return flat[:whole].view(torch.int64).sum() + flat[whole:].sum()


def _join(parts: Sequence[int | Tensor]) -> int | Tensor:
    """One number of several, where none can be changed without changing it."""
    on_device = [part for part in parts if isinstance(part, Tensor)]
    plain = hash(tuple(part for part in parts if not isinstance(part, Tensor))) & _MASK
    if not on_device:
        return plain
    factors = 2 * torch.arange(len(on_device), device=on_device[0].device) + 1
    return (torch.stack(on_device) * factors).sum() + _signed(plain)


def _signed(number: int | Tensor) -> int | Tensor:
    """A number of 64 bits as torch holds it."""
    return number - (1 << 64) if isinstance(number, int) and number >> 63 else number
