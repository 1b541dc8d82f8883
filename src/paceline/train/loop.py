"""`Loop`: training with the user's own forward, backward and optimizer step, under every layout but pp."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Literal
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from paceline.data.share import Share, count_owned, owned_microbatches, split_microbatches
from paceline.errors import PacelineError
from paceline.parallel.order import Settings
from paceline.parallel.shard.scalars import split_groups
from paceline.recipe import Layout
from paceline.recipe.islands import IslandsSection
from paceline.recipe.schema import DdpSection, ShardSection
from paceline.signatures import explain_arguments
from paceline.sinks.sink import Sink
from paceline.train.arguments import Arguments
from paceline.train.batches import check_same_batch, count_samples, cut_samples
from paceline.train.building import Model, OptimizerFactory, call_model, check_numbers, check_several
from paceline.train.evaluation import Evaluation
from paceline.train.foreign import open_models
from paceline.train.island_ranks import refuse_own_batch
from paceline.train.loaders import TrainerLoader
from paceline.train.own_buffers import FirstPass
from paceline.train.own_optimizers import take_optimizers, unknown_error
from paceline.train.own_step import LoopStep, check_weight, refuse_in_pass
from paceline.train.runners.work import OwnLoop, Work
from paceline.train.same_settings import read_hyperparameters
from paceline.train.several import Several, list_parts
from paceline.train.training import Training
from paceline.train.update import Update, Updated
from paceline.train.whole_metrics import Metric
from paceline.train.whole_steps import WholeSteps, build_whole_steps
from paceline.world import current_world


class Loop(Training[LoopStep]):
    """Models in training by the user's own loop, with the same result on any number of ranks.

        loop = paceline.Loop(model, optimizer, layout="dp_shard=2", microbatch_size=8)
        for step in loop.loader(DataLoader(train, batch_size=64, shuffle=True), epochs=3):
            for batch in step:
                loss = criterion(model(batch["x"]), batch["y"])
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    The outer loop has one step per global batch. The inner loop has this rank's microbatches of it. After
    the inner loop `p.grad` is the gradient of the mean over the global batch, on every rank. What follows is
    plain torch and runs once per step on every rank. The number of microbatches depends on the number of
    ranks, so count in `step.number` and never in the inner loop.

    Collective: construct it on every rank of the current world, with the same arguments, and run the same
    steps on every rank.

    Args:
        models: a module (rank 0's weights are broadcast), or several by name. They are laid out in place.
        optimizers: over their parameters, without state so far: one, a list, or a dict by name. Its groups
            are pointed at the laid-out parameters by full name. Or a function from the list of all (full
            name, parameter) pairs to an optimizer, which `optimizer` then is. `None`: see `parallelize`.
        layout: degrees, see `Trainer`; without pp. Several models: `dp_replicate` only.
        example: a batch of a few samples for `forward`. Required for tp and cp, which trace one forward.
        forward: from (model, batch) to the output, for the example and as the default of `evaluate`. Default:
            as for `Trainer`.
        weight: from a microbatch to the weight of its mean loss, for example
            `lambda batch: (batch["labels"] != -100).sum()`. Default: its samples.
        means: names of values whose means over the global batch `step.mean` collects.
        dtype: of the parameters, `"fp32"` or `"fp64"`. Autocast and scaler belong to the loop.
        on_nonfinite: `"skip"`: if the gradient is not finite, `p.grad` is `None` after the inner loop, so an
            optimizer leaves weights and state alone. `"keep"`: it stays, for a `GradScaler`.
        others: as for `Trainer`.

    Raises:
        PacelineError: PL400 to PL429 for invalid arguments, PL646 for what only `Trainer` can do, PL647 for
            optimizers that cannot be taken over.
    """

    @explain_arguments
    def __init__(
        self,
        models: Model | Mapping[str, Model],
        optimizers: Optimizer | Sequence[Optimizer] | Mapping[str, Optimizer] | OptimizerFactory | None,
        *,
        layout: str | Layout = "",
        example: Any = None,
        forward: Callable[[Any, Any], Any] | None = None,
        weight: Callable[[Any], Any] | None = None,
        means: Sequence[str] = (),
        shard: ShardSection | Mapping[str, Any] | None = None,
        ddp: DdpSection | Mapping[str, Any] | None = None,
        islands: IslandsSection | Mapping[str, Any] | None = None,
        dtype: Literal["fp64", "fp32", "bf16", "fp16"] = "fp32",
        reduction: Literal["fast", "exact"] = "exact",
        microbatch_size: int | None = None,
        seed: int | None = None,
        compile: bool = False,
        on_nonfinite: Literal["skip", "keep"] = "skip",
        ema: float | None = None,
        max_skipped_in_a_row: int = 10,
        keep: int = 3,
        checkpoint_mode: Literal["full", "sharded"] = "full",
        asynchronous_saves: bool = False,
        max_failed_saves: int = 3,
        sinks: str | Sink | Sequence[str | Sink] = (),
        tokens_per_sample: int | None = None,
        peak_flops: float | None = None,
    ) -> None:
        named = dict(locals())  # every argument; must be the first line
        self._step: LoopStep | None = None
        self._optimizer_hooks: tuple[RemovableHandle, ...] = ()
        self._num_split = 0
        self._first_pass: FirstPass | None = None
        self._is_several = isinstance(models, Mapping)
        model = _join_models(models)
        _check_dtype(dtype)
        self._is_layout_alone = optimizers is None
        model.zero_grad()  # laying out replaces parameters, and drops their gradients
        factory = take_optimizers(optimizers, model)
        named |= {
            "model": model,
            "optimizer": factory,
            "seed": current_world().seed if seed is None else seed,
        }
        names = [each.name for each in fields(Arguments)]
        taken: dict[str, Any] = {name: named.get(name, _UNUSED.get(name)) for name in names}
        given = Arguments(**taken)
        self._is_keeping = on_nonfinite == "keep"
        self._weigh = weight
        self.mean_names = tuple(means)
        super().__init__(given, forward or call_model, None, example)
        self.update.num_means = len(self.mean_names)
        self._optimizer_hooks = self._hook_optimizers()

    def _check_layout(self) -> None:
        super()._check_layout()
        layout = self.layout
        if layout.pp > 1:
            raise _trainer_only_error(
                f"layout={str(layout)!r} with paceline.Loop.",
                "In a pipeline no rank has the whole forward, so a loop cannot call backward on its result.",
                "Use paceline.Trainer(forward=, loss=) for pp, or another axis.",
            )
        if self._is_several:
            check_several(layout)
        count = self._given.islands_section.count
        if count > layout.degrees["dp_replicate"]:
            raise PacelineError(
                "PL670",
                saw=f"islands.count={count} with layout {layout} and paceline.Loop.",
                rule="Islands take turns on a rank, and a loop of your own has one optimizer.step() for all.",
                fix=f"Start {count} ranks or more, or use paceline.Trainer.",
            )

    def _lay_out(self, trial: Callable[[nn.Module], Any] | None) -> Settings:
        return replace(super()._lay_out(trial), keeps_gradients=True)

    # Data

    @explain_arguments
    def step(self, num_microbatches: int) -> LoopStep:
        """Return a step of microbatches that the loop makes itself; its inner loop has this rank's numbers.

            for batch_number in loop.step(8):
                x, y = get_batch()     # the random numbers of this microbatch

        Generators are seeded by (seed, step, number), so the samples do not depend on the number of ranks.
        Microbatches count alike; `step.backward(loss, weight=)` weighs them.
        The inputs of the model in the first steps are compared: a `DataLoader` gives the same ones on every
        rank, and belongs into `loader` or `split`.

        Raises:
            PacelineError: PL419 if ranks compute the same samples, PL668 if those of tp or cp do not.
        """
        check_numbers(num_microbatches=(num_microbatches, 1))
        if self._weigh is not None:
            raise PacelineError(
                "PL400",
                saw="loop.step(...) with Loop(weight=).",
                rule="Its microbatches are numbers, of which weight= knows nothing.",
                fix="Leave weight= out, and call step.backward(loss, weight=...).",
            )
        own, num_owned = self._share_out(num_microbatches)
        samples = [range(number, number + 1) for number in own]
        pairs: list[tuple[int, Any]] = [(number, number) for number in own]
        return self.open(
            Share(0, 0, num_microbatches, num_owned, pairs, samples, turns=self.turns), is_numbered=True
        )

    @explain_arguments
    def split(self, batch: Any, microbatch_size: int | None = None) -> LoopStep:
        """Return a step from a batch that every rank has whole; its inner loop has this rank's microbatches.

        Args:
            batch: a nest of tensors with the samples along their first dimension, the same on every rank. The
                first batches are compared.
            microbatch_size: samples per forward. Default: that of the loop, or an eighth of the batch.

        Raises:
            PacelineError: PL668 if ranks bring different samples.
        """
        num_samples = count_samples(batch)
        size = microbatch_size or self.microbatch_size or max(1, num_samples // 8)
        check_numbers(microbatch_size=(size, 1))
        self._num_split += 1
        check_same_batch(batch, self._num_split)
        cuts = split_microbatches(num_samples, size)
        own, num_owned = self._share_out(len(cuts))
        pairs = [(number, cut_samples(batch, *cuts[number])) for number in own]
        self._saver.has_raw_batches = True
        samples = [range(*cuts[number]) for number in own]
        return self.open(Share(0, 0, num_samples, num_owned, pairs, samples, turns=self.turns))

    @explain_arguments
    def own(self, batch: Any, microbatch_size: int | None = None) -> LoopStep:
        """Return a step from samples that only this rank has; its inner loop has microbatches of them.

        The ranks' samples together are the global batch. Costs one small collective.

        Args:
            batch: a nest of tensors with this rank's samples along their first dimension. Ranks may have
                different numbers of samples, or none (empty tensors); those of tp and cp bring the same ones.
            microbatch_size: samples per forward. Default: that of the loop, or all samples of the rank.

        Raises:
            PacelineError: PL419 if ranks bring the same samples, PL668 if those of tp or cp do not.
        """
        refuse_own_batch(self._islands)
        share = self._raw_batches.share(batch, microbatch_size or self.microbatch_size)
        self._saver.has_raw_batches = True
        return self.open(share)

    def _share_out(self, num_microbatches: int) -> tuple[range, tuple[int, ...]]:
        rank, size = (0, 1) if self._dp is None else (self._dp.rank, self._dp.size)
        own = owned_microbatches(num_microbatches, size, rank, self.num_slots, self.turns)
        return own, count_owned(num_microbatches, size, self.num_slots)

    def open(self, share: Share, *, is_numbered: bool = False) -> LoopStep:
        """Return the next step, of a share of a global batch."""
        self.leave()
        self._saver.check_complete()
        self._step = LoopStep(self, share, is_numbered=is_numbered)
        return self._step

    # Between steps

    def end_step(self) -> None:
        """End the step that is open, if any; the next step, `save` and the end of the world do so too.

        Raises:
            PacelineError: PL649 if its inner loop was left early.
        """
        step, self._step = self._step, None
        if step is not None:
            step.close()

    def save(self, *, wait: bool = False) -> Any:
        """Write a checkpoint of the last step, see `Trainer.save`; after the loop's own updates of it."""
        self._refuse_saving()
        self.end_step()
        saved = super().save(wait=wait)
        self._before_write()  # the loop may write to weights at any time
        return saved

    def resume(self, folder: str | Path, *, accept: str | Sequence[str] = ()) -> int:
        if self._is_layout_alone:
            raise PacelineError(
                "PL647",
                saw="resume() of a model that paceline.parallelize has laid out.",
                rule="A checkpoint has the optimizer's state too, and parallelize knows no optimizer.",
                fix="Use paceline.Loop(model, optimizer), or save whole_state() yourself.",
            )
        return super().resume(folder, accept=accept)

    def close(self) -> None:
        step, self._step = self._step, None
        if step is not None:
            step.close(quietly=True)
        for hook in self._optimizer_hooks:
            hook.remove()
        super().close()
        if not self._is_keeping and _NO_INF_CHECKS in str(self.world.error):
            raise PacelineError(
                "PL400",
                saw='a GradScaler found no gradients, with on_nonfinite="skip".',
                rule='With "skip", gradients that are not finite are dropped, and a scaler must see them.',
                fix='Pass Loop(on_nonfinite="keep").',
            ) from self.world.error

    @explain_arguments
    def evaluate(
        self,
        loader: TrainerLoader[Any],
        loss: Callable[[Any, Any], Any],
        metrics: Mapping[str, Metric] | None = None,
        *,
        forward: Callable[[Any, Any], Any] | None = None,
    ) -> Evaluation:
        """Compute the mean loss, and other means, over all of a loader's samples; collective.

        Args:
            loader: from `loader(..., shuffle=False)`; its position does not change.
            loss: from (output, batch) to (sum, weight), or to the mean over the microbatch's samples.
            metrics: by name, the same, or pairs as for `Trainer.evaluate`.
            forward: from (model, batch) to the output. Default: that of the loop. Several models are an
                `nn.ModuleDict` here.
        """
        return self._evaluate(loader, forward or self._forward, loss, metrics)

    def whole_state(self, model: str = "model") -> dict[str, Tensor]:
        """Return a whole model like a plain one's `state_dict`, see `Trainer.whole_state`; collective."""
        self.parameters_of(() if model == "model" else (model,))
        state = super().whole_state()
        if not self._is_several or model == "model":
            return state
        prefix = f"{model}."
        return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}

    # For steps

    def parameters_of(self, names: Collection[str]) -> dict[str, Tensor]:
        """Return the parameters of some models (none: of all) by full name; raise PL404 for another name."""
        named: dict[str, Tensor] = dict(self.models["model"].named_parameters())
        known = dict(self.models["model"].named_children()) if self._is_several else {"model": None}
        for name in names:
            if name not in known:
                raise PacelineError(
                    "PL404",
                    saw=f"the model {name!r} of the models {', '.join(known)}.",
                    rule="A step and whole_state() know models by their names in Loop(models).",
                    fix="Use one of these names.",
                )
        if not self._is_several or not names:
            return named
        return {key: p for key, p in named.items() if key.split(".", 1)[0] in names}

    @property
    def update(self) -> Update:
        """The update of all models."""
        return self._updates["model"]

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer; of several, one whose `step` steps all."""
        return self.update.optimizer

    def begin_pass(self, share: Share, number: int, left_out: Sequence[Tensor], *, is_numbered: bool) -> Work:
        """Begin a pass over a step's microbatches, the first one with the checks of a step."""
        if not number:
            self._begin_step(share)
        own = OwnLoop(
            (lambda _: 1.0) if is_numbered else self.weigh,
            left_out,
            self._is_keeping,
        )
        count, island = 1, 0
        if self._islands is not None:
            count, [island] = self._islands.ranks.section.count, self._islands.ranks.own
            [share] = self._islands.ranks.cut(share)
        return self.update.begin(
            share,
            None,
            step=self.step_number,
            phase=number * count + island,
            stop_signum=self._requests.signum,
            settings=self._settings,
            own=own,
        )

    def compare_inputs(self, counts: Callable[[], bool]) -> AbstractContextManager[None]:
        """Compare the inputs of the models over the ranks, in the first steps; see `RawBatches.drawn`."""
        called = list(self.model.children()) if self._is_several else [self.model]
        # A compiled call would be compiled anew with the hook, and again without it.
        return self._raw_batches.drawn([] if self._given.compile else called, counts)

    def watch_pass(self) -> FirstPass | None:
        """Watch what a pass changes; return what finds the buffers that forwards change, in the first one."""
        self._rates = read_hyperparameters(self.optimizer)
        if self._first_pass is not None:
            self._first_pass.begin_later()
            return None
        dp = None if self._inner_mesh is None else self._inner_mesh.dp
        return FirstPass(self.model, self._statistics, dp)

    def end_pass(self, work: Work, first: FirstPass | None) -> Updated:
        """End a pass; its gradients are in the parameters."""
        if first is not None:
            first.end(work.share)
            self._first_pass = first
        if self._rates != read_hyperparameters(self.optimizer):
            raise PacelineError(
                "PL649",
                saw="the optimizer's settings changed inside of the loop over a step's microbatches "
                "(schedule.step()).",
                rule="How often that loop's body runs depends on the number of ranks.",
                fix="Call it after the inner loop, once per step.",
            )
        if first is None:
            assert self._first_pass is not None
            self._first_pass.end_later(self.step_number)
        done = self.update.finish(work, self.update.runner.waited_s)
        self._note_stop(done.stop_signum)
        return done

    def record(
        self, share: Share, done: Updated, *, lr: float, comm_s: float, values: Mapping[str, float]
    ) -> None:
        """Record a step that has ended."""
        if self._islands is not None:
            self._islands.join_turns([{"model": done}])
        self._end_step(share, {"model": done}, lr=lr, comm_s=comm_s, values=values)

    def weigh(self, batch: Any) -> float:
        """Return the weight of a microbatch's mean loss."""
        if self._weigh is None:
            return float(count_samples(batch))
        return check_weight("weight= returned", self._weigh(batch))

    def _hook_optimizers(self) -> tuple[RemovableHandle, ...]:
        """Make the steps of optimizers over these models see tensors that their kernels can handle."""
        update, stacks = self.update, WeakKeyDictionary[Optimizer, ExitStack]()
        mine = set(map(id, self.model.parameters()))
        whole_steps: WeakKeyDictionary[Optimizer, WholeSteps | None] = WeakKeyDictionary()

        def begin(optimizer: Optimizer, *_: Any) -> None:
            groups = optimizer.param_groups
            if isinstance(optimizer, Several) or not any(id(p) in mine for g in groups for p in g["params"]):
                return
            refuse_in_pass("optimizer.step()")
            if optimizer not in whole_steps:
                whole_steps[optimizer] = update.whole_steps
                if self._is_layout_alone:
                    whole_steps[optimizer] = build_whole_steps(
                        optimizer, self.model, update.placement, self._inner_mesh
                    )
                elif optimizer not in list_parts(update.optimizer) and not any(
                    group is other for group in groups for other in update.optimizer.param_groups
                ):  # one inside of a user's own optimizer shares its groups
                    raise unknown_error(optimizer)
            stack = stacks[optimizer] = ExitStack()
            if (plain := whole_steps[optimizer]) is not None:
                stack.enter_context(plain.plain(optimizer))
            if self.layout.dp_shard > 1:
                stack.enter_context(split_groups(optimizer))

        def end(optimizer: Optimizer, *_: Any) -> None:
            stacks.pop(optimizer, ExitStack()).close()

        return register_optimizer_step_pre_hook(begin), register_optimizer_step_post_hook(end)


