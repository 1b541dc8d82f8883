"""Finds the experts of a model, and refuses those that ep cannot share out."""

from __future__ import annotations

from math import gcd

from torch import nn

from paceline.errors import PacelineError
from paceline.models.moe import Experts
from paceline.parallel.blocks import find_blocks
from paceline.parallel.experts.forms import (
    ExpertForm,
    OwnForm,
    TransformersForm,
    has_norm,
    is_decorated,
    open_forward,
)
from paceline.parallel.experts.list_trial import find_loops, is_list
from paceline.phrases import name_some


def find_experts(model: nn.Module) -> dict[str, ExpertForm]:
    """Return the experts of all mixtures of a model by full name, in the order of the definition."""
    found = {name: _find_form(module) for name, module in model.named_modules()}
    return {name: form for name, form in found.items() if form is not None}


def open_experts(model: nn.Module) -> None:
    """Set transformers' experts to one product per expert, in place, whatever the user has set."""
    for form in find_experts(model).values():
        if isinstance(form, TransformersForm):
            open_forward(form)


def list_mixtures(model: nn.Module) -> list[str]:
    """Return the full names of the modules that hold a router and its experts.

    That is the module around the experts, or the one that calls a list of them. If the module around them is
    a block, it is the experts themselves.
    """
    blocks, found = {name for name, _ in find_blocks(model)}, []
    for name in find_experts(model):
        around = name.rpartition(".")[0]
        found.append(name if around in blocks else around)
    for name, module in find_loops(model):
        around = name.rpartition(".")[0]
        found.append(around if is_list(name, module) and around not in blocks else name)
    return list(dict.fromkeys(found))


def count_experts(model: nn.Module) -> int | None:
    """Return the greatest number of experts that every mixture of a model is a multiple of.

    It is 0 for a model without mixtures, and `None` if `check_forms` refuses some.
    """
    if _list_unknown(model) or _find_shared(model):
        return None
    return gcd(*(form.num_experts for form in find_experts(model).values()))


def check_forms(model: nn.Module) -> None:
    """Raise for mixtures that cannot be shared out."""
    unknown = _list_unknown(model)
    if unknown:
        raise PacelineError(
            "PL658",
            saw=f"experts in a form that ep cannot share out: {name_some(unknown, 4)}.",
            rule="ep divides experts whose weights are stacked: those of transformers that its "
            "use_experts_implementation decorates, and paceline.models.moe.Experts.",
            fix="Hold the weights in a paceline.models.moe.Experts, or leave ep out. Rename a list of other "
            'modules that has "expert" in its name.',
        )
    shared = _find_shared(model)
    if shared:
        raise PacelineError(
            "PL659",
            saw=f"one parameter of experts under several names: {name_some(shared, 4)}.",
            rule="Under ep each expert of each mixture has weights of its own.",
            fix="Give each mixture its own experts, or leave ep out.",
        )


def _find_shared(model: nn.Module) -> list[str]:
    """Return the names of the first parameter of experts that has several; empty if none has."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    weights = (weight for form in find_experts(model).values() for weight in form.list_weights())
    return next((names[id(weight)] for weight in weights if len(names[id(weight)]) > 1), [])


def _find_form(module: nn.Module) -> ExpertForm | None:
    if isinstance(module, Experts):
        return OwnForm(module)
    return TransformersForm(module) if is_decorated(module) and not has_norm(module) else None


def _list_unknown(model: nn.Module) -> list[str]:
    """Return descriptions of the modules that hold experts in an unknown form."""
    found = []
    for name, module in model.named_modules():
        kind = type(module).__name__
        if is_list(name, module):
            children = list(module.children())
            found.append(f"{name} ({kind} of {len(children)} {type(children[0]).__name__})")
        elif is_decorated(module) and has_norm(module):
            found.append(f"{name} ({kind}, with a norm that all experts share)")
    return found
