"""Collects everything that ranks must agree on in a step, in one small collective.

One float64 vector is summed over the ranks. Only one rank fills each slot and the others add zero,
so the sum is exact. Every rank reads the same bits, in an order that does not depend on which rank
computed what:

    [ per rank: its own message (see `RankMessage`) |
      per microbatch: loss sum, weight, running statistics of BatchNorm ... |
      per parameter: on how many ranks a gradient was computed (where that is tracked) ]

A rank sends it before the last gradients, and reads it when they have arrived.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from paceline.errors import PacelineError

# Digests of what a rank holds. Each takes two numbers, one per half, which are exact in float64.
NUM_COPIES = 4
_STOP, _POSITION, _SIGNATURE, _LEAVES_OUT, _LENGTH, _SETTINGS, _COPIES = 0, 1, 2, 3, 4, 5, 7
NUM_SENT = _COPIES + 2 * NUM_COPIES
_HALF = 1 << 32
# Vectors are as long as a power of two, so that ranks with different batches can still compare lengths: gloo
# takes a shorter message without a word.
_LEAST_SENT = 256
_LOSS, _WEIGHT, _NUM_FIXED = 0, 1, 2

Numbers = np.ndarray[tuple[int, int], np.dtype[np.float64]]


@dataclass(frozen=True)
class RankMessage:
    """A rank's own part of the agreement.

    Attributes:
        stop_signum: the signal that the rank received, or 0.
        position: a number that must be the same on all ranks, such as the step number.
        signature: a digest of what the rank did in the previous step; must be the same on all ranks.
        leaves_out: whether the rank has parameters that none of its microbatches has used.
        settings: a 64-bit digest of the rank's arguments.
        copies: `NUM_COPIES` digests of the tensors that the rank holds; a tensor if they are on the device.
    """

    stop_signum: int
    position: int
    signature: int = 0
    settings: int = 0
    copies: Sequence[int] | Tensor = (0,) * NUM_COPIES
    leaves_out: bool = False


@dataclass
class Agreed:
    """The values that all ranks share after the collective.

    Attributes:
        losses: sum of losses of each microbatch of the global batch.
        statistics: float64 (microbatches, values): BatchNorm's, see `RunningStatistics`.
        stop_signum: the signal that some rank received, or 0.
        used: per parameter, whether any rank computed a gradient; `None` unless asked for.
        all_leave_out: whether every rank has parameters that none of its microbatches has used.
        settings: one row of two numbers per rank; two rows are equal if the digests are.
        copies: one row per rank, with two numbers per digest.
    """

    losses: list[float]
    weights: list[float]
    statistics: Tensor
    stop_signum: int
    used: list[bool] | None
    all_leave_out: bool
    settings: Numbers
    copies: Numbers


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
        self._num_ranks = 1 if group is None else group.size()
        self._rank = 0 if group is None else group.rank()
        self._first = self._num_ranks * NUM_SENT
        length = self._first + num_microbatches * self._width + num_parameters
        sent = max(_LEAST_SENT, 1 << (length - 1).bit_length())
        self._summed = torch.zeros(sent, dtype=torch.float64, device=device)
        self._vector = self._summed[:length]
        self._group = group
        self._work: dist.Work | None = None
        self._sent = RankMessage(0, 0)

    def put_microbatch(self, index: int, loss_sum: Tensor, weight: Tensor) -> None:
        """Fill the slot of microbatch `index` without waiting for the device."""
        start = self._first + index * self._width
        for place, number in ((start + _LOSS, loss_sum), (start + _WEIGHT, weight)):
            if number.device.type == "cpu":
                self._vector[place].fill_(number.item())  # a copy from the host would wait
            else:
                self._vector[place].copy_(number.detach())

    def add_statistics(self, index: int, *statistics: Tensor, first: int = 0) -> None:
        """Add to the statistics from `first` on of microbatch `index`; stages have those of some layers."""
        start = self._first + index * self._width + _NUM_FIXED + first
        for part in statistics:
            if part.device != self._vector.device:  # from locked memory, as in `_place`
                part = part.pin_memory().to(self._vector.device, non_blocking=True)
            self._vector[start : start + len(part)] += part
            start += len(part)

    def put_used(self, used: list[bool]) -> None:
        """Mark the parameters that got a gradient on this rank."""
        assert len(used) == self._num_parameters
        if used:
            self._place(len(self._vector) - len(used), used)

    def launch(self, message: RankMessage) -> None:
        """Start the collective."""
        self._sent = message
        plain = (message.stop_signum, message.position, message.signature % _HALF, message.leaves_out)
        row = [float(number) for number in (*plain, len(self._vector))]
        digests = [message.settings]
        if not isinstance(message.copies, Tensor):
            digests += message.copies
        for digest in digests:
            row += (float(digest % _HALF), float(digest // _HALF % _HALF))
        start = self._rank * NUM_SENT
        self._place(start, row)
        if isinstance(message.copies, Tensor):
            halves = torch.stack([message.copies & (_HALF - 1), (message.copies >> 32) & (_HALF - 1)], dim=1)
            self._vector[start + _COPIES : start + NUM_SENT] = halves.reshape(-1)
        if self._group is None:
            return
        self._work = dist.all_reduce(self._summed, group=self._group, async_op=True)

    @property
    def sent(self) -> Tensor:
        """The whole vector, also to be filled with that of another rank."""
        return self._summed

    def _place(self, start: int, numbers: Sequence[float]) -> None:
        """Copy numbers into the vector; from locked memory, so that a device is not waited for."""
        is_locked = self._vector.device.type == "cuda"
        sent = torch.tensor(numbers, dtype=torch.float64, pin_memory=is_locked)
        self._vector[start : start + len(numbers)].copy_(sent, non_blocking=True)

    def wait(self, extra: Tensor | None = None) -> tuple[Agreed, float]:
        """Wait for the collective and read its result, with one transfer from the device.

        Args:
            extra: a scalar to copy in the same transfer.

        Returns:
            The agreed values, and the value of `extra` (0 if there is none).
        """
        if self._work is not None:
            self._work.wait()
        vector, brought = self._vector, 0.0
        if extra is not None:
            vector = torch.cat([vector, extra.double().reshape(1)])
        numbers = vector.cpu().numpy()
        if extra is not None:
            brought, numbers = float(numbers[-1]), numbers[:-1]
        rows = numbers[: self._first].reshape(self._num_ranks, NUM_SENT)
        plain: list[list[float]] = rows[:, :_SETTINGS].tolist()
        self._check_same("is at step", [int(row[_POSITION]) for row in plain])
        self._check_same("has numbers of its batch and model:", [int(row[_LENGTH]) for row in plain])
        self._check_signatures([int(row[_SIGNATURE]) for row in plain])
        signums = [int(row[_STOP]) for row in plain]
        end = self._first + self._num_microbatches * self._width
        table = numbers[self._first : end].reshape(self._num_microbatches, self._width)
        agreed = Agreed(
            losses=table[:, _LOSS].tolist(),
            weights=table[:, _WEIGHT].tolist(),
            statistics=torch.from_numpy(table)[:, _NUM_FIXED:],
            # After Ctrl-C a person decides whether to go on; after any other signal a scheduler does.
            stop_signum=max(signums, key=lambda signum: (signum not in (0, signal.SIGINT), signum)),
            used=(numbers[end : end + self._num_parameters] > 0).tolist() if self._num_parameters else None,
            all_leave_out=all(row[_LEAVES_OUT] for row in plain),
            settings=rows[:, _SETTINGS:_COPIES],
            copies=rows[:, _COPIES:],
        )
        return agreed, brought

    def _check_same(self, words: str, numbers: list[int]) -> None:
        if numbers.count(numbers[0]) == len(numbers):
            return
        shown = ", ".join(f"rank {rank} {words} {number}" for rank, number in list(enumerate(numbers))[:8])
        error = PacelineError(
            "PL430",
            saw=shown + (" ..." if len(numbers) > 8 else "") + ".",
            rule="Every rank takes the same steps on the same global batches.",
            fix="Look for a step, a loader or an early exit that depends on the rank.",
        )
        error.on_every_rank = True
        raise error

    def _check_signatures(self, signatures: list[int]) -> None:
        if signatures.count(signatures[0]) == len(signatures):
            return
        error = PacelineError(
            "PL443",
            saw="in the previous step, ranks gathered or summed different blocks, or in another order.",
            rule="Under dp_shard, all ranks gather and sum every block together, so they must run the same "
            "blocks in each microbatch. The weights are wrong since that step.",
            fix="Run every block for every microbatch (multiply what must not count by zero), or use "
            "dp_shard=1. Resume from an earlier checkpoint.",
        )
        error.on_every_rank = True
        raise error
