"""The settings that a checkpoint keeps: compared with those of a start, also for loaders that come later."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.data.loader import Loader
from paceline.train.settings import (
    Settings,
    check_names,
    describe_loader,
    list_changes,
    refuse_changes,
    warn_fresh_objects,
)
from paceline.train.state.tracked import Tracked


class KeptSettings:
    """A run's settings, as its checkpoint has them and as they are here.

    Args:
        settings: those that the run's result depends on, see `train/settings.py`.
        loaders: by name; a loader made later is added to the same mapping.
        tracked: objects and positions of loaders that are part of the checkpoints.
        is_recipe: whether a recipe is trained; a user then accepts changes by recipe key.

    Attributes:
        has_raw_batches: whether some batches did not come from a loader, so that the trainer's own
            microbatch size counts.
        accept: settings that may differ.
        folder: of the run, for messages.
    """

    def __init__(
        self, settings: Settings, loaders: Mapping[str, Loader], tracked: Tracked, *, is_recipe: bool
    ) -> None:
        self.has_raw_batches = False
        self.accept: tuple[str, ...] = ()
        self.folder: Path | None = None
        self._settings, self._loaders, self._tracked = settings, loaders, tracked
        self._is_recipe = is_recipe
        self._saved: dict[str, Any] | None = None
        self._is_complete = True

    def describe(self, loaders: Mapping[str, Loader]) -> dict[str, Any]:
        """Return the settings for a checkpoint."""
        run = dict(self._settings)
        if not self.has_raw_batches:
            del run["microbatch_size"]
        described = {name: describe_loader(loader) for name, loader in loaders.items()}
        if self._saved is not None:  # of loaders that are not made yet
            described = {
                name: self._saved["loaders"].get(name, {}) for name in self._tracked.loaded_loaders
            } | described
        return {"run": run, "loaders": described, "tracked": self._tracked.names}

    def compare(self, saved: dict[str, Any]) -> list[str]:
        """Return names of settings that differ from a checkpoint's; raise PL515 unless all are accepted.

        Rank 0 calls it.
        """
        self.has_raw_batches = "microbatch_size" in saved["run"]
        moved = {name: self._loaders[name] for name in saved["loaders"] if name in self._loaders}
        here = self.describe(moved)
        before, now = dict(saved["run"]), dict(here["run"])
        for name in moved:
            before |= saved["loaders"][name]
            now |= here["loaders"][name]
        later = [key for name, keys in saved["loaders"].items() if name not in moved for key in keys]
        parts = [f"tracked.{name}" for name in saved["tracked"]]
        parts += [f"loaders.{name}" for name in saved["loaders"]]
        if not self._is_recipe:  # keys of a recipe stand for settings that a run may not have
            check_names(self.accept, {*before, *now, *later, *parts})
        return self._refuse(list_changes(before, now, moved))

    def load(self, saved: dict[str, Any]) -> None:
        """Note the settings of the checkpoint that was loaded."""
        self._saved, self._is_complete = saved, False

    @property
    def were_loaded(self) -> bool:
        """Whether a checkpoint was loaded."""
        return self._saved is not None

    def check_loader(self, loader: Loader) -> None:
        """Raise PL515 if a loader made after `load` differs from the saved one of its name; on rank 0."""
        assert self._saved is not None
        saved = self._saved["loaders"].get(loader.name, {})
        self._refuse(list_changes(saved, describe_loader(loader), [loader.name]))

    def check_complete(self, *, is_main: bool) -> None:
        """Raise PL515 if a saved state has no owner, once after `load`."""
        if self._is_complete:
            return
        self._is_complete = True
        self._refuse(dict.fromkeys(self._tracked.list_loaded(), (None, None)))
        self._tracked.drop_loaded()
        if self._saved is not None and is_main:
            fresh = [name for name in self._tracked.own_names if name not in self._saved["tracked"]]
            if fresh:
                warn_fresh_objects(fresh)

    def _refuse(self, changes: Mapping[str, tuple[Any, Any]]) -> list[str]:
        return refuse_changes(changes, self.accept, self.folder, is_recipe=self._is_recipe)
