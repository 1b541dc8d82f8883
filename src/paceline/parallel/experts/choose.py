"""Reads a user's choice of experts: by pattern of a module's name, whether ep shares what it holds."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from paceline.errors import PacelineError
from paceline.models.moe import Experts
from paceline.parallel.experts.forms import is_decorated
from paceline.parallel.experts.lists import is_list
from paceline.phrases import name_some


def choose_experts(model: nn.Module, patterns: Mapping[str, bool] | None) -> dict[str, bool]:
    """Return the modules that a user has chosen, by full name.

    Args:
        model: whole.
        patterns: by pattern of a full name (`*` stands for anything), `True` for a list of modules that are
            the experts of a mixture, `False` for experts that each rank keeps whole.

    Raises:
        PacelineError: PL667 for a pattern that matches no module, or none that can hold experts.
    """
    chosen: dict[str, bool] = {}
    for pattern, wanted in (patterns or {}).items():
        matched = {name: each for name, each in model.named_modules() if name and fnmatchcase(name, pattern)}
        if not matched:
            raise _choice_error(pattern, wanted, "which matches no module", _advise(model))
        fitting = [name for name, module in matched.items() if _holds_experts(name, module, wanted)]
        if not fitting:
            kinds = name_some([f"{name} ({type(module).__name__})" for name, module in matched.items()], 3)
            what = "no list of modules" if wanted else "no experts"
            raise _choice_error(pattern, wanted, f"which matches {what}, only {kinds}", _advise(model))
        for name in fitting:
            if chosen.setdefault(name, wanted) is not wanted:
                raise _choice_error(
                    pattern, wanted, f"and another pattern the opposite for {name}", "Leave one of them out."
                )
    return chosen


def keep_listed(chosen: Mapping[str, bool]) -> dict[str, bool]:
    """Return the lists that are chosen as experts.

    Trial forwards and cp treat experts alike, whether ep shares them or not.
    """
    return {name: True for name, wanted in chosen.items() if wanted}


def _holds_experts(name: str, module: nn.Module, wanted: bool) -> bool:
    if isinstance(module, Experts) or is_decorated(module):
        return True
    return _is_any_list(module) if wanted else is_list(name, module)


def _is_any_list(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList | nn.ModuleDict) and len(module) > 1


def _advise(model: nn.Module) -> str:
    """Return the next move: the modules that a pattern may match."""
    found = [
        name
        for name, each in model.named_modules()
        if name and (isinstance(each, Experts) or is_decorated(each) or _is_any_list(each))
    ]
    if not found:
        return f"Leave experts out: {type(model).__name__} has no list of modules."
    return f"Name one of {name_some(found, 4)}, as model.named_modules() does, or leave experts out."


def _choice_error(pattern: str, wanted: Any, what: str, fix: str) -> PacelineError:
    return PacelineError(
        "PL667",
        saw=f"experts has {pattern!r}: {wanted!r}, {what}.",
        rule="A pattern names modules that hold the experts of a mixture: True for a ModuleList or "
        "ModuleDict with one module per expert, False for experts that ep does not share.",
        fix=fix,
    )
