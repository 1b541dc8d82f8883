"""The microbatches of one update: forward and backward of each, and the rounds in which ranks reduce.

With replicas each rank runs its own microbatches and reduces in the last one. With shards all ranks take as
many rounds, because in each forward all of them gather parameters: a rank without a microbatch runs an idle
one.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from paceline.data.share import Share
from paceline.errors import PacelineError
from paceline.finding import Finding
from paceline.generators import seed_generators
from paceline.mesh import Mesh
from paceline.parallel.batchnorm import RunningStatistics
from paceline.parallel.dropout.find import find_random
from paceline.parallel.order import LaidOut
from paceline.parallel.replicate import Compute, Replica
from paceline.parallel.shard.shards import Shards
from paceline.seeds import derive_seed
from paceline.train.agreement import Agreement, RankMessage
from paceline.train.batches import count_samples, lend_batch
from paceline.train.precision import LossScaler, Precision

log = logging.getLogger(__name__)

# In place of a microbatch's number, where a rank runs one only because the others do.
_IDLE = -1


@dataclass
class Launch:
    """Starts the agreement at the right moment of the last microbatch."""

    agreement: Agreement
    told: RankMessage
    used: list[bool] | None
    is_done: bool = False

    def now(self, *, leaves_out: bool = False) -> None:
        if self.used is not None:
            self.agreement.put_used(self.used)
        self.agreement.launch(replace(self.told, leaves_out=leaves_out))
        self.is_done = True


@dataclass(frozen=True)
class Work:
    """What the microbatches of one update have in common.

    Attributes:
        compute: from a batch on the device to (sum of losses, weight).
        share: this rank's microbatches.
        step: number of the optimizer step, from 1.
        phase: number of the update within the step.
        unit: what losses are divided by.
        launch: starts the agreement.
    """

    compute: Compute
    share: Share
    step: int
    phase: int
    unit: float
    launch: Launch


class MicrobatchRunner:
    """Runs the microbatches of a model's updates; gradients are left in the parameters, summed over dp.

    Args:
        name: of the model, for messages.
        model: on its device.
        laid_out: what became of it.
        mesh: the ranks, or `None` in a world of one.
        statistics: BatchNorm's running statistics of all models that the loss runs.
        precision: dtype and device.
        scaler: of losses, or `None`.
        seed: base of the microbatches' seeds.
        track_used: find parameters that no microbatch used.

    Attributes:
        used: by trained parameter, whether a microbatch of this update has used it; `None` where that isn't
            tracked.
        left_out: the trained parameters that no microbatch of this rank has used, where `used` isn't tracked.
        flops_per_sample: forward and backward, once they were counted.
        scaler: as given.
        is_trying: whether a forward runs that is no step's (`try_forward`).
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
        scaler: LossScaler | None,
        seed: int,
        track_used: bool,
    ) -> None:
        self.flops_per_sample: float | None = None
        self._name = name
        self._model = model
        self._reducer = laid_out.reducer
        self._exact = laid_out.exact
        self._masks = laid_out.masks
        self._num_unsafe_told = 0
        self._mesh = mesh
        # Ranks of tp compute the same losses; the sums over ranks count each once.
        self._speaks = mesh is None or mesh.tp.rank == 0
        self._statistics = statistics
        self._precision = precision
        self.scaler = scaler
        self._seed = seed
        self.left_out: Sequence[Tensor] = []
        self.is_trying = False
        self._trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.used: list[bool] | None = [False] * len(self._trained) if track_used else None
        self._watch_use()

    def run(self, work: Work, *, is_talking: bool, count_flops: bool) -> float:
        """Runs a rank's microbatches of one update; collective. Gives the seconds that it waited for others.

        Args:
            work: what is to be run.
            is_talking: whether gradients are summed over ranks.
            count_flops: whether to count the floating-point operations of the first microbatch.
        """
        self._statistics.begin(work.share.num_owned)
        if self._exact is not None:
            self._exact.begin(work.share.num_owned)
        if isinstance(self._reducer, Shards):
            comm_s = self._run_shards(self._reducer, work, count_flops=count_flops)
        else:
            comm_s = self._run_whole(self._reducer, work, is_talking, count_flops=count_flops)
        self._tell_unsafe_draws()
        return comm_s

    def forget_used(self) -> None:
        """Before the next update."""
        if self.used is not None:
            self.used = [False] * len(self._trained)

    @torch.no_grad()
    def run_forward(self, forward: Callable[[Any], Any], share: Share, *, step: int, phase: int) -> list[Any]:
        """Runs a forward of each of this rank's microbatches, with the random numbers of `run`; no graph is
        kept and no statistics are changed. Collective where the model is divided.

        Args:
            forward: from a batch on the device to its output.
            share: this rank's microbatches.
            step, phase: as in `Work`.
        """
        outputs = []
        rounds = [
            (index, batch, samples)
            for (index, batch), samples in zip(share.microbatches, share.samples, strict=True)
        ]
        if isinstance(self._reducer, Shards) and len(set(share.num_owned)) > 1:
            assert self._mesh is not None
            lent = lend_batch(share, self._mesh.dp)
            idle = [(_IDLE, lent, range(count_samples(lent)))] * (max(share.num_owned) - len(rounds))
            rounds += idle
        self._statistics.begin()
        for index, batch, samples in rounds:
            seed_generators(derive_seed(self._seed, step, phase, index), self._precision.device)
            placed = self._precision.place_batch(batch)
            self._statistics.start_microbatch()
            drawing = self._masks.drawing(derive_seed(self._seed, step, phase), samples)
            with drawing, self._precision.autocast():
                output = forward(placed)
            if index != _IDLE:
                outputs.append(output)
        self._statistics.restore()
        return outputs

    @property
    def draws_unsafely(self) -> bool:
        """Whether some dropout was drawn that does not depend on its sample alone."""
        return bool(self._masks.unsafe)

    def try_forward(self, run: Callable[[Any], Any], batch: Any, samples: Sequence[int], word: str) -> Any:
        """Runs something on one batch, with random numbers that are no step's, and puts statistics back.

        Args:
            run: from a batch on the device to anything.
            batch: of which.
            samples: the numbers of its samples.
            word: gives the generators another seed; dropout by sample stays.
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

    def find_random(self, compute: Compute, share: Share) -> list[Finding]:
        """Random draws of a forward of the first microbatch that don't depend on its samples alone.

        In a world of one process. The model's state stays as it is; compiled code runs eagerly.
        """
        batch = self._precision.place_batch(share.microbatches[0][1])

        def forward() -> None:
            with self._masks.drawing(derive_seed(self._seed, "find random"), share.samples[0]):
                self._forward(compute, batch)

        self._statistics.begin()
        self._statistics.start_microbatch()
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            found = find_random(self._model, forward)
        self._statistics.restore()
        unsafe = self._masks.unsafe
        named = {finding.where for finding in unsafe}  # an LSTM's draws show in the forward as well
        return [*unsafe, *(finding for finding in found if finding.where not in named)]

    def _run_whole(
        self, replica: Replica | None, work: Work, is_talking: bool, *, count_flops: bool
    ) -> float:
        """The rank's own microbatches; the last one reduces, alongside its backward."""
        share, comm_s = work.share, 0.0
        sums = is_talking and replica is not None
        for number in range(len(share.microbatches)):
            index, is_last = share.microbatches[number][0], number == len(share.microbatches) - 1
            counting = self._counting_flops(share) if count_flops and number == 0 else nullcontext()
            with counting, self._synchronising(replica, work.launch, is_last):
                comm_s += self._run_microbatch(work, number, is_last=is_last)
            if self._exact is not None and (not sums or not is_last):
                self._exact.set_aside(index)
        if not share.microbatches:
            comm_s += self._run_nothing(replica, work.launch)
        if not work.launch.is_done:
            work.launch.now()
        if sums and self.used is None:
            assert replica is not None
            replica.check_reduced()
        if self._exact is not None:
            self._exact.end(reduced=sums)
        return comm_s

    def _synchronising(
        self, replica: Replica | None, launch: Launch, is_last: bool
    ) -> AbstractContextManager[None]:
        """Around a microbatch; in the last one ranks agree when it is known what this rank has left out."""
        if replica is None:
            return nullcontext()

        def agree() -> None:
            self.left_out = replica.left_out if replica.is_used else self._trained
            if self._exact is not None:
                self.left_out = [p for p in self.left_out if not self._exact.is_used(p)]
            launch.now(leaves_out=bool(self.left_out))

        return replica.synchronising(is_last, agree if self.used is None else None)

    def agree_on_used(self) -> list[bool]:
        """By trained parameter, whether any rank has used it; collective over the world."""
        left_out = {id(parameter) for parameter in self.left_out}
        used = [id(parameter) not in left_out for parameter in self._trained]
        counts = torch.tensor(used, dtype=torch.int32, device=self._precision.device)
        dist.all_reduce(counts)
        return [count > 0 for count in counts.tolist()]

    def _run_shards(self, shards: Shards, work: Work, *, count_flops: bool) -> float:
        """As many rounds on every rank, because in each forward all of them gather parameters."""
        assert self._mesh is not None
        share, comm_s = work.share, 0.0
        shards.begin(share.num_owned)
        if not shards.num_rounds:
            work.launch.now()
            return 0.0
        lent = None
        if min(share.num_owned) < shards.num_rounds:
            lent = lend_batch(share, self._mesh.dp)
        for number in range(shards.num_rounds):
            is_last = number == shards.num_rounds - 1
            is_own = number < len(share.microbatches)
            with shards.synchronising(is_last, share.microbatches[number][0] if is_own else None):
                if is_own:
                    with self._counting_flops(share) if count_flops and number == 0 else nullcontext():
                        comm_s += self._run_microbatch(work, number, is_last=is_last)
                else:
                    comm_s += self._run_idle(work, lent, is_last=is_last)
        if not shards.silent:
            shards.check_reduced()
        return comm_s

    def _run_microbatch(self, work: Work, number: int, *, is_last: bool) -> float:
        """Forward and backward of one microbatch; in the step's last one the agreement travels along."""
        index, batch = work.share.microbatches[number]
        seed_generators(derive_seed(self._seed, work.step, work.phase, index), self._precision.device)
        batch = self._precision.place_batch(batch)
        self._statistics.start_microbatch()
        with self._drawing(work, work.share.samples[number]):
            loss_sum, weight = self._forward(work.compute, batch)
            if not loss_sum.requires_grad:
                raise _constant_loss_error(self._name, index)
            statistics = self._statistics.read_microbatch() if self._statistics.num_values else None
            if self._speaks:
                work.launch.agreement.put_microbatch(index, loss_sum, weight, statistics)
            if is_last and self.used is None and not isinstance(self._reducer, Replica):
                work.launch.now()
            if self._exact is not None and isinstance(self._reducer, Replica) and is_last and self.used:
                self._exact.fill_missing()
            comm_s = self._backward(loss_sum, work.unit)
        if is_last and self.used is not None:
            self._read_used()
            work.launch.now()
        return comm_s

    def _run_idle(self, work: Work, batch: Any, *, is_last: bool) -> float:
        """A round in which this rank has no microbatch of its own: its loss counts nothing."""
        seed_generators(derive_seed(self._seed, work.step, work.phase, "idle"), self._precision.device)
        batch = self._precision.place_batch(batch)
        self._statistics.start_microbatch()
        with self._drawing(work, range(count_samples(batch))):
            loss_sum, _ = self._forward(work.compute, batch)
            if is_last and self.used is None:
                work.launch.now()
            comm_s = self._backward(loss_sum, work.unit)
        if is_last and self.used is not None:
            self._read_used()
            work.launch.now()
        return comm_s

    def _drawing(self, work: Work, samples: Sequence[int]) -> AbstractContextManager[None]:
        """Around a microbatch: its dropout depends on the step and the samples alone."""
        return self._masks.drawing(derive_seed(self._seed, work.step, work.phase), samples)

    def _tell_unsafe_draws(self) -> None:
        for finding in self._masks.unsafe[self._num_unsafe_told :]:
            log.warning("%s", finding)
        self._num_unsafe_told = len(self._masks.unsafe)

    def _forward(self, compute: Compute, batch: Any) -> tuple[Tensor, Tensor]:
        with self._precision.autocast():
            return compute(batch) if self._reducer is None else self._reducer.forward(compute, batch)

    def _backward(self, loss_sum: Tensor, unit: float) -> float:
        scaled = loss_sum / unit
        if self.scaler is not None:
            scaled = self.scaler.scale(scaled)
        if self._reducer is not None:
            return self._reducer.backward(scaled)
        scaled.backward()  # type: ignore[no-untyped-call]
        return 0.0

    def _run_nothing(self, replica: Replica | None, launch: Launch) -> float:
        """Joins the collectives of a step in which this rank owns no microbatch, in their order."""
        if replica is None:
            launch.now()
            return 0.0
        with self._synchronising(replica, launch, True):
            # First, as on the others: DDP has collectives of its own in a forward (buffers, and the new
            # order of the buckets in the second step).
            zero = replica.forward_nothing()
            if self.scaler is not None:
                zero = self.scaler.scale(zero)  # its state comes to life with the first use
            comm_s = replica.backward(zero)
        if self.used is not None:
            self.used[:] = [False] * len(self.used)  # zeros are no use of a parameter
            launch.now()
        return comm_s

    @contextmanager
    def _counting_flops(self, share: Share) -> Iterator[None]:
        """Counts operations eagerly: a compiled graph has none that could be counted.

        Under tp those of this rank stand for an equal part of all.
        """
        with FlopCounterMode(display=False) as counter, torch.compiler.set_stance("force_eager"):
            yield
        num_samples = math.ceil(share.num_samples / share.num_microbatches)
        num_parts = 1 if self._mesh is None else self._mesh.tp.size
        self.flops_per_sample = counter.get_total_flops() * num_parts / num_samples

    def _read_used(self) -> None:
        """Under sharding, gradients of zeros reach all parameters; the reducer knows which were used."""
        if self.used is not None and isinstance(self._reducer, Shards):
            self.used[:] = [id(p) in self._reducer.used for p in self._trained]

    def _watch_use(self) -> None:
        if self.used is None or isinstance(self._reducer, Shards):
            return
        for number, parameter in enumerate(self._trained):

            def mark(_parameter: Tensor, number: int = number) -> None:
                assert self.used is not None
                self.used[number] = True

            parameter.register_post_accumulate_grad_hook(mark)  # type: ignore[no-untyped-call]


def _constant_loss_error(name: str, index: int) -> PacelineError:
    return PacelineError(
        "PL412",
        saw=f"the loss of microbatch {index} does not depend on any trained parameter of {name}.",
        rule="Its gradient is what an update applies.",
        fix="Compute the loss from the model's output, outside of torch.no_grad() and without detach(); "
        "where a microbatch has no targets return output.sum() * 0.",
    )
