"""Checks that copies of weights and optimizer state have the same bits on all ranks that hold them.

Ranks along an axis that does not divide the model, such as dp_replicate, hold copies of all their tensors.
Ranks of tp and ep hold copies of the parameters that these axes do not divide. Copies have the same bits by
construction: each rank applies the same arithmetic to the same reduced gradients. They differ if a rank runs
other code, or if memory or a processor fails.

Each step's agreement carries a digest of the tensors that a rank holds, so no extra message is sent. The
digest is taken before the forward, of the state that the step starts from. It is the sum of the bits as
64-bit numbers, modulo 2**64, where every 4 KiB has a factor of its own. Any change of one number changes it.

On the CPU, a step reads:

- all weights: a difference ends the run in the step that would use it.
- a quarter of the optimizer state, by parameter, so all of it within four steps. A difference that changes a
  weight is detected earlier.

On another device, each operation takes the host some microseconds. A step reads up to 4 parameters with their
state there, and of a large tensor one part of 4 MiB. A save reads everything: at once (`check_all`), or while
training goes on (`hold`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from paceline.checkpoint.same_copies import Digests, find_difference
from paceline.comm.one_tensor import gather_objects
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
# 64-bit numbers of a tensor on a device that are read at once, and those that share a factor.
_PART, _ROW = 1 << 19, 512
# Smaller tensors on the CPU are read together.
_SMALL_BYTES = 1 << 17
_MASK = (1 << 64) - 1


class HeldCopies:
    """Tensors that other ranks hold copies of, and their digests.

    Args:
        model: its name, for messages.
    """

    def __init__(self, model: str) -> None:
        self._model = model
        self._unread: list[tuple[tuple[int, ...], str, Tensor, int]] = []
        self._digests: dict[tuple[int, ...], dict[str, Tensor]] = {}

    def add(self, ranks: Sequence[int], name: str, tensor: Tensor) -> None:
        """Add a tensor that these ranks hold copies of."""
        if len(ranks) > 1:
            self._unread.append((tuple(ranks), name, tensor, read_version(local(tensor))))

    def read(self) -> bool:
        """Read the tensors; return `False` if one of them was written to since it was added."""
        unread, self._unread = self._unread, []
        for ranks, name, tensor, version in unread:
            self._digests.setdefault(ranks, {})[name] = _digest(_read_words(tensor))
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
        mesh: the ranks, or `None` in a world of one.
    """

    def __init__(
        self, name: str, model: nn.Module, optimizer: Optimizer, placement: Placement, mesh: Mesh | None
    ) -> None:
        self._name = name
        self._optimizer = optimizer
        # By name, a tensor's place in memory and its bytes there.
        self._bytes: dict[str, tuple[int, Tensor]] = {}
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
            if isinstance(module, BatchNormBase)
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
        small: list[list[Tensor]] = [[] for _ in range(NUM_COPIES)]  # each operation takes time
        on_device: list[list[Tensor]] = [[] for _ in range(NUM_COPIES)]
        num_turns = -(-len(self._parameters) // _MAX_ON_DEVICE)

        def read(kind: int, name: str, tensor: Tensor) -> None:
            found = self._view_bytes(name, local(tensor))
            if not found.is_cpu:
                pieces = torch.split(_as_words(found), _PART)
                on_device[kind].append(pieces[step // num_turns % len(pieces)])
            elif found.numel() < _SMALL_BYTES:
                small[kind].append(found)
            else:
                parts[kind].append(int(_digest(_as_words(found))))

        for number, (name, parameter) in enumerate(self._parameters):
            is_on_device = not parameter.is_cpu
            if is_on_device and (number - step) % num_turns:
                continue
            read(self._kinds[name], name, parameter)
            if is_on_device or (number - step) % _STATE_TURNS == 0:
                for key, value in self._state_of(name, parameter):
                    read(_STATE, key, value)
        for name, buffer in self._statistics:
            read(_WHOLE, name, buffer)
        for part, own in zip(parts, small, strict=True):
            part.append(int(_digest(_as_words(torch.cat(own)))) if own else 0)
        digests = [hash(tuple(part)) & _MASK for part in parts]
        device = next((tensors[0].device for tensors in on_device if tensors), None)
        if device is None:
            return digests
        return torch.stack(
            [
                torch.full((), _signed(digest), device=device) + (_digest(torch.cat(own)) if own else 0)
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
        assert self._mesh is not None
        gathered = gather_objects(held.describe(), self._mesh.group)
        error = find_difference(dict(enumerate(gathered)))
        if error is not None:
            error.on_every_rank = True
            raise error

    def hold(self) -> HeldCopies:
        """Return the tensors that other ranks hold copies of, for digests of the present state.

        What a forward changes is read at once. The rest is to be read before an optimizer's step.
        """
        held = HeldCopies(self._name)
        if not self._has_copies or not is_comparing():
            return held
        assert self._mesh is not None
        rank = self._mesh.group.rank()
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

    def _view_bytes(self, name: str, part: Tensor) -> Tensor:
        """Return `_read_bytes` of a tensor; on the CPU the earlier view if the tensor is still there."""
        place, held = self._bytes.get(name, (None, part))
        if place is None or place != part.data_ptr():
            held = _read_bytes(part)
            if part.is_cpu and held.data_ptr() == part.data_ptr():
                self._bytes[name] = part.data_ptr(), held
        return held


def digest_tensor(tensor: Tensor) -> int:
    """Return a digest of this rank's part of a tensor, on any device; 0 for one without memory."""
    return 0 if tensor.is_meta else int(_digest(_read_words(tensor))) & _MASK


def _read_words(tensor: Tensor) -> Tensor:
    """Return the bits of this rank's part of a tensor as 64-bit numbers; zeros fill up the last one."""
    return _as_words(_read_bytes(local(tensor)))


def _read_bytes(part: Tensor) -> Tensor:
    return part.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def _as_words(part: Tensor) -> Tensor:
    left = -part.numel() % 8
    if left or part.storage_offset() % 8:
        part = functional.pad(part, (0, left)) if left else part.clone()
    return part.view(torch.int64)


def _digest(words: Tensor) -> Tensor:
    """Return a digest of numbers, without waiting for the device."""
    num_rows = len(words) // _ROW
    if not num_rows:
        return words.sum()
    rows = words[: num_rows * _ROW].view(num_rows, _ROW).sum(1)
    factors = torch.arange(1, 2 * num_rows, 2, device=words.device)
    return (rows * factors).sum() + words[num_rows * _ROW :].sum()


def _signed(number: int) -> int:
    """Return an unsigned 64-bit number as the signed one that torch holds."""
    return number - (1 << 64) if number >> 63 else number
