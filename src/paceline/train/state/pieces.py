"""The tensors of a run as the layout has cut them: pieces, and how they become whole.

A tree of state holds an `OwnPart` wherever this rank has a part of a tensor only. So what is saved is listed
without talking to other ranks; a content of whole tensors then has the pieces joined.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map_only

from paceline.parallel.placement import Placement


@dataclass(frozen=True)
class OwnPart:
    """This rank's part of a tensor that the layout divides.

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
        assert placement is not None
        if id(piece) not in made:
            whole = placement.whole(piece.name, piece.tensor)
            made[id(piece)] = whole.cpu() if keep else None
        return made[id(piece)]

    return tree_map_only(OwnPart, join, tree)
