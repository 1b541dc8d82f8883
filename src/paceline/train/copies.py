"""Checks that copies of weights and optimizer state have the same bits on all ranks that hold them.

Ranks along an axis that does not divide the model, such as dp_replicate, hold copies of all their tensors.
Ranks of tp and ep hold copies of the parameters that these axes do not divide. Copies have the same bits by
construction: each rank applies the same arithmetic to the same reduced gradients. They differ if a rank runs
other code, or if memory or a processor fails.

Each step's agreement carries a digest of the tensors that a rank holds, so no extra message is sent. The
digest is taken before the forward, of the state that the step starts from. It is the sum of the bits as
64-bit numbers, modulo 2**64; in large tensors every 4 KiB has a factor of its own. Any change of one number
changes it.

On the CPU, a step reads:

- all weights: a difference ends the run in the step that would use it.
- a quarter of the optimizer state, by parameter, so all of it within four steps. A difference that changes a
  weight is detected earlier.

On another device, each operation takes the host some microseconds. A step reads up to 4 parameters with their
state there, and of a large tensor one part of 4 MiB. Each number has a factor of its own.
A save reads everything: at once (`check_all`), or while training goes on (`hold`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from paceline.checkpoint.same_copies import Digests, find_difference
from paceline.mesh import Mesh
from paceline.parallel.placement import Placement, local
from paceline.recipe.axes import list_axes
from paceline.torch_seams.modules import BatchNormBase
from paceline.torch_seams.tensors import read_version
from paceline.train.agreement import NUM_COPIES, Numbers
from paceline.train.same_settings import is_comparing

# Digests of one step, in the order of the message: of parameters that neither tp nor ep divides, parameters
# that tp divides, parameters that ep divides, and all optimizer state.
_WHOLE, _CUT, _EXPERTS, _STATE = range(NUM_COPIES)
_STATE_TURNS = 4
_MAX_ON_DEVICE = 4
# 64-bit numbers of a tensor on a device that are read at once, and an odd number to make factors of.
_PART, _MIXING = 1 << 19, 0x1E3779B97F4A7C15
# 64-bit numbers in a row that has a factor of its own, and the length from which tensors have such rows.
_ROW, _LONG = 512, 1 << 15
_MASK = (1 << 64) - 1

Words = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class _View:
    """The bits of a tensor on the CPU; valid until its storage moves."""

    pointer: int
    rows: Words | None
    words: Words
    tail: bytes | memoryview = b""

    def digest(self) -> int:
        total = int(np.add.reduce(self.words))
        if self.rows is not None:
            total += int(np.dot(np.add.reduce(self.rows, axis=1), _row_factors(len(self.rows))))
        return total + int.from_bytes(self.tail, "little") if self.tail else total


class HeldCopies:
    """Tensors that other ranks hold copies of, and their digests.

    Args:
        model: its name, for messages.
        digest: returns a tensor's digest from its name; on a device without waiting for it.
    """

    def __init__(self, model: str, digest: Callable[[str, Tensor], int | Tensor]) -> None:
        self._model = model
        self._digest = digest
        self._unread: list[tuple[tuple[int, ...], str, Tensor, int]] = []
        self._digests: dict[tuple[int, ...], dict[str, int | Tensor]] = {}

    def add(self, ranks: Sequence[int], name: str, tensor: Tensor) -> None:
        """Add a tensor that these ranks hold copies of."""
        if len(ranks) > 1:
            self._unread.append((tuple(ranks), name, tensor, read_version(local(tensor))))

    def read(self) -> bool:
        """Read the tensors; return `False` if one of them was written to since it was added."""
        unread, self._unread = self._unread, []
        for ranks, name, tensor, version in unread:
            self._digests.setdefault(ranks, {})[name] = self._digest(name, tensor)
            if read_version(local(tensor)) != version:
                return False
        return True

    def describe(self) -> list[Digests]:
        """Return the digests of the tensors that were read."""
        groups = [
            {"ranks": ranks, "digests": {name: int(each) & _MASK for name, each in digests.items()}}
            for ranks, digests in self._digests.items()
        ]
        return [{"model": self._model, "groups": groups}] if groups else []


class Copies:
    """The check of one model's copies over the ranks that hold them.

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
        # Under pp, those of this rank's stages. Weights on several stages are not compared between them.
        self._parameters = [(n, p) for n, p in model.named_parameters() if placement.holds(n)]
        kinds = {"tp": _CUT, "ep": _EXPERTS}
        self._kinds = {
            n: kinds[placement.splits[n].axis] if n in placement.splits else _WHOLE
            for n, _ in self._parameters
        }
        self._statistics = [
            (f"{own}.{key}", buffer)
            for own, module in model.named_modules()
            if isinstance(module, BatchNormBase) and not isinstance(module, nn.SyncBatchNorm)
            for key, buffer in module.named_buffers(recurse=False)
        ]
        self._mesh = mesh
        self._has_copies = mesh is not None and any(
            len(ranks) > 1 for kind in range(NUM_COPIES) for ranks in self._holders(kind)
        )

    def give_up(self) -> None:
        """Stop comparing: from here on the ranks diverge on purpose."""
        self._has_copies = False

    def digest(self, step: int) -> list[int] | Tensor:
        """Return digests of the tensors that this rank holds before a step, to be sent to the other ranks.

        Returns:
            `NUM_COPIES` 64-bit numbers; on a device a tensor of them, without waiting for it.
        """
        if not self._has_copies:
            return [0] * NUM_COPIES
        parts: list[list[int]] = [[] for _ in range(NUM_COPIES)]
        on_device: list[list[Tensor]] = [[] for _ in range(NUM_COPIES)]
        num_turns = -(-len(self._parameters) // _MAX_ON_DEVICE)

        def read(kind: int, name: str, tensor: Tensor) -> None:
            if tensor.device.type == "cpu":
                parts[kind].append(self._read(name, tensor))  # type: ignore[arg-type]
            else:
                words = _split_words(local(tensor.detach()))
                on_device[kind].append(words[step // num_turns % len(words)])

        for number, (name, parameter) in enumerate(self._parameters):
            is_on_device = parameter.device.type != "cpu"
            if is_on_device and (number - step) % num_turns:
                continue
            read(self._kinds[name], name, parameter)
            if is_on_device or (number - step) % _STATE_TURNS == 0:
                for key, value in self._state_of(name, parameter):
                    read(_STATE, key, value)
        for name, buffer in self._statistics:
            read(_WHOLE, name, buffer)
        digests = [hash(tuple(part)) & _MASK for part in parts]
        device = next((tensors[0].device for tensors in on_device if tensors), None)
        if device is None:
            return digests
        return torch.stack(
            [
                torch.full((), _signed(digest), device=device) + (_digest_words(torch.cat(own)) if own else 0)
                for digest, own in zip(digests, on_device, strict=True)
            ]
        )

    def check(self, digests: Numbers) -> None:
        """Compare the digests of all ranks; collective only if they differ.

        Args:
            digests: one row per rank, with two numbers per digest, in the order of `digest`.

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
        held = self.hold()
        held.read()
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, held.describe())
        error = find_difference(dict(enumerate(gathered)))
        if error is not None:
            error.on_every_rank = True
            raise error

    def hold(self) -> HeldCopies:
        """Return the tensors that other ranks hold copies of, for digests of the present state.

        What a forward changes is read at once. The rest is to be read before an optimizer's step.
        """
        held = HeldCopies(self._name, self._read)
        if not self._has_copies or not is_comparing():
            return held
        rank = dist.get_rank()
        ranks_by_kind = {
            kind: next(ranks for ranks in self._holders(kind) if rank in ranks)
            for kind in (_WHOLE, _CUT, _EXPERTS)
        }
        for name, buffer in self._statistics:
            held.add(ranks_by_kind[_WHOLE], name, buffer)
        held.read()
        for name, parameter in self._parameters:
            for key, value in ((name, parameter), *self._state_of(name, parameter)):
                held.add(ranks_by_kind[self._kinds[name]], key, value)
        return held

    def _group(self, digests: Numbers, kind: int) -> list[list[tuple[float, ...]]]:
        pairs = digests[:, 2 * kind : 2 * kind + 2].tolist()
        return [[tuple(pairs[rank]) for rank in ranks] for ranks in self._holders(kind)]

    def _holders(self, kind: int) -> list[list[int]]:
        """Return the groups of ranks that hold the same values of a kind of tensors."""
        assert self._mesh is not None
        layout, apart = self._mesh.layout, set(list_axes(divides_model=True))
        if kind == _WHOLE:
            apart -= {"tp", "ep"}
        elif kind == _EXPERTS:
            # Not sharded, whatever shards of the rest their ranks have; and whole on every rank of tp.
            apart -= {"tp", "dp_shard"}
        return layout.group_by(sorted(apart))

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
            if view is None:  # it has gaps, or is a lazy conjugate or negative: read a copy each time
                return digest_tensor(tensor)
            self._views[name] = view
        return view.digest()


def digest_tensor(tensor: Tensor) -> int:
    """Return a digest of this rank's part of a tensor, on any device; 0 for one without memory."""
    part = local(tensor.detach())
    if part.device.type != "cpu":
        return 0 if part.is_meta else int(_digest_on_device(part)) & _MASK
    return _view_contiguous(part.resolve_conj().resolve_neg().contiguous()).digest() & _MASK


def _view(tensor: Tensor) -> _View | None:
    """Return a view of a tensor's bits in memory order, or `None` if a view cannot show them."""
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
    """Return a digest of all numbers of a tensor, without waiting for the device."""
    parts = _split_words(tensor)
    return torch.stack([_digest_words(part, _PART * place) for place, part in enumerate(parts)]).sum()


def _split_words(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return a tensor's bits as 64-bit numbers, in parts; zeros fill up the last number."""
    flat = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    left = -flat.numel() % 8
    words = (functional.pad(flat, (0, left)) if left else flat).view(torch.int64)
    return torch.split(words, _PART)


def _digest_words(words: Tensor, start: int = 0) -> Tensor:
    factors = torch.arange(start, start + len(words), device=words.device) * _MIXING
    return (words * (factors.bitwise_xor_(factors >> 31) | 1)).sum()


def _signed(number: int) -> int:
    """Return an unsigned 64-bit number as the signed one that torch holds."""
    return number - (1 << 64) if number >> 63 else number
