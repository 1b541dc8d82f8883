"""Measures the links between the running ranks by messages between pairs, in a few seconds.

Protocol, in the order of every rank; all messages travel on the default group:

1. Ranks exchange the identity of their node: host name, boot and network. Processes of one machine that have
   network namespaces of their own count as nodes of their own.
2. Pairs, one after the other while all others wait in a barrier: the first sends a message and the second
   returns it, for each size. Half of the median round trip is the time of one message. These pairs are all
   if there are at most 28, else those of the nodes' first ranks, and in each node those of its first rank.
   A pair that seems slow is measured again, and the shorter time counts.
   The largest message comes first: over a long link TCP sends little per round trip until its congestion
   window has grown, and the windows of a run that has sent large messages have grown.
3. Rings over the ranks of each node, all nodes at once, then over the nodes' first ranks: rounds of one
   message each (`exchange`), and messages with two in flight (`stream`). The median over rounds counts, of
   the rank where it is largest. Sizes grow until a message takes long enough to show the bandwidth. A stream
   that seems slower than an exchange is measured again, and the shorter time counts. Then the ranks of each
   ring send to all others at once (`contention`).
4. Each rank, all at once: copies and additions, of vectors that fit into the caches and of one that does not.
   A call's own cost is that of an all-reduce of nothing from a common instant or, if that is more, of a
   barrier less its steps: a call that stands alone wakes threads and cores that sleep, and the messages above
   follow each other closely. Both are lower quartiles.

The curves of a class of pairs are the medians over its pairs (2) and what its rings took (3), so they include
the competition for cores and memory that collectives meet too.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from paceline.bench.common_clock import CommonClock
from paceline.bench.links import Curve, Link, Links, MeasuredLinks, Pair
from paceline.comm.nodes import find_nodes
from paceline.errors import PacelineError
from paceline.phrases import first_line
from paceline.world import World

# From a call that is all latency to one that is all bandwidth. Between these sizes curves are straight.
SIZES = (64, 4096, 65536, 1 << 18, 1 << 20, 1 << 22, 1 << 24)
# Every pair is measured with these sizes, and the first pair of a class with the larger ones too.
PAIR_SIZES = SIZES[:5]
# A curve ends with the first size whose bytes take so long: latency and caches no longer matter.
_LONG_S = 0.15
_MOST_PAIRS = 28
# Repetitions of one size last about as long, if that allows as many of them.
_SAMPLE_S = 0.15
_SECOND_LOOKS = 2
_TICK_S = 1e-9
# A stream is measured again from this ratio to an exchange on.
_PLAUSIBLE_TIMES = 1.1
_FEWEST, _MOST = 5, 100
# Rounds of large messages in which congestion windows grow; they end when one is hardly faster than before.
_FEWEST_GROWING, _MOST_GROWING = 3, 10
_HARDLY_FASTER = 0.95
_PROBES = 3
# The last two are beyond the caches of a core and, with the other ranks, those of most processors.
_LOCAL_SIZES = (1 << 14, 1 << 18, 1 << 20, 1 << 22, 1 << 25, 1 << 26)
_LOCAL_REPEATS = 20


def measure_links(world: World) -> MeasuredLinks:
    """Measure the links between all ranks; all ranks must call it, and get the same result.

    Messages are tensors in CPU memory. On a round trip of 50 ms and 100 Mbit/s, four ranks take about a
    minute; ranks of one machine take some seconds.

    Raises:
        PacelineError: PL622 for one rank, PL954 if a rank does not answer within the group's timeout.
    """
    if world.world_size == 1:
        raise PacelineError(
            "PL622",
            saw="one rank.",
            rule="One rank does not communicate.",
            fix="Use two ranks or more: --nproc 2.",
        )
    start_s = time.perf_counter()
    try:
        hosts, nodes = find_nodes()
        pairs = tuple(_measure_pairs(nodes, world.rank))
        groups = [[rank for rank, node in enumerate(nodes) if node == at] for at in range(len(hosts))]
        leaders = [group[0] for group in groups]
        same = _measure_class(groups, pairs, nodes, between=False)
        between = _measure_class([leaders], pairs, nodes, between=True)
        steps_s = max(link.exchange.alpha_s for link in (same, between) if link is not None)
        steps_s *= (world.world_size - 1).bit_length()
        call_s = _measure_call(CommonClock(world), steps_s)
        copy, add = (_measure_local(work) for work in (torch.Tensor.copy_, torch.Tensor.add_))
        took_s = _agree(time.perf_counter() - start_s)
    except RuntimeError as error:
        raise PacelineError(
            "PL954",
            saw=f"rank {world.rank} got no answer while it measured links ({first_line(error)}).",
            rule=f"Every rank answers each message within the timeout ({world.timeout_s:g} s).",
            fix="Read the ranks' own messages: one of them has failed, or its network drops messages.",
        ) from error
    links = Links(same, between, call_s, copy, add)
    return MeasuredLinks(hosts, nodes, dist.get_backend(), pairs, links, took_s)


# ---- pairs


def list_pairs(nodes: Sequence[int]) -> list[tuple[int, int]]:
    """Return the pairs that are measured by themselves."""
    pairs = [(a, b) for a in range(len(nodes)) for b in range(a + 1, len(nodes))]
    if len(pairs) <= _MOST_PAIRS:
        return pairs
    leaders = {node: rank for rank, node in reversed(list(enumerate(nodes)))}
    firsts = set(leaders.values())
    return [(a, b) for a, b in pairs if a in firsts and (b in firsts or nodes[a] == nodes[b])]


def _measure_pairs(nodes: Sequence[int], rank: int) -> list[Pair]:
    found = {pair: _measure_pair(pair, rank) for pair in list_pairs(nodes)}
    for _ in range(_SECOND_LOOKS):
        slow = {link.ranks for link in _list_slow_pairs(list(found.values()), nodes)}
        for pair in [pair for pair in found if pair in slow]:
            # What took long only once was another program. A slow link stays slow.
            found[pair] = _keep_faster(found[pair], _measure_pair(pair, rank))
    return list(found.values())


def _measure_pair(pair: tuple[int, int], rank: int) -> Pair:
    """Return the times of a pair, on all ranks; all must call it."""
    row = torch.zeros(len(PAIR_SIZES) + 1, dtype=torch.float64)
    if rank in pair:
        for column, size in reversed(list(enumerate(PAIR_SIZES))):
            usual_s, least_s = _ping(pair[1] if rank == pair[0] else pair[0], size, begins=rank == pair[0])
            if rank == pair[0]:
                row[column] = usual_s
                row[-1] = least_s if column == 0 else row[-1]
    dist.all_reduce(row)  # the others wait here
    *usual, least_s = row.tolist()
    return Pair(*pair, _curve(usual), least_s)


def _keep_faster(a: Pair, b: Pair) -> Pair:
    usual = [min(a.message(size), b.message(size)) for size in PAIR_SIZES]
    return Pair(a.first, a.second, _curve(usual), min(a.latency_s, b.latency_s))


def _ping(peer: int, size: int, *, begins: bool) -> tuple[float, float]:
    """Return half of the median and of the shortest round trip; the rank that begins decides how often."""
    data, count = _make_messages(1, size)[0], torch.zeros(1, dtype=torch.int64)

    def turn() -> None:
        if begins:
            dist.send(data, peer)
            dist.recv(data, peer)
        else:
            dist.recv(data, peer)
            dist.send(data, peer)

    once_s = min(_time(turn) for _ in range(_PROBES))
    if begins:
        count[0] = _choose_repeats(once_s)
        dist.send(count, peer)
    else:
        dist.recv(count, peer)
    trips = [_time(turn) for _ in range(int(count.item()))]
    return statistics.median(trips) / 2, max(min(trips) / 2, _TICK_S)


# ---- rings


def _measure_class(
    rings: list[list[int]], pairs: Sequence[Pair], nodes: Sequence[int], *, between: bool
) -> Link | None:
    """Return the link of a class, or None if it has no pairs; all ranks must call it."""
    own = [pair for pair in pairs if (nodes[pair.first] != nodes[pair.second]) is between]
    if not own:
        return None
    message = [statistics.median(pair.message(size) for pair in own) for size in PAIR_SIZES]
    rank = dist.get_rank()
    message += _measure_large(own[0], rank)
    ring = next((ring for ring in rings if rank in ring and len(ring) > 1), [])
    alone, flowing = (_measure_ring_sizes(ring, in_flight) for in_flight in (1, 2))
    exchange, stream = _curve(alone), _curve(_look_again(ring, flowing, alone))
    return Link(_curve(message), exchange, stream, _measure_contention(ring, exchange))


def _measure_contention(ring: Sequence[int], exchange: Curve) -> float:
    """Return how many times longer than by its bytes an exchange of all in a ring takes, at least 1."""
    num_peers = int(_agree(float(len(ring)))) - 1
    if num_peers < 2:
        return 1.0
    per_peer = exchange.s_per_byte * num_peers
    size = next((size for size in SIZES if size * per_peer >= _LONG_S), SIZES[-1])
    count = max(1, size // num_peers)
    peers = [peer for peer in ring if peer != dist.get_rank()]
    sent, received = _make_messages(1, count)[0], _make_messages(len(peers), count)

    def exchange_all() -> None:
        works = [dist.irecv(row, peer) for row, peer in zip(received, peers, strict=True)]
        works += [dist.isend(sent, peer) for peer in peers]
        for work in works:
            assert work is not None
            work.wait()

    dist.barrier()
    _grow_windows(exchange_all)
    taken = [_agree(_time(exchange_all)) for _ in range(_FEWEST)]
    by_bytes_s = count * per_peer
    if by_bytes_s == 0:
        return 1.0
    return max(1.0, (statistics.median(taken) - exchange.alpha_s) / by_bytes_s)


def _measure_large(pair: Pair, rank: int) -> list[float]:
    """Return the seconds of the larger messages of one pair, on all ranks."""
    found: list[float] = []
    for size in SIZES[len(PAIR_SIZES) :]:
        if _is_long((*pair.message.seconds, *found)):
            break
        took_s = 0.0
        if rank in (pair.first, pair.second):
            peer = pair.second if rank == pair.first else pair.first
            took_s, _ = _ping(peer, size, begins=rank == pair.first)
        found.append(_agree(took_s if rank == pair.first else 0.0))
    return found


def _is_long(seconds: Sequence[float]) -> bool:
    """Return whether the bytes of the last size take long enough, whatever the latency."""
    return seconds[-1] - seconds[0] >= _LONG_S


def _measure_ring_sizes(ring: Sequence[int], in_flight: int) -> list[float]:
    found: list[float] = []
    # The windows of idle connections shrink again; see the protocol above.
    _grow_windows(lambda: _pass_on(ring, PAIR_SIZES[-1], in_flight, 1))
    for size in SIZES:
        found.append(_measure_ring(ring, size, in_flight=in_flight))
        if _is_long(found):
            break
    return found


def _look_again(ring: Sequence[int], flowing: Sequence[float], alone: Sequence[float]) -> list[float]:
    """Return the seconds per message of streams, after measuring again those that seem too slow.

    A message in a stream takes no longer than one that is sent alone, unless another program disturbed it.

    Args:
        ring: of this rank.
        flowing: seconds by size with two messages in flight.
        alone: the same with one.
    """
    found = list(flowing)
    for number, most_s in enumerate(alone[: len(found)]):
        for _ in range(_SECOND_LOOKS):
            if found[number] > _PLAUSIBLE_TIMES * most_s:
                found[number] = min(found[number], _measure_ring(ring, SIZES[number], in_flight=2))
    return found


def _grow_windows(send: Callable[[], object]) -> None:
    """Send large messages until the congestion windows of the connections have grown; on all ranks."""
    best_s = math.inf
    for number in range(_MOST_GROWING):
        took_s = _agree(_time(send))
        if number >= _FEWEST_GROWING and took_s > _HARDLY_FASTER * best_s:
            return
        best_s = min(best_s, took_s)


def _measure_ring(ring: Sequence[int], size: int, *, in_flight: int) -> float:
    """Return the median seconds per message in rings; ranks in none take part in the agreement alone."""
    dist.barrier()
    probes = _pass_on(ring, size, in_flight, _PROBES)
    count = _choose_repeats(_agree(min(probes)) * in_flight)
    dist.barrier()
    return _agree(statistics.median(_pass_on(ring, size, in_flight, count)))


def _pass_on(ring: Sequence[int], size: int, in_flight: int, rounds: int) -> list[float]:
    """Return the seconds per message of each round; in a round as many messages move on as are in flight."""
    if not ring:
        return [0.0]
    at = ring.index(dist.get_rank())
    after, before = ring[(at + 1) % len(ring)], ring[at - 1]
    sent, received = (_make_messages(in_flight, size) for _ in range(2))

    def begin(slot: int) -> tuple[dist.Work, dist.Work]:
        receive, send = dist.irecv(received[slot], before), dist.isend(sent[slot], after)
        assert receive is not None
        assert send is not None
        return receive, send

    works = [begin(slot) for slot in range(in_flight)]
    taken, last_s = [], time.perf_counter()
    for number in range(rounds):
        for slot in range(in_flight):
            _wait(works[slot])
            if number + 1 < rounds:
                works[slot] = begin(slot)
        now_s = time.perf_counter()
        taken.append((now_s - last_s) / in_flight)
        last_s = now_s
    return taken


def _make_messages(count: int, size: int) -> torch.Tensor:
    """Return messages of ones. New zeros would all be one page of the system's, which stays in the cache."""
    return torch.ones(count, size, dtype=torch.uint8)


