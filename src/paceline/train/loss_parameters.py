"""Finds trained parameters of a loss that no model of the trainer has, such as the centres of a criterion.

Their gradients are those of this rank's microbatches alone: no sum over ranks, layout or checkpoint has them.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Collection
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from paceline.errors import PacelineError
from paceline.finding import Finding

log = logging.getLogger(__name__)

_FIX = (
    "Register the criterion as a module of the model and use it from there, so that it is laid out and "
    "summed with the model. Set requires_grad=False on parameters of a loss that are not trained."
)


class WatchedLosses(TorchFunctionMode):
    """A mode that passes each loss to a function before its backward.

    Args:
        check: gets the loss.
    """

    def __init__(self, check: Callable[[Tensor], None]) -> None:
        super().__init__()
        self._check = check

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.backward:
            self._check(args[0])
        return func(*args, **(kwargs or {}))


def check_loss_parameters(loss: Tensor, own: Collection[int], name: str) -> None:
    """Walk a loss's graph once, and look for parameters that are not the model's.

    Args:
        own: ids of the parameters that its graph may end at.
        name: of the model, for messages.
    """
    foreign = [each for each in find_leaves(loss) if isinstance(each, nn.Parameter) and id(each) not in own]
    if not foreign:
        return
    saw = (
        f"the loss of {name} has trained parameters outside of the model: {len(foreign)}, the first of "
        f"shape {list(foreign[0].shape)}"
    )
    ids = set(map(id, foreign))
    for each in gc.get_objects():
        if issubclass(type(each), Optimizer) and any(
            id(p) in ids for group in each.param_groups for p in group["params"]
        ):
            raise PacelineError(
                "PL392",
                saw=f"{saw}; {type(each).__name__} trains them.",
                rule="Each rank has only the gradients of its own microbatches, in the scale of the "
                "trainer's sums. Only parameters of the model are summed over ranks, clipped and saved.",
                fix=_FIX,
            )
    log.warning(
        "%s",
        Finding("PL392", name, f"{saw}.", "They are neither summed over ranks nor trained nor saved.", _FIX),
    )


def find_leaves(loss: Tensor) -> list[Tensor]:
    """Return the tensors at which a graph ends."""
    seen, ahead, found = set(), [loss.grad_fn], []
    while ahead:
        node = ahead.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, Tensor):
            found.append(leaf)
        ahead += [parent for parent, _ in node.next_functions]
    return found
