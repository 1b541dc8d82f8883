"""Checks that a checkpoint holds what a run needs to continue, for `verify` and before each resume.

Hashes show that files are as they were written. These checks show that they are what a run writes: a state
with a key missing would otherwise begin again there without a word, and weights that are no numbers would be
trained on. What only the run can know (its model, its settings, its objects) is compared when it resumes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from paceline.checkpoint.content import StoredTensor, read_all
from paceline.generators import preserved_generators, write_generators

_NUMBER, _MOST = (int, float), 1 << 62
# Keys of the parts of a state, with the types of their values.
_STATE = {"counters": dict, "updates": dict, "loaders": dict, "rng": dict, "settings": dict, "tracked": dict}
_COUNTERS = {"step": int, "samples": int, "skipped_in_a_row": int, "loss": _NUMBER}
_UPDATE = {
    "schedule": (dict, type(None)),
    "scaler": (dict, type(None)),
    "unit": (*_NUMBER, type(None)),
    "flops_per_sample": (*_NUMBER, type(None)),
    "frozen": list,
}
_POSITION = ("epoch", "number", "samples", "global_batch_size")
_LOADER = {
    "kind": str,
    "num_samples": (int, type(None)),
    "seed": int,
    "shuffle": bool,
    **dict.fromkeys(_POSITION, int),
}
_SETTINGS = {"run": dict, "loaders": dict, "tracked": list}
_OPTIMIZER = {"kind": str, "parameters": dict, "groups": list, "other": dict}
_PARAMETER = {"shape": list, "group": int, "state": dict}
# Optimizers of torch whose state is a number, or a number for each of the parameter's.
_ELEMENTWISE = {"SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "RMSprop", "Rprop", "Adagrad", "Adadelta"}


class BadStateError(ValueError):
    """The error of a state that no run writes; it ends a sentence that begins with the name of a file."""


def looks_like_a_run(identity: Mapping[str, Any], state: Any) -> bool:
    """Return whether a checkpoint is a run's, and not that of somebody who stores tensors alone."""
    return "run" in identity or (isinstance(state, dict) and "counters" in state)


def check_run_state(step: int, model: Mapping[str, StoredTensor], optimizer: Any, state: Any) -> set[str]:
    """Check that the trees of a checkpoint are a run's, and return the names of the trained tensors.

    Raises:
        BadStateError: they are not, with the place. Whatever else it raises means that too.
    """
    _require(state, _STATE, "state")
    _require(state["counters"], _COUNTERS, "state.counters")
    if state["counters"]["step"] != step or min(state["counters"][key] for key in ("samples", "step")) < 0:
        raise BadStateError(f"state.counters does not fit step {step}")
    if best := state["counters"].get("best"):
        parts = dict(zip(("step", "value", "since"), best, strict=True))
        _require(parts, {"step": int, "value": _NUMBER, "since": int}, "state.counters.best")
    for name, update in state["updates"].items():
        _require({"frozen": []} | update, _UPDATE, f"state.updates.{name}")
        if update["unit"] is not None and math.frexp(update["unit"])[0] != 0.5:
            raise BadStateError(f"state.updates.{name}.unit is no power of two")
    for name, loader in state["loaders"].items():
        _require(loader, _LOADER, f"state.loaders.{name}")
        if min(loader[key] for key in _POSITION) < 0:
            raise BadStateError(f"state.loaders.{name} has a number below 0")
        if loader["num_samples"] is not None and loader["samples"] > loader["num_samples"]:
            raise BadStateError(f"state.loaders.{name} is behind the end of its epoch")
    _require({"residuals": {}} | state, {"residuals": dict}, "state")
    settings = state["settings"]
    _require(settings, _SETTINGS, "state.settings")
    _require(settings["loaders"], dict.fromkeys(settings["loaders"], dict), "state.settings.loaders")
    for key in ("loaders", "tracked"):
        if lost := set(settings[key]) - set(state[key]):
            raise BadStateError(f"state.{key} lacks {min(lost)}")
    if state["updates"].keys() != optimizer.keys():
        raise BadStateError("state.updates and the optimizer have different names")
    with preserved_generators():  # the function that resuming calls
        write_generators(read_all(state["rng"]), torch.device("cpu"))
    return {
        model[name].name for key, tree in optimizer.items() for name in _check_optimizer(key, tree, model)
    }


def _check_optimizer(key: str, tree: Any, model: Mapping[str, StoredTensor]) -> Iterator[str]:
    """Check the state of one optimizer, and yield the full names of its parameters."""
    _require(tree, _OPTIMIZER, f"optimizer.{key}")
    keys_of: dict[int, set[str]] = {}
    for name, parameter in tree["parameters"].items():
        place = f"optimizer.{key}.parameters.{name}"
        _require(parameter, _PARAMETER, place)
        full = f"{key}.{name}" if f"{key}.{name}" in model else name
        shape, held, group = tuple(parameter["shape"]), parameter["state"], parameter["group"]
        if full not in model or model[full].shape != shape:
            raise BadStateError(f"{place} has the shape {shape}, and the model has no such tensor")
        if not (model[full].dtype.is_floating_point or model[full].dtype.is_complex):
            raise BadStateError(f"{full} is trained, and its values are {model[full].dtype}")
        if not isinstance(tree["groups"][group], dict):
            raise BadStateError(f"optimizer.{key}.groups.{group} is not a group")
        if tree["kind"] in _ELEMENTWISE and held:
            shapes = {each.shape for each in held.values() if isinstance(each, StoredTensor)}
            if not all(other == shape or math.prod(other) == 1 for other in shapes):
                raise BadStateError(f"{place}.state has another shape than the parameter")
            if keys_of.setdefault(group, held.keys()) != held.keys():
                raise BadStateError(f"{place}.state has other keys than the rest of its group")
        yield full


def _require(value: Any, keys: Mapping[str, Any], place: str) -> None:
    """Raise unless a dict has these keys with values of these types."""
    if not isinstance(value, dict):
        raise BadStateError(f"{place} is not a dict")
    for key, kinds in keys.items():
        if key not in value:
            raise BadStateError(f"{place} lacks {key}")
        is_of_kind = type(value[key]) in (kinds if isinstance(kinds, tuple) else (kinds,))
        if not is_of_kind or (type(value[key]) is int and not -_MOST < value[key] < _MOST):
            raise BadStateError(f"{place}.{key} is {value[key]!r:.60}")
