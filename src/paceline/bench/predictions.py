"""Predicts the seconds of gloo's collectives from a table of links.

An algorithm is a list of phases that follow each other. All messages of a phase have one size. The seconds
of a phase are those of its slowest class of pairs. For n rounds of messages of b bytes, with k messages on a
rank's or a node's connection:

    stream:    n stream(k b) + min(exchange(0), k b beta)
    exchange:  n (exchange(b) + (k contention - 1) b beta), if k > 1
    message:   n (message(b) + (k - 1) b beta)

where `stream`, `exchange` and `message` are the curves of the link (`bench/links.py`). Numbers that a step
receives and adds cost the curve `add`, copies within a process the curve `copy`. The numbers of steps and
bytes are those of Thakur, Rabenseifner and Gropp 2005, "Optimization of Collective Communication Operations
in MPICH", sections 4.1 to 4.5; where gloo differs, its source file is named.

Sizes follow nccl-tests (doc/PERFORMANCE.md): the vector of all_reduce, reduce and broadcast; what a rank
receives in all_gather, brings to reduce_scatter, and sends in all_to_all, its own part included; what the
root has in gather and scatter. Rank 0 is the root. A request is the empty message by which a gloo receiver
asks a sender that already waits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from paceline.bench.links import Link, Links

Edge = tuple[int, int]
# gloo cuts a rank's chunk into two segments or more, of at most this size (AllreduceOptions::maxSegmentSize).
_SEGMENT_BYTES = 1 << 20


@dataclass(frozen=True)
class Phase:
    """Rounds of equal messages.

    Attributes:
        kind: which curve of the link applies.
        steps: messages that wait for each other, in one chain.
        num_bytes: of each message.
        edges: sender and receiver of every message of a round.
        rounds: how often every edge carries a message; default: once per step.
        added: bytes that a rank adds over the whole phase.
        copied: bytes that a rank copies over the whole phase.
    """

    kind: Literal["message", "exchange", "stream"]
    steps: int
    num_bytes: float
    edges: tuple[Edge, ...]
    rounds: int | None = None
    added: float = 0.0
    copied: float = 0.0

    @property
    def num_rounds(self) -> int:
        """Messages that every edge carries."""
        return self.steps if self.rounds is None else self.rounds


def predict(operation: str, num_bytes: float, nodes: Sequence[int], links: Links) -> float:
    """Return the seconds of a call, from the common start to the last rank's end.

    Args:
        operation: a key of `ALGORITHMS`.
        num_bytes: its size, as the module defines it.
        nodes: each rank's node; two ranks or more.
        links: with every class of pairs that the ranks have.
    """
    phases = list_phases(operation, num_bytes, nodes)
    return links.call_s + sum(_time_phase(phase, nodes, links) for phase in phases)


def list_phases(operation: str, num_bytes: float, nodes: Sequence[int]) -> list[Phase]:
    """Return the phases of a call; the arguments are those of `predict`."""
    assert len(nodes) > 1, "one rank does not communicate"
    _, list_own = ALGORITHMS[operation]
    return list_own(num_bytes, nodes)


# ---- seconds of a phase


def _time_phase(phase: Phase, nodes: Sequence[int], links: Links) -> float:
    took_s = _time_messages(phase, nodes, links)
    took_s += links.copy(phase.copied) if phase.copied else 0.0
    return took_s + (links.add(phase.added) if phase.added else 0.0)


def _time_messages(phase: Phase, nodes: Sequence[int], links: Links) -> float:
    slowest = 0.0
    for between in (False, True):
        edges = [edge for edge in phase.edges if (nodes[edge[0]] != nodes[edge[1]]) is between]
        if edges:
            shared = _count_shared(edges, nodes if between else range(len(nodes)))
            slowest = max(slowest, _time_class(phase, links.of_class(between=between), shared))
    return slowest


def _count_shared(edges: Iterable[Edge], owners: Sequence[int]) -> int:
    """Return the most messages of a round that one owner of a connection (a rank, a node) sends or
    receives."""
    sends: Counter[int] = Counter()
    receives: Counter[int] = Counter()
    for sender, receiver in edges:
        sends[owners[sender]] += 1
        receives[owners[receiver]] += 1
    return max(*sends.values(), *receives.values())


def _time_class(phase: Phase, link: Link, shared: int) -> float:
    if phase.kind == "stream":
        num_bytes = shared * phase.num_bytes
        # A short stream ends one message later; a long one begins one request later.
        edge_s = min(link.exchange.alpha_s, num_bytes * link.stream.s_per_byte)
        return phase.num_rounds * link.stream(num_bytes) + edge_s
    if phase.kind == "message":
        curve, more = link.message, shared - 1.0
    else:
        curve, more = link.exchange, shared * link.contention - 1 if shared > 1 else 0.0
    return phase.num_rounds * (curve(phase.num_bytes) + more * phase.num_bytes * curve.s_per_byte)


# ---- the edges of a round


def _ring_edges(ranks: Sequence[int]) -> tuple[Edge, ...]:
    return tuple(zip(ranks, (*ranks[1:], ranks[0]), strict=True))


def _all_edges(num_ranks: int) -> tuple[Edge, ...]:
    return tuple((a, b) for a in range(num_ranks) for b in range(num_ranks) if a != b)


def _root_edges(num_ranks: int) -> tuple[Edge, ...]:
    return tuple((0, rank) for rank in range(1, num_ranks))


def _reverse(edges: Iterable[Edge]) -> tuple[Edge, ...]:
    return tuple((receiver, sender) for sender, receiver in edges)


def _tree_levels(num_ranks: int) -> list[tuple[Edge, ...]]:
    """Return the edges of a binomial tree from rank 0, level by level: in level i, ranks below 2^i send to
    the rank that is 2^i higher."""
    levels = []
    distance = 1
    while distance < num_ranks:
        levels.append(tuple((r, r + distance) for r in range(distance) if r + distance < num_ranks))
        distance *= 2
    return levels


# ---- parts of algorithms


def _stream_ring(ring: tuple[Edge, ...], chunk: float, steps: int, *, adds: bool = False) -> Phase:
    """Return steps in which a chunk moves on in a ring, cut into segments as gloo does."""
    segments = max(2, -(-int(chunk) // _SEGMENT_BYTES))
    added = steps * chunk if adds else 0.0
    return Phase("stream", steps, chunk / segments, ring, steps * segments, added)


def _request(edges: Iterable[Edge]) -> Phase:
    """Return the receivers' requests to senders that wait for them."""
    return Phase("message", 0, 0.0, _reverse(edges), rounds=1)


