"""Optimizer state by parameter name, so that it does not depend on order, grouping or layout.

torch numbers parameters in the order of the groups. If a model or its groups are later written in another
order, a checkpoint with numbers silently gives one parameter another's moments. Here the key is the
parameter's name. torch's own `load_state_dict` is not used, because it casts all state to the parameter's
dtype (fp32 moments of bf16 weights lose bits) and breaks strings.

The tree is `{"kind": "AdamW", "parameters": {name: {"shape", "group", "state"}}, "groups": [settings],
"other"}`; `group` is a number in `groups`, and `other` holds state that belongs to no parameter.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from paceline.errors import PacelineError
from paceline.parallel.placement import Placement, lay_out_like, local
from paceline.phrases import name_some
from paceline.train.pieces import OwnPart
from paceline.train.several import PART

# Options that choose kernels and do not change the formula. They keep their values as built, so that a run
# can move to another device.
_IMPLEMENTATION = frozenset({"foreach", "fused", "capturable", "differentiable"})
_NOT_OPTIONS = frozenset({"params", "param_names"}) | _IMPLEMENTATION

NamedParameters = Iterable[tuple[str, torch.Tensor]]


def optimizer_state_by_name(
    optimizer: Optimizer, named_parameters: NamedParameters, placement: Placement | None = None
) -> dict[str, Any]:
    """Return all state and settings of an optimizer as a tree. Refers to its tensors, copies none.

    Args:
        optimizer: any `torch.optim.Optimizer` whose state is in `.state`, as torch's own all are.
        named_parameters: `model.named_parameters()`; more than the optimizer has is fine (frozen ones).
        placement: of the model; without it, every tensor is whole. With it, the tree has an `OwnPart` for
            each tensor that is laid out like its parameter.
    """
    names = _names_of(optimizer, named_parameters)
    parameters: dict[str, Any] = {}
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            name, state = names[parameter], dict(optimizer.state.get(parameter, {}))
            shape = list(parameter.shape)
            if placement is not None:
                shape = placement.whole_shape(name, parameter)
                for key, value in state.items():
                    if placement.lies_as(value, parameter):
                        state[key] = OwnPart(name, value)
            parameters[name] = {"shape": shape, "group": number, "state": state}
    options = [
        {key: value for key, value in group.items() if key not in _NOT_OPTIONS}
        for group in optimizer.param_groups
    ]
    other = {key: value for key, value in optimizer.state.items() if not isinstance(key, torch.Tensor)}
    return {"kind": type(optimizer).__name__, "parameters": parameters, "groups": options, "other": other}


def load_optimizer_state_by_name(
    optimizer: Optimizer,
    named_parameters: NamedParameters,
    tree: Mapping[str, Any],
    placement: Placement | None = None,
    *,
    is_same: bool = True,
) -> None:
    """Load saved state and settings into an optimizer, in any order of its groups.

    Tensors are copied to their parameter's device, with the dtype they were saved in. `step` tensors stay
    on the CPU unless the group is fused or capturable, as torch requires. A group gets the settings (`lr`,
    `betas` ...) that its parameters were saved with. The choice of kernels (`foreach`, `fused`,
    `capturable`, `differentiable`) stays as built. If it raises, nothing has been changed.

    Args:
        optimizer: of the same kind as the saved one.
        named_parameters: `model.named_parameters()`.
        placement: of the model; the tree then has an `OwnPart` for this rank's part of a divided tensor.
        is_same: whether both must have the same parameters; else others begin without state.
    """
    names = _names_of(optimizer, named_parameters)
    shapes = {
        name: list(p.shape) if placement is None else placement.whole_shape(name, p)
        for p, name in names.items()
    }
    saved = tree["parameters"]
    if not is_same:
        here = {names[p] for group in optimizer.param_groups for p in group["params"]}
        saved = {name: saved.get(name, {"shape": shapes[name], "state": {}}) for name in here}
        tree = {**tree, "parameters": saved}
    _check_fits(optimizer, names, shapes, tree)
    options = [_options_of(group, names, tree) for group in optimizer.param_groups]
    state: dict[Any, Any] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = names[parameter]
            held = saved[name]["state"]
            if held and (placement is None or placement.holds(name)):
                state[parameter] = {
                    key: _place_step(value, parameter, group)
                    if key == "step"
                    else _place_part(value, parameter)
                    for key, value in held.items()
                }
    state.update(tree["other"])
    for group, option in zip(optimizer.param_groups, options, strict=True):
        group.update(option)
    optimizer.state.clear()
    optimizer.state.update(state)


def _names_of(optimizer: Optimizer, named_parameters: NamedParameters) -> dict[torch.Tensor, str]:
    names = {parameter: name for name, parameter in reversed(list(named_parameters))}
    unnamed = [
        f"group {number}, parameter {place} of shape {list(parameter.shape)}"
        for number, group in enumerate(optimizer.param_groups)
        for place, parameter in enumerate(group["params"])
        if parameter not in names
    ]
    if unnamed:
        raise PacelineError(
            "PL511",
            saw=f"The optimizer has parameters that the model does not name: {name_some(unnamed, 5)}.",
            rule="State is saved by parameter name, so that it fits again in any order.",
            fix="Build the optimizer from the model's named_parameters(), and register other tensors that "
            "it trains as nn.Parameter of the model.",
        )
    return names


def _check_fits(
    optimizer: Optimizer,
    names: Mapping[torch.Tensor, str],
    shapes: Mapping[str, list[int]],
    tree: Mapping[str, Any],
) -> None:
    kind = type(optimizer).__name__
    if tree["kind"] != kind:
        raise of_another(f"it is of the optimizer {tree['kind']}, and this one is {kind}.")
    saved = tree["parameters"]
    here = {names[parameter] for group in optimizer.param_groups for parameter in group["params"]}
    problems = []
    if missing := sorted(here - saved.keys()):
        problems.append(f"it lacks {name_some(missing, 5)}")
    if extra := sorted(saved.keys() - here):
        problems.append(f"it has {name_some(extra, 5)}, which are not trained here")
    misshapen = [
        f"{name} ({saved[name]['shape']} there, {shapes[name]} here)"
        for name in here
        if name in saved and list(saved[name]["shape"]) != shapes[name]
    ]
    if misshapen:
        problems.append(f"shapes differ: {name_some(misshapen, 5)}")
    if problems:
        raise of_another("; ".join(problems) + ".")


def _options_of(
    group: Mapping[str, Any], names: Mapping[torch.Tensor, str], tree: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the settings that a group's parameters were saved with; raise PL511 unless all have the same."""
    saved = tree["parameters"]
    found: dict[str, Any] | None = None
    first = ""
    for parameter in group["params"]:
        name = names[parameter]
        if "group" not in saved[name]:
            continue
        options = tree["groups"][saved[name]["group"]]
        if options.get(PART) != group.get(PART):
            raise of_another(f"{name} was trained by {options.get(PART)}, and is by {group.get(PART)} here.")
        if found is None:
            found, first = options, name
        elif not _same(found, options):
            differing = [key for key in options if not _same(options[key], found.get(key))]
            raise of_another(
                f"{first} and {name} are in one group here, and were saved with other {', '.join(differing)}."
            )
    return {key: _copy(value) for key, value in (found or {}).items()}


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        both = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
        return both and torch.equal(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    return bool(one == other)


def _place(value: Any, parameter: torch.Tensor) -> Any:
    """Copy an entry of the state, with its tensors on the parameter's device."""
    if isinstance(value, torch.Tensor):
        placed = value.to(parameter.device, copy=True)
        if value.shape == parameter.shape and not parameter.is_contiguous():
            # Kernels over a whole tensor need the parameter's strides (channels_last).
            placed = torch.empty_like(parameter, dtype=value.dtype).copy_(placed)
        return placed
    return _map_items(value, lambda item: _place(item, parameter))


def _place_part(value: Any, parameter: torch.Tensor) -> Any:
    """Copy an entry of the state, laid out like the parameter if it belongs to a part of a sharded one."""
    if not isinstance(value, OwnPart):
        return _place(value, local(parameter))
    if not isinstance(parameter, DTensor):
        return _place(value.tensor, parameter)
    return lay_out_like(value.tensor.to(parameter.to_local().device, copy=True), parameter)


def _place_step(value: Any, parameter: torch.Tensor, group: Mapping[str, Any]) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if group.get("fused") or group.get("capturable"):
        return value.to(parameter.device, torch.float32, copy=True)
    return value.to("cpu", copy=True)


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else _map_items(value, _copy)


def _map_items(value: Any, function: Any) -> Any:
    if isinstance(value, dict):
        return {key: function(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)([function(item) for item in value])
    return value


def load_part(name: str, owner: Any, state: Any) -> None:
    """Load a saved state into a schedule or a tracked object; raise PL511 if that fails."""
    try:
        owner.load_state_dict(state)
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError) as error:
        raise of_another(f"{name} cannot load its part ({type(error).__name__}: {error}).") from error


def load_schedule(schedule: Any, state: Mapping[str, Any]) -> None:
    """Load a schedule's state; raise PL511 if that fails, or would fail in a later step."""
    fresh = schedule.state_dict()
    load_part("the schedule", schedule, state)
    for key, value in fresh.items():
        kinds = (int, float) if isinstance(value, (int, float)) else list
        if isinstance(value, kinds) and not isinstance(state.get(key, value), kinds):
            raise of_another(f"{key} of the schedule is {state[key]!r:.40}.")


def of_another(saw: str) -> PacelineError:
    """Return PL511 for state that does not fit."""
    return PacelineError(
        "PL511",
        saw=f"The saved state does not fit: {saw}",
        rule="State belongs to the parameters it was gathered for; a checkpoint of another model has none.",
        fix="Resume with the model and the optimizer that wrote it, or start a new run in another folder.",
    )
