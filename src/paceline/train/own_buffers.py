"""Finds the buffers that the forwards of a user's own loop change, in its first pass.

All microbatches of a step start from the same value of such a buffer (the power iteration of `spectral_norm`,
a counter), so that it does not depend on the number of ranks; see `RunningStatistics.keep`.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import nn

from paceline.data.share import Share
from paceline.errors import PacelineError
from paceline.mesh import Axis
from paceline.parallel.batchnorm import RunningStatistics, list_forward_buffers
from paceline.torch_seams.tensors import read_version
from paceline.train.cut_probe import warn_of_counts


class FirstPass:
    """A loop's first pass.

    Args:
        dp: the ranks that have different microbatches; `None` for one rank.
    """

    def __init__(self, model: nn.Module, statistics: RunningStatistics, dp: Axis | None) -> None:
        self._statistics, self._dp = statistics, dp
        self._buffers = list_forward_buffers(model)
        self._before = [(each.tensor, read_version(each.tensor), each.read()) for each in self._buffers]
        self._changed: list[int] | None = None

    def end_microbatch(self) -> None:
        """Find the buffers that the first microbatch has changed."""
        if self._changed is not None:
            return
        # Versions, not values: an iteration that has converged writes the same value again.
        self._changed = [
            number
            for number, (each, (tensor, version, _)) in enumerate(
                zip(self._buffers, self._before, strict=True)
            )
            if each.tensor is not tensor or read_version(tensor) != version
        ]
        self._keep(self._changed)

    def end(self, share: Share) -> None:
        """Tell ranks without microbatches; collective over dp if the model has such buffers."""
        if not self._buffers:
            return
        changed = self._changed or []
        if self._dp is not None and self._dp.size > 1:
            owner = next(rank for rank, owned in enumerate(share.num_owned) if owned)
            box = [changed]
            dist.broadcast_object_list(box, group=self._dp.group, group_src=owner)
            changed = box[0]
        self._keep([number for number in changed if number not in (self._changed or ())])
        self._changed = changed
        if self._dp is None or self._dp.rank == 0:
            warn_of_counts([self._buffers[n] for n in changed], share)

    def begin_later(self) -> None:
        """Begin a later pass."""
        self._before = [
            (each.tensor, read_version(each.tensor), before)
            for each, (*_, before) in zip(self._buffers, self._before, strict=True)
        ]

    def end_later(self, number: int) -> None:
        """Raise PL390 if a forward has begun to change a buffer after the first pass."""
        for place, (each, (tensor, version, _)) in enumerate(zip(self._buffers, self._before, strict=True)):
            is_same = each.tensor is tensor and read_version(tensor) == version
            if not is_same and place not in (self._changed or ()):
                raise PacelineError(
                    "PL390",
                    saw=f"a forward of step {number} has changed the buffer {each.name}, which those of the "
                    "first step did not change.",
                    rule="The buffers that forwards change are found in the first step, so that they do not "
                    "depend on the number of ranks.",
                    fix="Change it in every step, also by nothing (add_(0)), or between the steps.",
                )

    def _keep(self, numbers: list[int]) -> None:
        self._statistics.keep_from([(self._buffers[n], self._before[n][2]) for n in numbers], self._dp)
