"""Trains a model with its optimizer under a layout, with one call per optimizer step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import partial
from typing import Any, Literal

from torch import Tensor

from paceline.data.share import Share
from paceline.finding import Finding
from paceline.generators import preserved_generators
from paceline.parallel.objective import Loss, Objective
from paceline.recipe import Layout
from paceline.recipe.islands import IslandsSection
from paceline.recipe.schema import CompressSection, DdpSection, ShardSection
from paceline.signatures import explain_arguments
from paceline.sinks.sink import Sink
from paceline.train.arguments import Arguments, missing_loss_error
from paceline.train.asynchronous import (
    UpdateRow,
    Workers,
    find_oldest,
    pack,
    refusal,
    refuse_asynchronous,
    unpack,
)
from paceline.train.batches import weigh
from paceline.train.building import (
    Model,
    OptimizerFactory,
    ScheduleFactory,
    UpdateModel,
    call_model,
)
from paceline.train.cut_probe import explain_single_sample
from paceline.train.evaluation import Evaluation
from paceline.train.foreign import open_models
from paceline.train.island_ranks import refuse_own_batch
from paceline.train.loaders import TrainerLoader
from paceline.train.phases import Phases
from paceline.train.step import Step
from paceline.train.training import Training
from paceline.train.update import Updated
from paceline.train.versions import Pushed
from paceline.train.whole_metrics import Metric, measure_means, split_metrics, stack_numbers
from paceline.world import current_world


class Trainer(Training[Share]):
    """A model in training, with the same result on any number of ranks.

    Collective: construct it on every rank of the current world, with the same arguments, and call
    `step`, `evaluate`, `save` and `resume` on every rank.

    Args:
        model: an `nn.Module` (rank 0's weights are broadcast; modes are kept), or a factory (rank 0's model
            is sent to all ranks in parts), or a dict of these by name, for training with several models.
        optimizer: a function from the list of all (full name, parameter) pairs to an optimizer, or to a list
            of several that share out the parameters. For named models, a dict of such functions; a model
            without one is never updated, for example a teacher.
        forward: from (model, batch) to the output. Default: `model(**batch)` for a dict, `model(*batch)`
            for a tuple, else `model(batch)`. One model only.
        loss: from (output, batch) to (sum of losses, weight), or to a scalar, which counts as the
            mean over the microbatch's samples. Required for one model; not allowed for named models.
        step: for named models: `step(update)` calls `update(name, loss)` at least once. That
            `loss(models, batch)` returns the same as `loss` above. Each call is one optimizer step of
            that model on this global batch.
        layout: degrees, for example `"dp_replicate=2 dp_shard=2 tp=2"`. One of `dp_replicate` and `dp_shard`
            may be `auto`, which follows from the number of ranks. Default: all ranks replicate.
        example: a batch of a few samples, of the form that `step` gets. Required for tp, which traces one
            forward to find how the model can be split.
        shard: settings of the sharding, as the recipe's `[shard]`.
        schedule: from an optimizer to a learning-rate scheduler, stepped after every step.
        dtype: `"fp64"`, `"fp32"`, `"bf16"` or `"fp16"`, see `Precision`.
        reduction: how gradients are summed over microbatches and ranks. `"exact"` adds them in an order that
            does not depend on the number of ranks, so the weights have the same bits on any number of them.
            It uses one CPU thread per rank unless `start(threads_per_rank=...)` sets another number, because
            the thread count changes bits too. `"fast"` uses accumulation and the library's all-reduce.
        microbatch_size: samples per forward. It affects the result, because dropout and BatchNorm see
            microbatches, so it never depends on the number of ranks. Default: an eighth of the global batch.
        loss_over: `"microbatch"` computes the loss on each microbatch and adds up the results.
            `"global_batch"` computes it once, on the outputs of all samples, for losses that compare samples
            (contrastive ones). The gradients are then those of the whole batch. This costs a second forward.
        metrics: by name, functions from (output, batch) to (sum, weight), as `loss`. `step.metrics` and
            metrics.jsonl have their means over the global batch, and `evaluate` computes them too.
        clip_norm: global gradient norm to clip to; 0 for none.
        seed: for the order of samples and the random numbers inside forwards. Default: the seed of
            `paceline.start`.
        ddp, compress, islands: as the recipe's sections of these names, for example `islands={"count": 2}`.
        compile: `torch.compile` the models.
        ema: decay of an average of the weights, updated after every step that is not skipped, and saved. See
            `average`. For named models, a number for all of them or a dict.
        max_skipped_in_a_row: steps in a row with a non-finite loss or gradient before giving up.
        keep: checkpoints to keep.
        checkpoint_mode: `"full"`: rank 0 writes whole tensors; `"sharded"`: every rank writes its share.
            Either loads under any layout.
        asynchronous_saves: write checkpoints while training goes on, from a copy of what each rank writes.
        max_failed_saves: saves in a row that the disk may refuse before PL508 ends the run.
        sinks: what gets the metrics beside `metrics.jsonl`: names (`"csv"`, `"tensorboard"`, `"wandb"`,
            `"mlflow"`, `"progress"`, or of the entry points `paceline.sinks`) or objects of subclasses of
            `paceline.Sink`.
        tokens_per_sample: for tokens/s in the metrics.
        peak_flops: of one rank's device, for MFU. Default: known for common GPUs.
        recipe_toml: the run's recipe as text, kept in its checkpoints.

    Raises:
        PacelineError: PL400 to PL429, for invalid arguments.
    """

    @explain_arguments
    def __init__(
        self,
        model: Model | Mapping[str, Model],
        *,
        optimizer: OptimizerFactory | Mapping[str, OptimizerFactory],
        forward: Callable[[Any, Any], Any] | None = None,
        loss: Callable[[Any, Any], Any] | None = None,
        step: Callable[[UpdateModel], None] | None = None,
        layout: str | Layout = "",
        example: Any = None,
        shard: ShardSection | Mapping[str, Any] | None = None,
        schedule: ScheduleFactory | None = None,
        dtype: Literal["fp64", "fp32", "bf16", "fp16"] = "fp32",
        reduction: Literal["fast", "exact"] = "exact",
        microbatch_size: int | None = None,
        loss_over: Literal["microbatch", "global_batch"] = "microbatch",
        metrics: Mapping[str, Callable[[Any, Any], Any]] | None = None,
        clip_norm: float = 0.0,
        seed: int | None = None,
        ddp: DdpSection | Mapping[str, Any] | None = None,
        compress: CompressSection | Mapping[str, Any] | None = None,
        islands: IslandsSection | Mapping[str, Any] | None = None,
        compile: bool = False,
        ema: float | Mapping[str, float] | None = None,
        max_skipped_in_a_row: int = 10,
        keep: int = 3,
        checkpoint_mode: Literal["full", "sharded"] = "full",
        asynchronous_saves: bool = False,
        max_failed_saves: int = 3,
        sinks: str | Sink | Sequence[str | Sink] = (),
        tokens_per_sample: int | None = None,
        peak_flops: float | None = None,
        recipe_toml: str | None = None,
    ) -> None:
        named = dict(locals())  # every argument; must be the first line
        world = current_world()
        named["seed"] = world.seed if seed is None else seed
        named["model"], named["compile"] = open_models(model, compile)
        given = Arguments(**{each.name: named[each.name] for each in fields(Arguments)})
        given.check_functions()
        self._means, _ = split_metrics(given.metrics or {})
        super().__init__(given, forward or call_model, loss, example)
        for update in self._updates.values():
            update.num_means = len(self._means)
        self._is_apart = False
        self._phases = Phases(
            self.models,
            self._updates,
            self._inner_mesh,
            self._statistics,
            self._precision,
            global_loss=self._global_loss,
            microbatch_size=given.microbatch_size,
        )

    def step(self, batch: Share | Any) -> Step:
        """Run one optimizer step on a global batch; collective.

        Args:
            batch: a batch from a loader of this trainer, or any nest of tensors with this rank's samples
                along their first dimension. Such a nest costs one more small collective. Ranks may then have
                different numbers of samples, or none (empty tensors).

        Raises:
            Stopped: if some rank was asked to stop; all ranks have saved and leave together.
            PacelineError: PL390 to PL393 for a change since the build that is not followed, or a loss or hook
                that cannot be summed; PL417 to PL419 if ranks differ or have the same samples;
                PL431 after too many skipped steps in a row, PL432 if memory runs out.
        """
        # At the begin: its checkpoint has what the loop did after the last step.
        self.leave()
        self._saver.check_complete()
        if isinstance(batch, Share):
            share = batch
        else:
            refuse_own_batch(self._islands)
            share = self._raw_batches.share(batch, self.microbatch_size)
            self._saver.has_raw_batches = True
        self._begin_step(share)
        lr = next(iter(self._updates.values())).lr  # before the update moves the schedule
        comm_s = 0.0

        def update(name: str, loss: Callable[[Any, Any], Any]) -> Updated:
            objective = Objective(lambda batch: loss(self.models, batch), weigh, has_output=False)
            return self._phases.run(name, objective)

        with (
            preserved_generators(self.world.device),  # microbatches seed them; the user's draws go on
            self._memory.explained(share),
            explain_single_sample(share),
        ):
            turns: list[dict[str, Updated]] = []
            for island, part in [(0, share)] if self._islands is None else self._islands.take_turns(share):
                with self._phases.running(part, self.step_number, self._requests, self._settings, island):
                    if self._given.step is None:
                        self._phases.run("model", self._objective())
                    else:
                        self._given.step(update)
                turns.append(self._phases.end())
                comm_s += self._phases.comm_s
        done = turns[0] if self._islands is None else self._islands.join_turns(turns)
        self._note_stop(self._phases.stop_signum)
        return self._end_step(share, done, lr=lr, comm_s=comm_s, metrics=self._read_means(done))

    def step_asynchronously(
        self, loader: TrainerLoader[Share], num_steps: int, *, staleness: int
    ) -> Iterator[Step]:
        """Yield optimizer steps that ranks take without waiting for each other; collective.

            for step in trainer.step_asynchronously(loader, 50, staleness=8):
                print(step.number, step.loss)
            trainer.save()

        Each rank computes whole global batches alone, on weights that may lack up to `staleness` updates of
        others. The result depends on the ranks' speed. Every rank applies all updates in the same order, so
        it gets every step, and must iterate to the end. Then no gradient is under way, and ranks can save and
        evaluate. The order is written to `updates.jsonl` of the run's folder, see `replay_updates`.

        Args:
            loader: of this trainer, over a data set with an index.
            num_steps: steps to take; fewer if the loader's `epochs` end before.
            staleness: the most updates between the weights of a gradient and those that it is applied to.

        Raises:
            Stopped: as `step`.
            PacelineError: PL677 for settings that do not go with it, PL679 if a rank does not push.
        """
        refuse_asynchronous(self._given, self.layout, loader, self.world, staleness)
        if not (num_steps := loader.count_left(num_steps)):
            return
        compute = self._begin_updates(loader)
        place = {"first_step": self.step_number, "first_batch": loader.place}
        workers = Workers(self.world, staleness, num_steps=num_steps, **place)
        updates = workers.run(lambda batch: pack(compute(batch)), lambda: self._requests.signum)
        trained = self._updates["model"].trained
        yield from self._apply(loader, ((row, unpack(message, trained)) for row, message in updates))
        self._note_stop(workers.stop_signum)
        self.leave()

    def replay_updates(self, loader: TrainerLoader[Share], updates: Sequence[UpdateRow]) -> Iterator[Step]:
        """Yield the steps of a record again, with the same bits on any number of ranks; collective.

        Every rank computes all gradients, so more ranks take no less time.

        Args:
            loader: as it was in the recorded run.
            updates: of the record, from the next step on.

        Raises:
            PacelineError: PL678 if they do not follow on this trainer's steps.
        """
        refuse_asynchronous(self._given, self.layout, loader, self.world, staleness=1)
        oldest = find_oldest(updates, step=self.step_number, batch=loader.place)
        compute, update = self._begin_updates(loader), self._updates["model"]

        def replay() -> Iterator[tuple[UpdateRow, Pushed]]:
            past = {self.step_number: update.copy_version()}
            for row, first in zip(updates, oldest, strict=True):
                past = {version: weights for version, weights in past.items() if version >= first}
                with update.as_of(past[row.version]):
                    pushed = compute(row.batch)
                yield row, pushed
                past[row.step] = update.copy_version()

        yield from self._apply(loader, replay())

    def _begin_updates(self, loader: TrainerLoader[Share]) -> Callable[[int], Pushed]:
        """Check what ranks must have alike; return what computes the gradient of a batch alone."""
        self.leave()
        self._saver.check_complete()
        objective, first = self._objective(), next(iter(loader))
        self._phases.probe("model", objective, first)
        if self._statistics.keeps_some:
            raise refusal("a model whose forward changes buffers", "Ranks would change them apart.")

        def compute(batch: int) -> Pushed:
            share = loader.take_whole(batch, self.world.rank, reads=True)
            with preserved_generators(self.world.device), self._memory.explained(share):
                settings = self._settings
                return self._updates["model"].compute(objective, share, step=batch + 1, settings=settings)

        return compute

    def _apply(
        self, loader: TrainerLoader[Share], updates: Iterator[tuple[UpdateRow, Pushed]]
    ) -> Iterator[Step]:
        """Apply updates and record them, one after the other; every rank the same ones."""
        update, self._is_apart = self._updates["model"], True
        for row, pushed in updates:
            share, lr = loader.take_whole(row.batch, 0, reads=False), update.lr
            self._begin_step(share)
            done = update.apply(pushed, share, step=row.batch + 1, settings=self._settings)
            self._records.write_update(row._asdict())
            values = {"worker": row.worker, "staleness": row.staleness}
            found = {"model": done}
            metrics = self._read_means(found)
            yield self._end_step(share, found, lr=lr, comm_s=done.comm_s, values=values, metrics=metrics)
        self._is_apart = False

    def _read_means(self, done: Mapping[str, Updated]) -> dict[str, float]:
        return done["model"].read_means(self._means) if self._means else {}

    def open(self, share: Share) -> Share:
        return share

    @property
    def _is_in_step(self) -> bool:  # type: ignore[override]
        return self._phases.is_running or self._is_apart

    def find_random_draws(self, batch: Share) -> list[Finding]:
        """Find random draws of the model's forward that change with the layout or the microbatches' size.

        Dropout that `Trainer` draws by sample is not one of them. Runs the loss of the batch's first
        microbatch once and restores all state. Only for a world of one process.

        Args:
            batch: a batch from a loader of this trainer.

        Returns:
            Findings PL450 to PL453, by module and operation.
        """
        self._require_loss()
        with preserved_generators(self.world.device):
            return self._updates["model"].runner.find_random(self._objective(), batch)

    @explain_arguments
    def evaluate(
        self, loader: TrainerLoader[Share], metrics: Mapping[str, Metric] | None = None
    ) -> Evaluation:
        """Compute the mean loss, and other means, over all of a loader's samples; collective. One model only.

        Args:
            loader: from `loader(..., shuffle=False)`; its position does not change.
            metrics: further ones by name, from (output, batch) to (sum, weight). Or a pair, for what needs
                all samples at once: a metric of torchmetrics or a function of tensors, and a function from
                (output, batch) to its arguments.

        Raises:
            Stopped: as `step`.
        """
        self._require_loss()
        assert self._loss is not None
        return self._evaluate(loader, self._forward, self._loss, {**self._means, **(metrics or {})})

    def _require_loss(self) -> None:
        if self._loss is None:
            raise missing_loss_error()

    def _objective(self) -> Loss:
        """Return forward and loss of the only model."""
        model, forward, loss = self.models["model"], self._forward, self._loss
        assert loss is not None

        def measure(output: Any, batch: Any) -> Tensor:
            return stack_numbers(measure_means(self._means, output, batch, batch), self.world.device)

        return Objective(
            partial(forward, model),
            lambda output, batch: weigh(loss(output, batch), batch),
            measure=measure if self._means else None,
        )
