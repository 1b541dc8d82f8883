"""Pieces: the tensors of a run as the layout has cut them, and their joining into whole ones.

A tree of state holds an `OwnPart` for each tensor whose parts the layout assigns to ranks. So a save can be
listed without communication. For a checkpoint of whole tensors the parts are then joined.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.comm.one_tensor import gather_objects
from paceline.mesh import Axis
from paceline.parallel.placement import Placement
from paceline.torch_seams.trees import tree_map_only


@dataclass(frozen=True)
class OwnPart:
    """A tensor that is or belongs to a parameter or buffer: all of it, or this rank's part.

    Attributes:
        name: of the parameter or buffer.
        tensor: laid out like the parameter or buffer.
    """

    name: str
    tensor: Tensor


def complete_pieces(tree: dict[str, Any], placement: Placement, pp: Axis) -> dict[str, Any]:
    """Add the state of parameters on other stages to an optimizer's tree; collective over pp.

    Tensors laid out like their parameter become pieces of one number; the rest (a count of steps) is copied.
    """
    if not placement.holders:
        return tree

    def describe(value: Any) -> Any:
        return _Form(value.tensor.shape, value.tensor.dtype) if isinstance(value, OwnPart) else value

    own = {
        name: {key: describe(value) for key, value in each["state"].items()}
        for name, each in tree["parameters"].items()
        if placement.holders[name][0] == pp.rank
    }
    gathered = gather_objects(own, pp.group)
    for name, each in tree["parameters"].items():
        if not placement.holds(name):
            each["state"] = {
                key: OwnPart(name, placement.stand_in(name, value.shape, value.dtype))
                if isinstance(value, _Form)
                else value
                for key, value in gathered[placement.holders[name][0]][name].items()
            }
    return tree


@dataclass(frozen=True)
class _Form:
    shape: torch.Size
    dtype: torch.dtype


def join_pieces(tree: Any, placement: Placement | None, *, keep: bool = True) -> Any:
    """Replace every piece by the whole tensor; collective over dp_shard and tp.

    Args:
        tree: the same on all ranks except for the contents of the pieces.
        placement: of the model, or `None` if nothing is divided.
        keep: whether this rank returns the whole tensors (in CPU memory), or only takes part.
    """
    made: dict[int, Any] = {}

    def join(piece: OwnPart) -> Any:
        if id(piece) not in made:
            whole = piece.tensor if placement is None else placement.whole(piece.name, piece.tensor)
            is_new = whole is not piece.tensor  # what was whole before stays on its device
            made[id(piece)] = None if not keep else whole.cpu() if is_new else whole
        return made[id(piece)]

    return tree_map_only(OwnPart, join, tree)
