"""Shards a stage's parameters over `dp_shard`, and gathers them for the stage's work.

Outside of steps the model has shards: DTensors, cut along their first dimension as without pp. During a step
it has whole parameters in their places, whose memory exists only while they are gathered. Protocol of a step,
on every rank of dp_shard:

1. `enter` puts the whole parameters into the model.
2. Per action of the schedule `gather`, and afterwards `free`. With `zero` 1 and 2 the first `gather` of a
   step starts those of all stages, and nothing is freed; with 3 a stage is gathered for each action, the next
   action's stage ahead, and kept only if the next action is of the same stage.
3. `leave` puts the shards back. Gradients are cut in the sums of `reduction.py`.

`fully_shard` is not used: it expects that each forward is followed by its backward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from paceline.comm.one_tensor import all_gather
from paceline.mesh import Mesh
from paceline.parallel.parameter_hooks import check_hooks
from paceline.parallel.placement import local
from paceline.torch_seams.modules import own_parameters


@dataclass
class _Parted:
    """A parameter of this rank's stages.

    Attributes:
        name: full.
        shard: in the model outside of steps.
        whole: in the model during steps.
        places: the modules that have it, and its names there.
        most: rows of a rank; the last ranks may have fewer.
    """

    name: str
    shard: nn.Parameter
    whole: nn.Parameter
    places: list[tuple[nn.Module, str]]
    most: int

    def allocate(self) -> None:
        storage = self.whole.untyped_storage()
        if not storage.size():
            storage.resize_(self.whole.numel() * self.whole.element_size())

    def free(self) -> None:
        self.whole.untyped_storage().resize_(0)


@dataclass
class _StageGather:
    """A gather in progress: per type the parameters, the bytes of all ranks, and the collective."""

    parts: list[tuple[list[_Parted], Tensor, dist.Work | None]] = field(default_factory=list)


class StageShards:
    """The sharded parameters of a rank's stages.

    Args:
        model: with whole parameters on this rank's stages, or with their rows of this rank; and tensors of
            any memory in the places of others.
        mesh: with several ranks of dp_shard.
        shapes: by name, the shape of the parameter before it is sharded.
        users: by name of a parameter, the stages that use it.
        zero: 1, 2 or 3; see the module.
        prefetch: whether the next action's stage is gathered ahead.
        apart: full names of parameters that are not sharded.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: Mesh,
        shapes: Mapping[str, torch.Size],
        users: Mapping[str, Sequence[int]],
        own: Sequence[int],
        *,
        zero: int,
        prefetch: bool,
        apart: Collection[str] = (),
    ) -> None:
        axis = mesh.dp_shard
        self.num_ranks, self.rank, self.zero = axis.size, axis.rank, zero
        self._group = axis.group
        self._mesh = mesh.shard_mesh
        self._prefetch = prefetch
        self._by_whole: dict[int, _Parted] = {}
        self._by_stage: dict[int, list[_Parted]] = {stage: [] for stage in own}
        check_hooks(model.named_parameters())
        for name, parameter in list(model.named_parameters()):
            if not shapes[name] or name in apart:
                continue  # a number cannot be cut
            found = self._replace(model, name, parameter, shapes[name])
            for stage in users[name]:
                if stage in self._by_stage:
                    self._by_stage[stage].append(found)
                    self._by_whole[id(found.whole)] = found
        self._whole_of = {id(parted.shard): parted.whole for parted in self._by_whole.values()}
        self._gathers: dict[int, _StageGather] = {}
        self._held: Counter[int] = Counter()
        self._is_inside = False

    def whole(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return the whole parameter that stands for a shard in steps; another parameter itself."""
        return self._whole_of.get(id(parameter), parameter)

    def shard(self, whole: nn.Parameter) -> nn.Parameter:
        """Return the shard of a whole parameter; one that is not cut itself."""
        found = self._by_whole.get(id(whole))
        return whole if found is None else found.shard

    def keep_gradient(self, whole: Tensor, rows: Tensor | None) -> None:
        """Make this rank's rows of a gradient that of the shard."""
        whole.grad = None
        found = self._by_whole.get(id(whole))
        if found is None:
            whole.grad = rows
        elif rows is None:
            found.shard.grad = None
        else:
            found.shard.grad = self._wrap(rows, found.whole.shape)

    def pack(self, parameters: Sequence[Tensor], tensors: Sequence[Tensor]) -> Tensor:
        """Return `[num_ranks, length]`: row r has the rows of rank r of each tensor, padded with zeros.

        Args:
            parameters: whole.
            tensors: of their shapes; one that is not cut is in each row.
        """
        columns = []
        for parameter, tensor in zip(parameters, tensors, strict=True):
            found = self._by_whole.get(id(parameter))
            if found is None:
                columns.append(tensor.reshape(1, -1).expand(self.num_ranks, -1))
                continue
            padded = tensor.new_zeros(found.most * self.num_ranks, *tensor.shape[1:])
            padded[: len(tensor)] = tensor
            columns.append(padded.view(self.num_ranks, -1))
        return torch.cat(columns, dim=1)

    def unpack(self, row: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
        """Return this rank's rows of each tensor, from its row of what `pack` returns."""
        tensors, start = [], 0
        for parameter in parameters:
            found = self._by_whole.get(id(parameter))
            shape = list(parameter.shape)
            if found is not None:
                shape[0] = found.most
            length = torch.Size(shape).numel()
            part = row[start : start + length].view(shape)
            start += length
            if found is not None:
                first = self.rank * found.most
                part = part[: max(0, min(found.most, parameter.shape[0] - first))]
            tensors.append(part)
        return tensors

    # A step

    def enter(self) -> None:
        """Put whole parameters into the model."""
        assert not self._is_inside
        self._is_inside = True
        check_hooks((parted.name, parted.shard) for parted in self._by_whole.values())
        for parted in self._by_whole.values():
            _set(parted, parted.whole)

    def leave(self) -> None:
        """Put the shards back, and free the whole parameters."""
        for gather in self._gathers.values():
            for _, _, work in gather.parts:
                if work is not None:
                    work.wait()
        self._gathers.clear()
        self._held.clear()
        for parted in self._by_whole.values():
            _set(parted, parted.shard)
            parted.free()
        self._is_inside = False

    def gather(self, stage: int, following: int | None = None) -> None:
        """Make the parameters of a stage whole; collective over dp_shard.

        Args:
            following: the stage of the next action, if there is one.
        """
        if self.zero < 3:
            for each in self._by_stage:
                if not self._held[each] and each not in self._gathers:
                    self._start(each)
        elif not self._held[stage] and stage not in self._gathers:
            self._start(stage)
        ahead = following if self.zero == 3 and self._prefetch else None
        if ahead is not None and not self._held[ahead] and ahead not in self._gathers:
            self._start(ahead)
        if not self._held[stage]:
            self._finish(stage)

    def free(self, stage: int, following: int | None = None) -> None:
        """Free the parameters of a stage after an action, if `zero` asks for it; as in `gather`."""
        if self.zero < 3 or stage == following:
            return
        self._held[stage] = 0
        kept = {
            id(parted) for each, is_held in self._held.items() if is_held for parted in self._by_stage[each]
        }
        for parted in self._by_stage[stage]:
            if id(parted) not in kept:
                parted.free()

    def _start(self, stage: int) -> None:
        by_type: dict[torch.dtype, list[_Parted]] = {}
        for parted in self._by_stage[stage]:
            by_type.setdefault(parted.whole.dtype, []).append(parted)
        gather = self._gathers[stage] = _StageGather()
        for parts in by_type.values():
            own = []
            for parted in parts:
                rows = local(parted.shard.detach())
                padded = rows.new_zeros(parted.most, *rows.shape[1:])
                padded[: len(rows)] = rows
                own.append(padded.reshape(-1))
            sent = torch.cat(own)
            received = sent.new_empty(self.num_ranks * len(sent))
            work = all_gather(received, sent, group=self._group, async_op=True)
            gather.parts.append((parts, received.view(self.num_ranks, -1), work))

    def _finish(self, stage: int) -> None:
        for parts, received, work in self._gathers.pop(stage).parts:
            if work is not None:
                work.wait()
            start = 0
            for parted in parts:
                parted.allocate()
                # Hidden from autograd: forwards have saved the parameter, and its values are the same again.
                target = parted.whole.data
                shape = parted.most, *target.shape[1:]
                length = torch.Size(shape).numel()
                for rank, rows in enumerate(received[:, start : start + length]):
                    part = target[rank * parted.most : (rank + 1) * parted.most]
                    part.copy_(rows.view(shape)[: len(part)])
                start += length
        self._held[stage] = 1

    # Building

    def _replace(self, model: nn.Module, name: str, old: nn.Parameter, shape: torch.Size) -> _Parted:
        most = -(-shape[0] // self.num_ranks)
        num_rows = max(0, min(most, shape[0] - self.rank * most))
        rows = old.detach()
        if old.shape == shape:
            rows = rows[self.rank * most : self.rank * most + num_rows]
            if old.untyped_storage().size() > old.element_size():  # not a stand-in of one number
                rows = rows.clone(memory_format=torch.contiguous_format)
        assert len(rows) == num_rows, (name, old.shape, shape)
        shard = nn.Parameter(self._wrap(rows, shape), requires_grad=old.requires_grad)
        shard.__dict__.update(old.__dict__)
        empty = torch.empty(shape, dtype=old.dtype, device=old.device)
        whole = nn.Parameter(empty, requires_grad=old.requires_grad)
        whole.__dict__.update(old.__dict__)
        places = [
            (module, key)
            for module in model.modules()
            for key, value in own_parameters(module).items()
            if value is old
        ]
        parted = _Parted(name, shard, whole, places, most)
        parted.free()
        _set(parted, shard)
        return parted

    def _wrap(self, rows: Tensor, shape: torch.Size) -> DTensor:
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(rows, self._mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)


def _set(parted: _Parted, parameter: nn.Parameter) -> None:
    for module, key in parted.places:
        setattr(module, key, parameter)
