"""Finds the experts of a model, and refuses those that ep cannot share out."""

from __future__ import annotations

from collections.abc import Mapping
from math import gcd
from types import MappingProxyType

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
from paceline.parallel.experts.lists import (
    ListForm,
    find_objection,
    has_own_forward,
    is_list,
    join_names,
    open_trials,
)
from paceline.phrases import name_some

Chosen = Mapping[str, bool]
_NONE: Chosen = MappingProxyType({})


def find_experts(model: nn.Module, chosen: Chosen = _NONE) -> dict[str, ExpertForm]:
    """Return the experts of all mixtures of a model by full name, in the order of the definition.

    Args:
        model: of any kind.
        chosen: by full name of a module, whether it holds experts, as in all functions here.
    """
    found = {name: _find_form(name, module, chosen) for name, module in model.named_modules()}
    return {name: form for name, form in found.items() if form is not None}


def open_experts(model: nn.Module, chosen: Chosen = _NONE) -> None:
    """Set transformers' experts to one product per expert, in place, whatever the user has set."""
    for form in find_experts(model, chosen).values():
        if isinstance(form, TransformersForm):
            open_forward(form)


def open_loops(model: nn.Module, chosen: Chosen = _NONE) -> None:
    """Make trial forwards run the loops over experts, in place."""
    for form in _find_lists(model, chosen):
        open_trials(form)


def list_mixtures(model: nn.Module, chosen: Chosen = _NONE) -> list[str]:
    """Return the full names of the modules that hold a router and its experts.

    That is the module around the experts, or the one that calls a list of them. If the module around them is
    a block, it is the experts themselves.
    """
    blocks, found = {name for name, _ in find_blocks(model)}, []
    for name, form in find_experts(model, chosen).items():
        around = name.rpartition(".")[0]
        calls_list = isinstance(form, ListForm) and not _is_list(name, form.module, chosen)
        found.append(name if calls_list or around in blocks else around)
    return list(dict.fromkeys(found))


def list_looped(model: nn.Module, chosen: Chosen = _NONE) -> list[str]:
    """Return the full names of the experts that loops call."""
    return [name for form in _find_lists(model, chosen) for name in form.list_names()]


def _find_lists(model: nn.Module, chosen: Chosen) -> list[ListForm]:
    return [form for form in find_experts(model, chosen).values() if isinstance(form, ListForm)]


def count_experts(model: nn.Module, chosen: Chosen = _NONE) -> int | None:
    """Return the greatest number of experts that every mixture of a model is a multiple of.

    It is 0 for a model without mixtures, and `None` if `check_forms` refuses some.
    """
    if _list_unknown(model, chosen) or _find_shared(model, chosen):
        return None
    return gcd(*(form.num_experts for form in find_experts(model, chosen).values()))


def check_forms(model: nn.Module, chosen: Chosen = _NONE) -> None:
    """Raise for mixtures that cannot be shared out.

    Raises:
        PacelineError: PL658 for experts of an unknown form, PL659 for experts that share weights.
    """
    unknown = _list_unknown(model, chosen)
    if unknown:
        raise PacelineError(
            "PL658",
            saw=f"experts in a form that ep cannot share out: {name_some(unknown, 4)}.",
            rule="ep divides experts of transformers that its use_experts_implementation decorates, "
            'paceline.models.moe.Experts, and lists whose name has "expert" in it: of equal modules without '
            "buffers and dropout, which the forward of the module around them calls.",
            fix="Make the modules equal, hold their weights in a paceline.models.moe.Experts, or leave ep "
            "out. If the modules are not experts, pass experts={name: False}, or rename the list.",
        )
    shared = _find_shared(model, chosen)
    if shared:
        raise PacelineError(
            "PL659",
            saw=f"one parameter of experts under several names: {name_some(shared, 4)}.",
            rule="Under ep each expert of each mixture has weights of its own.",
            fix="Give each mixture its own experts, or leave ep out.",
        )


def _find_shared(model: nn.Module, chosen: Chosen) -> list[str]:
    """Return the names of the first parameter of experts that has several; empty if none has."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    weights = (weight for form in find_experts(model, chosen).values() for weight in form.list_weights())
    return next((names[id(weight)] for weight in weights if len(names[id(weight)]) > 1), [])


def _find_form(name: str, module: nn.Module, chosen: Chosen) -> ExpertForm | None:
    if isinstance(module, Experts):
        return OwnForm(module) if chosen.get(name, True) else None
    if is_decorated(module):
        return TransformersForm(module) if chosen.get(name, True) and not has_norm(module) else None
    if _is_list(name, module, chosen) and has_own_forward(module):
        return None if find_objection(module) else ListForm(module, "", name)
    for key, child in module.named_children():
        if not _is_list(join_names(name, key), child, chosen):
            continue
        if not has_own_forward(child) and not find_objection(child):
            return ListForm(module, key, name)
    return None


def _is_list(name: str, module: nn.Module, chosen: Chosen) -> bool:
    """Return whether a module is a list of experts: as chosen, or else by its name."""
    return chosen.get(name, is_list(name, module))


def _list_unknown(model: nn.Module, chosen: Chosen) -> list[str]:
    """Return descriptions of the modules that hold experts in an unknown form."""
    found, parents = [], set()
    for name, module in model.named_modules():
        if _is_list(name, module, chosen):
            parent = name.rpartition(".")[0]
            objection = find_objection(module)
            if objection is None and parent in parents:
                objection = "beside another list of experts"
            parents.add(parent)
            if objection is not None:
                kinds = name_some(sorted({type(child).__name__ for child in module.children()}), 2)
                what = f"{type(module).__name__} of {len(list(module.children()))} {kinds}, {objection}"
                found.append(f"{name} ({what})")
        elif is_decorated(module) and has_norm(module) and chosen.get(name, True):
            found.append(f"{name} ({type(module).__name__}, with a norm that all experts share)")
    return found
