"""Times a call from an instant that all ranks share to the last rank's end.

These are the windows of Hunold and Carpen-Amarie 2016, "Reproducible MPI Benchmarking is Still Not as Easy as
You Think". After a barrier, ranks would begin up to half a round trip apart.

Protocol of one call: rank 0 broadcasts an instant that is far enough ahead. Each rank sleeps until shortly
before, looks at the clock until then, and makes the call: a sleep ends up to some 0.1 ms late, and on a core
that has gone idle, which would count as time of the call. The largest duration counts. If any rank saw the
instant too late, the call is repeated with an instant further ahead.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from paceline.comm.nodes import read_boot
from paceline.world import World

_PINGS = 7
# Ranks get this time beyond what a broadcast takes to see the instant and get ready.
_LEAD_S = 1e-3
# Before the instant, a rank looks at the clock for this time.
_AWAKE_S = 0.4e-3


class CommonClock:
    """A clock that starts calls at the same instant on all ranks; all ranks make it, and time the same calls.

    Processes of one boot share Python's monotonic clock. The clock of another machine is compared with rank
    0's by messages: its offset is known to half of the difference between the ways there and back.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._offset_s, trip_s = self._compare()
        trip = torch.tensor(trip_s, dtype=torch.float64)
        dist.all_reduce(trip, dist.ReduceOp.MAX)
        # A broadcast has up to log2(N) + 1 hops.
        self._lead_s = _LEAD_S + trip.item() * (1 + world.world_size.bit_length())

    def time(self, call: Callable[[], object]) -> float:
        """Return the seconds from the common start to the last rank's end."""
        while True:
            begin = torch.tensor(time.perf_counter() + self._lead_s, dtype=torch.float64)
            dist.broadcast(begin, 0)
            begin_s = begin.item() + self._offset_s
            late_s = time.perf_counter() - begin_s
            if -late_s > _AWAKE_S:
                time.sleep(-late_s - _AWAKE_S)
            while time.perf_counter() < begin_s:
                os.sched_yield()  # to ranks that share the core
            call()
            end_s = time.perf_counter()
            slowest = torch.tensor([end_s - begin_s, late_s], dtype=torch.float64)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            took_s, late_s = slowest.tolist()
            if late_s < 0:
                return float(took_s)
            self._lead_s *= 1.5  # a rank saw the instant when it had passed

    def _compare(self) -> tuple[float, float]:
        """Return this rank's clock less rank 0's, and the round trip."""
        boots = [""] * self._world.world_size
        dist.all_gather_object(boots, read_boot())
        offset_s = trip_s = 0.0
        for rank in range(1, self._world.world_size):
            if self._world.rank in (0, rank):
                found = self._ping(rank)
                if self._world.rank == rank:
                    trip_s, offset_s = found
                    if boots[0] == boots[rank] != "":
                        offset_s = 0.0
            dist.barrier()
        return offset_s, trip_s

    def _ping(self, rank: int) -> tuple[float, float]:
        """Return the shortest round trip with rank 0, and the offset that it gives."""
        found = []
        stamp = torch.zeros(1, dtype=torch.float64)
        for _ in range(_PINGS):
            sent_s = time.perf_counter()
            if self._world.rank == 0:
                dist.recv(stamp, rank)
                stamp[0] = time.perf_counter()
                dist.send(stamp, rank)
                continue
            dist.send(stamp, 0)
            dist.recv(stamp, 0)
            back_s = time.perf_counter()
            found.append((back_s - sent_s, (sent_s + back_s) / 2 - stamp.item()))
        return min(found, default=(0.0, 0.0))
