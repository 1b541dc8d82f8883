"""`Runner`: the protocol between an update and a layout, and the work on a microbatch that all runners share.

An update knows losses, weights and optimizers. Its runner knows which microbatches this rank computes, in
which order, and in which of them ranks communicate. Per update:

1. `run` computes the microbatches. Afterwards the parameters hold gradients that are summed over dp, and the
   agreement (`agreement.py`) is under way.
2. `step` applies an optimizer.

`run_forward` and `evaluate` compute forwards only. `silenced` switches communication off, for measuring.

`rounds` is a generator of the microbatches in the order in which ranks run them. Around each of them it does
what comes before and after, so its caller only computes: `run` calls `forward` and `backward` for each. The
stages of a pipeline have no such rounds and no backward of the user's own (`staged.py`).
"""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar
from weakref import WeakSet

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
from paceline.parallel.dropout.random_draws import find_random
from paceline.parallel.flops import FlopCounter
from paceline.parallel.objective import Loss, Objective
from paceline.parallel.order import LaidOut
from paceline.parallel.reads import ParameterReads
from paceline.parallel.recompute import explaining_recompute
from paceline.seeds import derive_seed
from paceline.train.batches import count_samples
from paceline.train.loss_parameters import WatchedLosses, check_loss_parameters
from paceline.train.precision import Precision
from paceline.train.runners.own_errors import mixed_error, summed_already_error
from paceline.train.runners.work import IDLE, Round, Work

log = logging.getLogger(__name__)

Result = TypeVar("Result")
# Those of other models, which a loss may use: in a GAN of two loops, each trains one.
_RUNNERS: WeakSet[Runner] = WeakSet()
# The number of a microbatch in the global batch, and its batch.
Microbatch = tuple[int, Any]


