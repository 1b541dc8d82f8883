"""All that ranks must agree on per step, in one small collective.

One float64 vector is summed over the ranks. Everything has a slot that only one rank fills (the
others add zero), so the sum is exact and every rank reads the same bits, in an order that doesn't
depend on who computed what:

    [ number of ranks asked to stop by SIGINT | ... by SIGTERM | position, position squared |
      signature, signature squared |
      per microbatch: loss sum, weight, running statistics of BatchNorm ... |
      per parameter: on how many ranks a gradient was computed (only with find_unused_parameters) ]

It is launched before the last backward, so it travels while gradients are computed.

A small vector of few ranks on the CPU is exchanged by all-to-all and summed by each rank: one hop instead
of the 2(n-1) of a ring. Measured with gloo on one machine: 0.29 ms instead of 0.57 on 2 ranks, 1.6 instead
of 3.7 on 4, and half of the CPU time, which it takes away from backward.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.errors import PacelineError

_NUM_HEADER = 6
# Bits of a signature that are compared; sums of its square stay exact on any number of ranks.
_SIGNATURE_BITS = 20
_LOSS, _WEIGHT, _NUM_FIXED = 0, 1, 2
# Every rank sends all it has to every other, so this is for small numbers only.
_MAX_EXCHANGE_RANKS = 8
_MAX_EXCHANGE_VALUES = 4096


@dataclass
class Agreed:
    """What all ranks know after the collective.

    Attributes:
        losses: sum of losses of each microbatch of the global batch.
        weights: their weights.
        statistics: float64 (microbatches, values): BatchNorm's, see `RunningStatistics`.
        stop_signum: the signal that some rank got, or 0.
        used: per parameter, whether any rank computed a gradient; `None` unless asked for.
    """

    losses: list[float]
    weights: list[float]
    statistics: Tensor
    stop_signum: int
    used: list[bool] | None


class Agreement:
    """One step's packed vector, from filling to reading.

    Collective: `launch` and `wait` are called by every rank of the group, once each.

    Args:
        num_microbatches: of the global batch.
        num_statistics: values per microbatch beside loss and weight.
        num_parameters: parameters whose use is tracked, 0 for none.
        device: where the collective runs.
        group: the ranks, or `None` for a world of one.
    """

    def __init__(
        self,
        num_microbatches: int,
        num_statistics: int,
        num_parameters: int,
        device: torch.device,
        group: dist.ProcessGroup | None,
    ) -> None:
        self._num_microbatches = num_microbatches
        self._num_parameters = num_parameters
        self._width = _NUM_FIXED + num_statistics
        length = _NUM_HEADER + num_microbatches * self._width + num_parameters
        self._vector = torch.zeros(length, dtype=torch.float64, device=device)
        # On the CPU it is filled and read through numpy, which takes a tenth of the time of tensors.
        self._array = self._vector.numpy() if device.type == "cpu" else None
        self._group = group
        self._received: Tensor | None = None
        self._work: dist.Work | None = None
        self._position = 0
        self._signature = 0

    def put_microbatch(self, index: int, loss_sum: Tensor, weight: Tensor, statistics: Tensor | None) -> None:
        """Fills the slot of microbatch `index`; doesn't wait for the device."""
        start = _NUM_HEADER + index * self._width
        if self._array is not None:
            self._array[start + _LOSS] = loss_sum.item()
            self._array[start + _WEIGHT] = weight.item()
        else:
            self._vector[start + _LOSS] = loss_sum.detach()
            self._vector[start + _WEIGHT] = weight.detach()
        if statistics is not None:
            self._vector[start + _NUM_FIXED : start + self._width] = statistics

    def put_used(self, used: list[bool]) -> None:
        """Marks the parameters that got a gradient on this rank."""
        assert len(used) == self._num_parameters
        if used:
            self._vector[-len(used) :] = torch.tensor(used, dtype=torch.float64)

    def launch(self, *, stop_signum: int, position: int, signature: int = 0) -> None:
        """Starts the collective.

        Args:
            stop_signum: the signal this rank got, or 0.
            position: a number that must be the same on all ranks, such as the step's.
            signature: another one, of what ranks did before.
        """
        self._position = position
        self._signature = signature % 2**_SIGNATURE_BITS
        asked = [stop_signum == signal.SIGINT, stop_signum == signal.SIGTERM]
        header = [*asked, position, position**2, self._signature, self._signature**2]
        if self._array is not None:
            self._array[:_NUM_HEADER] = header
        else:
            self._vector[:_NUM_HEADER] = torch.tensor(header, dtype=torch.float64)
        if self._group is None:
            return
        num_ranks, length = self._group.size(), len(self._vector)
        if self._array is not None and num_ranks <= _MAX_EXCHANGE_RANKS and length <= _MAX_EXCHANGE_VALUES:
            self._received = torch.empty(num_ranks * length, dtype=torch.float64)
            sent = self._vector.repeat(num_ranks)
            self._work = dist.all_to_all_single(self._received, sent, group=self._group, async_op=True)
        else:
            self._work = dist.all_reduce(self._vector, group=self._group, async_op=True)

    def wait(self, extra: Tensor | None = None) -> tuple[Agreed, float]:
        """Waits and reads, with one transfer from the device.

        Args:
            extra: a scalar to bring over in the same transfer.

        Returns:
            What was agreed, and the value of `extra` (0 without).

        Raises:
            PacelineError: PL430 where ranks are at different positions, PL443 where they did other things.
        """
        if self._work is not None:
            self._work.wait()
        vector = self._vector
        if self._received is not None:
            vector = self._received.view(-1, len(vector)).sum(0)
        if extra is not None:
            vector = torch.cat([vector, extra.double().reshape(1)])
        vector = vector.cpu()
        values: list[float] = vector.tolist()
        end = _NUM_HEADER + self._num_microbatches * self._width
        num_int, num_term, *sums = values[:_NUM_HEADER]
        self._check_position(*sums[:2])
        self._check_signature(*sums[2:])
        used = None
        if self._num_parameters:
            used = [count > 0 for count in values[end : end + self._num_parameters]]
        agreed = Agreed(
            losses=values[_NUM_HEADER + _LOSS : end : self._width],
            weights=values[_NUM_HEADER + _WEIGHT : end : self._width],
            statistics=vector[_NUM_HEADER:end].view(-1, self._width)[:, _NUM_FIXED:],
            stop_signum=signal.SIGTERM if num_term else signal.SIGINT if num_int else 0,
            used=used,
        )
        return agreed, values[-1] if extra is not None else 0.0

    def _check_position(self, position_sum: float, square_sum: float) -> None:
        num_ranks = 1 if self._group is None else self._group.size()
        if position_sum == num_ranks * self._position and square_sum == num_ranks * self._position**2:
            return
        raise PacelineError(
            "PL430",
            saw=f"this rank is at step {self._position}, the mean of ranks is {position_sum / num_ranks:g}.",
            rule="Every rank takes the same steps on the same global batches.",
            fix="Look for a step, a loader or an early exit that depends on the rank.",
        )

    def _check_signature(self, total: float, squares: float) -> None:
        num_ranks = 1 if self._group is None else self._group.size()
        if total == num_ranks * self._signature and squares == num_ranks * self._signature**2:
            return
        error = PacelineError(
            "PL443",
            saw="in the step before, ranks gathered or summed different blocks, or in another order.",
            rule="Under dp_shard the ranks take part in every block's gathering and summing, so all of them "
            "run the same blocks in each microbatch. The weights are wrong since that step.",
            fix="Run every block for every microbatch (multiply what must not count by zero), or use "
            "dp_shard=1; and go on from a checkpoint of before.",
        )
        error.on_every_rank = True
        raise error