@explain_arguments
def parallelize(
    model: nn.Module,
    layout: str | Layout = "",
    *,
    example: Any = None,
    forward: Callable[[Any, Any], Any] | None = None,
    weight: Callable[[Any], Any] | None = None,
    means: Sequence[str] = (),
    shard: ShardSection | Mapping[str, Any] | None = None,
    ddp: DdpSection | Mapping[str, Any] | None = None,
    dtype: Literal["fp64", "fp32", "bf16", "fp16"] = "fp32",
    reduction: Literal["fast", "exact"] = "exact",
    microbatch_size: int | None = None,
    seed: int | None = None,
    compile: bool = False,
    on_nonfinite: Literal["skip", "keep"] = "skip",
) -> Loop:
    """Lay out a model in place, and nothing else: data, optimizer and checkpoints are the caller's.

        laid_out = paceline.parallelize(model, "dp_shard=2 tp=2", example=batch)
        optimizer = torch.optim.AdamW(model.parameters())     # after it: parameters were replaced
        for batch in batches_of_this_rank:
            for part in laid_out.own(batch):
                criterion(model(part["x"]), part["y"]).backward()
            optimizer.step()
            optimizer.zero_grad()

    After the inner loop `p.grad` is the gradient of the mean over the samples of all ranks, on every rank.
    Collective: call it on every rank of the current world, with the same arguments.

    Args:
        model: a module; rank 0's weights are broadcast.
        others: as for `Loop`.

    Returns:
        A `Loop` without an optimizer. Its steps come from `own`, `split`, `step` or `loader`; `resume` and
        `save` are refused (PL647).
    """
    return Loop(optimizers=None, models=model, **{k: v for k, v in locals().items() if k != "model"})


