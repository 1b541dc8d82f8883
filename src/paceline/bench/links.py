"""Describes links between ranks as the seconds that messages take by size.

A link is described by three curves, because collectives use it in three ways:

- `message`: one message to a receiver that waits for it. A chain of forwarded messages pays this per hop.
- `exchange`: every rank sends one message and receives one, and waits for both. gloo asks the receiver
  before it sends, so over a long link this takes a round trip and not one way (gloo/transport/tcp/pair.cc).
- `stream`: seconds per message while every rank keeps two messages to its neighbour in flight, as gloo's
  rings do (gloo/allreduce.cc, gloo/allgather.cc).

Each curve is a line `alpha + beta * bytes` (Hockney 1994) or, if measured, linear between measured sizes,
like the gap of parameterized LogP (Kielmann et al. 2000).
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Curve:
    """Seconds by size of message: linear between points, continued beyond the last one.

    Attributes:
        num_bytes: sizes of the points, ascending; two or more.
        seconds: of a message of each size.
    """

    num_bytes: tuple[float, ...]
    seconds: tuple[float, ...]

    @classmethod
    def line(cls, alpha_s: float, s_per_byte: float) -> Curve:
        """Return the curve `alpha_s + s_per_byte * num_bytes`."""
        return cls((0.0, 1e6), (alpha_s, alpha_s + 1e6 * s_per_byte))

    @property
    def alpha_s(self) -> float:
        """Seconds of the smallest message."""
        return self.seconds[0]

    @property
    def s_per_byte(self) -> float:
        """Seconds of one more byte in a large message; never negative, whatever was measured."""
        rise = self.seconds[-1] - self.seconds[-2]
        return max(0.0, rise / (self.num_bytes[-1] - self.num_bytes[-2]))

    def __call__(self, num_bytes: float) -> float:
        """Return the seconds of a message of this size."""
        if num_bytes >= self.num_bytes[-1]:
            return self.seconds[-1] + (num_bytes - self.num_bytes[-1]) * self.s_per_byte
        if num_bytes <= self.num_bytes[0]:
            return self.seconds[0]
        at = bisect_right(self.num_bytes, num_bytes)
        left, right = self.num_bytes[at - 1], self.num_bytes[at]
        share = (num_bytes - left) / (right - left)
        return self.seconds[at - 1] * (1 - share) + self.seconds[at] * share


@dataclass(frozen=True)
class Link:
    """The link of a class of pairs of ranks.

    Attributes:
        message: as the module defines the three curves.
        exchange: the same.
        stream: the same.
        contention: how many times longer than its bytes suggest an exchange of all ranks with all others
            takes (Steffenel 2006, "Modeling Network Contention Effects on All-to-All Operations").
    """

    message: Curve
    exchange: Curve
    stream: Curve
    contention: float = 1.0

    @classmethod
    def of(cls, alpha_s: float, bytes_per_s: float, *, asks_first: bool = True) -> Link:
        """Return the link with a latency and a bandwidth.

        Args:
            alpha_s: seconds that an empty message takes, one way.
            bytes_per_s: one way.
            asks_first: whether a sender asks the receiver before it sends, as gloo does.
        """
        s_per_byte = 1 / bytes_per_s
        hop_s = 2 * alpha_s if asks_first else alpha_s
        # Of two messages in flight, the second is sent while the first one's latency passes, up to this size.
        hidden = max(1.0, hop_s / s_per_byte)
        points = (0.0, hidden, 2 * hidden)
        stream = Curve(points, tuple(max(b * s_per_byte, (hop_s + b * s_per_byte) / 2) for b in points))
        return cls(Curve.line(alpha_s, s_per_byte), Curve.line(hop_s, s_per_byte), stream)


@dataclass(frozen=True)
class Links:
    """The links of a cluster by class of pair, and the costs inside of a process.

    Attributes:
        same_node: between two ranks of a node; None if no node has two.
        between_nodes: between ranks of two nodes; None if there is one node. One flow leaves each node.
        call_s: seconds of a collective beside its messages.
        copy: seconds of a copy within a process; what fits into the caches is copied much faster.
        add: seconds of adding a received vector to an own one.
    """

    same_node: Link | None
    between_nodes: Link | None
    call_s: float = 0.0
    copy: Curve = field(default_factory=lambda: Curve.line(0.0, 0.0))
    add: Curve = field(default_factory=lambda: Curve.line(0.0, 0.0))

    def of_class(self, *, between: bool) -> Link:
        """Return the link of a class that the ranks have."""
        link = self.between_nodes if between else self.same_node
        assert link is not None, "the table lacks a class of pairs that the ranks have"
        return link


@dataclass(frozen=True)
class Pair:
    """The link between two ranks.

    Attributes:
        first: rank.
        second: rank.
        message: seconds of a message between them, one way, while nothing else is sent.
        latency_s: of the fastest small one; unlike the median, a busy machine hardly changes it.
    """

    first: int
    second: int
    message: Curve
    latency_s: float


@dataclass(frozen=True)
class MeasuredLinks:
    """The links of a cluster with the ranks that they belong to.

    Attributes:
        hosts: each node's host name.
        nodes: each rank's node, numbered in the order of ranks.
        backend: that carried the messages.
        pairs: every pair that was measured by itself.
        links: the table for predictions.
        took_s: seconds of the measurement.
    """

    hosts: tuple[str, ...]
    nodes: tuple[int, ...]
    backend: str
    pairs: tuple[Pair, ...]
    links: Links
    took_s: float
