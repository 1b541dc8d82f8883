"""Runs algorithms of collectives message by message, to count what the formulas of a plan compute.

`run` moves real numbers between lists and checks the result. `simulate` computes when gloo's messages arrive.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field


@dataclass
class Wire:
    """The ranks' vectors and every message that travelled.

    Attributes:
        vectors: per rank, `num_ranks * length` numbers; None where a rank has nothing yet.
        messages: step, sender, receiver and number of elements of each.
    """

    vectors: list[list[int | None]]
    messages: list[tuple[int, int, int, int]] = field(default_factory=list)
    step: int = 0

    def exchange(self, moves: Sequence[tuple[int, int, range]], *, add: bool = False, steps: int = 1) -> None:
        """One step: all moves (sender, receiver, elements) happen at once."""
        taken = [(b, at, self.vectors[a][at]) for a, b, elements in moves for at in elements]
        for receiver, at, value in taken:
            own = self.vectors[receiver]
            if add:
                assert own[at] is not None
                assert value is not None
                own[at] += value  # type: ignore[operator]
            else:
                own[at] = value
        self.messages += [(self.step, a, b, len(elements)) for a, b, elements in moves if len(elements)]
        self.step += steps

    def sent(self, num_ranks: int) -> list[int]:
        """Return the number of elements that each rank has sent."""
        return [sum(m[3] for m in self.messages if m[1] == rank) for rank in range(num_ranks)]


def chunk(rank: int, length: int) -> range:
    return range(rank * length, (rank + 1) * length)


def ring_reduce_scatter(wire: Wire, ranks: Sequence[int], chunks: Sequence[range]) -> None:
    """Chunk i ends on ranks[i]."""
    n = len(ranks)
    for step in range(n - 1):
        moves = [(ranks[i], ranks[(i + 1) % n], chunks[(i - step - 1) % n]) for i in range(n)]
        wire.exchange(moves, add=True)


def ring_all_gather(wire: Wire, ranks: Sequence[int], chunks: Sequence[range]) -> None:
    n = len(ranks)
    for step in range(n - 1):
        wire.exchange([(ranks[i], ranks[(i + 1) % n], chunks[(i - step) % n]) for i in range(n)])


def tree(wire: Wire, n: int, length: int) -> None:
    """From rank 0 to all others."""
    levels, distance = [], 1
    while distance < n:
        levels.append([(r, r + distance) for r in range(distance) if r + distance < n])
        distance *= 2
    holders = [0]
    while moves := [(a, b, range(n * length)) for level in levels for a, b in level if a in holders]:
        wire.exchange(moves)  # to all children at once
        holders = [b for _, b, _ in moves]


def everyone(n: int, elements: Callable[[int, int], range]) -> list[tuple[int, int, range]]:
    return [(a, b, elements(a, b)) for a in range(n) for b in range(n) if a != b]


# ---- time


Program = list[tuple[str, int, float]]


def simulate(programs: Sequence[Program], alpha_s: float, s_per_byte: float) -> float:
    """Return the seconds until the last rank has ended its program, with gloo's requests.

    A program has ("send", receiver, bytes), ("recv", sender, bytes), ("wait send", 0, 0) and ("wait recv",
    0, 0), which wait for the oldest send or receive that was not waited for. Data leave when the receiver's
    request has arrived, and share the sender's and the receiver's connection.
    """
    n = len(programs)
    clock, at = [0.0] * n, [0] * n
    posted: dict[tuple[str, int, int], list[float]] = defaultdict(list)
    done: dict[tuple[str, int, int], list[float]] = defaultdict(list)
    sizes: dict[tuple[int, int], list[float]] = defaultdict(list)
    waiting: list[dict[str, list[tuple[int, int, int]]]] = [{"send": [], "recv": []} for _ in range(n)]
    leaves, arrives = [0.0] * n, [0.0] * n

    def advance(rank: int) -> None:
        """Go on until a wait is for what is not known yet."""
        for word, peer, size in programs[rank][at[rank] :]:
            if word.startswith("wait"):
                kind = word.split()[1]
                a, b, index = waiting[rank][kind][0]
                if len(done[(kind, a, b)]) <= index:
                    return
                clock[rank] = max(clock[rank], done[(kind, a, b)][index])
                waiting[rank][kind].pop(0)
            else:
                a, b = (rank, peer) if word == "send" else (peer, rank)
                waiting[rank][word].append((a, b, len(posted[(word, a, b)])))
                posted[(word, a, b)].append(clock[rank])
                if word == "send":
                    sizes[(a, b)].append(size)
            at[rank] += 1

    while True:
        for rank in range(n):
            advance(rank)
        ready = []
        for word, a, b in list(posted):
            index = len(done[(word, a, b)])
            if word == "send" and index < min(len(posted[(word, a, b)]), len(posted[("recv", a, b)])):
                start = max(posted[(word, a, b)][index], posted[("recv", a, b)][index] + alpha_s)
                ready.append((start, a, b, sizes[(a, b)][index] * s_per_byte))
        if not ready:
            break
        for start, a, b, cost in sorted(ready):
            leaves[a] = max(leaves[a], start) + cost
            arrives[b] = max(arrives[b] + cost, leaves[a] + alpha_s)
            done[("send", a, b)].append(leaves[a])
            done[("recv", a, b)].append(arrives[b])
    assert all(at[rank] == len(programs[rank]) for rank in range(n)), "a program waits for ever"
    return max(clock)
