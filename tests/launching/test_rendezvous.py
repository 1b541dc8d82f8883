"""The rendezvous of launchers over a store in memory: torch's rounds, without ranks and without processes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous.api import RendezvousClosedError, RendezvousGracefulExitError

from paceline.errors import PacelineError
from paceline.launching.elastic.members import Formed, StoreRendezvous
from paceline.launching.members.pulse import read_record
from paceline.launching.members.record import JobNode, Terms
from paceline.launching.members.store import StoreError
from paceline.launching.members.waits import Waits
from tests.launching.members.simulated import Disk, Link

pytestmark = pytest.mark.timeout(60)
WAITS = Waits(detect_s=2.0, join_s=40.0, last_call_s=2.0)


class Launcher:
    """One launcher without ranks."""

    def __init__(self, disk: Disk, name: str, terms: Terms) -> None:
        self.link, self.asked, self.ended = Link(disk), False, threading.Event()
        self.rendezvous = StoreRendezvous(
            "j",
            self.link,
            terms,
            WAITS,
            JobNode(f"key-{name}", name, "127.0.0.1"),
            is_elastic=True,
            on_loss=self.ended.set,
            hold=lambda until_s: None,
            is_asked=lambda: self.asked,
        )

    def meet(self) -> tuple[int, int]:
        """Return this node's number in the next round, and the number of nodes."""
        found = self.rendezvous.next_rendezvous()
        where = found.bootstrap_store_info
        assert where is not None
        place, timeout = (where.master_addr, where.master_port), timedelta(seconds=20)
        store = TCPStore(*place, is_master=False, wait_for_workers=False, timeout=timeout)
        store.set(f"here-{found.rank}", b"yes")
        return found.rank, found.world_size


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as made:
        yield made


def await_true(is_it: Callable[[], object], seconds: float = 10.0) -> None:
    end_s = time.monotonic() + seconds
    while not is_it():
        assert time.monotonic() < end_s
        time.sleep(0.02)


def test_nodes_join_are_lost_leave_and_end(pool: ThreadPoolExecutor) -> None:
    disk, terms = Disk(), Terms(1, 3)
    a, b, c = (Launcher(disk, name, terms) for name in "abc")
    first = [pool.submit(launcher.meet) for launcher in (a, b)]
    assert sorted(each.result() for each in first) == [(0, 2), (1, 2)]
    # A third one joins: the others hear of it, and all meet again.
    third = pool.submit(c.meet)
    for launcher in (a, b):
        await_true(lambda launcher=launcher: launcher.rendezvous.num_nodes_waiting())
        assert launcher.rendezvous.news == "c (127.0.0.1) joins"
        assert not launcher.rendezvous.lost
    again = [pool.submit(launcher.meet) for launcher in (a, b)]
    assert third.result() == (2, 3), "a newcomer comes last"
    assert sorted(each.result() for each in again) == [(0, 3), (1, 3)]
    # One is cut off from the store: it is lost, and the others go on.
    a.link.fault = "cut"
    for launcher in (b, c):
        assert launcher.rendezvous.await_news(20)
        assert launcher.rendezvous.news == "a (127.0.0.1) is lost: no beat for 2 s"
        assert launcher.rendezvous.lost
        assert launcher.ended.wait(1)
    again = [pool.submit(launcher.meet) for launcher in (b, c)]
    assert [each.result() for each in again] == [(0, 2), (1, 2)]
    # It comes back, and finds that the others have gone on.
    a.link.fault = ""
    await_true(lambda: a.rendezvous.lost)
    assert a.rendezvous.news == "other nodes have gone on without this one"
    back = pool.submit(a.meet)
    for launcher in (b, c):
        assert launcher.rendezvous.await_news(20)
    again = [pool.submit(launcher.meet) for launcher in (b, c)]
    assert {back.result(), *(each.result() for each in again)} == {(0, 3), (1, 3), (2, 3)}
    # One leaves.
    c.asked = True
    c.rendezvous.announce_leave()
    for launcher in (a, b):
        assert launcher.rendezvous.await_news(20)
        assert launcher.rendezvous.news == "c (127.0.0.1) left: it was asked to leave"
        assert not launcher.rendezvous.lost
    c.rendezvous.leave()
    again = [pool.submit(launcher.meet) for launcher in (a, b)]
    assert sorted(each.result() for each in again) == [(0, 2), (1, 2)]
    # The ranks of both succeed, one later than the other.
    early = pool.submit(a.rendezvous.finish)
    time.sleep(1)
    assert not early.done()
    b.rendezvous.finish()
    early.result()
    for launcher in (a, b):
        launcher.rendezvous.shutdown()
    record = read_record(disk.record)
    assert (record.ended, record.nodes) == ("done", {})


@pytest.mark.parametrize("is_good", [True, False])
def test_a_node_that_comes_back_to_a_job_at_its_end_ends_with_it(
    pool: ThreadPoolExecutor, is_good: bool
) -> None:
    disk, terms = Disk(), Terms(1, 2)
    a, b = (Launcher(disk, name, terms) for name in "ab")
    first = [pool.submit(launcher.meet) for launcher in (a, b)]
    assert sorted(each.result() for each in first) == [(0, 2), (1, 2)]
    b.link.fault = "cut"
    assert a.rendezvous.await_news(20)
    assert a.meet() == (0, 1)
    if is_good:
        a.rendezvous.finish()
    else:
        a.rendezvous.set_closed()
    b.link.fault = ""
    await_true(b.rendezvous.is_closed)
    expected = RendezvousGracefulExitError if is_good else RendezvousClosedError
    with pytest.raises(expected, match="ended"):
        b.meet()
    for launcher in (b, a):
        launcher.rendezvous.shutdown()
    assert read_record(disk.record).ended == ("done" if is_good else "failed")


