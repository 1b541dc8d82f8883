"""Keeps torch.compile out of our functions that the script's own code calls."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any


def hide_from_compiler(torch: Any, *functions: Callable[..., Any]) -> None:
    """Lets functions, and what they call, run as they are where compiled code comes to them.

    Does nothing on a torch that has other words for it: then they may be compiled as frames of their own.
    """
    with suppress(AttributeError):
        compiler = torch._C._dynamo.eval_frame
        skip = compiler._FrameExecStrategy(compiler._FrameAction.SKIP, compiler._FrameAction.SKIP)
        for function in functions:
            compiler.set_code_exec_strategy(function.__code__, skip)
