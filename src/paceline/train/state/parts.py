"""This rank's parts of the tensors that a run saves and loads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from paceline.checkpoint.part import Part, Run
from paceline.parallel.placement import Placement, lay_out_like
from paceline.parallel.split import Split
from paceline.recipe.layout import Layout
from paceline.torch_seams.trees import tree_flatten_with_path, tree_map_with_path
from paceline.train.pieces import OwnPart
from paceline.train.update import Update

# The keys that lead to a tensor of a checkpoint.
Names = tuple[Any, ...]


def model_tensors(models: Mapping[str, nn.Module], *, keep_vars: bool = False) -> dict[str, Any]:
    """Return the models' tensors by full name, which begins with the model's name if there are several.

    Args:
        models: by name.
        keep_vars: return the parameters themselves, so that tied names give the same object.
    """
    if len(models) == 1:
        return next(iter(models.values())).state_dict(keep_vars=keep_vars)
    return {
        f"{name}.{key}": tensor
        for name, model in models.items()
        for key, tensor in model.state_dict(keep_vars=keep_vars).items()
    }


def find_placement(models: Mapping[str, nn.Module], updates: Mapping[str, Update]) -> Placement | None:
    """Return the placement of the only model, if it is divided; several models never are."""
    if len(models) > 1 or not updates:
        return None
    placement = next(iter(updates.values())).placement
    return placement if placement.is_divided else None


@dataclass(frozen=True)
class KnownPlans:
    """The plans that saves of one layout have made, kept for later saves.

    Attributes:
        holders: by what decides about them, the parts of a tensor with the ranks that hold each.
        plans: by what decides about them, plans of whole saves (`write.py`).
    """

    holders: dict[Any, list[tuple[Part, tuple[int, ...]]]] = field(default_factory=dict)
    plans: dict[Any, Any] = field(default_factory=dict)


class Parts:
    """The parts of a run's tensors that each rank holds, by their names in a checkpoint.

    Args:
        models: of the trainer, laid out.
        layout: of the trainer, resolved.
        known: what was planned before, under the same layout.

    Attributes:
        placement: of the only model, or `None` where nothing is divided.
        known: what is planned with these parts.
    """

    def __init__(
        self,
        models: Mapping[str, nn.Module],
        updates: Mapping[str, Update],
        layout: Layout,
        rank: int,
        known: KnownPlans | None = None,
    ) -> None:
        self.placement = find_placement(models, updates)
        self.rank = rank
        self._models = models
        self._layout = layout
        self._tensors = model_tensors(models, keep_vars=True)
        self.known = known or KnownPlans()

    @property
    def is_divided(self) -> bool:
        """Whether this rank lacks a part of the model."""
        return self.placement is not None

    def holds(self, name: str) -> bool:
        """Return whether this rank has anything of a tensor of the models."""
        return self.placement is None or self.placement.holds(name)

    def list_model(self) -> dict[str, Any]:
        """Return the models' tensors by full name. Tied names share theirs.

        Parameters, and buffers that are divided, are `OwnPart`.
        """
        made: dict[int, Any] = {}
        for name, tensor in self._tensors.items():
            if id(tensor) not in made:
                is_own = isinstance(tensor, nn.Parameter) or self._is_divided(name, tensor)
                made[id(tensor)] = OwnPart(name, tensor.detach()) if is_own else tensor.detach()
        return {name: made[id(tensor)] for name, tensor in self._tensors.items()}

    def is_parameter(self, name: str) -> bool:
        """Return whether a tensor of the models is a parameter, which has the same bits in all copies."""
        return isinstance(self._tensors.get(name), nn.Parameter)

    def list_holders(self, own: OwnPart) -> list[tuple[Part, tuple[int, ...]]]:
        """Return the different parts of a tensor, each with the ranks that hold it; alike on every rank."""
        shape, split, is_sharded = self._describe(own)
        stages = None if self.placement is None else self.placement.holders.get(own.name)
        key = (shape, split, is_sharded, stages)
        holders = self.known.holders
        if key not in holders:
            found: dict[Part, list[int]] = {}
            for rank in range(self._layout.num_ranks):
                if stages is not None and self._layout.find_place(rank)["pp"] not in stages:
                    continue
                found.setdefault(self._part_at(rank, shape, split, is_sharded), []).append(rank)
            holders[key] = [(part, tuple(ranks)) for part, ranks in found.items()]
        return holders[key]

    def find_part(self, names: Names, shape: tuple[int, ...]) -> Part | None:
        """Return this rank's part of a tensor of a checkpoint, or `None` where it has all of it.

        Args:
            names: that lead to the tensor.
            shape: of the whole tensor.
        """
        name = _name_in_checkpoint(names)
        tensor = self._tensors.get(name) if isinstance(name, str) else None
        if self.placement is None or tensor is None:
            return None
        if not self.placement.holds(str(name)) and shape == tuple(tensor.shape) and shape:
            return Part(shape, ((), *(((0, size),) for size in shape[1:])))
        if not self._is_divided(str(name), tensor):
            return None
        whole, split, is_sharded = self._describe(OwnPart(str(name), tensor))
        return self._part_at(self.rank, whole, split, is_sharded) if whole == shape else None

    def _describe(self, own: OwnPart) -> tuple[tuple[int, ...], Split | None, bool]:
        """Return a tensor's whole shape, its split by tp, and whether dp_shard divides the rest by rows."""
        if self.placement is None:
            return tuple(own.tensor.shape), None, False
        is_sharded = isinstance(own.tensor, DTensor)
        if isinstance(own.tensor, DTensor):
            assert tuple(own.tensor.placements) == (Shard(0),), own.tensor.placements
        whole = tuple(self.placement.whole_shape(own.name, own.tensor))
        return whole, self.placement.splits.get(own.name), is_sharded

    def _part_at(self, rank: int, shape: tuple[int, ...], split: Split | None, is_sharded: bool) -> Part:
        """Return the part of a rank, from its place in the layout."""
        places = self._layout.find_place(rank)
        runs = [[(0, size)] for size in shape]
        if split is not None:
            runs[split.dim] = split.runs(shape[split.dim], places[split.axis])
        if is_sharded:
            runs[0] = _cut_rows(runs[0], places["dp_shard"], self._layout.dp_shard)
        return Part(shape, tuple(tuple(each) for each in runs))

    def _is_divided(self, name: str, tensor: Any) -> bool:
        return self.placement is not None and (isinstance(tensor, DTensor) or name in self.placement.splits)

    def list_tracked(self, state: Any) -> Any:
        """Return a tracked object's state with its divided tensors as `OwnPart`.

        A tensor with a parameter's name (such as an average of weights) and the size of this rank's part of
        that parameter counts as such a part.
        """

        def mark(path: Any, value: Any) -> Any:
            name = self._find_name(path)
            if name is None or not self._is_part(name, value):
                return value
            assert self.placement is not None
            if not self.placement.holds(name):
                value = self.placement.stand_in(name, value.shape, value.dtype)
            return OwnPart(name, value)

        return state if self.placement is None else tree_map_with_path(mark, state)

    def whole_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the models' whole tensors by full name."""
        return {
            name: tuple(tensor.shape if self.placement is None else self.placement.whole_shape(name, tensor))
            for name, tensor in model_tensors(self._models).items()
        }

    def cut_as(self, state: Any, current: Any) -> Any:
        """Cut a tracked object's whole state into this rank's parts, where the object holds parts now."""
        held = {str(path): value for path, value in tree_flatten_with_path(current)[0]}

        def cut(path: Any, value: Any) -> Any:
            name, now = self._find_name(path), held.get(str(path))
            if name is None or self.placement is None or not self._is_part(name, now):
                return value
            if not self.placement.divides(name, self._tensors[name], value):
                return value
            part = self.placement.part(name, value, self._tensors[name]).clone()
            return lay_out_like(part.to(now.device), now) if isinstance(now, DTensor) else part

        return tree_map_with_path(cut, state)

    def cut(self, names: Names, whole: Tensor) -> Tensor:
        """Return this rank's part of a parameter, a buffer or optimizer state; return other tensors whole."""
        name = _name_in_checkpoint(names)
        tensor = self._tensors.get(name) if isinstance(name, str) else None
        if self.placement is None or tensor is None or not self.placement.divides(str(name), tensor, whole):
            return whole
        return self.placement.part(str(name), whole, tensor).clone()

    def _find_name(self, path: Any) -> str | None:
        """Return the name of the model's tensor that a key ends with, or `None`."""
        key = getattr(path[-1], "key", None) if path else None
        while isinstance(key, str) and key:
            if key in self._tensors:
                return key
            key = key.partition(".")[2]
        return None

    def _is_part(self, name: str, value: Any) -> bool:
        assert self.placement is not None
        of_model = self._tensors[name]
        if not isinstance(value, torch.Tensor) or value.shape != of_model.shape:
            return False
        if isinstance(value, DTensor):
            return True
        is_divided = name in self.placement.splits or name in self.placement.holders
        return is_divided and not isinstance(of_model, DTensor)


def _name_in_checkpoint(names: Names) -> Any:
    """Return the name of the parameter or buffer that a tensor of a checkpoint is or belongs to."""
    if len(names) > 1 and names[0] == "model":
        return names[1]
    return names[3] if len(names) > 3 and names[0] == "optimizer" else None


def _cut_rows(runs: list[Run], place: int, degree: int) -> list[Run]:
    """Return the rows of a rank of dp_shard, cut as DTensor does: the last ranks may have fewer, or none."""
    num_rows = sum(stop - start for start, stop in runs)
    most = -(-num_rows // degree)
    first, last = place * most, (place + 1) * most
    found, before = [], 0
    for start, stop in runs:
        here = max(start, start + first - before), min(stop, start + last - before)
        if here[0] < here[1]:
            found.append(here)
        before += stop - start
    return found
