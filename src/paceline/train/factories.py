"""Checks the results of a user's factories: the optimizer and the schedule of a model."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from paceline.errors import PacelineError

_BUILD = (
    "Pass a function, for example optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=3e-4)."
)


def check_optimizer(name: str, optimizer: Any, model: nn.Module) -> None:
    """Raise PL407 unless the trainer can step this optimizer.

    Args:
        name: of the model, for the message.
        model: laid out; the factory got its parameters.
    """
    if not (hasattr(optimizer, "param_groups") and callable(getattr(optimizer, "step", None))):
        raise PacelineError(
            "PL407",
            saw=f"the optimizer function of {name} returned {_describe(optimizer)}.",
            rule="It returns an optimizer over the parameters that it is given, or a list of several.",
            fix=_BUILD,
        )
    if _needs_closure(optimizer):
        raise PacelineError(
            "PL407",
            saw=f"the optimizer {type(optimizer).__name__} of {name}, whose step() requires a closure.",
            rule="The trainer computes the gradients of a global batch once and then calls optimizer.step(). "
            "A closure would compute them again in the middle of the step.",
            fix="Use an optimizer that steps without a closure (AdamW, SGD, Lion ...).",
        )
    own = {id(parameter) for parameter in model.parameters()}
    held = [p for group in optimizer.param_groups for p in group["params"]]
    foreign = [p for p in held if id(p) not in own]
    if foreign:
        raise PacelineError(
            "PL407",
            saw=f"{len(foreign)} of the {len(held)} tensors in the optimizer of {name} are not its "
            "parameters "
            f"(the first has shape {list(foreign[0].shape)}).",
            rule="The trainer sums gradients over ranks and saves state for the parameters of the model that "
            "it trains. Other tensors would get neither.",
            fix="Build the optimizer from the list that its function is given. Register other tensors to "
            "train "
            "as nn.Parameter of the model.",
        )


def check_schedule(name: str, schedule: Any) -> None:
    """Raise PL407 unless the trainer can step this learning-rate schedule.

    Args:
        name: of the model, for the message.
        schedule: the function's result; `None` stands for no schedule.
    """
    if isinstance(schedule, ReduceLROnPlateau):
        raise PacelineError(
            "PL407",
            saw=f"the schedule of {name} is ReduceLROnPlateau.",
            rule="The trainer steps the schedule once per optimizer step, by its number alone. "
            "ReduceLROnPlateau needs a metric instead.",
            fix="Leave schedule= out, build ReduceLROnPlateau in the optimizer function, call its "
            "step(metric) "
            "after trainer.evaluate() on every rank, and pass it to trainer.track().",
        )
    if schedule is None or all(callable(getattr(schedule, method, None)) for method in _SCHEDULE_METHODS):
        return
    raise PacelineError(
        "PL407",
        saw=f"the schedule function of {name} returned {_describe(schedule)}.",
        rule="It returns a learning-rate scheduler over the optimizer that it is given.",
        fix="Pass for example schedule=lambda optimizer: "
        "torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=1000).",
    )


_SCHEDULE_METHODS = ("step", "state_dict", "load_state_dict")


def _needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    # Inspect the class: a schedule replaces the instance's step by a wrapper with other arguments.
    parameters = list(inspect.signature(type(optimizer).step).parameters.values())[1:]
    return any(
        parameter.default is parameter.empty
        for parameter in parameters
        if parameter.kind
        in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    )


def _describe(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
