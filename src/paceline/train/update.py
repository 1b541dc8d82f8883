"""Runs one optimizer's part of a step, from microbatches to new weights, the same on every layout.

For sums of losses l_j and weights w_j of microbatches j, the gradient is that of

    sum_j l_j / sum_j w_j

over the global batch. It does not depend on the number of ranks, or on the rank that runs a microbatch. The
total weight is known only after the last forward, so backward runs on l_j / unit. The unit is a power of two
near the expected weight: dividing by it is exact in floating point, and keeps fp16 in range. The rest of the
division is part of the one pass over the gradients that clipping needs anyway.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Collection, Container, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.data.share import Share
from paceline.mesh import Mesh
from paceline.parallel.batchnorm import RunningStatistics
from paceline.parallel.compress import Compression
from paceline.parallel.norm import measure_norm
from paceline.parallel.objective import Loss
from paceline.parallel.placement import Placement, local
from paceline.parallel.sums.gradients import explaining_sparse, settle_conjugates
from paceline.recipe.layout import Layout
from paceline.torch_seams.operators import multiply_each
from paceline.train.agreement import NUM_COPIES, Agreed, Agreement, RankMessage
from paceline.train.as_built import AsBuilt
from paceline.train.equal_copies import Copies
from paceline.train.optimizer_state import (
    load_optimizer_state_by_name,
    load_schedule,
    optimizer_state_by_name,
)
from paceline.train.pieces import complete_pieces, join_pieces
from paceline.train.precision import Precision
from paceline.train.runners.runner import Runner
from paceline.train.runners.work import Launch, OwnLoop, Work
from paceline.train.same_settings import StepSettings
from paceline.train.settings import BuiltOptimizer, moves_schedule
from paceline.train.versions import Pushed, Version
from paceline.train.whole_steps import WholeSteps

GradientHook = Callable[[dict[str, Tensor]], None]
# The unit changes only if the total weight differs from it by more than this factor: communication hooks
# with memory (error feedback) need gradients of a steady scale.
_UNIT_SLACK = 8.0
# Part of the message about a loss that is nan for some microbatches only, such as a mean over no targets.
ONE_IS_NAN = " while others are finite"
# As in torch.nn.utils.clip_grad_norm_, so that a loop that used it gives the same numbers here.
CLIP_EPS = 1e-6


@dataclass(frozen=True)
class Updated:
    """The result of one update; everything except the times is the same on every rank.

    Attributes:
        loss: global sum of losses over global sum of weights, before the update.
        weight: that sum of weights.
        grad_norm: global norm of the gradient, before clipping.
        skipped: the reason why the weights were left unchanged, or `None`.
        stop_signum: the signal that some rank received, or 0.
        comm_s: seconds this rank waited for others and for transfers (0 on CUDA, see `Replica.backward`).
        fullest_expert: the share of the choices that the fullest expert got, a mean over the mixtures; `None`
            without mixtures of `paceline.models.moe` and in skipped steps.
        sums: by microbatch, the user's values, each weighted sum and its weight.
    """

    loss: float
    weight: float
    grad_norm: float
    skipped: str | None
    stop_signum: int
    comm_s: float
    fullest_expert: float | None = None
    sums: Tensor | None = field(default=None, repr=False, compare=False)

    def read_means(self, names: Collection[str]) -> dict[str, float]:
        """Return the means of the user's values over the global batch, by name; nan without a weight."""
        columns = [] if self.sums is None else [math.fsum(column) for column in self.sums.T.tolist()]
        pairs = zip(columns[::2], columns[1::2], strict=True)
        return {
            name: total / weight if weight else math.nan
            for name, (total, weight) in zip(names, pairs, strict=True)
        }


class AddsIslands(Protocol):
    """The islands of a run, see `Islands`."""

    is_split: bool

    def add_gradients(
        self, gradients: Sequence[Tensor], has: Sequence[bool], agreed: Agreed
    ) -> Agreed | None:
        """Replace an island's gradients by the sum over all islands; return what these have agreed on."""


