"""The trainer: a model, its optimizer and a layout; one call per optimizer step."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset

from paceline.data.check import check_data, warn_of_oversized_batch
from paceline.data.loader import Loader, Position
from paceline.data.share import Share
from paceline.errors import PacelineError
from paceline.finding import Finding
from paceline.generators import preserved_generators
from paceline.mesh import build_mesh
from paceline.parallel.batchnorm import RunningStatistics
from paceline.parallel.objective import Loss, Objective
from paceline.parallel.order import Settings, align_with_main
from paceline.parallel.replicate import CommHook
from paceline.parallel.tensor.trace import cut_batch
from paceline.recipe import Layout
from paceline.recipe.explain import validate_section
from paceline.recipe.schema import DdpSection, ShardSection
from paceline.seeds import derive_seed
from paceline.train.batches import RawBatches, weigh
from paceline.train.building import (
    Model,
    OptimizerFactory,
    ScheduleFactory,
    UpdateModel,
    UpdateSettings,
    build_model,
    build_update,
    call_model,
    check_functions,
    check_loss_over,
    check_numbers,
    check_reduction,
    check_several,
    complete_model,
    refuse_illegal,
    sync_batchnorm_error,
)
from paceline.train.evaluation import Evaluation, Metric, evaluate
from paceline.train.global_loss import GlobalLoss
from paceline.train.memory import explain_out_of_memory
from paceline.train.metrics import MetricsWriter, describe_step, find_peak_flops
from paceline.train.precision import Precision
from paceline.train.probe import Probe, explain_single_sample
from paceline.train.same_settings import (
    StepSettings,
    check_same_settings,
    describe_code,
    describe_data,
    describe_model,
    describe_optimizer,
    read_hyperparameters,
)
from paceline.train.settings import describe_function, name_settings
from paceline.train.state.saver import Saver
from paceline.train.step import Step
from paceline.train.stopping import Stopped, StopRequests
from paceline.train.update import ONE_IS_NAN, GradientHook, Updated
from paceline.world import current_world

log = logging.getLogger(__name__)

# Microbatches per global batch where the user names no microbatch size. A fixed number, because a
# size that followed the number of ranks would make dropout and BatchNorm depend on it.
_DEFAULT_NUM_MICROBATCHES = 8


class Trainer:
    """Trains a model the same way on any number of ranks.

    Collective: construct it on every rank of the current world, with the same arguments, and call
    `step`, `evaluate`, `save` and `resume` on every rank.

    Args:
        model: a module, whose weights of rank 0 are the truth; or a function that builds one (seeded
            alike on every rank); or a dict of these by name, for training with several models.
        optimizer: from the list of all (full name, parameter) to an optimizer; for named models a
            dict of such functions (a model without one is never updated, a teacher for example).
        forward: from (model, batch) to the output. Default: `model(**batch)` for a dict, `model(*batch)`
            for a tuple, else `model(batch)`. One model only.
        loss: from (output, batch) to (sum of losses, weight), or to a scalar, which counts as the
            mean over the microbatch's samples. One model only, needed there.
        step: for named models: `step(update)` calls `update(name, loss)` once or more, with
            `loss(models, batch)` giving what `loss` above gives. Each call is one optimizer step of
            that model on this global batch.
        layout: degrees, for example `"dp_replicate=2 dp_shard=2 tp=2"`. Default: all ranks replicate.
        example: a batch of a few samples, as `step` will get them; needed for tp, which reads off one forward
            how the model can be split.
        tp_plan: by pattern of a module's name, `"colwise"`, `"rowwise"` or `"replicate"`; the rest is found
            by itself.
        shard: settings of the sharding, as the recipe's `[shard]`.
        schedule: from an optimizer to a learning-rate scheduler, stepped after every step.
        dtype: `"fp64"`, `"fp32"`, `"bf16"` or `"fp16"`, see `Precision`.
        reduction: how gradients are summed over microbatches and ranks. `"exact"`: in an order that doesn't
            depend on the number of ranks, so that the weights have the same bits on any number of them. It
            computes with one CPU thread per rank unless `start(threads_per_rank=...)` says another number,
            because that changes bits too. `"fast"`: by accumulation and the library's all-reduce; needed
            for `comm_hook` and `sync_batchnorm`.
        microbatch_size: samples per forward. Part of the result (dropout and BatchNorm see
            microbatches), so it never follows from the number of ranks. Default: an eighth of the
            global batch.
        loss_over: what the loss is computed on. `"microbatch"`: on each microbatch, and added up.
            `"global_batch"`: once, on the outputs of all samples, for losses that compare samples
            (contrastive ones). The gradients are then those of the whole batch, at the price of a second
            forward.
        clip_norm: global gradient norm to clip to; 0 for none.
        seed: of the order of samples and of the randomness inside forwards. Default: that of
            `paceline.start`.
        ddp: settings of DistributedDataParallel, as the recipe's `[ddp]`.
        comm_hook: a `(state, hook)` for gradients, as for DDP's `register_comm_hook`; it must average.
        sync_batchnorm: statistics over all ranks; CUDA, and one microbatch per rank.
        compile: `torch.compile` the models.
        max_skipped_in_a_row: steps in a row with a non-finite loss or gradient before giving up.
        keep: checkpoints to keep.
        checkpoint_mode: `"full"`: rank 0 writes whole tensors; `"sharded"`: every rank writes its share, into
            a folder that all ranks must see. Either loads under any layout.
        tensorboard: write event files into the run's folder.
        tokens_per_sample: for tokens/s in the metrics.
        peak_flops: of one rank's device, for MFU. Default: known for common GPUs.
        recipe_toml: a text that says what the run is, kept in its checkpoints.

    Raises:
        PacelineError: PL400 to PL429, for arguments that can't work.
    """

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
        tp_plan: Mapping[str, str] | None = None,
        shard: ShardSection | Mapping[str, Any] | None = None,
        schedule: ScheduleFactory | None = None,
        dtype: str = "fp32",
        reduction: str = "exact",
        microbatch_size: int | None = None,
        loss_over: Literal["microbatch", "global_batch"] = "microbatch",
        clip_norm: float = 0.0,
        seed: int | None = None,
        ddp: DdpSection | Mapping[str, Any] | None = None,
        comm_hook: tuple[Any, CommHook] | None = None,
        sync_batchnorm: bool = False,
        compile: bool = False,
        max_skipped_in_a_row: int = 10,
        keep: int = 3,
        checkpoint_mode: Literal["full", "sharded"] = "full",
        tensorboard: bool = False,
        tokens_per_sample: int | None = None,
        peak_flops: float | None = None,
        recipe_toml: str | None = None,
    ) -> None:
        self.world = current_world()
        seed = self.world.seed if seed is None else seed
        check_numbers(
            clip_norm=(clip_norm, 0),
            seed=(seed, 0),
            max_skipped_in_a_row=(max_skipped_in_a_row, 1),
            keep=(keep, 1),
            microbatch_size=(microbatch_size, 1),
            tokens_per_sample=(tokens_per_sample, 1),
            peak_flops=(peak_flops, 1),
        )
        layout = Layout.parse(layout) if isinstance(layout, str) else layout
        self.layout = layout.resolve(self.world.world_size)
        self.microbatch_size = microbatch_size
        self.step_number = 0
        self.num_samples = 0
        self._seed = seed
        self._precision = Precision(dtype, self.world.device)
        self._sync_batchnorm = sync_batchnorm
        self._user_step = step
        self._forward = forward or call_model
        self._loss = loss
        self._max_skipped_in_a_row = max_skipped_in_a_row
        self._num_skipped_in_a_row = 0
        self._last_loss = math.nan
        self._tokens_per_sample = tokens_per_sample
        self._tensorboard = tensorboard
        names = dict(model) if isinstance(model, Mapping) else None
        check_functions(names, step, forward, loss, optimizer)
        check_loss_over(loss_over, has_step=step is not None, sync_batchnorm=sync_batchnorm)
        check_reduction(reduction, has_comm_hook=comm_hook is not None, sync_batchnorm=sync_batchnorm)
        if reduction == "exact":
            self.world.pin_threads(1)
        if names is not None:
            check_several(self.layout)
        built = {
            name: build_model(name, model, self._precision, seed)
            for name, model in (names or {"model": model}).items()  # type: ignore[dict-item]
        }
        self.models = {name: each.model for name, each in built.items()}
        if self.world.world_size > 1:
            given = {
                "layout": str(self.layout),
                "dtype": dtype,
                "reduction": reduction,
                "microbatch_size": str(microbatch_size),
                "clip_norm": str(clip_norm),
                "seed": str(seed),
                "sync_batchnorm": str(sync_batchnorm),
                "compile": str(compile),
                "max_skipped_in_a_row": str(max_skipped_in_a_row),
                "ddp": str(ddp),
                "shard": str(shard),
                "tp_plan": str(tp_plan),
                "forward": describe_code(forward),
                "loss": describe_code(loss),
                "loss_over": loss_over,
                "step": describe_code(step),
                "schedule": describe_code(schedule),
                "comm_hook": describe_code(comm_hook and comm_hook[1]),
                "recipe": str(recipe_toml),
            }
            for name, each in built.items():
                given |= describe_model(name, each.model)
            check_same_settings(given, _all_ranks())
        self._mesh = build_mesh(self.layout, self.world) if self.world.world_size > 1 else None
        self._statistics = RunningStatistics(self.models.values())
        factories = dict(optimizer) if isinstance(optimizer, Mapping) else {"model": optimizer}
        settings = UpdateSettings(
            mesh=self._mesh,
            precision=self._precision,
            statistics=self._statistics,
            laying_out=Settings(
                self.layout,
                ddp=ddp if isinstance(ddp, DdpSection) else validate_section("ddp", DdpSection, ddp or {}),
                shard=shard
                if isinstance(shard, ShardSection)
                else validate_section("shard", ShardSection, shard or {}),
                exact=reduction == "exact",
                comm_hook=comm_hook,
                sync_batchnorm=sync_batchnorm,
                compile=compile,
                example=None if example is None else lambda model: self._try_forward(model, example),
                tp_plan=tp_plan,
            ),
            schedule=schedule,
            clip_norm=clip_norm,
            seed=seed,
        )
        for each in built.values():
            refuse_illegal(each, settings.laying_out, self._precision, self.world.world_size)
        self._updates = {
            name: build_update(name, built[name], factory, settings) for name, factory in factories.items()
        }
        for name in self.models.keys() - self._updates.keys():
            complete_model(built[name], self.world.device)
            if self._mesh is not None:
                align_with_main(self.models[name])
        peak = peak_flops or find_peak_flops(self.world.device, dtype)
        self._peak_flops = peak * self.world.world_size if peak else None
        self._saver = Saver(
            self.world,
            keep=keep,
            mode=checkpoint_mode,
            layout=self.layout,
            reduction=reduction,
            recipe_toml=recipe_toml,
            bucket_cap_mb=settings.laying_out.ddp.bucket_cap_mb,
            settings={
                "clip_norm": clip_norm,
                "dtype": dtype,
                "microbatch_size": microbatch_size,
                "seed": seed,
                "sync_batchnorm": sync_batchnorm,
                "loss_over": loss_over,
                "comm_hook": None if comm_hook is None else describe_function(comm_hook[1]),
                **{
                    name_settings(name, self._updates, key): value
                    for name, update in self._updates.items()
                    for key, value in update.settings.items()
                },
            },
        )
        self._dp = self._mesh.dp if self._mesh is not None else None
        self._global_loss: GlobalLoss | None = None
        if loss_over == "global_batch":
            assert loss is not None
            self._global_loss = GlobalLoss(self.model, self._forward, loss, self._mesh, self._precision)
        self._probed: set[str] = set()
        self._loaders: dict[str, Loader] = {}
        self._source: Loader | None = None
        self._settings = StepSettings(_all_ranks() if self._mesh else None, self._describe_settings)
        self._raw_batches = RawBatches(self._dp)
        self._requests = StopRequests()
        self._stop_signum = 0
        self._went_apart = False
        self._writer: MetricsWriter | None = None
        self._metrics_from: int | None = None
        self._last_step_end_s = time.perf_counter()
        self._data_s = 0.0
        self.world.on_close(self.close)

    @property
    def model(self) -> nn.Module:
        """The plain module, with the trained weights, usable on its own. One model only."""
        if len(self.models) > 1:
            raise PacelineError(
                "PL402",
                saw=f"trainer.model with {len(self.models)} models.",
                rule="`model` is the only one.",
                fix=f"Use trainer.models[name] with one of {', '.join(self.models)}.",
            )
        return next(iter(self.models.values()))

    @property
    def run_folder(self) -> Path | None:
        """The folder given to `resume`, or `None`."""
        return self._saver.folder

    def loader(
        self,
        dataset: Dataset[Any] | Any,
        *,
        global_batch_size: int,
        shuffle: bool | None = None,
        epochs: int | None = None,
        drop_last: bool = False,
        num_workers: int = 0,
        prefetch: int = 2,
        pin_memory: bool | None = None,
        collate: Callable[[Sequence[Any]], Any] | None = None,
        name: str | None = None,
    ) -> Loader:
        """A loader of global batches, of which each rank gets its share; see `paceline.data.Loader`.

        Its position is part of the checkpoints, under `name` (default: by order of creation, which
        must be the same in the start that resumes).
        """
        size = self.microbatch_size or max(1, global_batch_size // _DEFAULT_NUM_MICROBATCHES)
        if self._sync_batchnorm and global_batch_size != size * self.world.world_size:
            raise sync_batchnorm_error(global_batch_size, size, self.world.world_size)
        name = name or f"loader{len(self._loaders)}"
        check_data(dataset, name)
        loader = _TrainerLoader(
            self,
            dataset,
            global_batch_size=global_batch_size,
            microbatch_size=size,
            rank=0 if self._dp is None else self._dp.rank,
            world_size=1 if self._dp is None else self._dp.size,
            seed=self._seed,
            shuffle=shuffle,
            drop_last=drop_last,
            epochs=epochs,
            num_workers=num_workers,
            prefetch=prefetch,
            pin_memory=self.world.device.type == "cuda" if pin_memory is None else pin_memory,
            collate=collate,
            name=name,
        )
        self._loaders[name] = loader
        if shuffle is not False and self.world.is_main:
            warn_of_oversized_batch(loader)
        state = self._saver.tracked.take_loader_state(name)
        if state is not None:
            self._saver.check_loader(loader)
            loader.load_state_dict(state)
        return loader

    def track(self, **objects: Any) -> None:
        """Adds objects with `state_dict` and `load_state_dict` to the checkpoints, by name.

        After `resume` their saved state is loaded at once. Their state must be the same on every
        rank; rank 0's is what is saved.
        """
        self._saver.tracked.add(objects)

    def resume(self, folder: str | Path, *, accept: Sequence[str] = ()) -> int:
        """Goes on from the newest valid checkpoint of a run's folder; nothing there: starts fresh.

        From here on the folder is where `save` writes and where `metrics.jsonl` grows. Collective.

        The settings that the result depends on must be those that the checkpoint was trained with: batch
        sizes, dtype, clipping, seed, the options of optimizer and schedule as they were built, the data, the
        tracked objects. Ranks and layout may change.

        Args:
            folder: of the run.
            accept: settings that may differ, by the names that PL515 lists, as `["optimizer.lr"]`; a part
                before a dot stands for all that begin with it. The run goes on with the new values. With
                another learning rate or schedule it takes the rates of the new schedule at this step.

        Returns:
            The number of steps already taken.

        Raises:
            PacelineError: PL500 to PL531 where checkpoints are there and none can be used; PL515 for other
                settings, here or where a loader is made later, or in the first step; PL318 and PL319
                where nodes without a shared disk hold different checkpoints.
        """
        accept = [accept] if isinstance(accept, str) else accept
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        state = self._saver.load(Path(folder), self.models, self._updates, self._loaders, accept)
        if state is not None:
            self.step_number = state["step"]
            self.num_samples = state["samples"]
            self._num_skipped_in_a_row = state["skipped_in_a_row"]
            for name, loader in self._loaders.items():
                saved = self._saver.tracked.take_loader_state(name)
                if saved is not None:
                    loader.load_state_dict(saved)
        self._metrics_from = self.step_number
        self._last_step_end_s = time.perf_counter()
        return self.step_number

    def save(self) -> Path:
        """Writes a checkpoint of this step, unless there is one; collective.

        Returns:
            The checkpoint's folder.

        Raises:
            PacelineError: PL403 before `resume` named a folder, PL418 where copies on ranks differ, PL433
                after `without_communication`, PL5xx where writing fails; earlier checkpoints are kept.
        """
        if self._went_apart:
            raise PacelineError(
                "PL433",
                saw="save() after steps without communication.",
                rule="Each rank's weights went their own way, so there is no state of the run to save.",
                fix="Measure with a trainer of its own, and train with another.",
            )
        for update in self._updates.values():
            update.check_copies()
        if self._writer is not None:
            self._writer.flush()  # the file then has all steps that the checkpoint has
        return self._saver.save(
            self.models,
            self._updates,
            {
                "step": self.step_number,
                "samples": self.num_samples,
                "skipped_in_a_row": self._num_skipped_in_a_row,
                "loss": self._last_loss,
            },
            # One that has not moved, as those for evaluation, has nothing to go on from.
            {name: x for name, x in self._loaders.items() if x.position != Position()},
        )

    def step(self, batch: Share | Any) -> Step:
        """One optimizer step on a global batch; collective.

        Args:
            batch: what a loader of this trainer gave; or any nest of tensors with this rank's samples
                along their first dimension (ranks may have different numbers, also none: empty
                tensors), which costs one small collective more.

        Raises:
            Stopped: some rank was asked to stop; all have saved and leave together.
            PacelineError: PL417 to PL419 where ranks differ in settings or weights, or have the same samples;
                PL431 after too many skipped steps in a row, PL432 out of memory.
        """
        self._requests.install()
        self.leave_if_asked()
        self._saver.check_complete()
        if isinstance(batch, Share):
            share = batch
        else:
            share = self._raw_batches.share(batch, self.world.device, self.microbatch_size)
            self._saver.has_raw_batches = True
        if self._sync_batchnorm and share.num_microbatches != self.world.world_size:
            raise sync_batchnorm_error(
                share.num_samples, self.microbatch_size or share.num_samples, self.world.world_size
            )
        self._source = share.source
        updates = self._updates.values()
        self._settings.begin(
            (id(share.source), [len(u.gradient_hooks) for u in updates], self._saver.tracked.own_names),
            tuple(read_hyperparameters(u.optimizer) for u in updates),
        )
        self.step_number += 1
        lr = next(iter(self._updates.values())).lr
        done: dict[str, Updated] = {}
        comm_s = 0.0

        def run(name: str, objective: Loss) -> Updated:
            nonlocal comm_s
            updated = self._run_update(name, objective, share, phase=len(phases))
            phases.append(name)
            done[name] = updated
            comm_s += updated.comm_s
            self._stop_signum = self._stop_signum or updated.stop_signum
            return updated

        def update(name: str, loss: Callable[[Any, Any], Any]) -> Updated:
            return run(name, Objective(lambda batch: loss(self.models, batch), weigh, has_output=False))

        phases: list[str] = []
        with (
            preserved_generators(self.world.device),
            explain_out_of_memory(share, self.world),
            explain_single_sample(share),
        ):
            if self._user_step is None:
                run("model", self._objective())
            else:
                self._user_step(update)
        if not done:
            raise PacelineError(
                "PL406",
                saw="step= returned without an update.",
                rule="A step updates at least one model.",
                fix="Call update(name, loss) in it.",
            )
        if share.source is not None:
            share.source.mark_consumed(share)
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
        )
        self._last_step_end_s, self._data_s = now_s, 0.0
        self._last_loss = step.loss
        self._record(step)
        self._count_skipped(step)
        return step

    def find_random_draws(self, batch: Share) -> list[Finding]:
        """Random draws of the model's forward that change with the layout or with the microbatches' size.

        Dropout that `Trainer` draws itself, by sample, is none. Runs the loss of the batch's first
        microbatch once and leaves everything as it was; in a world of one process.

        Args:
            batch: what a loader of this trainer gave.

        Returns:
            PL450 to PL453, by module and operation.
        """
        self._require_loss()
        with preserved_generators(self.world.device):
            return self._updates["model"].runner.find_random(self._objective(), batch)

    def evaluate(self, loader: Loader, metrics: Mapping[str, Metric] | None = None) -> Evaluation:
        """Mean loss, and other means, over all of a loader's samples; collective. One model only.

        Args:
            loader: from `loader(..., shuffle=False)`; its position doesn't move.
            metrics: by name, from (output, batch) to (sum, weight), as `loss`.
        """
        self._require_loss()
        started_s = time.perf_counter()
        with preserved_generators(self.world.device), explain_out_of_memory(None, self.world):
            result = evaluate(
                self.model,
                self._updates["model"].runner,
                loader,
                forward=self._forward,
                loss=self._loss,  # type: ignore[arg-type]
                metrics=dict(metrics or {}),
                mesh=self._mesh,
                precision=self._precision,
                seed=derive_seed(self._seed, "evaluate"),
                global_loss=self._global_loss,
            )
        writer = self._open_writer()
        if writer is not None:
            writer.write_evaluation(self.step_number, result.values())
        self._last_step_end_s += time.perf_counter() - started_s  # no part of the next step's time
        return result

    def whole(self, name: str, tensor: Tensor, model: str = "model") -> Tensor:
        """A whole tensor, from what this rank has of it; collective.

        Args:
            name: of the parameter or buffer that it is or belongs to.
            tensor: that one, its gradient (as hooks get it) or a piece of its optimizer state.
            model: which one, where there are several.
        """
        if model in self._updates:
            return self._updates[model].placement.whole(name, tensor)
        return tensor

    def whole_state(self, model: str = "model") -> dict[str, Tensor]:
        """The whole model as a plain one's `state_dict`, with all of its buffers; collective.

        Returns:
            On rank 0 all parameters and buffers by full name, on the CPU; elsewhere an empty dict.
        """
        module, found = self.models[model], {}
        named = [
            *module.named_parameters(remove_duplicate=False),
            *module.named_buffers(remove_duplicate=False),
        ]
        for name, tensor in named:
            whole = self.whole(name, tensor.detach(), model)
            if self.world.is_main:
                found[name] = whole.to("cpu", copy=True)
        return found

    def gather_into(self, plain: nn.Module, model: str = "model") -> None:
        """Puts the trained weights into a plain module of the same kind, on rank 0; collective.

        Args:
            plain: as the model was before it was laid out; on ranks other than 0 it isn't touched.
            model: which one, where there are several.
        """
        state = self.whole_state(model)
        if self.world.is_main:
            persistent = plain.state_dict().keys()
            plain.load_state_dict({name: state[name] for name in persistent})

    def count_parameters(self, model: str = "model") -> int:
        """The number of a model's parameters, trained and frozen, whatever the layout."""
        named = self.models[model].named_parameters()
        if model not in self._updates:
            return sum(p.numel() for _, p in named)
        placement = self._updates[model].placement
        return sum(math.prod(placement.whole_shape(name, p)) for name, p in named)

    def on_gradients(self, hook: GradientHook, model: str = "model") -> None:
        """Calls `hook({name: gradient})` in every step after reduction, before clipping.

        The gradients are those of the mean loss over the global batch; the hook may change them in
        place, alike on every rank. Where the layout divides the model they are what this rank has; `whole`
        gives all of one.
        """
        if model not in self._updates:
            raise PacelineError(
                "PL404",
                saw=f"on_gradients(..., model={model!r}), but only {', '.join(self._updates)} have an "
                "optimizer.",
                rule="Gradients are those of a model that is updated.",
                fix="Use one of these names.",
            )
        self._updates[model].gradient_hooks.append(hook)

    @contextmanager
    def without_communication(self) -> Iterator[None]:
        """Steps inside compute this rank's share and nothing else: to time what communication costs.

        The ranks' weights go apart, so the trainer is good for measuring only; `save` refuses from here on.
        `SyncBatchNorm`, whose exchange is a part of the forward, still communicates.
        """
        self._went_apart = True
        with ExitStack() as stack:
            for update in self._updates.values():
                stack.enter_context(update.silenced())
            yield

    def leave_if_asked(self) -> None:
        """Saves and raises `Stopped` if the last step told that some rank was asked to stop; collective.

        Loaders call it before every batch, so that whatever the loop does after a step (an average of
        weights, a log line) belongs to the checkpoint.
        """
        if not self._stop_signum:
            return
        saved = str(self.save()) if self.run_folder is not None else None
        signum, self._stop_signum = self._stop_signum, 0
        raise Stopped(signum, self.step_number, saved)

    def close(self) -> None:
        """Closes files and gives signals back; `World.close` calls it."""
        self._requests.remove()
        for update in self._updates.values():
            update.close()
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def add_data_wait(self, seconds: float) -> None:
        """Counts time that the loop waited for data as such in the next step's metrics."""
        self._data_s += seconds

    def _describe_settings(self) -> dict[str, str]:
        """What may change between steps and is the same on all ranks, by name."""
        found = {"tracked": ", ".join(self._saver.tracked.own_names)}
        for name, update in self._updates.items():
            found |= describe_optimizer(name, update.optimizer)
            found[f"on_gradients of {name}"] = ", ".join(map(describe_code, update.gradient_hooks))
        return found | (describe_data(self._source) if self._source is not None else {})

    def _require_loss(self) -> None:
        if self._loss is None:
            raise PacelineError(
                "PL405",
                saw="the trainer has no loss=.",
                rule="What is asked for takes the loss of one model.",
                fix="Pass loss=lambda output, batch: (sum_of_losses, weight) to Trainer.",
            )

    def _try_forward(self, model: nn.Module, batch: Any) -> Any:
        with self._precision.autocast():
            return self._forward(model, self._precision.place_batch(cut_batch(batch)))

    def _objective(self) -> Loss:
        """Forward and loss of the only model."""
        model, forward, loss = self.models["model"], self._forward, self._loss
        assert loss is not None
        return Objective(
            lambda batch: forward(model, batch), lambda output, batch: weigh(loss(output, batch), batch)
        )

    def _run_update(self, name: str, objective: Loss, share: Share, *, phase: int) -> Updated:
        if name not in self._updates:
            raise PacelineError(
                "PL404",
                saw=f"update({name!r}, ...), but only {', '.join(self._updates)} have an optimizer.",
                rule="An update changes a model through its optimizer.",
                fix="Use one of these names.",
            )
        # Gradients of this phase belong to one model; the others are a fixed part of its loss.
        others = [m for other, m in self.models.items() if other != name]
        frozen = [p for model in others for p in model.parameters() if p.requires_grad]
        for parameter in frozen:
            parameter.requires_grad_(False)
        runner = self._updates[name].runner
        try:
            if name not in self._probed:
                self._probed.add(name)
                self._probe(name, objective, share)
            if self._global_loss is not None:
                objective, share = self._global_loss.prepare(
                    runner, share, step=self.step_number, phase=phase
                )
            return self._updates[name].run(
                objective,
                share,
                step=self.step_number,
                phase=phase,
                stop_signum=self._requests.signum,
                settings=self._settings,
                # On all ranks that see these samples: counting may change the last bits of a gradient.
                count_flops=runner.flops_per_sample is None and (self._dp is None or self._dp.rank == 0),
            )
        finally:
            for parameter in frozen:
                parameter.requires_grad_(True)

    def _probe(self, name: str, objective: Loss, share: Share) -> None:
        """Before the first update of a start: what the cut into microbatches does to it; collective."""
        update = self._updates[name]
        is_divided = update.placement.is_divided
        models, mesh = list(self.models.values()), self._mesh
        probe = Probe(models, update.runner, mesh, is_divided=is_divided, dtype=self._precision.name)
        run = objective if self._global_loss is None else self._global_loss.run
        self._statistics.keep(probe.find_buffers(run, share), self._dp)
        if self.microbatch_size is not None or share.source is None or share.num_microbatches == 1:
            return  # chosen by the user, or nothing is cut
        probe.tell_batchnorm(share)
        if self._global_loss is None:
            probe.check_cut(objective, share)

    def _record(self, step: Step) -> None:
        writer = self._open_writer()
        if writer is None:
            return
        flops = [update.runner.flops_per_sample for update in self._updates.values()]
        writer.write(
            describe_step(
                step,
                samples=self.num_samples,
                tokens_per_sample=self._tokens_per_sample,
                flops_per_sample=sum(f for f in flops if f) or None,
                peak_flops=self._peak_flops,
                memory_bytes=writer.measure_memory(self.world.device),
            )
        )

    def _open_writer(self) -> MetricsWriter | None:
        if self._writer is None and self._metrics_from is not None and self.world.is_main:
            assert self.run_folder is not None
            self._writer = MetricsWriter(
                self.run_folder, last_step=self._metrics_from, tensorboard=self._tensorboard
            )
            self._metrics_from = None
        return self._writer

    def _count_skipped(self, step: Step) -> None:
        if step.skipped is None:
            self._num_skipped_in_a_row = 0
            return
        self._num_skipped_in_a_row += 1
        log.warning("step %d skipped: %s", step.number, step.skipped)
        if self._num_skipped_in_a_row >= self._max_skipped_in_a_row:
            raise PacelineError(
                "PL431",
                saw=f"{self._num_skipped_in_a_row} steps in a row were skipped, the last one "
                f"(step {step.number}) because {step.skipped}.",
                rule="A step whose loss or gradient is not finite on any rank leaves the weights alone on "
                f"all; {self._max_skipped_in_a_row} in a row is the limit (max_skipped_in_a_row).",
                fix="Lower the learning rate, add warm-up, look at the data of that microbatch; "
                "the last checkpoint is from before."
                + (
                    " If the loss is a mean over targets, a microbatch without targets has 0/0: return "
                    "(sum of losses, number of targets) instead."
                    if ONE_IS_NAN in step.skipped
                    else ""
                ),
            )


def _all_ranks() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


class _TrainerLoader(Loader):
    """A loader that tells its trainer how long it was waited for, and leaves when asked to stop."""

    def __init__(self, trainer: Trainer, dataset: Any, **settings: Any) -> None:
        super().__init__(dataset, **settings)
        self._trainer = trainer

    def __iter__(self) -> Iterator[Share]:
        shares = super().__iter__()
        while True:
            self._trainer._requests.install()
            self._trainer.leave_if_asked()
            started_s = time.perf_counter()
            share = next(shares, None)
            self._trainer.add_data_wait(time.perf_counter() - started_s)
            if share is None:
                return
            yield share
