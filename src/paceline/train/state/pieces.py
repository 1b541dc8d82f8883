"""The tensors of a run as the layout has cut them: pieces, and how they become whole.

A tree of state holds an `OwnPart` wherever the layout says which ranks have which parts of a tensor. So what
is saved is listed without talking to other ranks; a content of whole tensors then has the parts joined.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from paceline.parallel.placement import Placement
from paceline.torch_seams.trees import tree_map_only


@dataclass(frozen=True)
class OwnPart:
    """A tensor that is or belongs to a parameter or buffer: all of it, or this rank's part.

    Attributes:
        name: of the parameter or buffer that it is or belongs to.
        tensor: laid out as that one.
    """

    name: str
    tensor: Tensor


def join_pieces(tree: Any, placement: Placement | None, *, keep: bool = True) -> Any:
    """Put the whole tensor in place of every piece; collective over dp_shard and tp.

    Args:
        tree: the same on all ranks, but for what the pieces hold.
        placement: of the model, or `None` where nothing is divided.
        keep: whether this rank wants the whole tensors (in CPU memory), or only helps with them.
    """
    made: dict[int, Any] = {}

    def join(piece: OwnPart) -> Any:
        if id(piece) not in made:
            whole = piece.tensor if placement is None else placement.whole(piece.name, piece.tensor)
            is_new = whole is not piece.tensor  # what was whole before stays on its device
            made[id(piece)] = None if not keep else whole.cpu() if is_new else whole
        return made[id(piece)]

    return tree_map_only(OwnPart, join, tree)