def _wait(works: tuple[dist.Work, dist.Work]) -> None:
    for work in works:
        work.wait()


# ---- within a process


def _measure_call(clock: CommonClock, barrier_steps_s: float) -> float:
    """Return the seconds of a call beside its messages; those of a barrier are given."""
    nothing = torch.zeros(0)
    empty_s = _time_often(clock, lambda: dist.all_reduce(nothing))
    return max(empty_s, _time_often(clock, dist.barrier) - barrier_steps_s)


def _time_often(clock: CommonClock, call: Callable[[], object]) -> float:
    """Return the usual seconds of a collective call, on all ranks.

    A busy machine wakes ranks late, so half of the calls may begin late on some rank: the lower quartile.
    """
    return statistics.quantiles([clock.time(call) for _ in range(_LOCAL_REPEATS)], n=4)[0]


def _measure_local(work: Callable[[torch.Tensor, torch.Tensor], object]) -> Curve:
    """Return the seconds of a copy or an addition by size, on all ranks at once, which share the memory."""
    seconds = []
    for size in _LOCAL_SIZES:
        once = partial(work, torch.ones(size // 4), torch.ones(size // 4))
        dist.barrier()
        count = _choose_repeats(_agree(min(_time(once) for _ in range(_PROBES))))
        dist.barrier()
        seconds.append(_agree(statistics.median(_time(once) for _ in range(count))))
    return Curve(tuple(map(float, _LOCAL_SIZES)), tuple(seconds))


def _time(work: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    work()
    return time.perf_counter() - start_s


def _choose_repeats(once_s: float) -> int:
    return max(_FEWEST, min(_MOST, int(_SAMPLE_S / max(once_s, 1e-9))))


def _agree(seconds: float) -> float:
    """Return the largest of the ranks' seconds, on all ranks."""
    largest = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return largest.item()


def _curve(seconds: Sequence[float]) -> Curve:
    """Return the curve through the first sizes. It never falls: a smaller message took longer by chance.

    Nor is it ever 0: a coarse clock may show no time at all.
    """
    rising = itertools.accumulate((max(each, _TICK_S) for each in reversed(seconds)), min)
    return Curve(tuple(map(float, SIZES[: len(seconds)])), tuple(reversed(list(rising))))


# ---- slow links


@dataclass(frozen=True)
class SlowLink:
    """A pair, or a node all of whose pairs between nodes are slow.

    Attributes:
        ranks: the pair, or the ranks of the node.
        node: the node, or None for a pair.
        times: how many times longer than usual in its class a message takes.
        by_latency: whether small messages show it, and not only large ones.
    """

    ranks: tuple[int, ...]
    node: int | None
    times: float
    by_latency: bool


# A pair counts as slow from here on: noise of a busy machine is below it, a link at half its speed above.
_SLOW_TIMES = 2.0
# A small message must also take so much longer: less is the scheduler of a busy machine, at any latency.
_SLOW_LATENCY_S = 1e-3


def find_slow_links(found: MeasuredLinks) -> list[SlowLink]:
    """Return the pairs that take much longer than their class: by large messages first, then by latency.

    The usual time of a class is that of the pair a quarter of the way from the fastest, for small and for
    large messages: of four nodes, one slow one slows half of all pairs. A small message must take 1 ms longer
    too. With two pairs or fewer in a class there is nothing to compare.
    """
    slow = _list_slow_pairs(found.pairs, found.nodes)
    named: list[SlowLink] = []
    for by_latency in (False, True):
        joined = _join_by_node([link for link in slow if link.by_latency is by_latency], found)
        named += sorted(joined, key=lambda link: -link.times)
    return named


def _list_slow_pairs(pairs: Sequence[Pair], nodes: Sequence[int]) -> list[SlowLink]:
    slow: list[SlowLink] = []
    for between in (False, True):
        own = [pair for pair in pairs if (nodes[pair.first] != nodes[pair.second]) is between]
        if len(own) >= 3:
            slow += _compare_pairs(own)
    return slow


def _compare_pairs(pairs: Sequence[Pair]) -> list[SlowLink]:
    """Return the pairs that are slow by large messages, and of the others those that are by latency."""
    large = PAIR_SIZES[-1]
    usual_s, usual_latency_s = (
        sorted(values)[len(pairs) // 4]
        for values in ([p.message(large) for p in pairs], [p.latency_s for p in pairs])
    )
    slow = []
    for pair in pairs:
        times, latency = pair.message(large) / usual_s, pair.latency_s / usual_latency_s
        if times >= _SLOW_TIMES:
            slow.append(SlowLink((pair.first, pair.second), None, times, by_latency=False))
        elif latency >= _SLOW_TIMES and pair.latency_s - usual_latency_s >= _SLOW_LATENCY_S:
            slow.append(SlowLink((pair.first, pair.second), None, latency, by_latency=True))
    return slow


def _join_by_node(slow: list[SlowLink], found: MeasuredLinks) -> list[SlowLink]:
    """Return one entry for a node all of whose pairs with other nodes are slow."""
    nodes = found.nodes
    pairs = [p for p in found.pairs if nodes[p.first] != nodes[p.second]]
    joined: list[SlowLink] = []
    rest = slow
    for node in range(len(found.hosts)) if len(found.hosts) > 2 else ():
        own = [link for link in rest if _crosses(link, nodes, node)]
        if own and len(own) == sum(node in (nodes[p.first], nodes[p.second]) for p in pairs):
            ranks = tuple(rank for rank, at in enumerate(nodes) if at == node)
            times = statistics.median(link.times for link in own)
            joined.append(SlowLink(ranks, node, times, own[0].by_latency))
            rest = [link for link in rest if link not in own]
    return joined + rest


def _crosses(link: SlowLink, nodes: Sequence[int], node: int) -> bool:
    ends = {nodes[rank] for rank in link.ranks}
    return len(ends) == 2 and node in ends
