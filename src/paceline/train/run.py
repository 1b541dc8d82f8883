"""Runs a recipe from start to end: builds, resumes, trains, evaluates, saves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Protocol

from torch import nn
from torch.utils.data import Subset, default_collate

from paceline.data import TaskData, build_data
from paceline.errors import PacelineError
from paceline.huggingface.factory import from_recipe
from paceline.models import build_model
from paceline.recipe import Layout, Recipe, dump_recipe, list_settings, read_arguments, settle_recipe
from paceline.recipe.hf_model import HfModel
from paceline.recipe.own_sections import OwnModel, call_named, named_error
from paceline.train.asynchronous import UpdateRow, read_updates
from paceline.train.belongings import EVALUATIONS, METRICS
from paceline.train.best import Best
from paceline.train.evaluation import Evaluation
from paceline.train.metrics import read_rows
from paceline.train.state.run_folder import claim_run_folder
from paceline.train.state.transfer import run_on_main
from paceline.train.step import Step
from paceline.train.tasks import build_lr_schedule, build_optimizer, build_task
from paceline.train.trainer import Trainer
from paceline.world import World, current_world


class Reporter(Protocol):
    """A receiver of a run's progress, on rank 0."""

    def begin(
        self, *, num_parameters: int, num_steps: int, first_step: int, world: World, layout: Layout
    ) -> None:
        """Report that the run is built and continues after `first_step` steps."""

    def step(self, step: Step, num_steps: int, tokens_per_sample: int | None) -> None:
        """Report a completed step."""

    def evaluation(self, step: int, evaluation: Evaluation) -> None:
        """Report an evaluation on the validation data after `step`."""


@dataclass(frozen=True)
class RunSummary:
    """The results of a finished run; JSON-able.

    Attributes:
        folder: of the run.
        num_parameters: trained and frozen.
        world_size: ranks of this start.
        layout: of this start.
        steps: optimizer steps of the whole run.
        samples: samples of the whole run.
        losses: training loss of every step, `None` for skipped ones.
        skipped: number of steps that left the weights unchanged.
        valid: last evaluation by name, or `None` without validation data.
        step_s: median seconds per step of this start, without its first three steps (warm-up).
        samples_per_s: samples per second from that median.
        tokens_per_s: the same for tokens, for text.
        data_share: share of the step time spent waiting for data.
        comm_share: share of the step time spent waiting for other ranks and for transfers.
        flops_per_s: of all ranks, or `None` if operations could not be counted.
        mfu: model FLOP/s utilisation, or `None` if the peak is unknown.
        memory_bytes: peak on rank 0.
    """

    folder: str
    num_parameters: int
    world_size: int
    layout: str
    steps: int
    samples: int
    losses: list[float | None]
    skipped: int
    valid: dict[str, float] | None
    step_s: float | None
    samples_per_s: float | None
    tokens_per_s: float | None
    data_share: float | None
    comm_share: float | None
    flops_per_s: float | None
    mfu: float | None
    memory_bytes: int | None


def build_trainer(recipe: Recipe, data: TaskData, num_steps: int, **settings: Any) -> Trainer:
    """Build the trainer that a recipe describes, on the current world; collective.

    Args:
        recipe: what to train.
        data: the result of `build_data(recipe)`.
        num_steps: length of the run, for the schedule.
        settings: other arguments of `Trainer`, such as `metrics`.
    """
    settled = settle_recipe(recipe, current_world().world_size)
    task, layout = build_task(recipe, data), settled.layout
    return Trainer(
        make_model(recipe, data),
        forward=task.forward,
        loss=task.loss,
        optimizer=lambda named: build_optimizer(recipe, named),
        schedule=lambda optimizer: build_lr_schedule(recipe, optimizer, num_steps),
        layout=layout,
        shard=settled.recipe.shard,
        example=default_collate([data.train[place] for place in range(2)])
        if layout.num_sample_parts > 1
        else None,
        ddp=settled.recipe.ddp,
        compress=settled.recipe.compress,
        islands=settled.recipe.islands,
        tokens_per_sample=data.tokens_per_sample,
        recipe_toml=dump_recipe(recipe),
        **read_arguments(recipe),
        **settings,
    )


def make_model(recipe: Recipe, data: TaskData) -> Callable[[], nn.Module]:
    """Return what builds a recipe's model."""
    if isinstance(recipe.model, HfModel):
        return from_recipe(recipe.model, data.vocab_size)
    if isinstance(recipe.model, OwnModel):
        return partial(_build_own, recipe.model, data)
    return lambda: build_model(recipe, data)


