"""Takes over optimizers that were built before their parameters were laid out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from paceline.errors import PacelineError
from paceline.phrases import name_some

Named = list[tuple[str, nn.Parameter]]


def take_optimizers(given: Any, model: nn.Module) -> Callable[[Named], Any]:
    """Return a factory of a loop's optimizers.

    Args:
        given: an optimizer, a list or dict of them, a function from (full name, parameter) pairs, or `None`
            for one that stands in for optimizers of which nothing is known.
        model: whose parameters they have, not laid out yet.
    """
    if given is None:
        return lambda named: SGD([p for _, p in named if p.requires_grad], lr=0.0)
    if callable(given) and not isinstance(given, Optimizer):
        return given  # type: ignore[no-any-return]
    optimizers = list(given.values()) if isinstance(given, Mapping) else given
    optimizers = list(optimizers) if isinstance(optimizers, (list, tuple)) else [optimizers]
    names = {id(p): name for name, p in model.named_parameters()}
    for each in optimizers:
        _check(each, names)

    def point(named: Named) -> list[Optimizer]:
        new: dict[str, Tensor] = dict(named)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["params"] = [new[names[id(p)]] for p in group["params"]]
        return optimizers

    return point


def _check(optimizer: Optimizer, names: Mapping[int, str]) -> None:
    if optimizer.state:
        raise _optimizer_error(
            f"{type(optimizer).__name__} has state for {len(optimizer.state)} parameters.",
            "Laying out replaces parameters, and the state of whole ones does not fit their parts.",
            "Build the optimizer anew and load checkpoints with loop.resume; one that makes its state when "
            "it is built (Adagrad) is passed as a function: "
            f"lambda named: {type(optimizer).__name__}([p for _, p in named]).",
        )
    params = [p for group in optimizer.param_groups for p in group["params"]]
    others = [f"one of shape {list(p.shape)}" for p in params if id(p) not in names]
    if others:
        raise _optimizer_error(
            f"{type(optimizer).__name__} has {len(others)} parameters that no model has: "
            f"{name_some(others, 3)}.",
            "An optimizer's parameters are found in the models by identity.",
            "Build it over the parameters of the models passed to Loop, after they have got their dtype and "
            "before anything else replaces them; or pass lambda named: ...",
        )


def unknown_error(optimizer: Optimizer) -> PacelineError:
    """Return PL647, for an optimizer over the models' parameters that the loop did not get."""
    return _optimizer_error(
        f"a step of {type(optimizer).__name__}, which was not passed to the loop and has its parameters.",
        "Its state would be neither saved nor laid out.",
        "Pass it to Loop(models, optimizers); one that the loop builds of a function is loop.optimizer.",
    )


def _optimizer_error(saw: str, rule: str, fix: str) -> PacelineError:
    return PacelineError("PL647", saw=saw, rule=rule, fix=fix)
