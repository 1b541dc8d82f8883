"""Measured links made up for tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paceline.bench.link_times import PAIR_SIZES, list_pairs
from paceline.bench.links import Curve, Link, Links, MeasuredLinks, Pair


def make_links(
    nodes: Sequence[int] = (0, 0, 1, 1),
    slow: Mapping[tuple[int, int], float] | None = None,
    late: Mapping[tuple[int, int], float] | None = None,
) -> MeasuredLinks:
    """Links of 50 us and 1 GB/s in a node and 1 ms and 10 MB/s between nodes.

    Args:
        nodes: each rank's.
        slow: pairs with how many times longer their large messages take.
        late: pairs with how many times longer their latency is.
    """
    classes = {False: _sample(Link.of(50e-6, 1e9)), True: _sample(Link.of(1e-3, 1e7))}
    pairs = []
    for first, second in list_pairs(nodes):
        curve = classes[nodes[first] != nodes[second]].message
        times = (slow or {}).get((first, second), 1.0)
        seconds = [curve(size) * (times if size > 1000 else 1) for size in PAIR_SIZES]
        pairs.append(
            Pair(
                first,
                second,
                Curve(tuple(map(float, PAIR_SIZES)), tuple(seconds)),
                curve(64) * (late or {}).get((first, second), 1.0),
            )
        )
    count = max(nodes) + 1
    links = Links(
        classes[False] if len(nodes) > count else None,
        classes[True] if count > 1 else None,
        call_s=1e-4,
        copy=Curve((1e4, 1e8), (1e-6, 1e-2)),
        add=Curve((1e4, 1e8), (2e-6, 2e-2)),
    )
    hosts = tuple(f"host{node}" for node in range(count))
    return MeasuredLinks(hosts, tuple(nodes), "gloo", tuple(pairs), links, 1.5)


def _sample(link: Link) -> Link:
    """Return the link with points at the measured sizes."""
    sizes = tuple(map(float, PAIR_SIZES))
    curves = (link.message, link.exchange, link.stream)
    return Link(*(Curve(sizes, tuple(map(curve, sizes))) for curve in curves))
