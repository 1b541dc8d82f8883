"""Replaces the function by which torch connects a process to its group's store; does not import torch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

RENDEZVOUS = "torch.distributed.rendezvous"
STORE_MAKER = "_create_c10d_store"


def replace_store(rendezvous: Any, around: Callable[..., Any]) -> None:
    """Make torch call `around(create, host, port, ...)` in place of `create(host, port, ...)`.

    Args:
        rendezvous: the module, whose import may just have ended.
        around: gets torch's function and its arguments.
    """
    create = getattr(rendezvous, STORE_MAKER, None)
    if create is not None and not hasattr(create, "__wrapped__"):
        setattr(rendezvous, STORE_MAKER, functools.wraps(create)(functools.partial(around, create)))
