"""Chooses how ranks exchange what a step or a start needs: the same numbers, to the bit, by several ways.

Operations, and their algorithms on CPU ranks:

- `exact_sum`: sums of gradients in a fixed order, as `paceline.plan.exact_sums` names them.
- `agreement`: the small vector that all ranks agree on in each step. `board`: in memory that all ranks share;
  `direct`: every rank sends its vector to all others; `library`: an all-reduce.
- `broadcast`: rank 0's weights at the start. `pipeline`: along a chain of ranks; `library`: a broadcast.

With `auto`, a fixed rule decides: shared memory where ranks can share it, then by node, then messages; the
board where it works, else `direct` for a small vector; the library's broadcast. With measured links, the
algorithm with the smallest predicted time is taken. On CUDA, all messages are NCCL's.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.distributed as dist

from paceline.comm.by_node import NodeExchange
from paceline.comm.exchange import Exchange, MessageExchange
from paceline.comm.segment import find_machines, share_memory
from paceline.comm.shared_memory import SharedMemoryExchange
from paceline.errors import PacelineError
from paceline.plan.collectives import predict
from paceline.plan.exact_sums import list_exact_sums, predict_exact_sum
from paceline.plan.links import Links

log = logging.getLogger(__name__)

AUTO = "auto"
# By the fixed rule, a vector of the agreement is sent directly if all that a rank sends is at most this: more
# takes longer than the hops that it saves.
MOST_DIRECT_BYTES = 256 << 10


@dataclass(frozen=True)
class RankLinks:
    """Measured links with the ranks that use them.

    Attributes:
        nodes: each rank's node, of all ranks.
        links: with every class of pairs that they have.
    """

    nodes: tuple[int, ...]
    links: Links


@dataclass(frozen=True)
class Algorithms:
    """The algorithms of a run, by operation, as the module defines them.

    Attributes:
        exact_sum: or `auto`.
        agreement: or `auto`.
        broadcast: or `auto`.
        links: to predict times from; `None`: `auto` is the fixed rule.
    """

    exact_sum: str = AUTO
    agreement: str = AUTO
    broadcast: str = AUTO
    links: RankLinks | None = None

    def build_exchange(
        self, group: dist.ProcessGroup, device: torch.device, sizes: Sequence[int]
    ) -> Exchange:
        """Return the exchange of exact sums over a group; collective over the group.

        Args:
            group: the ranks; no other code may use it.
            device: of the vectors.
            sizes: bytes of the sums of a step, about.

        Raises:
            PacelineError: PL968 for an algorithm that does not suit the ranks.
        """
        if device.type != "cpu":
            return MessageExchange(group, device)
        if self.exact_sum == AUTO and self.links is None:
            return SharedMemoryExchange(group)  # finds out with its first sum
        machines = find_machines(group)
        names = list_exact_sums(machines)
        name = self._predict_exact_sum(group, machines, names, sizes)
        if name not in names or not _can_share(group, name, machines):
            raise _unsuitable_error(
                f"exact_sum={name}",
                f"{len(machines)} ranks on {len(set(machines))} machines"
                + (" that cannot share memory" if name in names else ""),
                names if name not in names else ["direct"],
            )
        if name == "direct":
            return MessageExchange(group)
        return SharedMemoryExchange(group) if name == "shared-memory" else NodeExchange(group, machines)

    def _predict_exact_sum(
        self, group: dist.ProcessGroup, machines: Sequence[int], names: Sequence[str], sizes: Sequence[int]
    ) -> str:
        if self.exact_sum != AUTO:
            return self.exact_sum
        assert self.links is not None
        nodes = [self.links.nodes[rank] for rank in dist.get_process_group_ranks(group)]
        found = {
            name: predict_exact_sum(name, sizes, machines, nodes, self.links.links)
            for name in names
            if _can_share(group, name, machines)
        }
        return _pick("exact_sum", found, f"{sum(sizes)} bytes per step")

    def choose_agreement(self, num_bytes: int, num_ranks: int) -> str:
        """Return `direct` or `library` for a vector on CPU ranks that have no board.

        Args:
            num_bytes: of a rank's vector.
            num_ranks: all of them.
        """
        if self.agreement in ("direct", "library"):
            return self.agreement
        if self.links is None:
            return "direct" if num_bytes * num_ranks <= MOST_DIRECT_BYTES else "library"
        return _predict_agreement(num_bytes, self.links)

    def choose_broadcast(self, num_bytes: int, *, on_cpu: bool) -> str:
        """Return `pipeline` or `library` for rank 0's weights; logs what is picked by prediction."""
        if self.broadcast != AUTO:
            return self.broadcast
        if not on_cpu or self.links is None or len(self.links.nodes) == 1:
            return "library"
        nodes, links = self.links.nodes, self.links.links
        found = {
            name: predict("broadcast", num_bytes, nodes, links, algorithm).time_s
            for name, algorithm in (("library", "tree"), ("pipeline", "pipeline"))
        }
        return _pick("broadcast", found, f"{num_bytes} bytes")


@lru_cache(maxsize=256)  # asked in every step
def _predict_agreement(num_bytes: int, on: RankLinks) -> str:
    found = {
        name: predict("all_reduce", num_bytes, on.nodes, on.links, algorithm).time_s
        for name, algorithm in (("direct", "direct"), ("library", "ring"))
    }
    return _pick("agreement", found, f"{num_bytes} bytes per step")


def _pick(operation: str, found: dict[str, float], what: str) -> str:
    """Return the name with the smallest time, and log it on rank 0."""
    best = min(found, key=lambda name: found[name])
    if dist.get_rank() == 0:
        times = ", ".join(
            f"{name} {1e3 * found[name]:.3g} ms" for name in sorted(found, key=found.__getitem__)
        )
        log.info("algorithm: %s=%s, predicted for %s: %s", operation, best, what, times)
    return best


def _can_share(group: dist.ProcessGroup, name: str, machines: Sequence[int]) -> bool:
    """Return whether the ranks of each machine can share memory, if an algorithm needs that; collective."""
    if name == "direct":
        return True
    return share_memory(group, 1, [machines.index(at) for at in machines]) is not None


def _unsuitable_error(given: str, ranks: str, names: Sequence[str]) -> PacelineError:
    return PacelineError(
        "PL968",
        saw=f"algorithm.{given} for {ranks}.",
        rule=f"These ranks can use {' or '.join(names)}.",
        fix=f"Use --algorithm {given.partition('=')[0]}={names[0]}, or leave it out.",
    )


def check_board(agreement: str, *, is_possible: bool) -> None:
    """Raise PL968 if the board is asked for and does not work; ranks decide alike."""
    if agreement == "board" and not is_possible:
        raise _unsuitable_error(
            "agreement=board",
            "ranks that share no memory, or whose gradients are not summed over all of them in every step",
            ["direct", "library"],
        )