# What a loop does not take, by the names of `Arguments`.
_UNUSED: dict[str, Any] = {"loss_over": "microbatch", "clip_norm": 0.0}
# Part of torch's message for a GradScaler that steps an optimizer without gradients.
_NO_INF_CHECKS = "No inf checks were recorded"


def _join_models(models: Any) -> nn.Module:
    """Return one module of all models; raise PL646 for what cannot be laid out in place."""
    for name, model in models.items() if isinstance(models, Mapping) else [("models", models)]:
        if not isinstance(model, nn.Module):
            raise _trainer_only_error(
                f"{name} is a {type(model).__name__}.",
                "A loop calls its own model, which is laid out in place.",
                "Pass an nn.Module. A factory, for a model larger than one rank's memory, needs Trainer.",
            )
        if open_models(model, False)[1]:
            raise _trainer_only_error(
                f"{name} is compiled by torch.compile.",
                "The model is laid out first, and compiled then.",
                "Pass the model uncompiled, and Loop(compile=True).",
            )
    return nn.ModuleDict(dict(models)) if isinstance(models, Mapping) else models


def _check_dtype(dtype: str) -> None:
    if dtype in ("bf16", "fp16"):
        raise _trainer_only_error(
            f"dtype={dtype!r} with paceline.Loop.",
            "Its context would have to span the loop's own backward and losses.",
            f"Use torch.autocast in the loop{' and a GradScaler' * (dtype == 'fp16')}, or paceline.Trainer.",
        )


def _trainer_only_error(saw: str, rule: str, fix: str) -> PacelineError:
    return PacelineError("PL646", saw=saw, rule=rule, fix=fix)
