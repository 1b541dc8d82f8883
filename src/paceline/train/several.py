"""`Several`: optimizers of one model (Muon for its matrices, AdamW for the rest), stepped as one.

A schedule, checkpoints and the comparison of settings see one optimizer, with the groups and the state of
all. Each group has the name of its optimizer under `"optimizer"`, which is saved with its other settings.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer

from paceline.errors import PacelineError

# The setting of a group that names its optimizer.
PART = "optimizer"


class Several(Optimizer):
    """Several optimizers of one model.

    Args:
        parts: the optimizers, over different parameters.
    """

    def __init__(self, parts: Sequence[Optimizer]) -> None:
        self.parts: dict[str, Optimizer] = {}
        # One dict for all: the parts make their state in it, and a checkpoint replaces its contents.
        state: defaultdict[Any, Any] = defaultdict(dict)
        seen: Counter[str] = Counter()
        for part in parts:
            name = type(part).__name__
            seen[name] += 1
            name += f" {seen[name]}" if seen[name] > 1 else ""
            self.parts[name] = part
            for group in part.param_groups:
                group[PART] = name
            state.update(part.state)
            part.state = state
        super().__init__([group for part in parts for group in part.param_groups], {})
        self.state = state

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step the optimizers, in their order."""
        for name, part in self.parts.items():
            groups = part.param_groups
            # A layout may split groups for the step.
            part.param_groups = [group for group in self.param_groups if group[PART] == name]
            try:
                part.step()
            finally:
                part.param_groups = groups


def join_optimizers(model: str, made: Any) -> Any:
    """Return the result of a user's function as one optimizer, if it is a list or tuple of several.

    Args:
        model: its name, for the message.
    """
    if not isinstance(made, (list, tuple)) or not made or not all(isinstance(o, Optimizer) for o in made):
        return made
    if len(made) == 1:
        return made[0]
    held = Counter(id(p) for part in made for group in part.param_groups for p in group["params"])
    if twice := sum(number > 1 for number in held.values()):
        raise PacelineError(
            "PL407",
            saw=f"{twice} parameters of {model} are in several of its optimizers.",
            rule="Each parameter is updated once per step.",
            fix="Give each parameter to one of the optimizers.",
        )
    name = " and ".join(type(part).__name__ for part in made)
    return type(name, (Several,), {})(made)


def list_parts(optimizer: Optimizer) -> list[Optimizer]:
    """Return the optimizers of a `Several`, or the one itself."""
    return list(optimizer.parts.values()) if isinstance(optimizer, Several) else [optimizer]
