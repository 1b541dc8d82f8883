"""Where the parts of a laid-out model are, and how they become whole again.

A parameter may be divided twice: over tp by a `Split` (each rank then holds a plain tensor, its part), and
what is left of it over dp_shard by rows (torch's DTensor). What belongs to a parameter (gradient, optimizer
state) lies as the parameter does. Checkpoints, `verify` and users see full names and whole tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from paceline.mesh import Axis, Mesh
from paceline.parallel.split import Split
from paceline.recipe.axes import list_axes


def local(tensor: Tensor) -> Tensor:
    """What this rank has of a tensor, as a plain one that shares its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Placement:
    """How one model lies on the ranks.

    Args:
        model: laid out.
        mesh: the ranks, or `None` for one.
        splits: by full name, what an axis divides by a `Split`; buffers too, tied names each.
        partial: by name of a whole parameter, the axis whose ranks each have a part of its gradient only.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: Mesh | None,
        splits: Mapping[str, Split] | None = None,
        partial: Mapping[str, str] | None = None,
    ) -> None:
        self.splits = dict(splits or {})
        self.partial = dict(partial or {})
        self._model = model
        self._mesh = mesh

    @property
    def is_divided(self) -> bool:
        """Whether any rank lacks a part of the model."""
        return self._mesh is not None and self._mesh.model.size > 1

    def part_axes(self, name: str, tensor: Tensor) -> tuple[Axis, ...]:
        """The axes whose ranks hold different parts of a tensor; none of a tensor that is whole.

        Args:
            name: of the parameter or buffer that it is or belongs to.
            tensor: laid out as that one.
        """
        found = []
        if isinstance(tensor, DTensor):
            found.append(self._axis("dp_shard"))
        if name in self.splits:
            found.append(self._axis(self.splits[name].axis))
        return tuple(found)

    def sum_axis(self, name: str) -> Axis | None:
        """The ranks over which the gradient of a parameter is summed; `None` for this rank alone.

        Those that train on different microbatches with this parameter, so all of dp. An axis whose ranks
        exchange samples, and not gradients, for some parameters makes a difference here.
        """
        return None if self._mesh is None else self._mesh.dp

    def counts(self, name: str, tensor: Tensor) -> bool:
        """Whether this rank counts a tensor in a sum over the ranks of one copy, which counts each part once.

        Of the ranks along an axis that hold the same, the first does.
        """
        if self._mesh is None:
            return True
        parted = {axis.name for axis in self.part_axes(name, tensor)}
        return all(self._axis(axis).rank == 0 for axis in list_axes(divides_model=True) if axis not in parted)

    def _axis(self, name: str) -> Axis:
        assert self._mesh is not None
        return self._mesh.axes[name]

    def whole_shape(self, name: str, parameter: Tensor) -> list[int]:
        """The shape of the whole tensor of this name."""
        split = self.splits.get(name)
        return list(parameter.shape) if split is None else split.whole_shape(parameter.shape)

    def whole(self, name: str, tensor: Tensor) -> Tensor:
        """The whole tensor; collective over the axes that hold its parts, every rank gets it.

        Args:
            name: of the parameter or buffer that it is or belongs to.
            tensor: laid out as that one (itself, its gradient, a moment). A plain number, such as a count of
                steps, is whole already.
        """
        split = self.splits.get(name)
        if isinstance(tensor, DTensor):
            tensor = self._join_rows(tensor)
        elif tensor.dim() == 0:
            return tensor
        if split is None:
            return tensor
        axis = self._axis(split.axis)
        own = tensor.detach().contiguous()
        parts = [torch.empty_like(own) for _ in range(axis.size)]
        dist.all_gather(parts, own, group=axis.group)
        return split.join(parts)

    def _join_rows(self, tensor: DTensor) -> Tensor:
        """The whole of what dp_shard divides.

        `full_tensor()` would talk in a group that torch looks up by the name in a cached description of the
        tensor, which may be from a mesh of an earlier world in this process: another group by now, or none.
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
        """What this rank has of a whole tensor that lies as `parameter` does; may share its memory."""
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
        """Puts a whole value into a parameter or buffer, each rank its part. No collective."""
        with torch.no_grad():
            target = local(parameter.detach())
            target.copy_(self.part(name, whole, parameter))

    def lies_as(self, value: Any, parameter: Tensor) -> bool:
        """Whether a piece of optimizer state is laid out as its parameter."""
        if isinstance(value, DTensor):
            return True
        return isinstance(value, Tensor) and value.dim() > 0 and value.shape == parameter.shape

    def divides(self, name: str, parameter: Tensor, whole: Any) -> bool:
        """Whether a whole tensor is to be divided as a parameter is."""
        is_divided = name in self.splits or isinstance(parameter, DTensor)
        return (
            is_divided
            and isinstance(whole, Tensor)
            and list(whole.shape) == self.whole_shape(name, parameter)
        )

    def add_up_partial(self, gradients: Mapping[str, Tensor | None]) -> None:
        """Adds up what ranks have of whole parameters' gradients, over the axes of `partial`; collective.

        Costs one all-reduce per axis and dtype. A missing gradient counts as zero where another rank can't
        know.
        """
        if not self.partial:
            return
        found: dict[tuple[str, torch.dtype], list[Tensor]] = {}
        for name, gradient in gradients.items():
            if name in self.partial and gradient is not None:
                part = local(gradient)
                found.setdefault((self.partial[name], part.dtype), []).append(part)
        for (axis, _), parts in found.items():
            flat = torch.cat([part.reshape(-1) for part in parts])
            dist.all_reduce(flat, group=self._axis(axis).group)
            start = 0
            for part in parts:
                part.copy_(flat[start : start + part.numel()].view_as(part))
                start += part.numel()

    def fill(self, make: Callable[[str], Tensor], device: torch.device) -> None:
        """Gives a model its values in place; each rank makes one whole tensor at a time and keeps its part.

        Args:
            make: from a full name to the whole tensor.
            device: where the model is.
        """
        done: set[int] = set()
        for name, tensor in [
            *self._model.named_parameters(remove_duplicate=False),
            *self._model.named_buffers(remove_duplicate=False),
        ]:
            if id(tensor) not in done:
                done.add(id(tensor))
                self.write(name, tensor, make(name).to(device))
