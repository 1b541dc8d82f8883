"""One optimizer's share of a step: microbatches in, new weights out, the same on every layout.

For sums of losses l_j and weights w_j of microbatches j, the gradient is that of

    sum_j l_j / sum_j w_j

over the global batch. Which rank runs a microbatch, and how many there are, doesn't enter. The total
weight is known only when the last forward is done, so backward runs on l_j / unit, with a power of
two near the expected weight (exact in floating point, and it keeps fp16 in range); the rest of the
division is folded into the one pass over the gradients that clipping needs anyway.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from torch.utils.flop_counter import FlopCounterMode

from paceline.checkpoint.optimizer import load_optimizer_state_by_name, optimizer_state_by_name
from paceline.data.share import Share
from paceline.errors import PacelineError
from paceline.parallel.batchnorm import RunningStatistics
from paceline.parallel.exact import ExactReduction
from paceline.parallel.replicate import Compute, Replica
from paceline.train.agreement import Agreed, Agreement
from paceline.train.precision import Precision
from paceline.train.rng import derive_seed, seed_generators

GradientHook = Callable[[dict[str, Tensor]], None]
# The unit follows the total weight only when it is off by more than this: communication hooks with
# memory (error feedback) want gradients of a steady scale.
_UNIT_SLACK = 8.0
# As in torch.nn.utils.clip_grad_norm_, so that a loop that used it gives the same numbers here.
_CLIP_EPS = 1e-6


@dataclass(frozen=True)
class Updated:
    """What one update did; the same on every rank, but for the times.

    Attributes:
        loss: global sum of losses over global sum of weights, before the update.
        weight: that sum of weights.
        grad_norm: global norm of the gradient, before clipping.
        skipped: why the weights were left alone, or `None`.
        stop_signum: the signal that some rank got, or 0.
        comm_s: seconds this rank waited for others and for the wire (0 on CUDA, see `Replica.backward`).
    """

    loss: float
    weight: float
    grad_norm: float
    skipped: str | None
    stop_signum: int
    comm_s: float


class Update:
    """A model with its optimizer.

    Collective: every rank must construct and run it alike.

    Args:
        name: of the model, for messages and checkpoints.
        model: on its device; gradients are reduced through `replica`.
        optimizer: over the model's parameters.
        schedule: a learning-rate scheduler stepped once per update, or `None`.
        replica: who reduces the gradients, or `None` in a world of one.
        exact: sums them in an order that doesn't depend on the layout, or `None` for the fast reduction.
        statistics: BatchNorm's running statistics of all models that the loss runs.
        precision: dtype and device.
        clip_norm: global norm to clip to, 0 for none.
        seed: base of the microbatches' seeds.
        track_used: find parameters that no microbatch used, and leave them without a gradient.
    """

    def __init__(
        self,
        name: str,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        schedule: torch.optim.lr_scheduler.LRScheduler | None,
        replica: Replica | None,
        exact: ExactReduction | None,
        *,
        statistics: RunningStatistics,
        precision: Precision,
        clip_norm: float,
        seed: int,
        track_used: bool,
    ) -> None:
        self.name = name
        self.model = model
        self.optimizer = optimizer
        self.schedule = schedule
        self.gradient_hooks: list[GradientHook] = []
        self.flops_per_sample: float | None = None
        self._replica = replica
        self._exact = exact
        self._statistics = statistics
        self._precision = precision
        self._clip_norm = clip_norm
        self._seed = seed
        self._scaler = precision.build_scaler()
        self._unit: float | None = None
        self._named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
        self._updated = [(n, p) for n, p in self._named if id(p) in mine]
        self._used: list[bool] | None = [False] * len(self._named) if track_used else None
        self._watch_use()

    @property
    def lr(self) -> float:
        """Learning rate of the first parameter group, for the next update."""
        return float(self.optimizer.param_groups[0]["lr"])

    @property
    def not_updated(self) -> list[str]:
        """Names of parameters that require a gradient and that the optimizer doesn't have."""
        updated = {name for name, _ in self._updated}
        return [name for name, _ in self._named if name not in updated]

    def run(
        self,
        compute: Compute,
        share: Share,
        *,
        step: int,
        phase: int,
        stop_signum: int,
        count_flops: bool = False,
    ) -> Updated:
        """One update from a global batch; collective.

        Args:
            compute: from a batch on the device to (sum of losses, weight).
            share: this rank's microbatches.
            step: number of the optimizer step, from 1.
            phase: number of this update within the step.
            stop_signum: the signal that this rank got, or 0.
            count_flops: whether to count the floating-point operations of the first microbatch.
        """
        for _, parameter in self._named:  # those that the optimizer leaves alone too
            parameter.grad = None
        talking = None if self._replica is None or self._replica.silent else self._replica
        agreement = Agreement(
            share.num_microbatches,
            self._statistics.num_values,
            len(self._named) if self._used is not None else 0,
            self._precision.device,
            None if talking is None else talking.group,
        )
        if self._unit is None:
            self._unit = _power_of_two(share.num_samples)
        self._statistics.begin()
        if self._exact is not None:
            self._exact.begin(share.num_owned)
        launch = _Launch(agreement, stop_signum, step, self._used)
        comm_s = 0.0
        for number, (index, batch) in enumerate(share.microbatches):
            seed_generators(derive_seed(self._seed, step, phase, index), self._precision.device)
            is_last = number == len(share.microbatches) - 1
            with self._counting_flops(share) if count_flops and number == 0 else nullcontext():
                comm_s += self._run_microbatch(compute, index, batch, agreement, launch if is_last else None)
            if self._exact is not None and (talking is None or not is_last):
                self._exact.set_aside(index)
        if not share.microbatches:
            comm_s += self._run_nothing(launch)
        if talking is not None and self._used is None:
            talking.check_reduced()
        if self._exact is not None:
            self._exact.end(reduced=talking is not None)
        return self._finish(agreement, comm_s)

    def silenced(self) -> AbstractContextManager[None]:
        """Inside, `run` computes this rank's share and communicates nothing, see `Replica.silenced`."""
        return nullcontext() if self._replica is None else self._replica.silenced()

    def state_dict(self) -> dict[str, Any]:
        """Schedule, scaler, unit and counted operations; the optimizer's own state is `optimizer_state`."""
        return {
            "schedule": None if self.schedule is None else self.schedule.state_dict(),
            "scaler": None if self._scaler is None else self._scaler.state_dict(),
            "unit": self._unit,
            # Counting goes with other kernels (a fused RMSNorm comes apart), so a resumed run that counted
            # again would not have the bits of one that was never stopped.
            "flops_per_sample": self.flops_per_sample,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Puts back what `state_dict` gave."""
        if self.schedule is not None and state["schedule"] is not None:
            self.schedule.load_state_dict(state["schedule"])
        if self._scaler is not None and state["scaler"] is not None:
            self._scaler.load_state_dict(state["scaler"])
        self._unit = state["unit"]
        self.flops_per_sample = state["flops_per_sample"]

    def close(self) -> None:
        """Ends what runs beside the training."""
        if self._exact is not None:
            self._exact.close()

    def optimizer_state(self) -> Any:
        """The optimizer's state by parameter name."""
        return optimizer_state_by_name(self.optimizer, self.model.named_parameters())

    def load_optimizer_state(self, state: Any) -> None:
        """Puts back what `optimizer_state` gave."""
        load_optimizer_state_by_name(self.optimizer, self.model.named_parameters(), state)

    def _run_microbatch(
        self, compute: Compute, index: int, batch: Any, agreement: Agreement, launch: _Launch | None
    ) -> float:
        """Forward and backward of one microbatch; the last one carries `launch` and reduces."""
        assert self._unit is not None
        batch = self._precision.place_batch(batch)
        self._statistics.start_microbatch()
        with _synchronising(self._replica, launch is not None):
            with self._precision.autocast():
                loss_sum, weight = (
                    compute(batch) if self._replica is None else self._replica.forward(compute, batch)
                )
            if not loss_sum.requires_grad:
                raise _refuse_constant_loss(self.name, index)
            statistics = self._statistics.read_microbatch() if self._statistics.num_values else None
            agreement.put_microbatch(index, loss_sum, weight, statistics)
            if launch is not None and self._used is None:
                launch.now()
            if self._exact is not None and self._replica is not None and launch is not None and self._used:
                self._exact.fill_missing()
            scaled = loss_sum / self._unit
            if self._scaler is not None:
                scaled = self._scaler.scale(scaled)
            comm_s = _backward(self._replica, scaled)
        if launch is not None and self._used is not None:
            launch.now()
        return comm_s

    def _run_nothing(self, launch: _Launch) -> float:
        """Joins the collectives of a step in which this rank owns no microbatch, in their order."""
        if self._replica is None:
            launch.now()
            return 0.0
        with self._replica.synchronising(True):
            # First, as on the others: DDP has collectives of its own in a forward (buffers, and the new
            # order of the buckets in the second step).
            zero = self._replica.forward_nothing()
            if self._used is None:
                launch.now()
            if self._scaler is not None:
                zero = self._scaler.scale(zero)  # its state comes to life with the first use
            comm_s = self._replica.backward(zero)
        if self._used is not None:
            self._used[:] = [False] * len(self._used)  # zeros are no use of a parameter
            launch.now()
        return comm_s

    @contextmanager
    def _counting_flops(self, share: Share) -> Iterator[None]:
        """Counts operations eagerly: a compiled graph has none that could be counted."""
        with FlopCounterMode(display=False) as counter, torch.compiler.set_stance("force_eager"):
            yield
        num_samples = math.ceil(share.num_samples / share.num_microbatches)
        self.flops_per_sample = counter.get_total_flops() / num_samples

    def _finish(self, agreement: Agreement, comm_s: float) -> Updated:
        """Agrees on loss, weight and finiteness; then scales, clips and applies the gradients."""
        assert self._unit is not None
        started_s = time.perf_counter()
        found = [p.grad for _, p in self._updated]
        gradients = [g for g in found if g is not None]
        if self._scaler is not None and gradients:
            self._scaler.unscale_(self.optimizer)
        norm_tensor = self._measure_norm(found, gradients)
        compute_s = time.perf_counter() - started_s
        agreed, norm = agreement.wait(norm_tensor)
        if self._precision.device.type != "cuda":  # there the wait is for kernels, ours included
            comm_s += time.perf_counter() - started_s - compute_s
        if agreed.used is not None:
            self._drop_unused(agreed.used)
        weight = math.fsum(agreed.weights)
        loss = math.fsum(agreed.losses) / weight if weight and _all_finite(agreed.losses) else math.nan
        scale = self._unit / weight if weight else 0.0
        if self._replica is not None:
            scale *= self._replica.gradient_scale
        norm *= scale
        skipped = _find_reason_to_skip(agreed, weight, norm, self._named)
        if skipped is None:
            if self._statistics.num_values:
                self._statistics.merge(agreed.statistics)
            self._apply(gradients, scale, norm)
        else:
            self._statistics.restore()
        if self._scaler is not None and gradients:
            self._scaler.update()
        if weight and not 1 / _UNIT_SLACK < weight / self._unit < _UNIT_SLACK:
            self._unit = _power_of_two(weight)
        if self.schedule is not None:
            self._step_schedule(was_skipped=skipped is not None)
        return Updated(loss, weight, norm, skipped, agreed.stop_signum, comm_s)

    def _measure_norm(self, gradients: list[Tensor | None], present: list[Tensor]) -> Tensor:
        """The norm of all gradients, those that no microbatch of this rank reached counted as zero.

        Left out, they would make the list of norms shorter than on a rank where DDP has filled them in, and
        a shorter list is added up in another order.
        """
        if not present:
            return torch.zeros((), device=self._precision.device)
        if len(present) == len(gradients):
            return get_total_norm(present)
        norms = iter(torch._foreach_norm(present))
        zero = torch.zeros((), dtype=present[0].dtype, device=present[0].device)
        norm: Tensor = torch.linalg.vector_norm(
            torch.stack([zero if g is None else next(norms) for g in gradients])
        )
        return norm

    def _apply(self, gradients: list[Tensor], scale: float, norm: float) -> None:
        if self.gradient_hooks:
            torch._foreach_mul_(gradients, scale)
            for hook in self.gradient_hooks:
                hook({name: p.grad for name, p in self._updated if p.grad is not None})
            scale, norm = 1.0, float(get_total_norm(gradients))
        if self._clip_norm:
            scale *= min(1.0, self._clip_norm / (norm + _CLIP_EPS))
        if scale != 1.0:
            torch._foreach_mul_(gradients, scale)
        self.optimizer.step()

    def _step_schedule(self, *, was_skipped: bool) -> None:
        """The rate depends on the number of the step, so a skipped step moves it too."""
        assert self.schedule is not None
        if not was_skipped:
            self.schedule.step()
            return
        with warnings.catch_warnings():  # torch takes a schedule ahead of its optimizer for a mistake
            warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
            self.schedule.step()

    def _watch_use(self) -> None:
        if self._used is None:
            return
        for number, (_, parameter) in enumerate(self._named):

            def mark(_parameter: Tensor, number: int = number) -> None:
                assert self._used is not None
                self._used[number] = True

            parameter.register_post_accumulate_grad_hook(mark)  # type: ignore[no-untyped-call]

    def _drop_unused(self, used: list[bool]) -> None:
        """As in one process, a parameter that nobody used has no gradient (and no weight decay)."""
        for (_, parameter), is_used in zip(self._named, used, strict=True):
            if not is_used:
                parameter.grad = None
        self._used = [False] * len(self._named)


@dataclass
class _Launch:
    """Starts the agreement at the right moment of the last microbatch."""

    agreement: Agreement
    stop_signum: int
    position: int
    used: list[bool] | None

    def now(self) -> None:
        if self.used is not None:
            self.agreement.put_used(self.used)
        self.agreement.launch(stop_signum=self.stop_signum, position=self.position)


def _synchronising(replica: Replica | None, sync: bool) -> AbstractContextManager[None]:
    return nullcontext() if replica is None else replica.synchronising(sync)


def _backward(replica: Replica | None, loss: Tensor) -> float:
    if replica is not None:
        return replica.backward(loss)
    loss.backward()  # type: ignore[no-untyped-call]
    return 0.0


def _refuse_constant_loss(name: str, index: int) -> PacelineError:
    return PacelineError(
        "PL412",
        saw=f"the loss of microbatch {index} does not depend on any trained parameter of {name}.",
        rule="Its gradient is what an update applies.",
        fix="Compute the loss from the model's output, outside of torch.no_grad() and without detach(); "
        "where a microbatch has no targets return output.sum() * 0.",
    )


def _all_finite(values: list[float]) -> bool:
    return all(map(math.isfinite, values))


def _power_of_two(value: float) -> float:
    return 2.0 ** round(math.log2(value)) if value > 0 else 1.0


def _find_reason_to_skip(
    agreed: Agreed, weight: float, norm: float, named: list[tuple[str, nn.Parameter]]
) -> str | None:
    """Why the weights must be left alone; the same answer on every rank."""
    bad = [number for number, loss in enumerate(agreed.losses) if not math.isfinite(loss)]
    if bad:
        return f"the loss of microbatch {bad[0]} of {len(agreed.losses)} is {agreed.losses[bad[0]]}"
    if weight <= 0 or not math.isfinite(weight):
        return f"the global batch has a total weight of {weight:g}"
    if not math.isfinite(norm):
        names = [n for n, p in named if p.grad is not None and not bool(p.grad.isfinite().all())]
        return f"the gradient of {names[0] if names else 'the global norm'} is not finite"
    return None
