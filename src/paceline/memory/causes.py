"""Decides what filled the memory, from an account alone."""

from __future__ import annotations

from typing import Literal

from paceline.memory.account import Account

Cause = Literal[
    "kept graphs",
    "kept",
    "evaluation",
    "activations",
    "request",
    "model state",
    "batch",
    "loader workers",
    "other processes",
    "growth",
    "rest",
]
# The part of what could be saved that a leak must have to be named before what the model needs.
_LEAK = 0.3
# The part of its memory by which a step must exceed all others to be a jump.
_JUMP = 1.3


def find_cause(account: Account) -> Cause:
    """Return what filled the memory: something that should not be there, else the largest part."""
    state = account.get("parameters", "gradients", "optimizer", "buffers", "gathered")
    activations = account.get("activations")
    variable = sum(size for kind, size in account.kinds.items() if kind != "base")
    if account.get("kept graphs") > _LEAK * variable:
        return "kept graphs"
    if account.get("kept") > _LEAK * variable:
        return "kept"
    forward = activations + account.get("request")
    if account.progress.is_evaluating and activations and forward > _LEAK * variable:
        return "evaluation"
    sizes: dict[Cause, int] = {
        "model state": state,
        "activations": activations,
        "batch": account.get("batch"),
        "request": account.get("request"),
        "loader workers": account.get("loader workers"),
        "other processes": account.get("other processes"),
        # What the allocator has freed and keeps is part of it, so it must be more than all else.
        "rest": account.get("rest", "freed", "other tensors") // 2,
    }
    cause = max(sizes, key=lambda name: sizes[name])
    if cause == "request" and activations and account.progress.module is not None:
        return "activations" if activations * 2 > sizes["request"] else "request"
    if cause == "rest" and account.steps.growth * account.steps.count > _LEAK * sizes["rest"]:
        return "growth"
    return cause


def find_growth(account: Account) -> Literal["first step", "leak", "jump", "none", "no steps"]:
    """Return how the memory came to be full, by the steps that fitted.

    A leak left memory behind in each step. A jump is a step that needs much more than all before.
    """
    steps, now = account.steps, account.own
    if not steps.count:
        return "no steps"
    if steps.count == 1:
        return "first step"
    if steps.count > 3 and steps.growth * (steps.count - 2) > _LEAK * now:
        return "leak"
    return "jump" if now > _JUMP * steps.peak else "none"
