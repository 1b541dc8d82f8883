"""Holds a trainer's arguments, and the one list of settings that ranks and resumed runs compare."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Literal

from torch import nn

from paceline.errors import PacelineError
from paceline.parallel.compress import CompressSettings
from paceline.parallel.order import Settings
from paceline.parallel.replicate import ReplicaSettings
from paceline.parallel.shard.setup import ShardSettings
from paceline.recipe import SETTINGS, Layout
from paceline.recipe.compress import CompressSection
from paceline.recipe.explain import validate_section
from paceline.recipe.islands import IslandsSection
from paceline.recipe.schema import DdpSection, ShardSection
from paceline.sinks.sink import Sink, build_sinks
from paceline.train.building import (
    Model,
    OptimizerFactory,
    ScheduleFactory,
    UpdateModel,
    check_functions,
    check_loss_over,
    check_numbers,
    check_several,
)
from paceline.train.compressing import choose_compression
from paceline.train.recording import StepRecords
from paceline.train.same_settings import describe_code
from paceline.train.settings import name_settings
from paceline.train.update import Update
from paceline.world import World


@dataclass(frozen=True)
class RunSetting:
    """A setting that all ranks share.

    Attributes:
        is_kept: whether a resumed run must have the same value, because the result depends on it.
        is_code: whether it is a function, of which ranks compare the code.
    """

    name: str
    value: Any
    is_kept: bool = False
    is_code: bool = False


@dataclass(frozen=True)
class Arguments:
    """The arguments of a trainer; `Trainer` describes each. The seed is known."""

    model: Model | Mapping[str, Model]
    optimizer: OptimizerFactory | Mapping[str, OptimizerFactory]
    forward: Callable[[Any, Any], Any] | None
    loss: Callable[[Any, Any], Any] | None
    step: Callable[[UpdateModel], None] | None
    layout: str | Layout
    shard: ShardSection | Mapping[str, Any] | None
    schedule: ScheduleFactory | None
    dtype: str
    reduction: str
    microbatch_size: int | None
    loss_over: str
    metrics: Mapping[str, Callable[[Any, Any], Any]] | None
    clip_norm: float
    seed: int
    ddp: DdpSection | Mapping[str, Any] | None
    compress: CompressSection | Mapping[str, Any] | None
    islands: IslandsSection | Mapping[str, Any] | None
    compile: bool
    ema: float | Mapping[str, float] | None
    max_skipped_in_a_row: int
    keep: int
    checkpoint_mode: Literal["full", "sharded"]
    asynchronous_saves: bool
    max_failed_saves: int
    sinks: str | Sink | Sequence[str | Sink]
    tokens_per_sample: int | None
    peak_flops: float | None
    recipe_toml: str | None

    @property
    def models(self) -> dict[str, Model]:
        """The models by name; a single one is named `model`."""
        return dict(self.model) if isinstance(self.model, Mapping) else {"model": self.model}

    @property
    def optimizers(self) -> dict[str, OptimizerFactory]:
        """The optimizer factories by name of the model."""
        return dict(self.optimizer) if isinstance(self.optimizer, Mapping) else {"model": self.optimizer}

    @property
    def saving(self) -> tuple[bool, bool, int]:
        """Whether every rank writes its share, if saves are asynchronous, and failed saves that end a run."""
        return self.checkpoint_mode == "sharded", self.asynchronous_saves, self.max_failed_saves

    def resolve_layout(self, world_size: int) -> Layout:
        """Return the layout with all degrees known; raise for impossible numbers and layouts."""
        check_numbers(
            clip_norm=(self.clip_norm, 0),
            seed=(self.seed, 0),
            max_skipped_in_a_row=(self.max_skipped_in_a_row, 1),
            keep=(self.keep, 1),
            max_failed_saves=(self.max_failed_saves, 1),
            microbatch_size=(self.microbatch_size, 1),
            tokens_per_sample=(self.tokens_per_sample, 1),
            peak_flops=(self.peak_flops, 1),
        )
        return self._read_layout().resolve(world_size)

    def _read_layout(self) -> Layout:
        """Return the layout as given; a degree may be open."""
        return Layout.parse(self.layout) if isinstance(self.layout, str) else self.layout

    def check_together(self, layout: Layout) -> None:
        """Raise if arguments contradict each other."""
        self.choose_compression(layout)
        check_loss_over(self.loss_over, has_step=self.step is not None, has_metrics=bool(self.metrics))
        if isinstance(self.model, Mapping):
            check_several(layout)

    def check_functions(self) -> None:
        """Raise PL404 or PL406 if models, losses and optimizers do not fit together."""
        names = self.models if isinstance(self.model, Mapping) else None
        check_functions(names, self.step, self.forward, self.loss, self.optimizer, self.metrics)

    def choose_compression(self, layout: Layout) -> CompressSettings | None:
        """Return the settings of the compression, if there is one; raise PL958 to PL960."""
        return choose_compression(
            self._compress_section,
            layout,
            reduction=self.reduction,
        )

    @cached_property
    def _compress_section(self) -> CompressSection:
        return validate_section("compress", CompressSection, self.compress)

    @property
    def has_compression(self) -> bool:
        """Whether gradients are compressed."""
        return self._compress_section.kind != "none"

    @cached_property
    def islands_section(self) -> IslandsSection:
        """The settings of the islands; one island by default."""
        return validate_section("islands", IslandsSection, self.islands)

    def lay_out(
        self,
        layout: Layout,
        example: Callable[[nn.Module], Any] | None,
    ) -> Settings:
        """Return the settings for laying out the models; all ranks must call it, with the same settings.

        Args:
            layout: resolved.
            example: calls the model on a batch of a few samples, or `None`.
        """
        compress = self.choose_compression(layout)
        ddp = validate_section("ddp", DdpSection, self.ddp)
        shard = validate_section("shard", ShardSection, self.shard)
        if self._read_layout().awaits_shards(layout):
            shard = ShardSection()
        return Settings(
            layout,
            ddp=ReplicaSettings(**ddp.model_dump()),
            shard=ShardSettings(**shard.model_dump()),
            exact=self.reduction == "exact",
            compress=compress,
            compile=self.compile,
            example=example,
        )

    def build_records(
        self, world: World, layout: Layout, describe: Callable[[], dict[str, Any]]
    ) -> StepRecords:
        """Return what writes the run's metrics.

        Args:
            describe: returns the settings of the run that is not a recipe's.
        """
        recipe = self.recipe_toml
        if recipe is not None:
            describe = lambda: _flatten(tomllib.loads(recipe))  # noqa: E731
        return StepRecords(
            world,
            layout,
            dtype=self.dtype,
            peak_flops=self.peak_flops,
            tokens_per_sample=self.tokens_per_sample,
            sinks=build_sinks(self.sinks),
            describe=describe,
            needs_folder=recipe is None,  # `verify` and `bench` run recipes without one
        )

    def describe_for_ranks(self, layout: Layout) -> dict[str, str]:
        """Return the settings that must be the same on all ranks, as texts by name."""
        found = {
            each.name: describe_code(each.value) if each.is_code else str(each.value)
            for each in self._list_settings(layout)
        }
        kinds = {True: "a module", False: "a factory"}  # which only rank 0 builds
        models = {name: kinds[isinstance(each, nn.Module)] for name, each in self.models.items()}
        found["model"] = ", ".join(models.values()) if len(models) == 1 else str(models)
        return found

    def describe_for_resume(self, layout: Layout, updates: Mapping[str, Update]) -> dict[str, Any]:
        """Return the settings that a resumed run must keep, by name; JSON-able.

        Args:
            layout: resolved; it may change.
            updates: the models' updates, which hold the settings of optimizer and schedule as built.
        """
        found = {each.name: each.value for each in self._list_settings(layout) if each.is_kept}
        for name, update in updates.items():
            found |= {name_settings(name, updates, key): value for key, value in update.settings.items()}
        return found

    def _list_settings(self, layout: Layout) -> list[RunSetting]:
        compress = self.choose_compression(layout)
        chosen = {} if compress is None else asdict(compress)
        islands = self.islands_section.model_dump() if self.islands_section.count > 1 else {}
        return [
            *(RunSetting(f"compress.{key}", value, is_kept=True) for key, value in chosen.items()),
            *(RunSetting(f"islands.{key}", value, is_kept=True) for key, value in islands.items()),
            RunSetting("layout", layout),
            *(
                RunSetting(each.argument, getattr(self, each.argument), is_kept=each.argument in each.names)
                for each in SETTINGS
                if each.argument and not each.is_local
            ),
            RunSetting("ema", self.ema, is_kept=True),
            RunSetting("ddp", self.ddp),
            RunSetting("shard", self.shard),
            RunSetting("forward", self.forward, is_code=True),
            RunSetting("loss", self.loss, is_code=True),
            RunSetting("loss_over", self.loss_over, is_kept=True),
            RunSetting("metrics", list(self.metrics or ())),
            RunSetting("step", self.step, is_code=True),
            RunSetting("schedule", self.schedule, is_code=True),
            RunSetting("recipe", self.recipe_toml),
        ]


def _flatten(table: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{section}.{key}": each for section, keys in table.items() for key, each in keys.items()}


def missing_loss_error() -> PacelineError:
    """Return PL405, for a call that needs the loss of one model."""
    return PacelineError(
        "PL405",
        saw="the trainer has no loss=.",
        rule="This needs the loss of one model.",
        fix="Pass loss=lambda output, batch: (sum_of_losses, weight) to Trainer.",
    )
