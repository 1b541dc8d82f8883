"""`Runner`: the protocol between an update and a layout, and the work on a microbatch that all runners share.

An update knows losses, weights and optimizers. Its runner knows which microbatches this rank computes, in
which order, and in which of them ranks communicate. Per update:

1. `run` computes the microbatches. Afterwards the parameters hold gradients that are summed over dp, and the
   agreement (`agreement.py`) is under way.
2. `step` applies an optimizer.

`run_forward` and `evaluate` compute forwards only. `silenced` switches communication off, for measuring.

Each kind of runner implements `_run_rounds` with `_start`, `_forward` and `_backward`, which process one
microbatch each. They may be called in any order, as long as a microbatch's forward precedes its backward.
Both run inside `_drawing`, which may be entered once for both or once for each.
"""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.data.share import Share
from paceline.errors import PacelineError
from paceline.finding import Finding
from paceline.generators import seed_generators
from paceline.mesh import Mesh
from paceline.parallel.batchnorm import ForwardBuffer, RunningStatistics
from paceline.parallel.compress import Compression
from paceline.parallel.dropout.find import find_random
from paceline.parallel.flops import FlopCounter
from paceline.parallel.hook_state import HookState
from paceline.parallel.objective import Loss, Objective
from paceline.parallel.order import LaidOut
from paceline.parallel.reads import ParameterReads
from paceline.parallel.recompute import explaining_recompute
from paceline.seeds import derive_seed
from paceline.train.batches import count_samples
from paceline.train.loss_parameters import check_loss_parameters
from paceline.train.precision import Precision
from paceline.train.runners.work import Work

log = logging.getLogger(__name__)

# Replaces a microbatch's number if a rank runs one only because the others do.
IDLE = -1
Result = TypeVar("Result")
# The number of a microbatch in the global batch, and its batch.
Microbatch = tuple[int, Any]


