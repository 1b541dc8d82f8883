"""Refuses calls that ask for a cache of keys and values: a rank of cp has only a part of these."""

from __future__ import annotations

from typing import Any

from torch import nn

from paceline.errors import PacelineError


def refuse_caches(model: nn.Module) -> None:
    """Make a model of transformers refuse calls with `use_cache=True`, in place.

    Its own setting is switched off before (`recompute.disable_caches`).

    Args:
        model: of transformers, or one that holds such a model.
    """
    for name, module in model.named_modules():
        if hasattr(getattr(module, "config", None), "use_cache") and not _is_inside(model, name):
            module.register_forward_pre_hook(_refuse, with_kwargs=True, prepend=True)


def _is_inside(model: nn.Module, name: str) -> bool:
    """Return whether a module around this one has a setting for caches itself."""
    parts = name.split(".") if name else []
    around = (model.get_submodule(".".join(parts[:end])) for end in range(len(parts)))
    return any(hasattr(getattr(module, "config", None), "use_cache") for module in around)


def _refuse(module: nn.Module, _: Any, kwargs: dict[str, Any]) -> None:
    if kwargs.get("use_cache"):
        raise PacelineError(
            "PL641",
            saw=f"a call of {type(module).__name__} with use_cache=True, with layout.cp above 1.",
            rule="The cache would hold the keys and values of some heads or positions: those of this rank.",
            fix="Leave use_cache out of the batch and of the forward; training needs no cache. To generate, "
            "gather the trained model into a plain module.",
        )
