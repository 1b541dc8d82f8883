"""Times loops against each other on the same ranks, in short alternating blocks.

All loops live in the same processes and take turns: A B C, C B A, A B C ... If the machine is slower for a
while, all of them are, and a ratio is that of neighbouring blocks.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from machine import describe_machine

from paceline.world import World


@dataclass(frozen=True)
class BlockTimes:
    """The times of one rank's blocks.

    Attributes:
        block_s: by loop, the seconds of each of its blocks, in order of time.
        block_cpu_s: by loop, the seconds that all threads of this process computed in them.
        last: by loop, the result of its last step.
    """

    block_s: dict[str, list[float]]
    block_cpu_s: dict[str, list[float]]
    last: dict[str, Any]


def alternate(
    world: World,
    loops: Mapping[str, Iterator[Any]],
    *,
    num_blocks: int,
    block_steps: int = 1,
    warm_up: int = 0,
    before: Callable[[str], object] = lambda name: None,
) -> BlockTimes:
    """Run blocks of all loops in order, then in reverse order, and so on; a barrier precedes each block.

    Every rank of the world must call it with loops of the same names.

    Args:
        world: the ranks.
        loops: by name; `next` takes one step.
        num_blocks: of each loop; 0 to warm up only.
        block_steps: steps of a block.
        warm_up: steps of each loop before its first block, not timed.
        before: called with a loop's name before each of its blocks.
    """
    times = BlockTimes({name: [] for name in loops}, {name: [] for name in loops}, {})

    def run_block(name: str, steps: int) -> tuple[float, float]:
        before(name)
        world.barrier()
        start_s, start_cpu_s = time.perf_counter(), time.process_time()
        for _ in range(steps):
            times.last[name] = next(loops[name])
        world.wait_for_device()
        return time.perf_counter() - start_s, time.process_time() - start_cpu_s

    names = list(loops)
    for name in names:
        run_block(name, warm_up)
    for number in range(num_blocks):
        for name in names if number % 2 == 0 else reversed(names):
            taken_s, computed_s = run_block(name, block_steps)
            times.block_s[name].append(taken_s)
            times.block_cpu_s[name].append(computed_s)
    world.barrier()
    return times


def join_ranks(found: Sequence[BlockTimes]) -> dict[str, dict[str, list[float]]]:
    """Return the times of all ranks' blocks: seconds until the last rank is through, CPU seconds in sum."""
    return {
        "block_s": {
            name: [max(ranks) for ranks in zip(*(times.block_s[name] for times in found), strict=True)]
            for name in found[0].block_s
        },
        "block_cpu_s": {
            name: [sum(ranks) for ranks in zip(*(times.block_cpu_s[name] for times in found), strict=True)]
            for name in found[0].block_cpu_s
        },
    }


class Conditions:
    """The date, the machine and its load before a measurement; `read` adds the load after it."""

    def __init__(self) -> None:
        self._started, self._load = time.strftime("%Y-%m-%d %H:%M"), os.getloadavg()[0]

    def read(self, *more: str) -> dict[str, Any]:
        """Return the conditions, to keep beside the times; `more` is added to the line about the machine."""
        return {
            "started": self._started,
            "load_before": self._load,
            "load_after": os.getloadavg()[0],
            "machine": ", ".join((describe_machine(), *more)),
        }
