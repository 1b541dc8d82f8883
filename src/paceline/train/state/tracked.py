"""The user's objects and the loaders' positions: saved by name, restored when their owner is registered."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch.distributed as dist
from torch import Tensor

from paceline.data.loader import Loader
from paceline.errors import PacelineError
from paceline.torch_seams.trees import keystr, tree_flatten_with_path
from paceline.train.equal_copies import digest_tensor
from paceline.train.optimizer_state import load_part
from paceline.train.pieces import OwnPart
from paceline.train.same_settings import digest_text, list_differences
from paceline.train.state.parts import Parts

_MAX_SHOWN = 4


class Tracked:
    """The named state of a run besides its models: objects with state, and positions of loaders.

    Attributes:
        parts: of the models, once something was loaded.
        loaded: states of objects that nobody has tracked yet.
        loaded_loaders: positions of loaders that are not made yet.
    """

    def __init__(self) -> None:
        self.parts: Parts | None = None
        self.loaded: dict[str, Any] = {}
        self.loaded_loaders: dict[str, Any] = {}
        self._objects: dict[str, Any] = {}

    @property
    def names(self) -> list[str]:
        """Names of the objects, those that are only in the checkpoint included."""
        return sorted({*self._objects, *self.loaded})

    @property
    def own_names(self) -> list[str]:
        """Names of the objects that were given."""
        return sorted(self._objects)

    @property
    def is_empty(self) -> bool:
        """Whether no objects were given."""
        return not self._objects

    def add(self, objects: Mapping[str, Any]) -> None:
        """Add objects with state; give them what was loaded for them."""
        for name, value in objects.items():
            if not (hasattr(value, "state_dict") and hasattr(value, "load_state_dict")):
                raise PacelineError(
                    "PL408",
                    saw=f"track({name}={type(value).__name__}).",
                    rule="A tracked object has state_dict() and load_state_dict(state).",
                    fix="Add the two methods, or keep that value elsewhere.",
                )
            self._objects[name] = value
            self._give(name)

    def read(self, parts: Parts) -> dict[str, Any]:
        """Return the objects' states by name, with pieces of what the layout divides."""
        return {name: parts.list_tracked(value.state_dict()) for name, value in self._objects.items()}

    def check_same(self, parts: Parts, group: dist.ProcessGroup) -> str:
        """Return how the states differ between ranks, or ""; collective.

        Args:
            parts: of the models; a rank's own part of a tensor may differ.
        """
        texts = {
            f"{name}{keystr(path)}": _describe_value(value)
            for name, state in self.read(parts).items()
            for path, value in tree_flatten_with_path(state)[0]
        }
        return "; ".join(list_differences(texts, group)[:_MAX_SHOWN])

    def load(self, state: Mapping[str, Any], parts: Parts) -> None:
        """Take the part of a checkpoint's state that is tracked; give the objects theirs."""
        self.parts = parts
        self.loaded_loaders = dict(state["loaders"])
        self.loaded = dict(state["tracked"])
        for name in self._objects:
            self._give(name)

    def take_loader_state(self, name: str) -> dict[str, Any] | None:
        """Return the loaded position of a loader, once."""
        state: dict[str, Any] | None = self.loaded_loaders.pop(name, None)
        return state

    def read_loaders(self, loaders: Mapping[str, Loader]) -> dict[str, Any]:
        """Return the positions of loaders by name, those included that are not made yet."""
        return self.loaded_loaders | {name: loader.state_dict() for name, loader in loaders.items()}

    def list_loaded(self) -> list[str]:
        """Return the names of what was loaded and has found no owner yet."""
        return [f"tracked.{name}" for name in self.loaded] + [
            f"loaders.{name}" for name in self.loaded_loaders
        ]

    def drop_loaded(self) -> None:
        """Forget what was loaded and has found no owner."""
        self.loaded.clear()
        self.loaded_loaders.clear()

    def _give(self, name: str) -> None:
        """Load an object's state, and only this rank's parts of tensors that are divided now."""
        if name not in self.loaded:
            return
        value, state = self._objects[name], self.loaded.pop(name)
        if self.parts is not None and self.parts.is_divided:
            state = self.parts.cut_as(state, value.state_dict())
        load_part(f"the tracked object {name}", value, state)


def _describe_value(value: Any) -> str:
    """Return a text that is the same on all ranks that hold the same value."""
    if isinstance(value, OwnPart):
        return "a part"
    if isinstance(value, Tensor):
        return f"{value.dtype} {list(value.shape)} ({digest_tensor(value) % 2**32:08x})"
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {list(value.shape)} ({digest_text(repr(value.tolist())) % 2**32:08x})"
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        return repr(value)
    return type(value).__qualname__


def state_differs_error(differing: str) -> PacelineError:
    """Return PL395, for states of tracked objects that differ between ranks."""
    return PacelineError(
        "PL395",
        saw=f"ranks have different states of tracked objects: {differing}.",
        rule="A checkpoint has one state of each object, which a resumed start gives to all ranks.",
        fix="Make the value the same on every rank before the save (dist.all_reduce, "
        "dist.all_gather_object), or leave it out of state_dict().",
        on_every_rank=True,
    )
