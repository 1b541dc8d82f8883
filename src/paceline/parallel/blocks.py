"""Finds the repeated blocks of a model: the unit of sharding, recompute and compile.

A transformer holds its layers in a `ModuleList` (torchtitan in a `ModuleDict`), a residual network in one
`Sequential` per stage, an encoder-decoder in two lists. So the blocks are the members of the outermost lists
of modules of one class. Blocks are not searched for further blocks. There are three special cases.

- A list may hold stages, which hold the blocks in lists of their own (Swin). It is searched if the modules of
  the inner lists are themselves made of parts, as blocks are. A block's own list of experts is not.
- Lists that hold little (three output heads) are no blocks: a class with less than a twentieth of the
  parameters found in lists is left out.
- A block must be called as a module, because sharding, recompute and compile act on its call. An
  nn.ModuleDict only holds the parts of a block, and the model calls these: then the parts are the blocks.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterator

from torch import nn

from paceline.torch_seams.modules import own_parameters

# A class of blocks holds at least this share of the parameters of all members of lists.
_MIN_SHARE = 0.05
Named = tuple[str, nn.Module]


def find_blocks(model: nn.Module) -> list[Named]:
    """Return the repeated blocks of a model by full name, in the order of the model's definition.

    For a model without any, the result is the model itself, under the empty name.

    Args:
        model: any; nothing is run, so it may be on the meta device.
    """
    found = list(_outermost_lists(model, ""))
    classes = {type(child) for _, container in found for child in _children_with_parameters(container)}
    found += [
        (name, module)
        for name, module in _free_modules(model, {id(container) for _, container in found})
        if isinstance(module, (nn.Sequential, nn.ModuleList)) and _holds_one_of(module, classes)
    ]
    blocks = [part for block in _children_of(found) for part in _called_parts(*block)]
    sizes: Counter[type[nn.Module]] = Counter()
    for _, block in blocks:
        sizes[type(block)] += _count(block)
    total = sum(sizes.values())
    kept = {id(block): None for _, block in blocks if sizes[type(block)] >= _MIN_SHARE * total}
    # In the order of the definition, each once: a block that is used in several places gets one name.
    in_order = [(name, module) for name, module in model.named_modules() if id(module) in kept]
    return in_order or [("", model)]


def separable_blocks(model: nn.Module) -> list[Named]:
    """Return the blocks that share no parameter with the rest of the model, without the model itself.

    A block that shares a parameter (tied weights between two blocks, or a block and the head) must be
    gathered together with the other user of it, so it stays with the root.
    """
    homes: dict[int, set[str]] = {}
    blocks = find_blocks(model)
    names = {id(block): name for name, block in blocks}
    for parameter, home in _homes(model, names, ""):
        homes.setdefault(parameter, set()).add(home)
    shared = {home for owners in homes.values() if len(owners) > 1 for home in owners}
    return [(name, block) for name, block in blocks if name and name not in shared]


def _outermost_lists(module: nn.Module, name: str) -> Iterator[Named]:
    if _is_list_of_blocks(module):
        inner = [
            found
            for child_name, child in module.named_children()
            for found in _outermost_lists(child, _join(name, child_name))
        ]
        if inner and _is_list_of_stages(module):
            yield from inner
        else:
            yield name, module
        return
    for child_name, child in module.named_children():
        yield from _outermost_lists(child, _join(name, child_name))


def _is_list_of_blocks(module: nn.Module) -> bool:
    """Return whether a container holds modules of one class; a single one, or one of a dict, has parts."""
    if not isinstance(module, (nn.ModuleList, nn.Sequential, nn.ModuleDict)):
        return False
    children = list(module.children())
    with_parameters = _children_with_parameters(module)
    if len({type(child) for child in children}) != 1 or len(with_parameters) != len(children):
        return False
    has_parts = all(map(_has_parts, children))
    if isinstance(module, nn.ModuleDict):
        return len(children) > 1 and has_parts
    return len(children) > 1 or (isinstance(module, nn.ModuleList) and has_parts)


def _is_list_of_stages(module: nn.Module) -> bool:
    """Return whether most parameters of its modules are in blocks of their own."""
    children = list(module.children())
    if all(isinstance(child, (nn.ModuleList, nn.Sequential)) for child in children):
        return True
    inner = [
        container
        for child in children
        for _, container in _outermost_lists(child, "")
        if all(any(_has_parts(part) for part in block.children()) for block in container.children())
    ]
    return 2 * sum(map(_count, inner)) > _count(module)


def _holds_one_of(module: nn.Module, classes: set[type[nn.Module]]) -> bool:
    """Return whether a list holds a single block of a class in `classes`: a stage that is short."""
    children = list(module.children())
    return len(children) == 1 and type(children[0]) in classes and _has_parts(children[0])


def _free_modules(model: nn.Module, taken: set[int], name: str = "") -> Iterator[Named]:
    """Yield all modules that are not inside one of `taken`."""
    if id(model) in taken:
        return
    yield name, model
    for child_name, child in model.named_children():
        yield from _free_modules(child, taken, _join(name, child_name))


def _homes(module: nn.Module, names: dict[int, str], home: str) -> Iterator[tuple[int, str]]:
    """Yield, for every use of a parameter, its identity and the block that it is in ("" for none)."""
    home = names.get(id(module), home)
    for parameter in own_parameters(module).values():
        if parameter is not None:
            yield id(parameter), home
    for child in module.children():
        yield from _homes(child, names, home)


def _children_of(containers: list[Named]) -> list[Named]:
    return [
        (_join(name, child_name), child)
        for name, container in containers
        for child_name, child in container.named_children()
    ]


def _called_parts(name: str, module: nn.Module) -> Iterator[Named]:
    """Yield the module itself, or its called parts if it only holds others (for example an nn.ModuleDict)."""
    # Static, because a traced module's class has no forward, but a descriptor that fails.
    own = inspect.getattr_static(type(module), "forward")
    if "forward" in vars(module) or own is not nn.Module.forward:
        yield name, module
        return
    for child_name, child in module.named_children():
        yield from _called_parts(_join(name, child_name), child)


def _children_with_parameters(container: nn.Module) -> list[nn.Module]:
    return [child for child in container.children() if next(child.parameters(), None) is not None]


def _has_parts(module: nn.Module) -> bool:
    return next(module.children(), None) is not None


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _join(name: str, child: str) -> str:
    return f"{name}.{child}" if name else child
