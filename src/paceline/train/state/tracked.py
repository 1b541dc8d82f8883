"""The user's objects and the loaders' positions: saved by name, restored when their owner is registered."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.data.loader import Loader
from paceline.errors import PacelineError
from paceline.train.state.parts import Parts


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
        value.load_state_dict(state)
