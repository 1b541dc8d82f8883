"""Names modules and parameters of the live models, and finds the module of an operation by its neighbours.

Nothing is recorded while a model runs. An operation that uses a parameter belongs to that parameter's
module. Autograd numbers operations in their order. An operation without parameters is between two that have
some, and belongs to the innermost module that contains both.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.torch_seams.saved import read_fields

# Modules that wrap a model without being part of it: DistributedDataParallel, DataParallel, torch.compile.
_WRAPPED = {"module", "_orig_mod"}
# They have no forward of their own, or one that only calls their children in order.
_CONTAINERS = {"ModuleList", "ModuleDict", "Sequential"}
OUTSIDE = "loss"
"""The name for operations after the last module."""


@dataclass
class Models:
    """The models of this process.

    Attributes:
        roots: the outermost modules, wrappers taken off, those with most parameters first.
        modules: by name, all modules of the roots.
        names: by `id`, the name of each module.
        owners: by `id`, the name of the module of each parameter.
        parameters: of all roots, each once.
        first: the number of parameters that belong to the first root; they come first.
    """

    roots: list[Any] = field(default_factory=list)
    modules: dict[str, Any] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)
    owners: dict[int, str] = field(default_factory=dict)
    parameters: list[Any] = field(default_factory=list)
    buffers: list[Any] = field(default_factory=list)
    first: int = 0

    @property
    def trained(self) -> list[Any]:
        """The parameters of the first root that get gradients."""
        return [parameter for parameter in self.parameters[: self.first] if parameter.requires_grad]

    def kind(self, name: str) -> str:
        """Return a module's class, "" for an unknown name."""
        module = self.modules.get(name)
        return "" if module is None else type(module).__name__


def find_models(modules: Iterable[Any]) -> Models:
    """Return the models among all live modules, each with the names of its parts."""
    found = Models(find_roots(modules))
    for number, root in enumerate(found.roots):
        # Several models are distinguished by their classes.
        _enter(found, root, type(root).__name__ if number else "")
        found.first = found.first or len(found.parameters)
    return found


def find_roots(modules: Iterable[Any]) -> list[Any]:
    """Return the outermost of all live modules, wrappers taken off, those with most parameters first."""
    alive = list(modules)
    children = {id(child) for module in alive for child in read_fields(module)[2].values()}
    roots = [_unwrap(module) for module in alive if id(module) not in children]
    roots = [root for root in roots if type(root).__module__.partition(".")[0] != "torch" or _has_many(root)]
    return sorted(roots, key=lambda root: (_is_traced(root), -_count_parameters(root)))


def _is_traced(model: Any) -> bool:
    """Return whether a model is a compiler's trace of another one, with other names."""
    return any(kind.__name__ == "GraphModule" for kind in type(model).__mro__)


def _has_many(module: Any) -> bool:
    """Return whether a module of torch is a model: it has parameters or parts."""
    parameters, _, parts = read_fields(module)
    return bool(parameters or parts)


def _enter(found: Models, module: Any, name: str) -> None:
    if id(module) in found.names:
        return
    found.names[id(module)] = name
    found.modules.setdefault(name, module)
    parameters, buffers, children = read_fields(module)
    found.buffers += [buffer for buffer in buffers.values() if buffer is not None]
    for parameter in parameters.values():
        if parameter is not None and id(parameter) not in found.owners:
            found.owners[id(parameter)] = name
            found.parameters.append(parameter)
    is_wrapper = len(children) == 1 and not parameters and children.keys() <= _WRAPPED
    for key, child in children.items():
        if child is not None:
            _enter(found, child, name if is_wrapper else _join(name, key))


def _join(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key


def _unwrap(model: Any) -> Any:
    while True:
        parameters, _, children = read_fields(model)
        if len(children) != 1 or parameters or not children.keys() <= _WRAPPED:
            return model
        (model,) = children.values()


def _count_parameters(module: Any) -> int:
    """Return the number of parameters of a module and its parts, without calling its methods."""
    seen: set[int] = set()
    todo, number = [module], 0
    while todo:
        parameters, _, children = read_fields(todo.pop())
        number += sum(parameter is not None for parameter in parameters.values())
        for child in children.values():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                todo.append(child)
    return number


@dataclass(frozen=True)
class Anchor:
    """An operation that uses a parameter of a module: its number, and the module's name."""

    order: int
    name: str


class Neighbours:
    """A finder of the modules to which operations belong.

    Args:
        anchors: operations with parameters, in any order.
    """

    def __init__(self, anchors: Sequence[Anchor], models: Models) -> None:
        self._anchors = sorted(anchors, key=lambda anchor: anchor.order)
        self._orders = [anchor.order for anchor in self._anchors]
        self._models = models

    def find(self, order: int) -> str:
        """Return the module of the operation with this number; `OUTSIDE` after the last module."""
        left = bisect_right(self._orders, order) - 1
        right = bisect_left(self._orders, order)
        before = self._anchors[left].name if left >= 0 else None
        after = self._anchors[right].name if right < len(self._orders) else None
        if after is None:
            return OUTSIDE
        if before is None:
            return after.rpartition(".")[0]
        return self._find_between(before, after)

    def _find_between(self, before: str, after: str) -> str:
        parts, others = _split(before), _split(after)
        common = 0
        while common < min(len(parts), len(others)) and parts[common] == others[common]:
            common += 1
        name = ".".join(parts[:common])
        # A container runs nothing by itself: the operation follows the module before.
        inside = self._models.kind(name) in _CONTAINERS and common < len(parts)
        return ".".join(parts[: common + 1]) if inside else name


def _split(name: str) -> list[str]:
    return name.split(".") if name else []


def find_repeated(names: Iterable[str], models: Models) -> tuple[str, int]:
    """Return the prefix of the model's repeated modules, and their number; `("", 0)` without any.

    Args:
        names: of modules with activations; the list that has most of these is chosen.
    """
    counts: dict[str, int] = {}
    for name in names:
        parts = _split(name)
        for at in range(len(parts)):
            prefix = ".".join(parts[:at])
            if models.kind(prefix) in _CONTAINERS:
                counts[prefix] = counts.get(prefix, 0) + 1
                break
    for prefix, _ in sorted(counts.items(), key=lambda pair: -pair[1]):
        children = [c for c in read_fields(models.modules[prefix])[2].values() if c is not None]
        kinds = {type(child) for child in children}
        if len(children) > 1 and len(kinds) == 1 and _count_parameters(children[0]):
            return prefix, len(children)
    return "", 0
