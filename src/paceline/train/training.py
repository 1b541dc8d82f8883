"""`Training`: what `Trainer` and `Loop` share: models, data, checkpoints, metrics, signals."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple
from itertools import chain
from pathlib import Path
from typing import Any, Generic, Literal

from torch import Tensor, nn

from paceline.comm.buckets import broadcast_tensors
from paceline.data.loader import Loader
from paceline.data.share import Share
from paceline.mesh import build_mesh, join_blocks
from paceline.parallel.batchnorm import RunningStatistics
from paceline.parallel.order import Settings
from paceline.parallel.placement import local
from paceline.parallel.shard.shards import refuse_mixed
from paceline.seeds import derive_seed
from paceline.signatures import explain_arguments
from paceline.train.arguments import Arguments
from paceline.train.average import name_averages, refuse_averaged, refuse_copied_models, update_averages
from paceline.train.batches import RawBatches
from paceline.train.best import Best, choose_best
from paceline.train.building import UpdateSettings, build_model, build_updates, make_trial
from paceline.train.evaluation import Evaluation, Pass, check_in_order, evaluate, predict
from paceline.train.global_loss import GlobalLoss
from paceline.train.island_ranks import place_islands, refuse_own_batch
from paceline.train.islands import Exchanged, Islands
from paceline.train.loaders import Handed, TrainerLoader
from paceline.train.out_of_memory import MemoryErrors
from paceline.train.own_loader import open_loader
from paceline.train.own_step import refuse_in_pass
from paceline.train.precision import Precision
from paceline.train.recording import SkippedSteps
from paceline.train.same_settings import (
    StepSettings,
    all_ranks,
    check_same_settings,
    describe_model,
    describe_step_settings,
    read_hyperparameters,
)
from paceline.train.state.saver import Saver
from paceline.train.state.saving import SaveHandle, Saving, refuse_saving
from paceline.train.step import Step
from paceline.train.stopping import REQUESTS, AskedToStopError, Stopped
from paceline.train.trained_models import TrainedModels
from paceline.train.update import Updated
from paceline.train.whole_metrics import Metric
from paceline.world import current_world

# Microbatches per global batch if the user sets no microbatch size. The number is fixed: a size derived from
# the number of ranks would make dropout and BatchNorm depend on that number.
_DEFAULT_NUM_MICROBATCHES = 8
# The arguments of `loader` that a `DataLoader` has no counterpart of.
_NOT_TAKEN = ("self", "data", "shard", "name")


class Training(TrainedModels, Generic[Handed]):
    """Models in training, with the same result on any number of ranks.

    Collective: construct it on every rank of the current world, with the same arguments.

    Args:
        given: the arguments.
        forward: from (model, batch) to the output.
        loss: from (output, batch) to the loss, or `None` if the user's own code computes it.
        example: a batch of a few samples, or `None`.
    """

    # Whether a step is under way, in which nothing may be saved.
    _is_in_step = False

    def __init__(
        self,
        given: Arguments,
        forward: Callable[[Any, Any], Any],
        loss: Callable[[Any, Any], Any] | None,
        example: Any,
    ) -> None:
        world = current_world()
        self._given = given
        self.layout = given.resolve_layout(world.world_size)
        self.microbatch_size = given.microbatch_size
        self.step_number = self.num_samples = 0
        self._precision = Precision(given.dtype, world.device)
        self._check_layout()
        self._placed = placed = place_islands(given, self.layout, world.rank)
        if given.reduction == "exact":
            world.pin_threads(1)
            world.switch_on_determinism()
        self._forward, self._loss = forward, loss
        ranks = all_ranks() if world.world_size > 1 else None
        if ranks is not None:
            check_same_settings(given.describe_for_ranks(self.layout), ranks)
        built = {
            name: build_model(name, each, self._precision, given.seed, ranks)
            for name, each in given.models.items()
        }
        self._statistics = RunningStatistics([each.model for each in built.values()])
        if ranks is not None:
            texts: dict[str, str] = {}
            for name, each in built.items():
                texts |= describe_model(name, each.model)
            check_same_settings(texts, ranks)
        # Of all ranks, which share out samples; and of those that share one model, which islands make fewer.
        self._mesh = build_mesh(self.layout, world) if world.world_size > 1 else None
        self._dp = self._mesh.dp if self._mesh is not None else None
        self._inner_mesh, joined = self._mesh, None
        if placed is not None and placed.num_blocks > 1:
            is_alone = placed.layout.num_ranks == 1
            self._inner_mesh = None if is_alone else build_mesh(placed.layout, world, placed.num_blocks)
            joined = join_blocks(world, placed.num_blocks)
        laying_out = self._lay_out(make_trial(example, forward, loss, self._precision))
        self.num_slots = None if laying_out.compress is None else laying_out.compress.slots
        if placed is not None:
            self.num_slots = placed.section.count
        self.turns = self.layout.count_turns(is_exact=laying_out.exact)
        settings = UpdateSettings(
            mesh=self._inner_mesh,
            precision=self._precision,
            statistics=self._statistics,
            laying_out=laying_out,
            schedule=given.schedule,
            clip_norm=given.clip_norm,
            seed=given.seed,
        )
        updates = build_updates(built, given.optimizers, settings, laying_out.layout.num_ranks)
        self._islands: Islands | None = None
        if placed is not None:
            [update] = updates.values()
            broadcast_tensors(map(local, chain(update.model.parameters(), update.model.buffers())), joined)
            self._islands = Islands(placed, update, joined, is_main=world.is_main, device=world.device)
        models = {name: each.model for name, each in built.items()}
        super().__init__(world, models, updates, self.layout, given.ema)
        self._start_run()
        self._forget = world.on_close(self.close)

    def _check_layout(self) -> None:
        """Raise if the arguments do not go with the layout."""
        self._given.check_together(self.layout)

    def _lay_out(self, trial: Callable[[nn.Module], Any] | None) -> Settings:
        return self._given.lay_out(self.layout if self._placed is None else self._placed.layout, trial)

    def _start_run(self) -> None:
        """Set up everything that accompanies steps: state, metrics, data, signals."""
        given = self._given
        saving = Saving(self.world, *given.saving, lambda: bool(self._requests.signum))
        self.wait_before_writing(saving.before_write)
        self._loaders: dict[str, Loader] = {}
        self._saver = Saver(
            self.world,
            self.models,
            self._updates,
            self._loaders,
            saving=saving,
            keep=given.keep,
            layout=self.layout,
            reduction=given.reduction,
            recipe_toml=given.recipe_toml,
            settings=given.describe_for_resume(self.layout, self._updates),
            islands=self._islands,
        )
        self._saver.tracked.add(name_averages(self.averages))
        self._global_loss: GlobalLoss | None = None
        if given.loss_over == "global_batch":
            assert self._loss is not None
            self._global_loss = GlobalLoss(self.model, self._forward, self._loss, self._mesh, self._precision)
        self._records = given.build_records(
            self.world, self.layout, lambda: given.describe_for_resume(self.layout, self._updates)
        )
        self._skipped = SkippedSteps(given.max_skipped_in_a_row)
        self._memory = MemoryErrors(self.world, self.layout, self._precision.name)
        self._last_loss, self._stop_signum = math.nan, 0
        self._best: Best | None = None
        self._source: Loader | None = None
        self._settings = StepSettings(
            self._inner_mesh.group if self._inner_mesh else None, self._describe_settings
        )
        self._raw_batches = RawBatches(self._dp, self.world.host)
        self._requests = REQUESTS
        self._last_step_end_s, self._data_s = time.perf_counter(), 0.0

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.layout}, after step {self.step_number})"

    @property
    def run_folder(self) -> Path | None:
        """The folder given to `resume`, or `None`."""
        return self._saver.folder

    @property
    def best(self) -> Best | None:
        """What `keep_best` returned last, also before this start."""
        return self._best

    @explain_arguments
    def loader(
        self,
        data: Any,
        *,
        global_batch_size: int | None = None,
        shuffle: bool | None = None,
        epochs: int | None = None,
        drop_last: bool | None = None,
        num_workers: int | None = None,
        prefetch: int | None = None,
        pin_memory: bool | None = None,
        collate: Callable[[Sequence[Any]], Any] | None = None,
        shard: Literal["loader", "mine"] = "loader",
        name: str | None = None,
    ) -> TrainerLoader[Handed]:
        """Build a loader of global batches, which gives each rank its share.

        Its position is saved in the checkpoints, under `name`. By default the name follows from the order of
        creation, which must then be the same in the start that resumes. A loader of data that another loader
        has trained on starts with the next epoch.

        Args:
            data: a data set or a stream, see `paceline.data.Loader`. Or a torch `DataLoader`, of which the
                data set, collate function, workers, batch size and samplers (weighted, by length, one's own)
                are used. Its batch size is that of all ranks together. Samplers are drawn once per epoch
                under the seed, alike on every rank; each list of a batch sampler is a global batch.
            global_batch_size, shuffle, drop_last, num_workers, prefetch, pin_memory, collate: as for
                `paceline.data.Loader`; of a `DataLoader` they need not be told.
            epochs: after which the iteration ends. Default: one, again at each iteration.
            shard: `"mine"` states that the data are already divided, and are this rank's own part.
            name: of the position.

        Raises:
            PacelineError: PL648 for a `DataLoader` that cannot be taken over, or without a batch size.
        """
        given = {key: each for key, each in locals().items() if key not in _NOT_TAKEN and each is not None}
        data, settings = open_loader(data, given, self._given.seed, is_own=shard == "mine")
        global_batch_size = settings["global_batch_size"]
        size = self.microbatch_size or max(1, global_batch_size // _DEFAULT_NUM_MICROBATCHES)
        if shard == "mine":
            refuse_own_batch(self._islands)
        if self._placed is not None and settings.get("shuffle") is not False:
            ends = epochs is not None and not settings.get("drop_last")
            self._placed.check_batches(data, global_batch_size, size, is_whole=ends)
        name = name or f"loader{len(self._loaders)}"
        settings |= {"shard": shard, "name": name, "microbatch_size": size, "seed": self._given.seed}
        loader = TrainerLoader(self, data, dp=self._dp, others=self._loaders, **settings)
        self._loaders[name] = loader
        state = self._saver.tracked.take_loader_state(name)
        if state is not None:
            self._saver.check_loader(loader)
            loader.load_state_dict(state)
        return loader

    def open(self, share: Share) -> Handed:
        """Return what the user's loop gets of a share of a global batch."""
        raise NotImplementedError

    def track(self, **objects: Any) -> None:
        """Add objects with `state_dict` and `load_state_dict` to the checkpoints, by name.

        After `resume`, their saved state is loaded at once. Their state must be the same on every
        rank; `save` compares it.
        """
        refuse_copied_models(objects, self._updates.values())
        self._saver.tracked.add(objects)

    @explain_arguments
    def resume(self, folder: str | Path, *, accept: str | Sequence[str] = ()) -> int:
        """Resume from the newest valid checkpoint of a run's folder, or start from scratch if there is none.

        Collective. From now on, `save` writes to this folder, and metrics go to its `metrics.jsonl`.

        The settings that affect the result must be those of the checkpoint: batch sizes, dtype, clipping,
        seed, the options of optimizer and schedule as built, the data, what is frozen and tracked. The
        number of ranks and the layout may change.

        Args:
            folder: of the run.
            accept: settings that may differ, by the names that PL515 lists, such as `["optimizer.lr"]`. The
                part before a dot stands for all names that begin with it. The run continues with the new
                values. If the learning rate or the schedule differs, the new schedule applies from this step.

        Returns:
            The number of steps already taken.

        Raises:
            PacelineError: PL500 to PL531 if there are checkpoints and none can be used; PL515 if settings
                differ, raised here, when a loader is made later, or in the first step; PL550 if the run has
                saved and no checkpoint is found; PL553 for a sharded
                checkpoint in a folder that ranks do not share.
        """
        accept = [accept] if isinstance(accept, str) else accept
        self._records.close()
        state = self._saver.load(Path(folder), accept)
        if state is not None:
            self.step_number = state["step"]
            self.num_samples = state["samples"]
            self._skipped.num_in_a_row = state["skipped_in_a_row"]
            self._best = Best(*state["best"]) if state.get("best") else None
            for name, loader in self._loaders.items():
                if (saved := self._saver.tracked.take_loader_state(name)) is not None:
                    loader.load_state_dict(saved)
        self._records.begin(Path(folder), self.step_number)
        self._last_step_end_s = time.perf_counter()
        return self.step_number

    def save(self, *, wait: bool = False) -> SaveHandle:
        """Write a checkpoint of this step, unless there is one; collective.

        A save that the disk refuses is logged and does not raise, unless it waits or is the last of
        `max_failed_saves` in a row. Earlier checkpoints are kept.

        Args:
            wait: return only once the checkpoint is committed, and raise if that fails.

        Returns:
            A handle with `path` and `wait()`; it can be used as a path.

        Raises:
            PacelineError: PL403 before `resume` was called, PL395 if tracked state differs between ranks,
                PL418 if copies do (of an asynchronous save, raised by `wait` or the next save), PL433 after
                `without_communication`, PL545 inside of a step, PL5xx if saving fails.
        """
        self._refuse_saving()
        self._records.flush()  # the file then has all steps that the checkpoint has
        handle = self._saver.save(self._describe_progress(), wait=wait)
        self._records.note_save(handle)
        return handle

    @explain_arguments
    def keep_best(self, value: float | Tensor) -> Best:
        """Save if a value is the lowest so far, and keep the checkpoint of the lowest one; collective.

            best = trainer.keep_best(trainer.evaluate(valid).loss)
            if best.num_since >= 3:
                break  # three evaluations in a row were not better

        Pass `-accuracy` for a value that should rise. The checkpoint stays beside the newest `keep` ones, and
        `paceline checkpoint export --best` finds it. What was best is saved, so a resumed run goes on.

        Args:
            value: the same on every rank, for example of `evaluate`.

        Raises:
            PacelineError: as `save`; PL417 if ranks give different values.
        """
        value = float(value)
        self._refuse_saving()
        if self._mesh is not None:
            check_same_settings({"the value of keep_best": repr(value)}, all_ranks())
        self._best = choose_best(self._best, self.step_number, value)
        if not self._best.num_since:
            self.save()
        return self._best

    def log(self, **values: Any) -> None:
        """Add numbers of rank 0 to the latest step's row in `metrics.jsonl`, and send them to the sinks.

        Args:
            values: numbers or tensors of one, by name.

        Raises:
            PacelineError: PL403 before `resume` was called, PL734 for something else, or a name that the row
                has already.
        """
        self._records.log(values)

    def _begin_step(self, share: Share) -> None:
        """Check everything that ranks must have alike before a step, and count it."""
        self._source = share.source
        updates = self._updates.values()
        for each in updates:
            each.as_built.check()
        self._settings.begin(
            (id(share.source), [len(u.gradient_hooks) for u in updates], self._saver.tracked.own_names),
            tuple((read_hyperparameters(u.optimizer), u.as_built.changes) for u in updates),
            share,
        )
        self.step_number += 1
        if self._islands is not None:
            self._islands.begin_step(self.step_number)

    def _end_step(
        self,
        share: Share,
        done: dict[str, Updated],
        *,
        lr: float,
        comm_s: float,
        values: Mapping[str, float] | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> Step:
        """Move the data's position behind a step, and record it."""
        if self._islands is not None:
            is_last = self._count_steps() == self.step_number
            found = self._islands.end_step(self.step_number, self._requests.signum, is_last=is_last)
            values = {**(values or {}), **self._take_exchanged(found)}
        update_averages(self.averages, done)
        if share.source is not None:
            share.source.mark_consumed(share)  # only now, so that a checkpoint skips no unused samples
        self.num_samples += share.num_samples
        now_s = time.perf_counter()
        step = Step(
            number=self.step_number,
            epoch=share.epoch,
            num_samples=share.num_samples,
            lr=lr,
            updates=done,
            step_s=now_s - self._last_step_end_s,
            data_s=self._data_s,
            comm_s=comm_s,
            metrics=dict(metrics or {}),
        )
        self._last_step_end_s, self._data_s = now_s, 0.0
        self._last_loss = step.loss
        times = self._saver.end_step()
        self._records.write_step(
            *(step, self.num_samples, self._updates.values(), times),
            {**(values or {}), **step.metrics},
            self._count_steps(),
        )
        self._skipped.count(step)
        return step

    def _note_stop(self, signum: int) -> None:
        """Note the signal on which ranks have agreed; islands agree only when they exchange."""
        if self._islands is None or not self._islands.is_split:
            self._stop_signum = self._stop_signum or signum

    def _take_exchanged(self, found: Exchanged | None) -> dict[str, float]:
        """Return what the metrics get of an exchange with other islands, if there was one."""
        if found is None:
            return {}
        self._stop_signum = self._stop_signum or found.stop_signum
        return {"islands_loss": found.loss}

    def synchronize(self) -> None:
        """Average the islands now, although their period has not ended; collective. See `islands=`.

        Call it after the last step of a run whose length the trainer does not know. Without islands, or after
        an exchange, it does nothing.
        """
        if self._islands is not None and self._islands.num_apart:
            self._take_exchanged(self._islands.exchange(self.step_number, self._requests.signum))

    def _count_steps(self) -> int | None:
        """Return the number of steps of the run, if its loader counts epochs of known length."""
        source = self._source
        if source is None or source.epochs is None or source.num_samples is None or source.is_own:
            return None
        return source.epochs * len(source)

    def _evaluate(
        self,
        loader: TrainerLoader[Any],
        forward: Callable[[Any, Any], Any],
        loss: Callable[[Any, Any], Any],
        metrics: Mapping[str, Metric] | None,
    ) -> Evaluation:
        """Compute means over all of a loader's samples, and record them; collective."""
        started_s = time.perf_counter()
        with self._watched_pass():
            result = evaluate(
                self._pass(forward),
                loader,
                loss=loss,
                metrics=dict(metrics or {}),
                global_loss=self._global_loss,
            )
        self._records.write_evaluation(self.step_number, result.values())
        self._last_step_end_s += time.perf_counter() - started_s  # no part of the next step's time
        return result

    @explain_arguments
    def predict(
        self, loader: TrainerLoader[Any], *, forward: Callable[[Any, Any], Any] | None = None
    ) -> Iterator[tuple[Any, Any]]:
        """Yield the model's output for every sample, once and in order, on every rank; collective.

            outputs = torch.cat([output for output, batch in trainer.predict(loader)])

        The model runs in eval mode. Costs the bytes of all outputs and batches on every rank, sent once per
        global batch.

        Args:
            loader: from `loader(..., shuffle=False)`; its position does not change.
            forward: from (model, batch) to the output. Default: that of the trainer.

        Yields:
            (output, batch) of one microbatch after the other, with tensors on the CPU. Every rank must
            iterate to the end.

        Raises:
            Stopped: as `step`.
            PacelineError: PL736 for a loader that shuffles or leaves samples out.
        """
        check_in_order(loader)
        with self._watched_pass():
            yield from predict(self._pass(forward or self._forward), loader)

    def _pass(self, forward: Callable[[Any, Any], Any]) -> Pass:
        seed = derive_seed(self._given.seed, "evaluate")
        runner = self._updates["model"].runner
        ranks = None if self._islands is None else self._islands.ranks
        return Pass(self.model, runner, forward, self._mesh, self._precision, seed, self._requests, ranks)

    @contextmanager
    def _watched_pass(self) -> Iterator[None]:
        """Explain a lack of memory, and leave if some rank was asked to stop."""
        refuse_in_pass("evaluate() or predict()")
        try:
            with self._memory.explained(None), self._whole_islands():
                yield
        except AskedToStopError as asked:
            self.leave(asked.signum)
            raise

    def leave_if_asked(self) -> None:
        """Save and raise `Stopped` if some rank was asked to stop; collective.

        Call it equally often on all ranks in long work of your own between steps, such as a loop over batches
        without a step: one small all-reduce about once a second.
        """
        self.end_step()
        self.leave(self._requests.check_rest(self.step_number, self.world.device, self._mesh))

    def leave(self, signum: int = 0) -> None:
        """Save and raise `Stopped` if ranks have agreed on a signal, now or in the last step; collective.

        Loaders call it before every batch, so the checkpoint has what the loop does after a step, such as an
        average of weights. They do not ask: a rank may leave a loop without steps earlier than others.
        """
        self._stop_signum = self._stop_signum or signum
        refuse_in_pass("another step")
        self.end_step()
        refuse_averaged(self.averages.values())
        self._requests.install()
        if not self._stop_signum:
            return
        saved = None
        if self.run_folder is not None:
            self._refuse_saving()
            self._records.flush()
            saved = str(self._saver.save(self._describe_progress(), wait=True, is_last=True))
        signum, self._stop_signum = self._stop_signum, 0
        raise Stopped(signum, self.step_number, saved)

    def end_step(self) -> None:
        """End the step that a loop of the user's own has open, if any."""

    def close(self) -> None:
        """Close files, restore the signal handlers, and let the world hold this object no longer.

        `World.close` calls it. Call it on all ranks to train another model in the same world: the memory of
        this one is free when nothing else of yours holds it.
        """
        self._forget()
        self._requests.remove()
        for update in self._updates.values():
            update.close()
        self._saver.close()
        self._records.close()
        refuse_mixed(self.world.error, list(self.models.values()))

    def add_data_wait(self, seconds: float) -> None:
        """Add time that the loop waited for data to the next step's metrics."""
        self._data_s += seconds

    def _describe_progress(self) -> dict[str, Any]:
        """Return the counters to save."""
        return {
            "step": self.step_number,
            "samples": self.num_samples,
            "skipped_in_a_row": self._skipped.num_in_a_row,
            "loss": self._last_loss,
            "best": None if self._best is None else list(astuple(self._best)),
        }

    def _describe_settings(self) -> dict[str, str]:
        hooks = {name: (each.optimizer, each.gradient_hooks) for name, each in self._updates.items()}
        found = describe_step_settings(self._saver.tracked.own_names, hooks, self._source)
        changes = {
            f"since the build of {name}": each.as_built.changes for name, each in self._updates.items()
        }
        return found | {what: "; ".join(each) for what, each in changes.items() if each}

    def _refuse_saving(self) -> None:
        refuse_in_pass("save()")
        refuse_averaged(self.averages.values())
        refuse_saving(in_step=self._is_in_step, went_apart=self._went_apart)