# ---- all_reduce


def _ring_all_reduce(size: float, nodes: Sequence[int]) -> list[Phase]:
    """Model 2 (N-1) steps of S/N bytes: 2 (N-1)/N S per rank (Patarasuk and Yuan 2009; gloo/allreduce.cc)."""
    ring, chunk, steps = _ring_edges(range(len(nodes))), size / len(nodes), len(nodes) - 1
    return [_stream_ring(ring, chunk, steps, adds=True), _stream_ring(ring, chunk, steps)]


# ---- reduce_scatter and all_gather


def _ring_reduce_scatter(size: float, nodes: Sequence[int]) -> list[Phase]:
    """Model N-1 steps of S/N bytes: (N-1)/N S per rank (Thakur et al., section 4.2)."""
    return _ring_all_reduce(size, nodes)[:1]


def _by_all_reduce(size: float, nodes: Sequence[int]) -> list[Phase]:
    """Model a ring all-reduce of a copy: twice the bytes of a ring reduce-scatter (ProcessGroupGloo.cpp)."""
    first, second = _ring_all_reduce(size, nodes)
    return [first, replace(second, copied=size)]


def _ring_all_gather(size: float, nodes: Sequence[int]) -> list[Phase]:
    """Model N-1 steps of S/N bytes, each in two messages (gloo/allgather.cc); torch then copies the
    result."""
    steps, half = len(nodes) - 1, size / len(nodes) / 2
    return [Phase("stream", steps, half, _ring_edges(range(len(nodes))), 2 * steps, copied=size)]


