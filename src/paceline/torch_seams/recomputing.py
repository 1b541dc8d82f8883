"""Recomputes modules in backward, and replaces the generator around the repeated forward."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch.utils.checkpoint as torch_checkpoint

from paceline.torch_seams.dispatch import TorchDispatchMode
from paceline.torch_seams.installed import checked, set_existing

with checked("recomputing"):
    from torch.distributed._composable.checkpoint_activation import checkpoint

_GENERATOR = "_checkpoint_without_reentrant_generator"

# A pair: around the first forward, and around a repeated one.
Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]

__all__ = ["Contexts", "allow_repetition", "checkpoint", "find_generator", "is_repeating", "set_generator"]

_num_repeating = 0


def is_repeating() -> bool:
    """Return whether contexts are made for a forward that was repeated before."""
    return _num_repeating > 0


def allow_repetition(make_contexts: Callable[[], Contexts]) -> Callable[[], Contexts]:
    """Return a factory of pairs of contexts whose second may be entered several times.

    A forward is repeated in every backward through it: for a gradient penalty in two. A context that can be
    entered only once, as torch's own around a repeated forward of a module, is made anew each time.
    """
    if make_contexts is torch_checkpoint.noop_context_fn:
        return make_contexts

    def make() -> Contexts:
        first, second = make_contexts()
        # Compiled code needs the mode itself.
        is_mode = isinstance(second, TorchDispatchMode)
        return first, second if is_mode else _Repeated(second, make_contexts)

    return make


class _Repeated:
    """A context that is made anew when it is entered again."""

    def __init__(self, first: AbstractContextManager[Any], make_contexts: Callable[[], Contexts]) -> None:
        self._next: AbstractContextManager[Any] | None = first
        self._make_contexts = make_contexts
        self._entered: list[AbstractContextManager[Any]] = []

    def __enter__(self) -> Any:
        global _num_repeating
        context, self._next = self._next, None
        if context is None:
            _num_repeating += 1
            try:
                context = self._make_contexts()[1]
            finally:
                _num_repeating -= 1
        self._entered.append(context)
        return context.__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        return self._entered.pop().__exit__(*error)


def find_generator() -> Callable[..., Iterator[None]]:
    """Return the generator function around each forward that checkpointing without reentry runs."""
    found: Callable[..., Any] = getattr(torch_checkpoint, _GENERATOR)
    return found


def set_generator(generate: Callable[..., Iterator[None]]) -> None:
    """Replace the generator function of `find_generator`."""
    # The composable module has its own reference. It is imported by name, because its package has a function
    # of the same name.
    composable = importlib.import_module(checkpoint.__module__)
    for module in (torch_checkpoint, composable):
        set_existing(module, _GENERATOR, generate)