def _build_own(section: OwnModel, data: TaskData) -> nn.Module:
    model = call_named("model", section.build, section.args, data)
    if not isinstance(model, nn.Module):
        raise named_error("model", f"{section.build} returned a {type(model).__name__}.")
    return model


def build_loader(recipe: Recipe, trainer: Trainer, dataset: Any, *, train: bool) -> Any:
    """Build the trainer's loader over a recipe's training or validation data."""
    section = recipe.loader
    return trainer.loader(
        dataset,
        global_batch_size=recipe.train.global_batch_size,
        shuffle=None if train else False,
        epochs=recipe.train.epochs if train else None,
        drop_last=train and recipe.islands.count > 1,  # a smaller batch is no equal share for each
        num_workers=section.num_workers,
        prefetch=section.prefetch,
        pin_memory=None if section.pin_memory == "auto" else section.pin_memory,
        name="train" if train else "valid",
    )


def count_steps(recipe: Recipe, num_samples: int) -> int:
    """Return the number of optimizer steps of a run over a data set of `num_samples`."""
    if recipe.train.steps is not None:
        return recipe.train.steps
    assert recipe.train.epochs is not None
    size = recipe.train.global_batch_size
    rest = 0 if recipe.islands.count > 1 else size - 1
    num_steps = recipe.train.epochs * ((num_samples + rest) // size)
    if parts := recipe.islands.find_broken(num_steps):
        raise PacelineError(parts[0], saw=parts[1], rule=parts[2], fix=parts[3])
    return num_steps


def train_recipe(
    recipe: Recipe,
    folder: Path,
    world: World,
    reporter: Reporter | None,
    *,
    accept: Sequence[str] = (),
    launcher_pid: int | None = None,
    is_dry: bool = False,
    updates: Path | None = None,
) -> RunSummary | None:
    """Train a recipe to its end, continuing from the newest checkpoint in `folder`; collective.

    Args:
        recipe: what to train.
        reporter: receives the progress, on rank 0.
        accept: keys or sections of the recipe that may differ from those of the run in the folder; it
            continues with the new values.
        launcher_pid: of the process that started the ranks; by default the parent of rank 0.
        is_dry: take one step, and evaluate one global batch.
        updates: a record of asynchronous updates to replay; the recipe of its run stands beside it.

    Returns:
        The summary on rank 0, `None` elsewhere.

    Raises:
        Stopped: on a signal, after saving.
    """

    def claim() -> None:
        lock = claim_run_folder(folder, recipe, accept=accept, launcher_pid=launcher_pid)
        # The trainer is built later, so it closes its files first: nothing writes to an unlocked folder.
        world.on_close(lock.close)

    rows = None if updates is None else run_on_main(world, lambda: read_updates(updates, recipe))
    run_on_main(world, claim)
    run = _RecipeRun(recipe, folder, world, reporter if world.is_main else None, accept, is_dry, rows)
    run.train()
    return run.summarise() if world.is_main else None


class _RecipeRun:
    """One start of a run."""

    def __init__(
        self,
        recipe: Recipe,
        folder: Path,
        world: World,
        reporter: Reporter | None,
        accept: Sequence[str],
        is_dry: bool,
        updates: list[UpdateRow] | None,
    ) -> None:
        self._updates = updates
        self._recipe, self._folder, self._world, self._reporter = recipe, folder, world, reporter
        self._data = build_data(recipe)
        self._num_steps = count_steps(recipe, len(self._data.train))  # type: ignore[arg-type]
        self._last_step = 1 if is_dry else self._num_steps
        self._trainer = build_trainer(recipe, self._data, self._num_steps)
        self._loader = build_loader(recipe, self._trainer, self._data.train, train=True)
        self._valid_loader = None
        if self._data.valid is not None:
            valid: Any = self._data.valid
            limit = recipe.train.global_batch_size if is_dry else recipe.train.eval_samples
            if limit is not None and limit < len(valid):
                valid = Subset(valid, range(limit))
            self._valid_loader = build_loader(recipe, self._trainer, valid, train=False)
        self._first_step = self._trainer.resume(folder, accept=list_settings(accept))
        self._num_parameters = self._trainer.count_parameters()
        self._valid: dict[str, float] | None = None
        self._has_stopped_early = self._is_stale(self._trainer.best)
        self._steps: list[Step] = []

    def train(self) -> None:
        """Train the remaining steps."""
        if self._reporter is not None:
            self._reporter.begin(
                num_parameters=self._num_parameters,
                num_steps=self._last_step,
                first_step=self._first_step,
                world=self._world,
                layout=self._trainer.layout,
            )
        self._complete_evaluation()
        while not self._has_ended():
            if self._updates is not None or self._recipe.asynchronous.staleness:
                for step in self._take_apart():
                    self._note(step)
                self._complete_step()
                continue
            for share in self._loader:
                self._note(self._trainer.step(share))
                self._complete_step()
                if self._has_ended():
                    break

    def _take_apart(self) -> Iterator[Step]:
        """Yield asynchronous steps, or recorded ones, up to the next one to save or evaluate after."""
        number = self._trainer.step_number
        periods = (self._recipe.train.eval_every, self._recipe.checkpoint.every)
        stop = min(self._last_step, *(number - number % n + n for n in periods if n > 0))
        if self._updates is not None:
            return self._trainer.replay_updates(self._loader, self._updates[number:stop])
        staleness = self._recipe.asynchronous.staleness
        return self._trainer.step_asynchronously(self._loader, stop - number, staleness=staleness)

    def _has_ended(self) -> bool:
        return self._has_stopped_early or self._trainer.step_number >= self._last_step

    def _is_stale(self, best: Best | None) -> bool:
        patience = self._recipe.train.patience
        return 0 < patience <= (0 if best is None else best.num_since)

    def summarise(self) -> RunSummary:
        """Return the summary of this run; on rank 0."""
        rows = read_rows(self._folder / METRICS)
        warm = self._steps[3:] or self._steps
        total_s = sum(step.step_s for step in warm)
        step_s = median([step.step_s for step in warm]) if warm else None
        samples_per_s = self._recipe.train.global_batch_size / step_s if step_s else None
        tokens = self._data.tokens_per_sample
        last = rows[-1] if rows else {}
        return RunSummary(
            folder=str(self._folder),
            num_parameters=self._num_parameters,
            world_size=self._world.world_size,
            layout=str(self._trainer.layout),
            steps=self._trainer.step_number,
            samples=self._trainer.num_samples,
            losses=[row.get("loss") for row in rows],
            skipped=sum(row.get("skipped") is not None for row in rows),
            valid=self._valid,
            step_s=step_s,
            samples_per_s=samples_per_s,
            tokens_per_s=samples_per_s * tokens if samples_per_s and tokens else None,
            data_share=sum(step.data_s for step in warm) / total_s if total_s else None,
            comm_share=sum(step.comm_s for step in warm) / total_s if total_s else None,
            flops_per_s=last.get("flops_per_s"),
            mfu=last.get("mfu"),
            memory_bytes=last.get("memory_bytes"),
        )

    def _note(self, step: Step) -> None:
        self._steps.append(step)
        if self._reporter is not None:
            self._reporter.step(step, self._last_step, self._data.tokens_per_sample)

    def _complete_step(self) -> None:
        """Evaluate and save if that is due after the latest step."""
        number = self._trainer.step_number
        if self._has_ended():
            self._trainer.synchronize()
        if self._has_ended() or _is_due(number, self._recipe.train.eval_every):
            self._evaluate()
        if self._has_ended() or _is_due(number, self._recipe.checkpoint.every):
            self._trainer.save(wait=self._has_ended())

    def _complete_evaluation(self) -> None:
        """Read the last evaluation of the starts before this one, or make it if it was interrupted."""
        step = self._trainer.step_number
        rows = run_on_main(self._world, lambda: read_rows(self._folder / EVALUATIONS))
        # Rows of later steps, from a start that was killed, are dropped with the first new row.
        if found := [row for row in rows if row["step"] == step]:
            self._valid = {key: value for key, value in found[-1].items() if key != "step"}
        elif step >= self._last_step or (step and _is_due(step, self._recipe.train.eval_every)):
            self._evaluate()

    def _evaluate(self) -> None:
        if self._valid_loader is None:
            return
        evaluation = self._trainer.evaluate(self._valid_loader, build_task(self._recipe, self._data).metrics)
        self._valid = evaluation.values()
        if self._recipe.train.patience:
            self._has_stopped_early = self._is_stale(self._trainer.keep_best(evaluation.loss))
        if self._reporter is not None:
            self._reporter.evaluation(self._trainer.step_number, evaluation)


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