def test_a_spare_takes_over_and_ends_with_the_job(pool: ThreadPoolExecutor) -> None:
    disk, terms = Disk(), Terms(1, 2)
    a, b, c, d = (Launcher(disk, name, terms) for name in "abcd")
    first = [pool.submit(launcher.meet) for launcher in (a, b)]
    assert sorted(each.result() for each in first) == [(0, 2), (1, 2)]
    spare = pool.submit(c.meet)
    await_true(lambda: read_record(disk.record).spares == ["key-c"])
    time.sleep(1)
    assert a.rendezvous.news is None
    b.link.fault = "cut"
    assert a.rendezvous.await_news(20)
    assert a.meet() == (0, 2)
    assert spare.result() == (1, 2)
    another = pool.submit(d.meet)
    await_true(lambda: read_record(disk.record).spares == ["key-d"])
    a.rendezvous.shutdown()  # its ranks failed, and no restart is left
    c.rendezvous.shutdown()
    assert isinstance(another.exception(10), RendezvousGracefulExitError)
    d.rendezvous.shutdown()
    assert read_record(disk.record).ended == "failed"
    # The name may be used again, by a node alone.
    again = Launcher(disk, "e", terms)
    assert again.meet() == (0, 1)
    again.rendezvous.shutdown()
    for launcher in (b, again):
        launcher.rendezvous.shutdown()


def test_a_node_with_other_terms_is_refused_and_named(pool: ThreadPoolExecutor) -> None:
    disk = Disk()
    a = Launcher(disk, "a", Terms(1, 2, {"a.py": "(1)"}))
    assert a.meet() == (0, 1)
    other = Launcher(disk, "b", Terms(1, 2, {"a.py": "(2)"}))
    with pytest.raises(PacelineError, match="PL376") as raised:
        other.meet()
    assert raised.value.exit_code == 2
    assert "the job runs a.py (1), and this node runs a.py (2)" in raised.value.saw
    assert list(read_record(disk.record).refused) == ["b (127.0.0.1)"]
    for launcher in (a, other):
        launcher.rendezvous.shutdown()


def test_a_wait_ends_with_its_reason_or_a_signal(pool: ThreadPoolExecutor) -> None:
    short = Waits(detect_s=0.5, join_s=1.0)
    disk, terms = Disk(), Terms(2, 3)
    alone = Launcher(disk, "a", terms)
    alone.rendezvous._waits = short
    with pytest.raises(PacelineError, match="PL375") as raised:
        alone.meet()
    assert "1 of at least 2 nodes were there after 1 s" in raised.value.saw
    alone.rendezvous.shutdown()
    cut = Launcher(disk, "b", terms)
    cut.rendezvous._waits = short
    cut.link.fault = "cut"
    with pytest.raises(PacelineError, match="PL381"):
        cut.meet()
    waiting = Launcher(disk, "c", terms)
    found = pool.submit(waiting.meet)
    time.sleep(0.5)
    waiting.asked = True
    assert isinstance(found.exception(5), RendezvousClosedError)
    for launcher in (cut, waiting):
        launcher.rendezvous.leave()


def test_a_node_that_stands_still_while_a_round_forms_keeps_no_other_waiting(
    pool: ThreadPoolExecutor,
) -> None:
    """It is number 0, and learns of the round only when the other has gone on without it."""
    disk, terms, stands, goes_on = Disk(), Terms(1, 2), threading.Event(), threading.Event()
    a, b = (Launcher(disk, name, terms) for name in "ab")

    def stand_still(formed: Formed) -> None:
        stands.set()
        goes_on.wait(40)

    a.rendezvous._report = stand_still  # type: ignore[method-assign]
    still = pool.submit(a.meet)
    try:
        assert pool.submit(b.rendezvous.next_rendezvous).result(15).rank == 1
        assert stands.wait(15)
        a.link.fault = "cut"
        assert b.rendezvous.await_news(15)
        assert b.rendezvous.lost
        assert b.meet() == (0, 1)
    finally:
        a.link.fault = ""
        goes_on.set()
    assert still.result() == (0, 2)
    await_true(lambda: a.rendezvous.lost)
    for launcher in (a, b):
        launcher.rendezvous.shutdown()


def test_a_node_whose_joining_was_not_answered_ends_with_its_job(pool: ThreadPoolExecutor) -> None:
    disk, terms = Disk(), Terms(2, 2)
    a, b = (Launcher(disk, name, terms) for name in "ab")
    first = pool.submit(a.meet)
    await_true(lambda: disk.record and read_record(disk.record).numbers)
    replace = b.link.replace
    lost: list[bool] = []

    def lose_first_answer(number: int, before: bytes | None, after: str) -> bool:
        is_set = replace(number, before, after)
        lost.append(is_set)
        if lost == [True]:
            raise StoreError("timed out")
        return is_set

    b.link.replace = lose_first_answer  # type: ignore[method-assign]
    assert (b.meet(), first.result()) == ((1, 2), (0, 2))
    a.rendezvous.shutdown()  # its ranks failed, and no restart is left
    again = pool.submit(b.meet)
    try:
        assert isinstance(again.exception(10), RendezvousClosedError)
    finally:
        b.asked = True
    b.rendezvous.shutdown()
