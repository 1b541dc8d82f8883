"""Sends and receives what crosses the cuts of a model, between the ranks of `pp`.

Every rank knows all messages of a step, their order, shapes and types. So a receive is posted in the sender's
order, and no message describes another. Each has its own tag. If the library knows tags (gloo), a receiver
waits for a missing message and does not take the next one in its place.

Tensors travel as bytes, in their order in memory, so that the receiver has the same strides: kernels may add
in their order. The strides of outputs are recorded; those of gradients follow as one byte per dimension.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.mesh import Axis
from paceline.pipeline.messages import Message, Payload, list_received, list_taken
from paceline.pipeline.schedule import Schedule
from paceline.pipeline.under_way import UNDER_WAY

# Tags of gloo have 31 bits, and a message has fewer tensors than this.
_MOST_TAGS, _MOST_TENSORS = 1 << 30, 1 << 10


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
        self._sent: dict[Message, list[tuple[dist.Work, Tensor]]] = {}
        self._taken = list_taken(schedule, pp.rank, shared)
        self._kinds = [(Payload.OUTPUT, ""), (Payload.GRADIENT, "")]
        self._kinds += [(Payload.SHARED, name) for name in sorted(shared)]

    def give(self, message: Message, tensors: Sequence[Tensor]) -> None:
        """Send what an action made; does not wait."""
        tensors = [tensor.detach() for tensor in tensors]
        peer = self._homes[message.target]
        if peer == self._pp.rank:
            self._local[message] = list(tensors)
            return
        UNDER_WAY.posted = message
        for place, (tensor, form) in enumerate(zip(tensors, self._describe(message), strict=True)):
            assert (tuple(tensor.shape), tensor.dtype) == (form.shape, form.dtype), (message, form)
            if not tensor.numel():
                continue
            order = _find_order(tensor.stride() if form.stride is None else form.stride)
            numbers = tensor.permute(order).resolve_conj().resolve_neg().contiguous()
            sent = numbers.reshape(-1).view(torch.uint8)
            if form.stride is None:
                sent = torch.cat([sent, torch.tensor(order, dtype=torch.uint8, device=sent.device)])
            work = dist.isend(sent, group=self._pp.group, group_dst=peer, tag=self._tag(message, place))
            assert work is not None
            self._sent.setdefault(message, []).append((work, sent))
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
            self._posted[following] = [
                self._post(form, peer, self._tag(following, place))
                for place, form in enumerate(self._describe(following))
            ]
        UNDER_WAY.posted = None

    def take(self, message: Message) -> list[Tensor]:
        """Return the tensors of a message; waits for them."""
        if self._homes[message.source] == self._pp.rank:
            return self._local.pop(message)
        self.expect(message)
        UNDER_WAY.awaited = message
        with self._naming(message, message.source):
            found = [posted.take() for posted in self._posted.pop(message)]
        UNDER_WAY.awaited = None
        # What the peer took before it sent this has left; its memory is needed no longer.
        for earlier in self._taken.pop(message, ()):
            self._end_send(earlier)
        return found

    def finish(self) -> None:
        """Wait until everything that was given has left."""
        for message in list(self._sent):
            self._end_send(message)
        assert not self._local
        assert not self._posted
        assert not any(self._expected.values())

    def _end_send(self, message: Message) -> None:
        """Wait until a message has left, and release its tensors."""
        UNDER_WAY.awaited = message
        with self._naming(message, message.target):
            for work, _ in self._sent.pop(message, ()):
                work.wait()
        UNDER_WAY.awaited = None

    def _post(self, form: Form, peer: int, tag: int) -> _Posted:
        if not math.prod(form.shape):
            return _Posted(form, torch.empty(form.shape, dtype=form.dtype, device=self._device), None)
        flat = torch.empty(form.num_bytes, dtype=torch.uint8, device=self._device)
        return _Posted(form, flat, dist.irecv(flat, group=self._pp.group, group_src=peer, tag=tag))

    def _tag(self, message: Message, place: int) -> int:
        """Return the tag of a message's tensor: the same on both ranks, and no other's of this step."""
        kind = self._kinds.index((message.content, message.name))
        number = (message.microbatch * len(self._homes) + message.target) * len(self._kinds) + kind
        return (1 + number * _MOST_TENSORS + place) % _MOST_TAGS

    @contextmanager
    def _naming(self, message: Message, stage: int) -> Iterator[None]:
        """Name the message in an error of the library, which knows ranks and bytes only."""
        try:
            yield
        except RuntimeError as error:
            peer = self._homes[stage]
            what = "received" if stage == message.source else "sent"
            side = "from" if stage == message.source else "to"
            error.add_note(
                f"paceline: rank {self._pp.rank} of pp {what} {message}, {side} rank {peer} of pp."
            )
            raise


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
