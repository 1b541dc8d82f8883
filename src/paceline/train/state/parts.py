"""This rank's parts of what a run saves and loads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten_with_path, tree_map_with_path

from paceline.parallel.placement import Placement
from paceline.train.state.pieces import OwnPart
from paceline.train.update import Update

# The keys that lead to a tensor of a checkpoint.
Names = tuple[Any, ...]


def model_tensors(models: Mapping[str, nn.Module]) -> dict[str, Any]:
    """Return the models' tensors by full name, which begins with the model's name where there are several."""
    if len(models) == 1:
        return next(iter(models.values())).state_dict()
    return {f"{name}.{key}": t for name, model in models.items() for key, t in model.state_dict().items()}


def find_placement(models: Mapping[str, nn.Module], updates: Mapping[str, Update]) -> Placement | None:
    """Return the placement of the only model, if it is divided; several models never are."""
    if len(models) > 1 or not updates:
        return None
    placement = next(iter(updates.values())).placement
    return placement if placement.is_divided else None


class Parts:
    """This rank's parts of a run's tensors, by the names that lead to them in a checkpoint.

    Args:
        models: of the trainer, laid out.
        updates: of the trainer.

    Attributes:
        placement: of the only model, or `None` where nothing is divided.
    """

    def __init__(self, models: Mapping[str, nn.Module], updates: Mapping[str, Update]) -> None:
        self.placement = find_placement(models, updates)
        self._models = models
        self._tensors: dict[str, Any] = {}
        if self.placement is not None:
            self._tensors = next(iter(models.values())).state_dict(keep_vars=True)

    @property
    def is_divided(self) -> bool:
        """Whether this rank lacks a part of the model."""
        return self.placement is not None

    def list_model(self) -> dict[str, Any]:
        """Return the models' tensors by full name, pieces of what is divided. Tied names share theirs."""
        if self.placement is None:
            return model_tensors(self._models)
        made: dict[int, Any] = {}
        for name, tensor in self._tensors.items():
            if id(tensor) not in made:
                is_piece = isinstance(tensor, DTensor) or name in self.placement.splits
                made[id(tensor)] = OwnPart(name, tensor.detach()) if is_piece else tensor.detach()
        return {name: made[id(tensor)] for name, tensor in self._tensors.items()}

    def list_tracked(self, state: Any) -> Any:
        """Return a tracked object's state with pieces in it. What is named like a parameter (an average of
        weights) and is as large as this rank's part of it, is such a part."""

        def mark(path: Any, value: Any) -> Any:
            name = self._find_name(path)
            return value if name is None or not self._is_part(name, value) else OwnPart(name, value)

        return state if self.placement is None else tree_map_with_path(mark, state)

    def whole_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the models' whole tensors by full name."""
        return {
            name: tuple(tensor.shape if self.placement is None else self.placement.whole_shape(name, tensor))
            for name, tensor in model_tensors(self._models).items()
        }

    def cut_as(self, state: Any, current: Any) -> Any:
        """The rank's parts of a tracked object's whole state, where it has parts of these at present."""
        held = {str(path): value for path, value in tree_flatten_with_path(current)[0]}

        def cut(path: Any, value: Any) -> Any:
            name, now = self._find_name(path), held.get(str(path))
            if name is None or self.placement is None or not self._is_part(name, now):
                return value
            if not self.placement.divides(name, self._tensors[name], value):
                return value
            part = self.placement.part(name, value, self._tensors[name]).clone()
            return _lie_as(part, now) if isinstance(now, DTensor) else part

        return tree_map_with_path(cut, state)

    def cut(self, names: Names, whole: Tensor) -> Tensor:
        """The rank's part of a parameter, buffer or piece of optimizer state; anything else as it is."""
        name = _name_in_checkpoint(names)
        tensor = self._tensors.get(name) if isinstance(name, str) else None
        if self.placement is None or tensor is None or not self.placement.divides(str(name), tensor, whole):
            return whole
        return self.placement.part(str(name), whole, tensor).clone()

    def _find_name(self, path: Any) -> str | None:
        """The tensor of the model that a key is named after, whatever stands before its full name."""
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
        return name in self.placement.splits and not isinstance(of_model, DTensor)


def _name_in_checkpoint(names: Names) -> Any:
    """The parameter or buffer that names in a checkpoint lead to, or to whose optimizer state they lead."""
    if len(names) > 1 and names[0] == "model":
        return names[1]
    return names[3] if len(names) > 3 and names[0] == "optimizer" else None


def _lie_as(part: torch.Tensor, like: DTensor) -> DTensor:
    return DTensor.from_local(
        part.to(like.device),
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )
