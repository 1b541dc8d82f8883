"""Reach into torch's modules."""

from __future__ import annotations

from typing import Any

from torch import nn

from paceline.torch_seams.check import require

require("modules")


def list_forward_hooks(module: nn.Module) -> tuple[dict[Any, Any], dict[Any, Any], dict[Any, Any]]:
    """Return the dicts of hooks before and after the forward, and of those called whatever is raised.

    torch's own keys are whole numbers, so a key that is a string is ours. A copy of the module has it too.
    """
    return module._forward_pre_hooks, module._forward_hooks, module._forward_hooks_always_called