class Runner(ABC):
    """A runner of a model's microbatches, which leaves gradients in the parameters, summed over dp.

    Args:
        name: of the model, for messages.
        model: on its device, laid out.
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
        waited_s: seconds that the last `rounds` waited for other ranks.
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
        self.waited_s = 0.0
        self._has_walked = False
        _RUNNERS.add(self)
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

    def _rounds(self, work: Work) -> Generator[Round, None, None]:
        """Yield the microbatches as `rounds` does."""
        raise NotImplementedError

    @abstractmethod
    def _propagate(self, work: Work, each: Round, scaled: Tensor, *, retain_graph: bool) -> float:
        """Run backward of one microbatch; return the seconds that it waited for other ranks."""

    @property
    def signature(self) -> int:
        """A number that is equal on all ranks if they communicated alike in the previous update."""
        return 0

    @property
    def silent(self) -> bool:
        """Whether communication is switched off at the moment, see `silenced`."""
        return False

    @property
    def compression(self) -> Compression | None:
        """The compression of the gradients on this rank, or `None`."""
        return None

    def _list_microbatches(self, share: Share) -> list[Microbatch]:
        """Return the microbatches whose forward this rank runs, including idle ones."""
        return list(share.microbatches)

    def silenced(self) -> AbstractContextManager[None]:
        """Return a context in which `run` communicates nothing, to measure compute alone."""
        return nullcontext()

    def step(self, optimizer: Optimizer) -> None:
        """Run the optimizer's step."""
        optimizer.step()

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

    def run(self, work: Work) -> float:
        """Run a rank's microbatches of one update; return the seconds of waiting for others. Collective."""
        assert work.objective is not None
        work = replace(work, objective=self._reads.watch(work.objective))
        for number, each in enumerate(self.rounds(work)):
            is_counted = work.count_flops and number == 0 and each.index != IDLE
            with self._counting_flops(work.share) if is_counted else nullcontext():
                self.forward(work, each)
                self.backward(work, each)
        return self.waited_s

    def rounds(self, work: Work) -> Generator[Round, None, None]:
        """Yield the microbatches that this rank runs, between those that it runs for others; collective.

        When it ends, the gradients are summed and the agreement is under way.
        """
        self.waited_s = 0.0
        self._statistics.begin(work.share.num_owned)
        yield from self._rounds(work)
        self._warn_unsafe_draws()

    def forward(self, work: Work, each: Round) -> None:
        """Run the objective on a microbatch, and keep its loss and weight."""
        assert work.objective is not None
        with self._precision.autocast():
            output = work.objective.forward(each.batch)
            each.loss_sum, each.weight = work.objective.loss(output, each.batch)
            if work.objective.measure is not None:  # on every rank that runs it: parts may be exchanged
                with torch.no_grad():
                    each.means = work.objective.measure(output, each.batch)
        if each.index == IDLE:
            return
        if not each.loss_sum.requires_grad:
            raise _constant_loss_error(self._name, each.index)
        self._check_leaves(each.loss_sum)

    def _check_leaves(self, loss: Tensor) -> None:
        if not self._has_walked:
            self._has_walked = True
            own = {id(leaf) for runner in _RUNNERS for leaf in runner._list_leaves()}
            check_loss_parameters(loss, own, self._name)

    def backward(
        self, work: Work, each: Round, total: Tensor | None = None, *, retain_graph: bool = False
    ) -> None:
        """Run backward of a microbatch's loss, or of `total`, a part of it."""
        total = each.loss_sum if total is None else total
        assert total is not None
        scaled = total / work.unit
        if self.scaler is not None:
            scaled = self.scaler.scale(scaled)
        with explaining_recompute():
            self.waited_s += self._propagate(work, each, scaled, retain_graph=retain_graph)

    def forget_used(self) -> None:
        """Forget which parameters were used, before the next update."""
        if self.used is not None:
            self.used[:] = [False] * len(self._trained)

    def run_forward(
        self, objective: Objective[Result], share: Share, *, step: int, phase: int
    ) -> list[Result]:
        """Run a forward of each of this rank's microbatches, with the random numbers of `run`.

        No graph is kept and no statistics are changed. Collective if the model is divided.

        Args:
            objective: forward and loss; its results are returned.
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
                objective(batch)

        self._statistics.begin()
        self._statistics.start_microbatch()
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            found = find_random(self._model, forward)
        self._statistics.restore()
        unsafe = self._masks.unsafe
        named = {finding.where for finding in unsafe}  # both lists have an LSTM's draws
        return [*unsafe, *(finding for finding in found if finding.where not in named)]

    # One microbatch

    @contextmanager
    def _round(self, work: Work, number: int, *, is_last: bool, lent: Any = None) -> Iterator[Round]:
        """Wrap the round in which this rank runs its microbatch `number`, or a lent one if it has fewer."""
        share = work.share
        if number < len(share.microbatches):
            index, batch = share.microbatches[number]
            samples = share.samples[number]
            placed = self._start(work, index, batch)
        else:
            index = IDLE
            samples = range(1) if isinstance(lent, int) else range(count_samples(lent))
            placed = self._start(work, "idle", lent)
        each = Round(index, placed, is_last)
        if work.own is None:
            with self._drawing(work, samples):
                yield each
        else:
            each.weight = torch.tensor(float(work.own.weigh(placed)), dtype=torch.float64)
            each.scale = 0.0 if index == IDLE else each.weight.item() / work.unit
            each.means = torch.zeros(2 * work.num_means, dtype=torch.float64)
            self._begin_own(each)
            watched = nullcontext() if self._has_walked else WatchedLosses(self._check_leaves)
            own_code = self._reads.own_code(partial(self._before_own_backward, each))
            with watched, self._drawing(work, samples), own_code:
                yield each
            self._end_own(each)
        self._report(work, each)

    def backward_own(
        self, work: Work, each: Round, loss: Tensor, weight: float | None, *, retain_graph: bool
    ) -> None:
        """Run `step.backward` of the user's own code.

        Args:
            work, each: as for `backward`.
            loss: the mean over the microbatch, or a part of it.
            weight: of the microbatch; `None` for the known one.
            retain_graph: whether another one follows.
        """
        if each.is_reduced:
            raise summed_already_error()
        if not each.is_explicit and self._has_computed(each):
            raise mixed_error()
        if weight is not None:
            each.weight = torch.tensor(float(weight), dtype=torch.float64)
        assert each.weight is not None
        each.is_explicit = True
        each.scale = 1.0 if each.weight and each.index != IDLE else 0.0
        total = loss * each.weight.item()
        each.loss_sum = total.detach() + (0.0 if each.loss_sum is None else each.loss_sum)
        self.backward(work, each, total, retain_graph=retain_graph)

    def _has_computed(self, each: Round) -> bool:
        """Return whether a backward of the user's own code has run in this microbatch."""
        raise NotImplementedError

    def _begin_own(self, each: Round) -> None:
        """Prepare for a forward and backward that the user's own code runs."""
        raise NotImplementedError

    def _before_own_backward(self, each: Round, loss: Tensor, options: Mapping[str, Any]) -> Tensor:
        """Return the loss to run such a backward of; called for layouts that divide parameters."""
        each.num_backwards += 1
        return loss

    def _end_own(self, each: Round) -> None:
        """Scale the gradients of such backwards, as `backward` scales its loss."""
        raise NotImplementedError

    def _report(self, work: Work, each: Round) -> None:
        """Fill a microbatch's slot of the agreement; called before the agreement starts."""
        if each.is_reported or not self.reports or each.index == IDLE:
            return
        each.is_reported = True
        assert each.weight is not None
        loss_sum = torch.tensor(math.nan) if each.loss_sum is None else each.loss_sum  # of a plain backward
        work.launch.agreement.put_microbatch(each.index, loss_sum, each.weight)
        if self._statistics.num_values or each.means is not None:
            means = () if each.means is None else (each.means,)
            work.launch.agreement.add_statistics(each.index, self._statistics.read_microbatch(), *means)

    def _start(self, work: Work, index: int | str, batch: Any) -> Any:
        """Set generators and statistics for microbatch `index`; return its batch on the device."""
        seed_generators(derive_seed(self._seed, work.step, work.phase, index), self._precision.device)
        batch = self._precision.place_batch(batch)
        self._statistics.start_microbatch()
        return batch

    def _list_leaves(self) -> list[Tensor]:
        """Return the parameters that the graph of a loss may end at."""
        return list(self._model.parameters())

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