class Update:
    """A model with its optimizer.

    Collective: every rank must construct and run it in the same way.

    Args:
        name: of the model, for messages and checkpoints.
        model: on its device.
        placement: the distribution of its parts over the ranks.
        mesh: the ranks, or `None` in a world of one.
        schedule: a learning-rate scheduler stepped once per update, or `None`.
        built: how the optimizer was built.
        is_exact: whether gradients and their norm are summed in an order that does not depend on dp.
        statistics: BatchNorm's running statistics of all models that the loss runs.
        precision: dtype and device.
        clip_norm: global norm to clip to, 0 for none.
        whole_steps: for optimizers that need whole tensors, if the layout divides them.
    """

    def __init__(
        self,
        name: str,
        model: nn.Module,
        runner: Runner,
        placement: Placement,
        mesh: Mesh | None,
        optimizer: torch.optim.Optimizer,
        schedule: torch.optim.lr_scheduler.LRScheduler | None,
        built: BuiltOptimizer,
        *,
        is_exact: bool,
        statistics: RunningStatistics,
        precision: Precision,
        clip_norm: float,
        whole_steps: WholeSteps | None = None,
    ) -> None:
        self.name = name
        self.model = model
        self.optimizer = optimizer
        self.schedule = schedule
        layout = Layout() if mesh is None else mesh.layout
        self.as_built = AsBuilt(
            name,
            model,
            optimizer,
            logs=mesh is None or dist.get_rank() == 0,
            cuts_gradients=layout.dp_shard * layout.tp * layout.cp > 1,
        )
        self.settings = built.describe(schedule) | {"frozen": self.as_built.frozen}
        self._built = built
        self.gradient_hooks: list[GradientHook] = []
        # Called before anything writes to weights or optimizer state, which a save may be copying.
        self.before_write: Callable[[], None] = lambda: None
        # Where the update is that of islands: adds their gradients in the warm-up.
        self.islands: AddsIslands | None = None
        # Of the user's values in each microbatch, see `Updated.sums`.
        self.num_means = 0
        self.runner = runner
        self.placement = placement
        self._mesh = mesh
        self._is_exact = is_exact
        self._statistics = statistics
        self._precision = precision
        self._clip_norm = clip_norm
        self._scaler = runner.scaler
        self._unit: float | None = None
        self._named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
        self._updated = [(n, p) for n, p in self._named if id(p) in mine]
        self.whole_steps = whole_steps
        # Frozen since the build.
        self._frozen: list[Tensor] = []
        self._copies = Copies(name, model, optimizer, placement, mesh)

    @property
    def lr(self) -> float:
        """Learning rate of the first parameter group, for the next update."""
        return float(self.optimizer.param_groups[0]["lr"])

    @property
    def compression(self) -> Compression | None:
        """The compression of the gradients on this rank, or `None`."""
        return self.runner.compression

    @property
    def updated(self) -> list[tuple[str, nn.Parameter]]:
        """The parameters that the optimizer updates, by name."""
        return self._updated

    @property
    def trained(self) -> list[nn.Parameter]:
        """The parameters that get a gradient, as built."""
        return [p for _, p in self._named]

    @property
    def not_updated(self) -> list[str]:
        """Names of parameters that require a gradient and that the optimizer does not have."""
        updated = {name for name, _ in self._updated}
        return [name for name, _ in self._named if name not in updated]

    def run(self, objective: Loss, share: Share, **settings: Any) -> Updated:
        """Run one update from a global batch; collective.

        Args:
            objective: forward and loss.
            share, settings: as for `begin`.
        """
        work = self.begin(share, objective, **settings)
        try:
            with explaining_sparse():
                return self.finish(work, self.runner.run(work))
        finally:
            self.end()

    def copy_version(self) -> Version:
        """Return a copy of what a gradient depends on: the weights and the unit of losses."""
        return [p.detach().clone() for _, p in self._named], self._unit

    @contextmanager
    def as_of(self, past: Version) -> Iterator[None]:
        """Have an earlier version's weights in the model inside of the context."""
        now = self.copy_version()
        self._write_weights(past[0])
        self._unit = past[1]
        try:
            yield
        finally:
            self._write_weights(now[0])
            self._unit = now[1] or self._unit

    @torch.no_grad()
    def _write_weights(self, weights: list[Tensor]) -> None:
        self.before_write()
        for (_, parameter), value in zip(self._named, weights, strict=True):
            parameter.copy_(value)

    def compute(self, objective: Loss, share: Share, *, step: int, settings: StepSettings) -> Pushed:
        """Compute the gradients of a whole global batch on this rank alone, for `apply` on every rank.

        Args:
            objective, share, step, settings: as for `run`.
        """
        with self.runner.silenced(), explaining_sparse():
            work = self.begin(share, objective, step=step, phase=0, stop_signum=0, settings=settings)
            try:
                self.runner.run(work)
            finally:
                self.end()
        self._statistics.restore()
        gradients = [None if p.grad is None else p.grad.detach() for _, p in self._named]
        return Pushed(work.unit, work.launch.agreement.sent, gradients)

    def apply(self, pushed: Pushed, share: Share, *, step: int, settings: StepSettings) -> Updated:
        """Update the weights by what some rank has computed from a share, which has no samples here."""
        with self.runner.silenced():
            work = self.begin(share, None, step=step, phase=0, stop_signum=0, settings=settings)
            try:
                self._statistics.begin(share.num_owned)
                work.launch.agreement.sent.copy_(pushed.agreement)
                for (_, parameter), gradient in zip(self._named, pushed.gradients, strict=True):
                    parameter.grad = gradient
                return self.finish(replace(work, unit=pushed.unit), 0.0)
            finally:
                self.end()

    def begin(
        self,
        share: Share,
        objective: Loss | None,
        *,
        step: int,
        phase: int,
        stop_signum: int,
        settings: StepSettings,
        count_flops: bool = False,
        own: OwnLoop | None = None,
    ) -> Work:
        """Return the work for the runner; `finish` and `end` follow.

        Args:
            objective: forward and loss; `None` if the caller computes them.
            step: number of the optimizer step, from 1.
            phase: number of this update within the step.
            stop_signum: the signal that this rank received, or 0.
            settings: the settings to compare over the ranks.
            count_flops: whether to count the floating-point operations of the first microbatch.
            own: what a loop of the user's own adds.
        """
        self._frozen = [p for _, p in self._named if not p.requires_grad]
        for _, parameter in self._named:  # including those that the optimizer does not have
            parameter.grad = None
            # The sums over ranks were built with all of them; `finish` drops the gradients of frozen ones.
            parameter.requires_grad_(True)
        runner, is_talking = self.runner, self.runner.is_talking
        agreement = Agreement(
            share.num_microbatches,
            self._statistics.num_values + 2 * self.num_means,
            len(self._named) if runner.used is not None else 0,
            self._precision.device,
            self._mesh.group if self._mesh is not None and is_talking else None,
        )
        if self._unit is None:
            self._unit = _power_of_two(share.num_samples)
        # The signature is that of the previous step: this step's is complete only after its last backward.
        copies = self._copies.digest(step) if is_talking else (0,) * NUM_COPIES
        message = RankMessage(stop_signum, step, runner.signature, settings.digest, copies)
        if self.compression is not None:
            loss_scale = 1.0 if self._scaler is None else 1.0 / self._scaler.scale_of_gradients()
            self.compression.factor = self._unit / loss_scale
        launch = Launch(agreement, message, settings, runner.used)
        return Work(objective, share, step, phase, self._unit, launch, count_flops, own, self.num_means)

    def end(self) -> None:
        """Freeze again what was frozen before `begin`."""
        for frozen in self._frozen:
            frozen.requires_grad_(False)

    @property
    def copies(self) -> Copies:
        """The check of what ranks hold copies of."""
        return self._copies

    def silenced(self) -> AbstractContextManager[None]:
        """Return a context in which `run` computes this rank's share and communicates nothing."""
        self._copies.give_up()
        return self.runner.silenced()

    def state_dict(self) -> dict[str, Any]:
        """Return schedule, scaler, unit and counted operations; `optimizer_state` returns the optimizer's."""
        return {
            "schedule": None if self.schedule is None else self.schedule.state_dict(),
            "scaler": None if self._scaler is None else self._scaler.state_dict(),
            "unit": self._unit,
            # Counting runs other kernels (a fused RMSNorm is decomposed). A resumed run that counted again
            # would not have the same bits as one that was never stopped.
            "flops_per_sample": self.runner.flops_per_sample,
            "frozen": [name for name, p in self._named if not p.requires_grad],
        }

    def load(
        self, optimizer_state: Any, state: dict[str, Any], *, step: int, changed: Collection[str]
    ) -> None:
        """Load the results of `optimizer_state` and `state_dict`, each rank its part.

        Args:
            step: number of the last step taken.
            changed: names in `settings` that keep their values as built.
        """
        saved_schedule = state["schedule"]
        moves = moves_schedule(changed)
        num_steps = step if saved_schedule is None else saved_schedule.get("last_epoch", step)
        advanced = self._built.advance(self.schedule if moves else None, num_steps)
        self.load_optimizer_state(optimizer_state, is_same="frozen" not in changed)
        for name, parameter in self._named:
            parameter.requires_grad_(name not in state.get("frozen", ()))
        self._built.take(advanced, changed)
        self.load_progress(state | ({"schedule": None} if moves else {}))

    def load_progress(self, state: dict[str, Any]) -> None:
        """Load schedule, scaler, unit and counted operations of `state_dict`."""
        if self.schedule is not None and state["schedule"] is not None:
            load_schedule(self.schedule, state["schedule"])
        if self._scaler is not None and state["scaler"] is not None:
            self._scaler.load_state_dict(state["scaler"])
        self._unit = state["unit"]
        self.runner.flops_per_sample = state["flops_per_sample"]

    def close(self) -> None:
        """Release the runner's resources."""
        self.runner.close()

    def optimizer_pieces(self) -> Any:
        """Return the optimizer's state by parameter name, with this rank's pieces of divided tensors.

        Collective over pp, where each rank has the state of its own stages.
        """
        found = optimizer_state_by_name(self.optimizer, self.model.named_parameters(), self.placement)
        return found if self._mesh is None else complete_pieces(found, self.placement, self._mesh.pp)

    def optimizer_state(self, *, keep: bool = True) -> Any:
        """Return the optimizer's state by parameter name, as whole tensors; collective.

        Args:
            keep: whether this rank wants the tensors.
        """
        return join_pieces(self.optimizer_pieces(), self.placement, keep=keep)

    def load_optimizer_state(self, state: Any, *, is_same: bool = True) -> None:
        """Load the result of `optimizer_state`, each rank its part.

        Args:
            is_same: whether it must have the same parameters; else others begin without state.
        """
        self.before_write()
        named = self.model.named_parameters()
        load_optimizer_state_by_name(self.optimizer, named, state, self.placement, is_same=is_same)

    def finish(self, work: Work, comm_s: float) -> Updated:
        """Agree on loss, weight and finiteness; then scale, clip and apply the gradients, or skip them.

        In a loop of the user's own the gradients are scaled, and the rest is up to the loop.
        """
        assert self._unit is not None
        agreement, own, started_s = work.launch.agreement, work.own, time.perf_counter()
        settle_conjugates(p for _, p in self._named)
        self.placement.add_up_partial({name: p.grad for name, p in self._named})
        self._drop_frozen(work)
        gradients = [local(p.grad) for _, p in self._updated if p.grad is not None]
        norm_tensor = self.measure_norm()
        compute_s = time.perf_counter() - started_s
        agreed, norm = agreement.wait(norm_tensor)
        work.launch.settings.check(agreed.settings)
        self._copies.check(agreed.copies)
        if self._precision.device.type != "cuda":  # on CUDA the wait includes this rank's own kernels
            comm_s += time.perf_counter() - started_s - compute_s
        if agreed.used is not None:
            self._drop_unused(agreed.used)
        elif agreed.all_leave_out:
            self._drop_unused(self.runner.agree_on_used())
        if self.islands is not None and not self.islands.is_split:
            gradients = [local(p.grad) for _, p in self._updated if p.grad is not None]
            has = [p.grad is not None for _, p in self._updated]
            joined = self.islands.add_gradients(gradients, has, agreed)
            if joined is None:  # another island follows, and the model is updated once
                self._statistics.restore()
                return Updated(math.nan, 0.0, math.nan, None, 0, comm_s)
            agreed, norm = joined, float(self.measure_norm())
        weight = math.fsum(agreed.weights)
        loss = math.fsum(agreed.losses) / weight if weight and _all_finite(agreed.losses) else math.nan
        scale = work.unit / weight if weight else 0.0
        if self._scaler is not None:
            scale *= self._scaler.scale_of_gradients()
        norm *= scale
        skipped = self._find_reason_to_skip([] if own is not None else agreed.losses, weight, norm)
        if own is not None and not weight:
            skipped = f"{skipped}; microbatches without a backward in the inner loop do not count"
        if own is not None and own.keeps_nonfinite and weight:
            skipped = None
        if skipped is None and self.gradient_hooks:
            after = self._run_hooks(gradients, scale)
            scale = 1.0
            if not math.isfinite(after):
                skipped = f"after the hooks of on_gradients, {self._name_broken()} is not finite"
        else:
            after = norm
        num_statistics = self._statistics.num_values
        if skipped is None:
            self._statistics.merge(agreed.statistics[:, :num_statistics])
            if own is None:
                self._apply(gradients, scale, after)
            elif scale != 1.0 and gradients:
                multiply_each(gradients, scale)
        else:
            self._statistics.restore()
            for _, parameter in self._named if own is not None else ():
                parameter.grad = None  # optimizers leave such parameters and their state alone
        if self._scaler is not None:
            self._scaler.update(found_finite=math.isfinite(norm))
        if weight and not 1 / _UNIT_SLACK < weight / self._unit < _UNIT_SLACK:
            self._unit = _power_of_two(weight)
        if self.schedule is not None:
            self._step_schedule(was_skipped=skipped is not None)
        if self.compression is not None:
            self.compression.residuals.settle(keep=skipped is None)
        fullest = self._statistics.choices.fullest if skipped is None else None
        return Updated(
            *(loss, weight, norm, skipped, agreed.stop_signum, comm_s, fullest),
            sums=agreed.statistics[:, num_statistics:],
        )

    def _drop_frozen(self, work: Work) -> None:
        for unwanted in (*self._frozen, *(() if work.own is None else work.own.left_out)):
            unwanted.grad = None

    def measure_norm(self, only: Container[str] | None = None) -> Tensor:
        """Return the global norm of the gradients as they are, of all parameters or those with some names."""
        named = [(name, p) for name, p in self._updated if only is None or name in only]
        return measure_norm(
            [(name, p.grad) for name, p in named],
            [p for _, p in named],
            self.placement,
            self._mesh,
            exact=self._is_exact,
        )

    def _find_reason_to_skip(self, losses: list[float], weight: float, norm: float) -> str | None:
        """Return the reason to leave the weights unchanged, or `None`; the same on every rank."""
        bad = [number for number, loss in enumerate(losses) if not math.isfinite(loss)]
        if bad:
            value, num_losses = losses[bad[0]], len(losses)
            alone = len(bad) < num_losses and all(math.isnan(losses[number]) for number in bad)
            return f"the loss of microbatch {bad[0]} of {num_losses} is {value}" + (
                ONE_IS_NAN if alone else ""
            )
        if weight <= 0 or not math.isfinite(weight):
            return f"the global batch has a total weight of {weight:g}"
        return None if math.isfinite(norm) else f"{self._name_broken()} is not finite"

    def _name_broken(self) -> str:
        """Name the first gradient that is not finite; collective where the model is divided."""
        broken = torch.tensor(
            [p.grad is not None and not bool(local(p.grad).isfinite().all()) for _, p in self._named],
            dtype=torch.int32,
            device=self._precision.device,
        )
        if self.placement.is_divided:
            assert self._mesh is not None
            dist.all_reduce(broken, group=self._mesh.model.group)
        names = [name for (name, _), is_broken in zip(self._named, broken.tolist(), strict=True) if is_broken]
        return f"the gradient of {names[0] if names else 'the global norm'}"

    def _run_hooks(self, gradients: list[Tensor], scale: float) -> float:
        """Scale the gradients and call the user's hooks on them; return their norm."""
        self.before_write()
        multiply_each(gradients, scale)
        for hook in self.gradient_hooks:
            hook({name: p.grad for name, p in self._updated if p.grad is not None})
        return float(self.measure_norm())

    def _apply(self, gradients: list[Tensor], scale: float, norm: float) -> None:
        self.before_write()
        if self._clip_norm:
            scale *= min(1.0, self._clip_norm / (norm + CLIP_EPS))
        if scale != 1.0:
            multiply_each(gradients, scale)
        with nullcontext() if self.whole_steps is None else self.whole_steps.plain(self.optimizer):
            self.runner.step(self.optimizer)

    def _step_schedule(self, *, was_skipped: bool) -> None:
        """Step the schedule, also after a skipped step: the rate depends on the step's number."""
        assert self.schedule is not None
        if not was_skipped:
            self.schedule.step()
            return
        with warnings.catch_warnings():  # torch warns if a schedule is stepped before its optimizer
            warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
            self.schedule.step()

    def _drop_unused(self, used: list[bool]) -> None:
        """Remove gradients of parameters that no rank used: as in one process, they get no weight decay."""
        for (_, parameter), is_used in zip(self._named, used, strict=True):
            if not is_used:
                parameter.grad = None
        self.runner.forget_used()


def _all_finite(values: list[float]) -> bool:
    return all(map(math.isfinite, values))


def _power_of_two(value: float) -> float:
    return 2.0 ** round(math.log2(value)) if value > 0 else 1.0
