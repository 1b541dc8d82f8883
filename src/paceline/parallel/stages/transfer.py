"""Sends and receives what crosses the cuts of a model, between the ranks of `pp`.

Every rank knows all messages of a step, their order, shapes and types. So a receive is posted in the sender's
order, and no message describes another. Tensors travel as bytes, in the order in which they lie in memory, so
that the receiver has the same strides: kernels may add in their order. The strides of outputs are recorded;
those of gradients follow as one byte per dimension.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.mesh import Axis
from paceline.pipeline.messages import Message, list_received
from paceline.pipeline.schedule import Schedule
from paceline.pipeline.under_way import UNDER_WAY


@dataclass(frozen=True)
class Form:
    """The form of a tensor that is sent.

    Attributes:
        shape, dtype: its own.
        stride: its own; `None` if only the sender knows it.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    stride: tuple[int, ...] | None = None

    @property
    def num_bytes(self) -> int:
        """The length of the message."""
        order = 0 if self.stride is not None else len(self.shape)
        return math.prod(self.shape) * self.dtype.itemsize + order


class StageTransfer:
    """The messages of one step.

    Args:
        pp: the ranks.
        schedule: of the step.
        shared: by name of a weight that several stages use, these stages.
        describe: from a message to the forms of its tensors.
        device: where they are.

    Attributes:
        sent_bytes: to other ranks.
    """

    def __init__(
        self,
        pp: Axis,
        schedule: Schedule,
        shared: Mapping[str, Sequence[int]],
        describe: Callable[[Message], list[Form]],
        device: torch.device,
    ) -> None:
        self.sent_bytes = 0
        self._pp = pp
        self._homes = schedule.homes
        self._describe = describe
        self._device = device
        self._expected = {
            peer: deque(messages) for peer, messages in list_received(schedule, pp.rank, shared).items()
        }
        self._posted: dict[Message, list[_Posted]] = {}
        self._local: dict[Message, list[Tensor]] = {}
        self._sent: list[tuple[Message, dist.Work, Tensor]] = []
        self._tags: dict[tuple[int, int], int] = {}

    def give(self, message: Message, tensors: Sequence[Tensor]) -> None:
        """Send what an action made; does not wait."""
        tensors = [tensor.detach() for tensor in tensors]
        peer = self._homes[message.target]
        if peer == self._pp.rank:
            self._local[message] = list(tensors)
            return
        UNDER_WAY.posted = message
        for tensor, form in zip(tensors, self._describe(message), strict=True):
            assert (tuple(tensor.shape), tensor.dtype) == (form.shape, form.dtype), (message, form)
            if not tensor.numel():
                continue
            order = _find_order(tensor.stride() if form.stride is None else form.stride)
            sent = tensor.permute(order).contiguous().reshape(-1).view(torch.uint8)
            if form.stride is None:
                sent = torch.cat([sent, torch.tensor(order, dtype=torch.uint8, device=sent.device)])
            work = dist.isend(
                sent, group=self._pp.group, group_dst=peer, tag=self._next_tag(self._pp.rank, peer)
            )
            assert work is not None
            self._sent.append((message, work, sent))
            self.sent_bytes += sent.numel()
        UNDER_WAY.posted = None

    def expect(self, message: Message) -> None:
        """Post the receives of a message, and of those that its sender sends before it."""
        peer = self._homes[message.source]
        if peer == self._pp.rank or message in self._posted:
            return
        queue = self._expected[peer]
        while message not in self._posted:
            following = queue.popleft()
            UNDER_WAY.posted = following
            self._posted[following] = [self._post(form, peer) for form in self._describe(following)]
        UNDER_WAY.posted = None

    def take(self, message: Message) -> list[Tensor]:
        """Return the tensors of a message; waits for them."""
        if self._homes[message.source] == self._pp.rank:
            return self._local.pop(message)
        self.expect(message)
        UNDER_WAY.awaited = message
        found = [posted.take() for posted in self._posted.pop(message)]
        UNDER_WAY.awaited = None
        return found

    def finish(self) -> None:
        """Wait until everything that was given has left."""
        for message, work, _ in self._sent:
            UNDER_WAY.awaited = message
            work.wait()
        UNDER_WAY.awaited = None
        self._sent.clear()
        assert not self._local
        assert not self._posted
        assert not any(self._expected.values())

    def _post(self, form: Form, peer: int) -> _Posted:
        if not math.prod(form.shape):
            return _Posted(form, torch.empty(form.shape, dtype=form.dtype, device=self._device), None)
        flat = torch.empty(form.num_bytes, dtype=torch.uint8, device=self._device)
        tag = self._next_tag(peer, self._pp.rank)
        return _Posted(form, flat, dist.irecv(flat, group=self._pp.group, group_src=peer, tag=tag))

    def _next_tag(self, source: int, target: int) -> int:
        """Return the number of a message between two ranks: the same on both, as both count in one order."""
        tag = self._tags.get((source, target), 0)
        self._tags[source, target] = tag + 1
        return tag


@dataclass(frozen=True)
class _Posted:
    """A receive in progress: the bytes of a tensor, or an empty tensor without a message."""

    form: Form
    flat: Tensor
    work: dist.Work | None

    def take(self) -> Tensor:
        """Wait for the bytes; return the tensor."""
        if self.work is None:
            return self.flat
        self.work.wait()
        shape, stride, num_dims = self.form.shape, self.form.stride, len(self.form.shape)
        if stride is None:
            num_bytes = len(self.flat) - num_dims
            order = self.flat[num_bytes:].tolist()
        else:
            num_bytes, order = len(self.flat), _find_order(stride)
        values = self.flat[:num_bytes].view(self.form.dtype).view([shape[dim] for dim in order])
        return values.permute([order.index(dim) for dim in range(num_dims)])


def _find_order(stride: Sequence[int]) -> list[int]:
    """Return the dimensions from the slowest to the fastest in memory."""
    return sorted(range(len(stride)), key=lambda dim: (-stride[dim], dim))
