"""The memory of a communication hook: the state that it keeps on each rank between steps.

Hooks that compress (PowerSGD) keep the part of a gradient that they did not send, and add it to the next one.
That state of the run differs between ranks. A skipped step must not change it, and a resumed run needs that
of each rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from paceline.errors import PacelineError
from paceline.torch_seams.trees import tree_map_only


class HookState:
    """The state object of a communication hook, as a tree of tensors and plain values.

    Args:
        state: the object passed along with the hook: one with attributes, or a dict.
    """

    def __init__(self, state: Any) -> None:
        self._state = state

    @property
    def is_empty(self) -> bool:
        """Whether the hook keeps nothing."""
        return not any(True for _ in self._items())

    def read(self) -> dict[str, Any]:
        """Return a copy of everything in it, except process groups and functions.

        Raises:
            PacelineError: PL516 for a value that cannot be copied.
        """
        return {name: _read(value, name) for name, value in self._items()}

    def write(self, saved: dict[str, Any], device: torch.device) -> None:
        """Restore the state that `read` returned.

        Args:
            saved: of this hook.
            device: for tensors that the hook does not have yet.
        """
        for name, value in saved.items():
            live = (
                self._state.get(name) if isinstance(self._state, dict) else getattr(self._state, name, None)
            )
            written = _write(live, value, device)
            if isinstance(self._state, dict):
                self._state[name] = written
            else:
                setattr(self._state, name, written)

    def _items(self) -> Iterator[tuple[str, Any]]:
        state = self._state
        if isinstance(state, dict):
            found = state
        else:
            slots = [name for kind in type(state).__mro__ for name in getattr(kind, "__slots__", ())]
            found = {name: getattr(state, name) for name in slots if hasattr(state, name)}
            found |= getattr(state, "__dict__", {})
        if state is None or isinstance(state, dist.ProcessGroup):
            return
        for name, value in found.items():
            if not isinstance(value, dist.ProcessGroup) and not callable(value):
                yield name, value


def _read(value: Any, path: str) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, np.random.RandomState):
        return value.get_state(legacy=False)
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, dict):
        return {key: _read(item, f"{path}[{key!r}]") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_read(item, f"{path}[{number}]") for number, item in enumerate(value)]
    if value is None or isinstance(value, (bool, int, float, str, bytes, np.generic)):
        return value
    raise PacelineError(
        "PL516",
        saw=f"the state of the communication hook has {path}, a {type(value).__name__}.",
        rule="The state of a hook is restored if a step is skipped, and saved for each rank. It consists of "
        "tensors, arrays, generators, numbers, texts, and dicts and lists of these.",
        fix="Keep that value outside of the hook's state, or use a hook without state.",
    )


def _write(live: Any, saved: Any, device: torch.device) -> Any:
    if isinstance(live, np.random.RandomState):
        live.set_state(saved)
        return live
    if isinstance(live, torch.Generator):
        live.set_state(saved.cpu())
        return live
    if isinstance(saved, Tensor):
        return saved.to(live.device if isinstance(live, Tensor) else device, copy=True)
    if isinstance(saved, dict):
        held = live if isinstance(live, dict) else {}
        written = {key: _write(held.get(key), value, device) for key, value in saved.items()}
        held.clear()
        held.update(written)  # the same object, which the hook may refer to
        return held
    if isinstance(saved, list):
        items = live if isinstance(live, (list, tuple)) else ()
        lives = [*items, *[None] * len(saved)]
        found = [_write(one, value, device) for one, value in zip(lives, saved, strict=False)]
        return type(live)(found) if isinstance(live, tuple) else found
    return saved.copy() if isinstance(saved, np.ndarray) else saved


def gather_hook_state(state: HookState) -> list[dict[str, Any]] | None:
    """Return every rank's state on rank 0, in CPU memory; `None` elsewhere. Collective over all ranks.

    Raises:
        PacelineError: PL516, on every rank that cannot copy its state.
    """
    own = tree_map_only(Tensor, lambda tensor: tensor.cpu(), state.read())
    found: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(own, found, dst=0)
    return found


def scatter_hook_state(state: HookState, saved: list[dict[str, Any]] | None, device: torch.device) -> None:
    """Restore each rank's state from those that rank 0 has. Collective over all ranks."""
    own: list[Any] = [None]
    dist.scatter_object_list(own, saved, src=0)
    state.write(own[0], device)
