"""Samples of the main thread: whether it waits for others, and where it is."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from types import TracebackType

import torch
import torch.distributed as dist
from torch import nn

from paceline.watch.protocol.report import PlaceTime
from paceline.watch.protocol.words import own_frames
from paceline.watch.rank.sampling import EVERY_S, Sampler
from paceline.world import World

TIMEOUT_S = 25.0


class Looker:
    """Samples this thread from one beside it, as the watching thread does, but more often."""

    def __init__(self) -> None:
        self.places: tuple[PlaceTime, ...] = ()
        self.samples = 0
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Looker:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ends.set()
        self._thread.join()

    def share(self, where: Callable[[PlaceTime], bool]) -> float:
        """Return the share of the time."""
        total_s = sum(place.seconds for place in self.places)
        return sum(place.seconds for place in self.places if where(place)) / total_s

    def _run(self) -> None:
        sampler = Sampler(time.monotonic())
        sampler.skip(time.monotonic())
        while not self._ends.wait(0.02):
            sampler.take(time.monotonic())
        pace = sampler.drain()
        assert pace is not None
        self.places, self.samples = pace.places, pace.samples
        assert sampler.drain() is None


def is_waiting(place: PlaceTime) -> bool:
    return place.is_waiting


def is_in(text: str) -> Callable[[PlaceTime], bool]:
    return lambda place: any(text in frame.text for frame in own_frames(place.frames)[:1])


def look(action: Callable[[], object], seconds: float = 0.6) -> Looker:
    """Return the samples that were taken while something was done repeatedly."""
    with Looker() as looker:
        ends_s = time.monotonic() + seconds
        while time.monotonic() < ends_s:
            action()
    return looker


# ---- one process


def be_asleep() -> None:
    time.sleep(0.05)  # ASLEEP HERE


def test_a_sleep_is_no_waiting_for_others() -> None:
    looker = look(be_asleep, seconds=3.0)
    assert looker.share(is_waiting) == 0
    assert looker.share(is_in("ASLEEP HERE")) > 0.7
    assert looker.samples >= 5
    names = [frame.function for frame in looker.places[0].frames]
    assert "be_asleep" in names
    assert "look" in names


def test_a_lock_is_no_waiting_for_others() -> None:
    assert look(lambda: threading.Event().wait(0.05)).share(is_waiting) == 0


def test_backward_that_computes_is_no_waiting() -> None:
    x = torch.randn(300, 300, requires_grad=True)

    def compute() -> None:
        (x @ x @ x @ x).sum().backward()

    assert look(compute).share(is_waiting) < 0.4


def hold_python() -> None:
    sum(range(3_000_000))  # HELD HERE


def test_code_that_holds_pythons_lock_counts_in_full() -> None:
    began_s = time.monotonic()
    looker = look(hold_python, 2.5)  # what it takes to begin and end is little beside it
    took_s = time.monotonic() - began_s
    assert sum(place.seconds for place in looker.places) > 0.7 * took_s
    assert looker.share(lambda place: place.frames[0].function == "hold_python") > 0.7


def recurse(depth: int) -> None:
    if depth:
        recurse(depth - 1)
    else:
        time.sleep(0.05)


def test_deep_stacks_are_shortened() -> None:
    looker = look(lambda: recurse(60), 0.2)
    assert all(len(place.frames) <= 40 for place in looker.places)
    assert any(place.frames[0].function == "recurse" for place in looker.places)


def test_the_scripts_random_numbers_stay() -> None:
    state = random.getstate()
    draw_gaps(Sampler(0.0), 100.0)
    assert random.getstate() == state


def test_looks_are_at_no_rhythm() -> None:
    """A step could have the same."""
    gaps = draw_gaps(Sampler(0.0), 100.0)
    assert min(gaps) < 0.7 * EVERY_S
    assert max(gaps) > 1.3 * EVERY_S
    assert abs(sum(gaps) / len(gaps) - EVERY_S) < 0.2 * EVERY_S


def draw_gaps(sampler: Sampler, until_s: float) -> list[float]:
    gaps = []
    while (now_s := sampler.next_s) < until_s:
        sampler.take(now_s)
        gaps.append(sampler.next_s - now_s)
    return gaps


# ---- ranks


def wait_in(world: World, kind: str) -> tuple[float, float]:
    """Rank 1 comes late to something, again and again; gives the shares of waiting and of being late."""
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 3))
    tensor = torch.ones(4)
    dist.barrier()
    with Looker() as looker:
        for _ in range(6):
            loss = model(torch.ones(2, 4)).sum()
            if world.rank == 1:
                time.sleep(0.2)  # LATE HERE
            if kind == "all_reduce":
                dist.all_reduce(tensor)
            elif kind == "wait":
                work = dist.all_reduce(tensor, async_op=True)
                work.wait()
            elif kind == "receive" and world.rank == 0:
                dist.recv(tensor, 1)
            elif kind == "receive":
                dist.send(tensor, 0)
            elif kind == "functional":
                dist._functional_collectives.all_reduce(tensor, "sum", dist.group.WORLD).sum()
            else:
                loss.backward()
    return looker.share(is_waiting), looker.share(is_in("LATE HERE"))


def check(ranks: object, kind: str) -> None:
    (waits, late), (others_waits, others_late) = ranks.run(wait_in, args=(kind,), timeout_s=TIMEOUT_S)  # type: ignore[attr-defined]
    assert waits > 0.5
    assert late == 0
    assert others_waits < 0.4
    assert others_late > 0.5


def test_waits_in_all_reduce(ranks):
    check(ranks, "all_reduce")


def test_waits_in_backward(ranks):
    check(ranks, "backward")


def test_waits_for_an_asynchronous_one(ranks):
    check(ranks, "wait")


def test_waits_in_receive(ranks):
    check(ranks, "receive")


def test_waits_in_a_functional_collective(ranks):
    check(ranks, "functional")
