"""Records where the parts of a laid-out model are, and makes whole tensors of them.

A parameter may be divided twice: over tp or ep by a `Split` (each rank then holds a plain tensor, its part),
and that part over dp_shard by rows (torch's DTensor). Tensors that belong to a parameter (gradient, optimizer
state) are laid out like the parameter. Checkpoints, `verify` and users see full names and whole tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import lcm
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from paceline.comm.buckets import broadcast_tensors
from paceline.mesh import Axis, Mesh
from paceline.parallel.construct.hand_out import Construction
from paceline.parallel.split import Split
from paceline.recipe.axes import list_axes
from paceline.torch_seams.modules import own_buffers, own_parameters


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, as a plain one that shares its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def lay_out_like(part: Tensor, like: Tensor) -> Tensor:
    """Return this rank's part of a tensor, laid out like another tensor of the whole one's shape."""
    if not isinstance(like, DTensor):
        return part
    return DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


class Placement:
    """The placement of one model's parts on the ranks.

    Args:
        model: laid out.
        mesh: the ranks, or `None` for one.
        splits: by full name, the `Split` that divides a parameter or buffer; tied names each.
        partial: by name of a parameter, the axes along which each rank has only an addend of its gradient.
        holders: by full name of a parameter, tied names each, the ranks of pp that hold it; on the others it
            is on the meta device. Also of buffers that only some ranks change. Empty without pp.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: Mesh | None,
        splits: Mapping[str, Split] | None = None,
        partial: Mapping[str, tuple[str, ...]] | None = None,
        holders: Mapping[str, tuple[int, ...]] | None = None,
    ) -> None:
        self.splits = dict(splits or {})
        self.partial = dict(partial or {})
        self.holders = dict(holders or {})
        self._model = model
        self._mesh = mesh
        named = (
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        )
        self._numbers = {name for name, tensor in named if not tensor.dim()}
        for prefix, module in model.named_modules() if self.is_divided else ():
            module.register_load_state_dict_pre_hook(self._cut_loaded(prefix))

    def _cut_loaded(self, prefix: str) -> Callable[..., None]:
        """Return a hook by which a module's `load_state_dict` takes whole tensors, each rank its part."""

        def cut(module: nn.Module, state: dict[str, Any], path: str, *_: Any) -> None:
            for key, own in (own_parameters(module) | own_buffers(module)).items():
                name, given = f"{prefix}.{key}".removeprefix("."), state.get(f"{path}{key}")
                if own is None or given is None or isinstance(given, DTensor):
                    continue
                if not self.divides(name, own, given):
                    continue
                part = self.part(name, given, own).to(local(own).device) if self.holds(name) else None
                state[f"{path}{key}"] = own if part is None else lay_out_like(part, own)

        return cut

    @property
    def is_divided(self) -> bool:
        """Whether any rank lacks a part of the model."""
        return self._mesh is not None and self._mesh.model.size > 1

    def part_axes(self, name: str, tensor: Tensor) -> tuple[Axis, ...]:
        """Return the axes whose ranks hold different parts of a tensor; none if it is whole.

        Args:
            name: of the parameter or buffer that the tensor is or belongs to.
            tensor: laid out like that one.
        """
        found = []
        if isinstance(tensor, DTensor):
            found.append(self._axis("dp_shard"))
        if name in self.splits:
            found.append(self._axis(self.splits[name].axis))
        return tuple(found)

    def holds(self, name: str) -> bool:
        """Return whether this rank has a part of a parameter or buffer, or all of it."""
        return name not in self.holders or self._axis("pp").rank in self.holders[name]

    def is_on_first_stage(self, name: str) -> bool:
        """Return whether this rank has the first of the stages that use a parameter."""
        return name not in self.holders or self.holders[name][0] == self._axis("pp").rank

    def counts(self, name: str, tensor: Tensor) -> bool:
        """Return whether this rank counts a tensor in a sum over `mesh.model` that counts each part once.

        Among ranks that hold the same part, the first one counts it.
        """
        if self._mesh is None:
            return True
        parted = {axis.name for axis in self.part_axes(name, tensor)}
        if name in self.holders:
            parted.add("pp")
        if not self.is_on_first_stage(name):
            return False
        # Among neighbouring data ranks, dp_shard and ep each make parts of their own; among ranks of cp, ep
        # does.
        shards, experts, sources = self._axis("dp_shard"), self._axis("ep"), self._mesh.ep_data.size
        place = self._mesh.dp.rank % lcm(shards.size, sources)
        num_parts = shards.size if shards.name in parted else sources if experts.name in parted else 1
        if self._mesh.ep_cp.rank and experts.name not in parted:
            return False
        others = [axis for axis in list_axes(divides_model=True) if axis not in (shards.name, experts.name)]
        return place < num_parts and all(self._axis(axis).rank == 0 for axis in others if axis not in parted)

    def _axis(self, name: str) -> Axis:
        assert self._mesh is not None
        return self._mesh.axes[name]

    def whole_shape(self, name: str, parameter: Tensor) -> list[int]:
        """Return the shape of the whole tensor of this name."""
        split = self.splits.get(name)
        return list(parameter.shape) if split is None else split.whole_shape(parameter.shape)

    def whole(self, name: str, tensor: Tensor) -> Tensor:
        """Return the whole tensor on every rank; collective over the axes that hold its parts.

        Args:
            name: of the parameter or buffer that the tensor is or belongs to.
            tensor: laid out like that one (itself, its gradient, a moment). A plain number, such as a count
                of steps, is whole already.
        """
        if name in self.holders and (tensor.dim() or name in self._numbers):
            return self._send_from_holder(name, tensor)
        return self._join_parts(name, tensor)

    def _join_parts(self, name: str, tensor: Tensor) -> Tensor:
        """Return the whole tensor, from its parts on ranks of the same stage."""
        split = self.splits.get(name)
        if isinstance(tensor, DTensor):
            tensor = self._join_rows(tensor)
        elif tensor.dim() == 0:
            return tensor
        return tensor if split is None else split.join(self.gather(tensor, split.axis))

    def gather(self, tensor: Tensor, axis: str) -> list[Tensor]:
        """Return the tensors of all ranks of an axis, which have the same shape; collective over it."""
        ranks, own = self._axis(axis), tensor.detach().contiguous()
        parts = [torch.empty_like(own) for _ in range(ranks.size)]
        dist.all_gather(parts, own, group=ranks.group)
        return parts

    def _send_from_holder(self, name: str, tensor: Tensor) -> Tensor:
        """Return the tensor of the first rank of pp that holds it; collective over pp."""
        axis, holder = self._axis("pp"), self.holders[name][0]
        if axis.rank == holder:
            whole = self._join_parts(name, tensor)
        else:
            shape = self.whole_shape(name, tensor)
            whole = torch.empty(shape, dtype=tensor.dtype, device=self._device)
        broadcast_tensors([whole], axis.group, holder)
        return whole

    @property
    def _device(self) -> torch.device:
        """The device of the parts that this rank holds."""
        assert self._mesh is not None
        held = (t.device for name, t in self._model.named_parameters() if self.holds(name))
        return next(held, self._mesh.device)

    def _join_rows(self, tensor: DTensor) -> Tensor:
        """Return the whole tensor that dp_shard divides.

        `full_tensor()` would use a group that torch finds by a name in a cached description of the tensor.
        That may be from a mesh of an earlier world in this process: another group by now, or none.
        """
        if tuple(tensor.placements) != (Shard(0),):
            return tensor.full_tensor()
        assert self._mesh is not None
        axis = self._mesh.dp_shard
        own = tensor.to_local().detach()
        num_rows, most = tensor.shape[0], -(-tensor.shape[0] // axis.size)
        padded = own.new_zeros(most, *own.shape[1:])
        padded[: len(own)] = own
        rows = [torch.empty_like(padded) for _ in range(axis.size)]
        dist.all_gather(rows, padded, group=axis.group)
        return torch.cat([part[: max(0, num_rows - rank * most)] for rank, part in enumerate(rows)])

    def part(self, name: str, whole: Tensor, parameter: Tensor) -> Tensor:
        """Return this rank's part of a whole tensor laid out like `parameter`; may share its memory.

        On a rank that holds nothing of it, that is an empty tensor.
        """
        if not self.holds(name):
            return whole.reshape(-1)[:0]
        split = self.splits.get(name)
        if split is not None:
            whole = split.take(whole, self._axis(split.axis).rank)
        if not isinstance(parameter, DTensor):
            return whole
        assert self._mesh is not None
        axis = self._mesh.dp_shard
        rows = torch.chunk(whole, axis.size, dim=0)  # as DTensor cuts: the last ranks may have fewer, or none
        return rows[axis.rank] if axis.rank < len(rows) else whole[:0]

    def write(self, name: str, parameter: Tensor, whole: Tensor) -> None:
        """Write a whole value into a parameter or buffer, each rank its part. No collective."""
        if not self.holds(name):
            return
        with torch.no_grad():
            target = local(parameter.detach())
            target.copy_(self.part(name, whole, parameter))

    def lies_as(self, value: Any, parameter: Tensor) -> bool:
        """Return whether a piece of optimizer state is laid out like its parameter."""
        if isinstance(value, DTensor):
            return True
        return isinstance(value, Tensor) and value.dim() > 0 and value.shape == parameter.shape

    def divides(self, name: str, parameter: Tensor, whole: Any) -> bool:
        """Return whether a whole tensor must be divided like a parameter."""
        is_divided = name in self.splits or isinstance(parameter, DTensor) or not self.holds(name)
        return (
            is_divided
            and isinstance(whole, Tensor)
            and list(whole.shape) == self.whole_shape(name, parameter)
        )

    def stand_in(self, name: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Return a tensor of one number, laid out like a parameter of another stage.

        Args:
            shape: of the tensor as it is on ranks of the parameter's stage.
        """
        like = dict(self._model.named_parameters(remove_duplicate=False))[name]
        one = torch.zeros((), dtype=dtype)
        if shape != like.shape:
            return one.expand(shape)
        return lay_out_like(one.expand(local(like.detach()).shape), like)

    def add_up_partial(self, gradients: Mapping[str, Tensor | None]) -> None:
        """Sum the ranks' partial gradients over the axes of `partial`; collective.

        Costs one all-reduce per axis and dtype, whose result has the same bits on all ranks. A missing
        gradient counts as zero if another rank cannot know that it is missing.
        """
        for axis in dict.fromkeys(axis for axes in self.partial.values() for axis in axes):
            found: dict[torch.dtype, list[Tensor]] = {}
            for name, gradient in gradients.items():
                if axis in self.partial.get(name, ()) and gradient is not None:
                    part = local(gradient)
                    found.setdefault(part.dtype, []).append(part)
            for parts in found.values():
                flat = torch.cat([part.reshape(-1) for part in parts])
                dist.all_reduce(flat, group=self._axis(axis).group)
                start = 0
                for part in parts:
                    part.copy_(flat[start : start + part.numel()].view_as(part))
                    start += part.numel()

    def fill(self, construction: Construction, device: torch.device) -> None:
        """Write a construction's values into a model in place, each rank its part; collective."""
        tensors: dict[str, Tensor] = dict(self._model.named_parameters(remove_duplicate=False))
        tensors |= dict(self._model.named_buffers(remove_duplicate=False))
        in_rows = {
            name
            for name, each in tensors.items()
            if isinstance(each, DTensor) and tuple(each.placements) == (Shard(0),) and name not in self.splits
        }
        for names, first, whole in construction.hand_out(device, in_rows):
            for name in {id(tensors[name]): name for name in names}.values():
                if name in in_rows:
                    self._write_rows(tensors[name], first, whole)
                else:
                    self.write(name, tensors[name], whole)
            del whole  # before the next one is made

    def _write_rows(self, parameter: Tensor, first: int, rows: Tensor) -> None:
        """Write those of some rows that this rank holds of a parameter that dp_shard alone divides."""
        assert self._mesh is not None
        axis, own = self._mesh.dp_shard, local(parameter.detach())
        start = min(axis.rank * -(-len(parameter) // axis.size), len(parameter))
        low, high = max(first, start), min(first + len(rows), start + len(own))
        if low < high:
            own[low - start : high - start].copy_(rows[low - first : high - first])
