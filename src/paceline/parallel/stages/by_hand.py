"""Cuts a model where the user chooses, by the names of modules."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from torch import nn

from paceline.errors import PacelineError
from paceline.phrases import name_some
from paceline.recipe.layout import Layout


def add_named(model: nn.Module, blocks: Sequence[str], layout: Layout) -> list[str]:
    """Return the modules that may begin a stage: the blocks, and those that the layout names."""
    found = list(blocks)
    names = [name for name, _ in model.named_modules() if name]
    for word in layout.stages_by_hand:
        if word in found:
            continue
        if word not in names:
            near = difflib.get_close_matches(word, [*blocks, *names], 3, 0.4) or list(blocks[:3])
            raise _name_error(layout, f"the model has no module {word!r}", near)
        around = [block for block in blocks if word.startswith(f"{block}.")]
        if around:
            raise _name_error(layout, f"{word} is inside of the block {around[0]}", around)
        inside = [block for block in blocks if block.startswith(f"{word}.")]
        if inside:
            raise _name_error(layout, f"{word} has blocks inside, such as {inside[0]}", inside)
        found.append(word)
    return found


def add_layers(model: nn.Module, blocks: Sequence[str]) -> list[str]:
    """Return the modules that may begin a stage of a model with few blocks: these, and layers elsewhere.

    A layer has parameters of its own, and no module with parameters inside.
    """
    inside = {id(module) for name in blocks for module in model.get_submodule(name).modules()}
    layers = [
        name
        for name, module in model.named_modules()
        if name and id(module) not in inside and any(True for _ in module.parameters())
        if not any(any(True for _ in child.parameters()) for child in module.children())
    ]
    return [*blocks, *layers]


def find_named(entered: Sequence[str], layout: Layout) -> tuple[int, ...] | None:
    """Return the first segment of every stage and the number of segments; `None` if nothing is given by hand.

    Args:
        entered: the blocks that the trial forward called, in order.
        layout: with `stages`.
    """
    words = layout.stages_by_hand
    if not words:
        return None
    starts = [0]
    for word in words:
        if word not in entered:
            raise _name_error(layout, f"the forward does not call {word}", list(entered[1:]))
        start = 1 + entered.index(word)
        if start <= starts[-1]:
            raise PacelineError(
                "PL499",
                saw=f'layout.stages="{layout.stages}": {word} is not called after the module before it.',
                rule="Stages follow each other in the order in which the forward calls their modules, and "
                "none of them is empty.",
                fix="Name each module once, in the order of calls: "
                f"{'+'.join(sorted(set(words), key=entered.index))}.",
            )
        starts.append(start)
    return (*starts, len(entered) + 1)


def _name_error(layout: Layout, reason: str, near: Sequence[str]) -> PacelineError:
    return PacelineError(
        "PL498",
        saw=f'layout.stages="{layout.stages}": {reason}.',
        rule="A stage begins with a repeated block, or with a module outside of all blocks, that the forward "
        "calls.",
        fix=f"Use for example {name_some(list(near), 3)}.",
    )