# ---- operations with a root


def _tree_broadcast(size: float, nodes: Sequence[int]) -> list[Phase]:
    """Model a binomial tree in which a rank sends to all of its children at once (gloo/broadcast.cc).

    The messages of a rank share its connection. With N = 2^d the last rank has the vector after
    d + (d-1) + ... + 1 times S, not after d times S as with one child after the other.
    """
    edges = [edge for level in _tree_levels(len(nodes)) for edge in level]
    phases = []
    depth = 0
    while senders := [edge for edge in edges if edge[0].bit_count() == depth]:
        phases.append(Phase("message", 1, size, tuple(senders)))
        depth += 1
    return [_request(phases[0].edges), *phases]


def _ring_reduce(size: float, nodes: Sequence[int]) -> list[Phase]:
    """Model a ring reduce-scatter, then a gather of the chunks.

    gloo/reduce.cc runs the ring for all segments but two. With more than two per chunk (above 2 MiB per
    chunk), it so sends more than the (N-1)/N S that the sum needs.
    """
    (ring,) = _ring_reduce_scatter(size, nodes)
    segments = ring.num_rounds // ring.steps * len(nodes)
    edges = _reverse(_root_edges(len(nodes)))
    gather = Phase("message", 1, size / len(nodes), edges)
    return [replace(ring, rounds=segments - 2), _request(edges), gather]


def _direct_gather(size: float, nodes: Sequence[int]) -> list[Phase]:
    """Model all others sending S/N bytes to the root at once (gloo/gather.cc); torch then copies the
    result."""
    edges = _reverse(_root_edges(len(nodes)))
    return [_request(edges), Phase("message", 1, size / len(nodes), edges, copied=size)]


def _direct_scatter(size: float, nodes: Sequence[int]) -> list[Phase]:
    """Model a root that sends S/N bytes to each of the others at once (gloo/scatter.cc)."""
    edges = _root_edges(len(nodes))
    return [_request(edges), Phase("message", 1, size / len(nodes), edges)]


# ---- operations without data of a root


def _direct_all_to_all(size: float, nodes: Sequence[int]) -> list[Phase]:
    """Model one step: every rank sends each other rank S/N bytes (gloo/alltoall.cc)."""
    return [Phase("exchange", 1, size / len(nodes), _all_edges(len(nodes)))]


def _dissemination(size: float, nodes: Sequence[int]) -> list[Phase]:
    """Model ceil(log2 N) steps in which every rank sends to the rank 1, 2, 4 ... further.

    The dissemination barrier of Hensgen, Finkel and Manber (1988); gloo/barrier.cc.
    """
    num_ranks, phases, distance = len(nodes), [], 1
    while distance < num_ranks:
        edges = tuple((rank, (rank + distance) % num_ranks) for rank in range(num_ranks))
        phases.append(Phase("exchange", 1, 0.0, edges))
        distance *= 2
    return phases


# What gloo runs when torch.distributed calls it, with the usual name; it has no other choice (gloo's sources,
# read in 2026).
ALGORITHMS: dict[str, tuple[str, Callable[[float, Sequence[int]], list[Phase]]]] = {
    "all_reduce": ("ring", _ring_all_reduce),
    "reduce_scatter": ("by-all-reduce", _by_all_reduce),
    "all_gather": ("ring", _ring_all_gather),
    "broadcast": ("tree", _tree_broadcast),
    "reduce": ("ring", _ring_reduce),
    "gather": ("direct", _direct_gather),
    "scatter": ("direct", _direct_scatter),
    "all_to_all": ("direct", _direct_all_to_all),
    "barrier": ("dissemination", _dissemination),
}
