"""Predicts the seconds and bytes of collectives by algorithm, from a table of links; without torch.

An algorithm is a list of phases that follow each other. All messages of a phase have one size. The seconds
of a phase are those of its slowest class of pairs. For n rounds of messages of b bytes, with k messages on a
rank's or a node's connection:

    stream:    n stream(k b) + min(exchange(0), k b beta)
    exchange:  n (exchange(b) + (k contention - 1) b beta), if k > 1
    message:   n (message(b) + (k - 1) b beta)

where `stream`, `exchange` and `message` are the curves of the link (`plan/links.py`). Every meeting, in which
ranks wait for each other by a word of memory that they share, takes the same time. Numbers that a step
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

from paceline.plan.links import Link, Links

Edge = tuple[int, int]
# gloo cuts a rank's chunk into two segments or more, of at most this size (AllreduceOptions::maxSegmentSize).
_SEGMENT_BYTES = 1 << 20
# Segments of a pipelined broadcast: long enough for the bandwidth of a WAN, yet the chain fills soon.
PIPELINE_BYTES = 1 << 18


@dataclass(frozen=True)
class Phase:
    """Rounds of equal messages.

    Attributes:
        kind: which curve of the link applies; none does to a meeting, which sends nothing.
        steps: messages that wait for each other, in one chain.
        num_bytes: of each message.
        edges: sender and receiver of every message of a round.
        rounds: how often every edge carries a message; default: once per step.
        added: bytes that a rank adds over the whole phase.
        copied: bytes that a rank copies over the whole phase.
        is_fill: whether it is only the wait until a pipeline is full, whose bytes another phase counts.
    """

    kind: Literal["message", "exchange", "stream", "meeting"]
    steps: int
    num_bytes: float
    edges: tuple[Edge, ...]
    rounds: int | None = None
    added: float = 0.0
    copied: float = 0.0
    is_fill: bool = False

    @property
    def num_rounds(self) -> int:
        """Messages that every edge carries."""
        return self.steps if self.rounds is None else self.rounds


@dataclass(frozen=True)
class Prediction:
    """The cost of one call.

    Attributes:
        operation: as torch.distributed calls it.
        algorithm: of `ALGORITHMS`.
        num_bytes: the size of the call.
        steps: messages that wait for each other, without requests.
        sent_bytes: of the rank that sends most.
        crossing_bytes: that leave the node from which most leave.
        time_s: from the common start to the last rank's end.
    """

    operation: str
    algorithm: str
    num_bytes: float
    steps: int
    sent_bytes: float
    crossing_bytes: float
    time_s: float


def predict(
    operation: str, num_bytes: float, nodes: Sequence[int], links: Links, algorithm: str | None = None
) -> Prediction:
    """Return the cost of a call by one algorithm.

    Args:
        operation: a key of `ALGORITHMS`.
        num_bytes: its size, as the module defines it.
        nodes: each rank's node; two ranks or more.
        links: with every class of pairs that the ranks have.
        algorithm: one of the operation's that suits the ranks; default: gloo's.
    """
    name = algorithm or GLOO_ALGORITHMS[operation]
    phases = list_phases(operation, name, num_bytes, nodes)
    sent = [0.0] * len(nodes)
    leaving = dict.fromkeys(nodes, 0.0)
    for phase in phases:
        for sender, receiver in () if phase.is_fill else phase.edges:
            sent[sender] += phase.num_rounds * phase.num_bytes
            if nodes[sender] != nodes[receiver]:
                leaving[nodes[sender]] += phase.num_rounds * phase.num_bytes
    return Prediction(
        operation=operation,
        algorithm=name,
        num_bytes=num_bytes,
        steps=sum(phase.steps for phase in phases),
        sent_bytes=max(sent),
        crossing_bytes=max(leaving.values()),
        time_s=time_phases(phases, nodes, links),
    )


def list_phases(operation: str, algorithm: str, num_bytes: float, nodes: Sequence[int]) -> list[Phase]:
    """Return the phases of a call; the arguments are those of `predict`."""
    assert len(nodes) > 1, "one rank does not communicate"
    assert suits(algorithm, nodes), f"{algorithm} does not exist for ranks on nodes {nodes}"
    return ALGORITHMS[operation][algorithm](num_bytes, nodes)


def choose_algorithm(operation: str, num_bytes: float, nodes: Sequence[int], links: Links) -> Prediction:
    """Return the prediction of the algorithm that takes the shortest, of those that suit the ranks."""
    names = [name for name in ALGORITHMS[operation] if suits(name, nodes)]
    return min(
        (predict(operation, num_bytes, nodes, links, name) for name in names), key=lambda found: found.time_s
    )


def suits(algorithm: str, nodes: Sequence[int]) -> bool:
    """Return whether an algorithm exists for these ranks: halving and doubling need a power of two, and
    by-node equally many ranks on two nodes or more."""
    if algorithm in ("halving-doubling", "halving", "doubling"):
        return len(nodes) & (len(nodes) - 1) == 0
    if algorithm == "by-node":
        sizes = Counter(nodes)
        return len(sizes) > 1 and len(set(sizes.values())) == 1
    return True


# ---- seconds of a phase


def time_phases(phases: Iterable[Phase], nodes: Sequence[int], links: Links) -> float:
    """Return the seconds of a call that consists of phases; `nodes` and `links` are those of `predict`.

    Where the time of a meeting is not known, it counts as an exchange of a byte between all of its ranks.
    """
    usual = [
        replace(phase, kind="exchange", num_bytes=1.0)
        if phase.kind == "meeting" and links.meet_s is None
        else phase
        for phase in phases
    ]
    call_s = 0.0 if all(phase.kind == "meeting" for phase in usual) else links.call_s
    return call_s + sum(_time_phase(phase, nodes, links) for phase in usual)


def _time_phase(phase: Phase, nodes: Sequence[int], links: Links) -> float:
    if phase.kind == "meeting":
        assert links.meet_s is not None
        took_s = phase.steps * links.meet_s
    else:
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


def _partner_edges(num_ranks: int, distance: int) -> tuple[Edge, ...]:
    return tuple((rank, rank ^ distance) for rank in range(num_ranks))


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


def _halving_doubling(size: float, nodes: Sequence[int]) -> list[Phase]:
    """Model 2 log2 N steps, 2 (N-1)/N S per rank (Thakur et al., section 4.5); N is a power of two."""
    return _halving(size, nodes) + _doubling(size, nodes)


def _tree_all_reduce(size: float, nodes: Sequence[int]) -> list[Phase]:
    """Reduce to rank 0, then broadcast: 2 ceil(log2 N) steps of S bytes."""
    return _tree_reduce(size, nodes) + _tree_broadcast(size, nodes)


def _direct_all_reduce(size: float, nodes: Sequence[int]) -> list[Phase]:
    """Model one step: every rank sends its vector to all others and adds those it receives; (N-1) S per
    rank."""
    return [Phase("exchange", 1, size, _all_edges(len(nodes)), added=(len(nodes) - 1) * size)]


def _by_node(size: float, nodes: Sequence[int]) -> list[Phase]:
    """Reduce-scatter in the node, all-reduce of each slice between its holders, all-gather in the node.

    With L ranks on each of M nodes, 2 (M-1)/M S leave a node; with a ring over all, 2 (N-1)/N S.
    """
    groups = [[rank for rank, node in enumerate(nodes) if node == name] for name in dict.fromkeys(nodes)]
    local, num_nodes = len(groups[0]), len(groups)
    twins = tuple(edge for ranks in zip(*groups, strict=True) for edge in _ring_edges(ranks))
    part = size / local / num_nodes
    across = [
        _stream_ring(twins, part, num_nodes - 1, adds=True),
        _stream_ring(twins, part, num_nodes - 1),
    ]
    if local == 1:
        return across
    inside = tuple(edge for group in groups for edge in _ring_edges(group))
    return [
        _stream_ring(inside, size / local, local - 1, adds=True),
        *across,
        _stream_ring(inside, size / local, local - 1),
    ]


# ---- reduce_scatter and all_gather


def _ring_reduce_scatter(size: float, nodes: Sequence[int]) -> list[Phase]:
    """Model N-1 steps of S/N bytes: (N-1)/N S per rank (Thakur et al., section 4.2)."""
    return _ring_all_reduce(size, nodes)[:1]


def _halving(size: float, nodes: Sequence[int]) -> list[Phase]:
    """Model log2 N steps of S/2, S/4 ... bytes: (N-1)/N S per rank; N is a power of two."""
    phases, distance, part = [], len(nodes) // 2, size / 2
    while distance:
        phases.append(Phase("exchange", 1, part, _partner_edges(len(nodes), distance), added=part))
        distance, part = distance // 2, part / 2
    return phases


def _direct_reduce_scatter(size: float, nodes: Sequence[int]) -> list[Phase]:
    """Model one step: every rank sends each other rank its chunk; (N-1)/N S per rank."""
    chunk = size / len(nodes)
    return [Phase("exchange", 1, chunk, _all_edges(len(nodes)), added=(len(nodes) - 1) * chunk)]


def _by_all_reduce(size: float, nodes: Sequence[int]) -> list[Phase]:
    """Model a ring all-reduce of a copy: twice the bytes of a ring reduce-scatter (ProcessGroupGloo.cpp)."""
    first, second = _ring_all_reduce(size, nodes)
    return [first, replace(second, copied=size)]


def _ring_all_gather(size: float, nodes: Sequence[int]) -> list[Phase]:
    """Model N-1 steps of S/N bytes, each in two messages (gloo/allgather.cc); torch then copies the
    result."""
    steps, half = len(nodes) - 1, size / len(nodes) / 2
    return [Phase("stream", steps, half, _ring_edges(range(len(nodes))), 2 * steps, copied=size)]


def _doubling(size: float, nodes: Sequence[int]) -> list[Phase]:
    """Model log2 N steps of S/N, 2 S/N ... bytes: (N-1)/N S per rank; N is a power of two."""
    phases, distance, part = [], 1, size / len(nodes)
    while distance < len(nodes):
        phases.append(Phase("exchange", 1, part, _partner_edges(len(nodes), distance)))
        distance, part = distance * 2, part * 2
    return phases


def _direct_all_gather(size: float, nodes: Sequence[int]) -> list[Phase]:
    """Model one step: every rank sends its chunk to all others; (N-1)/N S per rank."""
    return [Phase("exchange", 1, size / len(nodes), _all_edges(len(nodes)))]


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


def _direct_broadcast(size: float, nodes: Sequence[int]) -> list[Phase]:
    """Model a root that sends S bytes to each of the others at once: (N-1) S from the root."""
    edges = _root_edges(len(nodes))
    return [_request(edges), Phase("message", 1, size, edges)]


def _pipelined_broadcast(size: float, nodes: Sequence[int]) -> list[Phase]:
    """Model a chain of ranks that pass on segments: S bytes per rank, after N-2 segments that fill it.

    The stream is that of the slowest edge, so the chain is filled over the others.
    """
    chain = _ring_edges(range(len(nodes)))[:-1]
    segments = max(1, -(-int(size) // PIPELINE_BYTES))
    slowest = next((edge for edge in chain if nodes[edge[0]] != nodes[edge[1]]), chain[0])
    return [
        _request(chain),
        Phase("stream", segments, size / segments, chain),
        *(Phase("message", 1, size / segments, (edge,), is_fill=True) for edge in chain if edge != slowest),
    ]


def _tree_reduce(size: float, nodes: Sequence[int]) -> list[Phase]:
    """Model ceil(log2 N) steps of S bytes up a binomial tree (Thakur et al., section 4.4)."""
    levels = [_reverse(level) for level in reversed(_tree_levels(len(nodes)))]
    return [_request(levels[0]), *(Phase("message", 1, size, level, added=size) for level in levels)]


def _direct_reduce(size: float, nodes: Sequence[int]) -> list[Phase]:
    """Model all others sending S bytes to the root at once, which adds them."""
    edges = _root_edges(len(nodes))
    return [_request(_reverse(edges)), Phase("message", 1, size, _reverse(edges), added=len(edges) * size)]


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


_Algorithm = Callable[[float, Sequence[int]], list[Phase]]

ALGORITHMS: dict[str, dict[str, _Algorithm]] = {
    "all_reduce": {
        "ring": _ring_all_reduce,
        "tree": _tree_all_reduce,
        "direct": _direct_all_reduce,
        "halving-doubling": _halving_doubling,
        "by-node": _by_node,
    },
    "reduce_scatter": {
        "ring": _ring_reduce_scatter,
        "direct": _direct_reduce_scatter,
        "halving": _halving,
        "by-all-reduce": _by_all_reduce,
    },
    "all_gather": {"ring": _ring_all_gather, "direct": _direct_all_gather, "doubling": _doubling},
    "broadcast": {"tree": _tree_broadcast, "direct": _direct_broadcast, "pipeline": _pipelined_broadcast},
    "reduce": {"ring": _ring_reduce, "tree": _tree_reduce, "direct": _direct_reduce},
    "gather": {"direct": _direct_gather},
    "scatter": {"direct": _direct_scatter},
    "all_to_all": {"direct": _direct_all_to_all},
    "barrier": {"dissemination": _dissemination},
}
# What gloo runs when torch.distributed calls it; it has no other choice (gloo's sources, read in 2026).
GLOO_ALGORITHMS = {
    "all_reduce": "ring",
    "reduce_scatter": "by-all-reduce",
    "all_gather": "ring",
    "broadcast": "tree",
    "reduce": "ring",
    "gather": "direct",
    "scatter": "direct",
    "all_to_all": "direct",
    "barrier": "dissemination",
}
# The bus bandwidth of nccl-tests is size / time times this factor of N (its doc/PERFORMANCE.md).
BUS_FACTORS: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
    "reduce": lambda n: 1.0,
    "gather": lambda n: (n - 1) / n,
    "scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
}
