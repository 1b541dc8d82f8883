"""Sends and receives what crosses the cuts of a model, between the ranks of `pp`.

Every rank knows all messages of a step, their order, shapes and types, so no message describes another. All
ranks post sends and receives in one order (`pipeline/messages.py`). Each message has its own tag. If the
library knows tags (gloo), a receiver waits for a missing message and does not take the next one in its place.

Tensors travel as bytes, in their order in memory, so that the receiver has the same strides: kernels may add
in their order. The strides of outputs are recorded. Those of gradients follow the first one of each shape, as
one byte per dimension; the receiver has to wait for the device to read them.
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
from paceline.pipeline.messages import Message, Payload, list_posted, list_taken
from paceline.pipeline.schedule import Schedule
from paceline.pipeline.under_way import UNDER_WAY

# Tags of gloo have 31 bits, and a message has fewer tensors than this.
_MOST_TAGS, _MOST_TENSORS = 1 << 30, 1 << 10


@dataclass(frozen=True)
class Form:
    """The form of a tensor that is sent.

    Attributes:
        stride: its own; `None` if only the sender knows it.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    stride: tuple[int, ...] | None = None

    @property
    def num_bytes(self) -> int:
        """The bytes of the values."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass
class StrideOrder:
    """The dimensions of a gradient from the slowest to the fastest in memory.

    Attributes:
        first: the receive of the first gradient of this shape, behind which they follow.
        dims: them, once they are known.
    """

    first: _Posted | None = None
    dims: list[int] | None = None

    def read(self) -> list[int]:
        """Return the dimensions; the first time waits for the message and the device."""
        if self.dims is None:
            assert self.first is not None
            self.first.wait()
            self.dims = self.first.flat[self.first.form.num_bytes :].tolist()
            self.first = None
        return self.dims


# By stages, name of a shared weight, place in the message, and form.
StrideOrders = dict[tuple[int, int, str, int, Form], StrideOrder]


class StageTransfer:
    """The messages of one step.

    Args:
        schedule: of the largest number of microbatches of a data rank.
        shared: by name of a weight that several stages use, these stages.
        describe: from a message to the forms of its tensors.
        device: where they are.
        orders: of the gradients that were sent and received before; this one adds to it.
    """

    def __init__(
        self,
        pp: Axis,
        schedule: Schedule,
        num_microbatches: int,
        shared: Mapping[str, tuple[int, ...]],
        describe: Callable[[Message], list[Form]],
        device: torch.device,
        orders: StrideOrders,
    ) -> None:
        self.sent_bytes = 0
        self._pp = pp
        self._homes = schedule.homes
        self._describe = describe
        self._device = device
        self._orders = orders
        stages = tuple(sorted(shared.items()))
        # Data ranks with fewer microbatches keep the others' order: all of them meet in collectives.
        posted = list_posted(schedule, pp.rank, stages)
        self._ahead = deque(message for message in posted if message.microbatch < num_microbatches)
        self._posted: dict[Message, list[_Posted]] = {}
        self._local: dict[Message, list[Tensor]] = {}
        self._sent: dict[Message, list[tuple[dist.Work, Tensor]]] = {}
        self._taken = dict(list_taken(schedule.keep_first(num_microbatches), pp.rank, stages))
        self._kinds = [(Payload.OUTPUT, ""), (Payload.GRADIENT, "")]
        self._kinds += [(Payload.SHARED, name) for name in sorted(shared)]

    def give(self, message: Message, tensors: Sequence[Tensor]) -> None:
        """Send what an action made; does not wait."""
        tensors = [tensor.detach() for tensor in tensors]
        peer = self._homes[message.target]
        if peer == self._pp.rank:
            self._local[message] = list(tensors)
            return
        self._reach(message)
        UNDER_WAY.posted = message
        for place, (tensor, form) in enumerate(zip(tensors, self._describe(message), strict=True)):
            assert (tuple(tensor.shape), tensor.dtype) == (form.shape, form.dtype), (message, form)
            if not tensor.numel():
                continue
            order, is_first = self._find_order(message, place, form)
            if order.dims is None:
                order.dims = _sort_dims(tensor.stride())
            numbers = tensor.permute(order.dims).resolve_conj().resolve_neg().contiguous()
            sent = numbers.reshape(-1).view(torch.uint8)
            if is_first:
                sent = torch.cat([sent, torch.tensor(order.dims, dtype=torch.uint8, device=sent.device)])
            work = dist.isend(sent, group=self._pp.group, group_dst=peer, tag=self._tag(message, place))
            assert work is not None
            self._sent.setdefault(message, []).append((work, sent))
            self.sent_bytes += sent.numel()
        UNDER_WAY.posted = None

    def expect(self, message: Message) -> None:
        """Post the receives of a message and of those before it, up to the next one that this rank sends."""
        if self._homes[message.source] == self._pp.rank:
            return
        while message not in self._posted and self._homes[self._ahead[0].target] == self._pp.rank:
            self._post(self._ahead.popleft())

    def take(self, message: Message) -> list[Tensor]:
        """Return the tensors of a message; waits for them."""
        if self._homes[message.source] == self._pp.rank:
            return self._local.pop(message)
        if message not in self._posted:
            self._reach(message)
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
        assert not any(self._homes[message.target] == self._pp.rank for message in self._ahead)

    def _reach(self, message: Message) -> None:
        """Post the receives that come before a message in the order, and its own if it is received."""
        while True:
            following = self._ahead.popleft()
            if self._homes[following.target] == self._pp.rank:
                self._post(following)
            if following == message:
                return

    def _end_send(self, message: Message) -> None:
        """Wait until a message has left, and release its tensors."""
        UNDER_WAY.awaited = message
        with self._naming(message, message.target):
            for work, _ in self._sent.pop(message, ()):
                work.wait()
        UNDER_WAY.awaited = None

    def _post(self, message: Message) -> None:
        """Post the receives of a message."""
        UNDER_WAY.posted, peer = message, self._homes[message.source]
        self._posted[message] = found = []
        for place, form in enumerate(self._describe(message)):
            if not math.prod(form.shape):
                empty = torch.empty(form.shape, dtype=form.dtype, device=self._device)
                found.append(_Posted(form, empty, None, StrideOrder()))
                continue
            order, is_first = self._find_order(message, place, form)
            num_bytes = form.num_bytes + (len(form.shape) if is_first else 0)
            flat = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
            tag = self._tag(message, place)
            work = dist.irecv(flat, group=self._pp.group, group_src=peer, tag=tag)
            found.append(_Posted(form, flat, work, order))
            if is_first:
                order.first = found[-1]
        UNDER_WAY.posted = None

    def _find_order(self, message: Message, place: int, form: Form) -> tuple[StrideOrder, bool]:
        """Return the order of a tensor, and whether it has to be sent."""
        if form.stride is not None:
            return StrideOrder(dims=_sort_dims(form.stride)), False
        key = message.source, message.target, message.name, place, form
        is_first = key not in self._orders
        return self._orders.setdefault(key, StrideOrder()), is_first

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


@dataclass
class _Posted:
    """A receive in progress: the bytes of a tensor, or an empty tensor without a message."""

    form: Form
    flat: Tensor
    work: dist.Work | None
    order: StrideOrder

    def wait(self) -> None:
        """Wait for the bytes, once: gloo would wait for another message."""
        if self.work is not None:
            self.work.wait()
            self.work = None

    def take(self) -> Tensor:
        """Wait for the bytes; return the tensor."""
        shape = self.form.shape
        if not math.prod(shape):
            return self.flat
        self.wait()
        order = self.order.read()
        values = self.flat[: self.form.num_bytes].view(self.form.dtype).view([shape[dim] for dim in order])
        return values.permute([order.index(dim) for dim in range(len(shape))])


def _sort_dims(stride: Sequence[int]) -> list[int]:
    """Return the dimensions from the slowest to the fastest in memory."""
    return sorted(range(len(stride)), key=lambda dim: (-stride[dim], dim))