class Runner(ABC):
    """A runner of a model's microbatches, which leaves gradients in the parameters, summed over dp.

    Args:
        name: of the model, for messages.
        model: on its device, laid out.
        laid_out: the result of laying it out.
        mesh: the ranks, or `None` in a world of one.
        statistics: BatchNorm's running statistics of all models that the loss runs.
        precision: dtype and device.
        seed: base of the microbatches' seeds.
        track_used: find parameters that no microbatch used.

    Attributes:
        scaler: of losses, or `None`.
        used: by trained parameter, whether a microbatch of this update has used it; `None` if that is not
            tracked.
        flops_per_sample: of forward and backward; `None` until they are counted.
        is_trying: whether a forward outside of any step runs (`try_forward`).
        reports: whether this rank reports the losses of its microbatches, so that a sum over ranks counts
            each once.
    """

    def __init__(
        self,
        name: str,
        model: nn.Module,
        laid_out: LaidOut,
        mesh: Mesh | None,
        *,
        statistics: RunningStatistics,
        precision: Precision,
        seed: int,
        track_used: bool,
    ) -> None:
        self.scaler = precision.build_scaler()
        self.flops_per_sample: float | None = None
        self.is_trying = False
        self.reports = mesh is None or mesh.reports
        self._name = name
        self._model = model
        self._masks = laid_out.masks
        self._reads = ParameterReads(model, laid_out.placement, mesh)
        self._lent = laid_out.lent
        self._num_unsafe_logged = 0
        self._has_walked = False
        self._mesh = mesh
        self._statistics = statistics
        self._precision = precision
        self._seed = seed
        self._trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.used: list[bool] | None = [False] * len(self._trained) if track_used else None

    # Whether ranks run parts of a forward, so that none of them can run all of it.
    is_staged = False

    def list_kept(self) -> list[ForwardBuffer] | None:
        """Return this rank's buffers that a forward changes alike for any samples; `None` if not known."""
        return None

    @property
    def has_outputs(self) -> bool:
        """Whether forwards of this rank end with the model's output."""
        return True

    # What a layout decides

    @abstractmethod
    def _run_rounds(self, work: Work, *, count_flops: bool) -> float:
        """Run the microbatches and start the agreement; return the seconds of waiting. Collective."""

    @abstractmethod
    def _compute(self, objective: Loss, batch: Any) -> tuple[Tensor, Tensor]:
        """Run an objective on one microbatch with a graph; return (sum of losses, weight)."""

    @abstractmethod
    def _propagate(self, scaled: Tensor) -> float:
        """Run backward of one microbatch; return the seconds that it waited for other ranks."""

    @property
    def gradient_scale(self) -> float:
        """The factor that turns a reduced gradient into the sum over the ranks."""
        return 1.0

    @property
    def signature(self) -> int:
        """A number that is equal on all ranks if they communicated alike in the previous update."""
        return 0

    @property
    def silent(self) -> bool:
        """Whether communication is switched off at the moment, see `silenced`."""
        return False

    @property
    def hook_state(self) -> HookState | None:
        """The state that the communication hook keeps on this rank between steps, or `None`."""
        return None

    @property
    def is_graph_static(self) -> bool:
        """Whether replicas used the same parameters in all steps, as far as DDP has looked at it."""
        return False

    @property
    def compression(self) -> Compression | None:
        """The compression of the gradients on this rank, or `None`."""
        return None

    @abstractmethod
    def _before_backward(self, work: Work, *, is_last: bool) -> None:
        """Prepare for backward; called between a microbatch's forward and its backward."""

    @abstractmethod
    def _after_backward(self, work: Work, *, is_last: bool) -> None:
        """Finish a microbatch; called after its backward."""

    def _list_microbatches(self, share: Share) -> list[Microbatch]:
        """Return the microbatches whose forward this rank runs, including idle ones."""
        return list(share.microbatches)

    def silenced(self) -> AbstractContextManager[None]:
        """Return a context in which `run` communicates nothing, to measure compute alone."""
        return nullcontext()

    def step(self, optimizer: Optimizer) -> None:
        """Run the optimizer's step."""
        optimizer.step()

    @abstractmethod
    def adopt_state(self, optimizer: Optimizer) -> None:
        """Move an optimizer's state, loaded from a checkpoint, to where the layout keeps it."""

    def agree_on_used(self) -> list[bool]:
        """Return, by trained parameter, whether any rank has used it; collective over the world.

        Called only if every rank has reported parameters that it did not use.
        """
        raise AssertionError(f"{type(self).__name__} tracks the use of parameters")

    def close(self) -> None:
        """Release the runner's resources."""
        if self._lent is not None:
            assert self._mesh is not None
            self._mesh.return_group(self._lent)
            self._lent = None

    # What an update and its callers use

    @property
    def is_talking(self) -> bool:
        """Whether `run` communicates with other ranks."""
        return self._mesh is not None and not self.silent

    def run(self, work: Work, *, count_flops: bool) -> float:
        """Run a rank's microbatches of one update; return the seconds of waiting for others. Collective.

        Args:
            work: the microbatches and their objective.
            count_flops: whether to count the floating-point operations of the first microbatch.
        """
        self._statistics.begin(work.share.num_owned)
        work = replace(work, objective=self._reads.watch(work.objective))
        comm_s = self._run_rounds(work, count_flops=count_flops)
        self._warn_unsafe_draws()
        return comm_s

    def forget_used(self) -> None:
        """Forget which parameters were used, before the next update."""
        if self.used is not None:
            self.used = [False] * len(self._trained)

    def run_forward(
        self, objective: Objective[Result], share: Share, *, step: int, phase: int
    ) -> list[Result]:
        """Run a forward of each of this rank's microbatches, with the random numbers of `run`.

        No graph is kept and no statistics are changed. Collective if the model is divided.

        Args:
            objective: forward and loss; its results are returned.
            share: this rank's microbatches.
            step, phase: as in `Work`.
        """
        samples = dict(zip((number for number, _ in share.microbatches), share.samples, strict=True))

        def around(index: int, batch: Any) -> AbstractContextManager[None]:
            self._statistics.start_microbatch()
            known = range(count_samples(batch)) if index == IDLE else samples[index]
            return self._masks.drawing(derive_seed(self._seed, step, phase), known)

        self._statistics.begin()
        seed_of: Callable[[int], int] = lambda index: derive_seed(self._seed, step, phase, index)  # noqa: E731
        results = self._forward_all(self._reads.watch(objective), share, seed_of, around)
        self._statistics.restore()
        return results

    def evaluate(
        self, objective: Objective[Result], share: Share, seed_of: Callable[[int], int]
    ) -> list[Result]:
        """Run a forward of each of this rank's microbatches, for a model in eval mode.

        No graph is kept. Collective if the model is divided.

        Args:
            objective: forward and loss; its results are returned.
            share: this rank's microbatches.
            seed_of: from the number of a microbatch to the seed of its generators.
        """
        around = lambda index, batch: nullcontext()  # noqa: E731
        return self._forward_all(self._reads.watch(objective), share, seed_of, around)

    @property
    def draws_unsafely(self) -> bool:
        """Whether some dropout was drawn that depends on more than its sample."""
        return bool(self._masks.unsafe)

    def try_forward(self, run: Callable[[Any], Any], batch: Any, samples: Sequence[int], word: str) -> Any:
        """Run a function on one batch with random numbers of no step, and restore the statistics.

        Args:
            run: from a batch on the device to anything.
            batch: the batch, on any device.
            samples: the numbers of its samples.
            word: part of the generators' seed; dropout by sample does not depend on it.
        """
        seed_generators(derive_seed(self._seed, "try", word), self._precision.device)
        placed = self._precision.place_batch(batch)
        self._statistics.begin()
        self._statistics.start_microbatch()
        self.is_trying = True
        try:
            with self._masks.drawing(derive_seed(self._seed, "try"), samples), self._precision.autocast():
                return run(placed)
        finally:
            self.is_trying = False
            self._statistics.restore()

    def find_random(self, objective: Loss, share: Share) -> list[Finding]:
        """Find random draws of a forward of the first microbatch that depend on more than its samples.

        Only for a world of one process. The model's state is unchanged; compiled code runs eagerly.
        """
        batch = self._precision.place_batch(share.microbatches[0][1])

        def forward() -> None:
            drawing = self._masks.drawing(derive_seed(self._seed, "find random"), share.samples[0])
            with drawing, self._precision.autocast():
                self._compute(objective, batch)

        self._statistics.begin()
        self._statistics.start_microbatch()
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            found = find_random(self._model, forward)
        self._statistics.restore()
        unsafe = self._masks.unsafe
        named = {finding.where for finding in unsafe}  # both lists have an LSTM's draws
        return [*unsafe, *(finding for finding in found if finding.where not in named)]

    # One microbatch

    def _run_microbatch(self, work: Work, number: int, *, is_last: bool) -> float:
        """Run forward and backward of one microbatch; the step's last one starts the agreement."""
        index, batch = work.share.microbatches[number]
        batch = self._start(work, index, batch)
        with self._drawing(work, work.share.samples[number]):
            loss_sum = self._forward(work, index, batch)
            self._before_backward(work, is_last=is_last)
            comm_s = self._backward(loss_sum, work.unit)
        self._after_backward(work, is_last=is_last)
        return comm_s

    def _start(self, work: Work, index: int | str, batch: Any) -> Any:
        """Set generators and statistics for microbatch `index`; return its batch on the device."""
        seed_generators(derive_seed(self._seed, work.step, work.phase, index), self._precision.device)
        batch = self._precision.place_batch(batch)
        self._statistics.start_microbatch()
        return batch

    def _forward(self, work: Work, index: int, batch: Any) -> Tensor:
        """Return the sum of losses of microbatch `index`, and fill its slot of the agreement."""
        with self._precision.autocast():
            loss_sum, weight = self._compute(work.objective, batch)
        if not loss_sum.requires_grad:
            raise _constant_loss_error(self._name, index)
        if not self._has_walked:
            self._has_walked = True
            check_loss_parameters(loss_sum, set(map(id, self._list_leaves())), self._name)
        if self.reports:
            work.launch.agreement.put_microbatch(index, loss_sum, weight)
        self._report_statistics(work, index)
        return loss_sum

    def _list_leaves(self) -> list[Tensor]:
        """Return the parameters that the graph of a loss may end at."""
        return list(self._model.parameters())

    def _report_statistics(self, work: Work, index: int) -> None:
        """Add BatchNorm's statistics of microbatch `index` to its slot of the agreement."""
        if self.reports and self._statistics.num_values:
            work.launch.agreement.add_statistics(index, self._statistics.read_microbatch())

    def _backward(self, loss_sum: Tensor, unit: float) -> float:
        scaled = loss_sum / unit
        if self.scaler is not None:
            scaled = self.scaler.scale(scaled)
        with explaining_recompute():
            return self._propagate(scaled)

    def _drawing(self, work: Work, samples: Sequence[int]) -> AbstractContextManager[None]:
        """Return the context of a microbatch in which dropout depends only on the step and the samples."""
        return self._masks.drawing(derive_seed(self._seed, work.step, work.phase), samples)

    @torch.no_grad()
    def _forward_all(
        self,
        objective: Objective[Result],
        share: Share,
        seed_of: Callable[[int], int],
        around: Callable[[int, Any], AbstractContextManager[None]],
    ) -> list[Result]:
        results = []
        for index, batch in self._list_microbatches(share):
            seed_generators(seed_of(index), self._precision.device)
            placed = self._precision.place_batch(batch)
            with around(index, batch), self._precision.autocast():
                result = objective(placed)
            if index != IDLE:
                results.append(result)
        return results

    @contextmanager
    def _counting_flops(self, share: Share) -> Iterator[None]:
        """Count operations, running compiled code eagerly: the counter does not see inside compiled graphs.

        Under tp, each rank is assumed to run an equal part of all operations.
        """
        counter = FlopCounter()
        with counter, torch.compiler.set_stance("force_eager"):
            yield
        num_samples = math.ceil(share.num_samples / share.num_microbatches)
        num_parts = 1 if self._mesh is None else self._mesh.layout.num_sample_parts
        self.flops_per_sample = counter.get_total_flops() * num_parts / num_samples

    def _warn_unsafe_draws(self) -> None:
        for finding in self._masks.unsafe[self._num_unsafe_logged :]:
            log.warning("%s", finding)
        self._num_unsafe_logged = len(self._masks.unsafe)


def _constant_loss_error(name: str, index: int) -> PacelineError:
    return PacelineError(
        "PL412",
        saw=f"the loss of microbatch {index} does not depend on any trained parameter of {name}.",
        rule="Its gradient is what an update applies.",
        fix="Compute the loss from the model's output, outside of torch.no_grad() and without detach(); "
        "where a microbatch has no targets return output.sum() * 0.",
    )
