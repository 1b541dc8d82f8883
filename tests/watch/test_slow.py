"""The report on a slow rank: its place, in words; and `paceline run` on real ones."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from paceline.watch.protocol.report import Beat, Frame, Pace, PlaceTime
from paceline.watch.reasoning.pace import Slow
from paceline.watch.reasoning.render import render
from paceline.watch.reasoning.slow import SlowRanks, build_message, find_spot
from paceline.watch.reasoning.source import Source
from tests.launching.launched import Launched, paceline_run
from tests.launching.nodes import Nodes, why_no_nodes
from tests.watch.situations import BACKWARD, COLLECTIVE, library, reader, user

pytestmark = pytest.mark.timeout(240)
_END_S = 120.0
UNEVEN = Path(__file__).parent / "scripts" / "own" / "uneven.py"
MAIN = user(60, "<module>", "main()")
SLEEP = user(22, "__getitem__", "time.sleep(0.02)")
LOADS = (
    SLEEP,
    library("torch/utils/data/dataloader.py", "__next__"),
    user(41, "main", "for x in loader:"),
    MAIN,
)
FORWARD = (library("torch/nn/modules/module.py", "_call_impl"), user(45, "main", "y = model(x)"), MAIN)
BACK = (*BACKWARD, user(47, "main", "loss.backward()"), MAIN)


def source() -> Source:
    return Source(reader(""))


def at(seconds: float, *frames: Frame, waits: bool = False) -> PlaceTime:
    return PlaceTime(seconds, waits, frames)


def line_in(mark: str) -> int:
    return 1 + next(n for n, line in enumerate(UNEVEN.read_text().splitlines()) if mark in line)


# ---- where


def test_what_all_do_is_not_what_makes_one_slow() -> None:
    own = [at(6, *FORWARD), at(4, *LOADS)]
    others = [[at(6, *FORWARD), at(4, *BACK, waits=True)]]
    spot = find_spot(own, others, source())
    assert spot.frames == (SLEEP, LOADS[2], MAIN)
    assert (spot.share, spot.others) == (0.4, 0.0)
    assert spot.words == "is in the data loader, asleep in time.sleep"
    assert spot.is_loader
    assert not spot.is_everywhere


def test_a_function_whose_lines_share_the_time_is_named_as_a_whole() -> None:
    outer = (user(49, "main", "x = make()"), MAIN)
    lines = [user(n, "augment", f"line {n}") for n in (10, 11, 12, 13)]
    own = [at(1.0 + (line.line == 12) / 2, line, *outer) for line in lines] + [at(0.5, *FORWARD)]
    spot = find_spot(own, [[at(1, *FORWARD), at(9, *BACK, waits=True)]], source())
    assert spot.frames == (lines[2], *outer)
    assert not spot.is_line
    assert spot.share == pytest.approx(0.9)


def test_a_function_that_is_called_there_is_named_if_it_has_most_of_the_time() -> None:
    outer = (user(12, "augment", "rotate(x)"), MAIN)
    inner = user(5, "rotate", "rows")
    spot = find_spot([at(8, inner, *outer), at(2, *outer)], [], source())
    assert spot.frames == (inner, *outer)
    assert spot.is_line
    spot = find_spot([at(5, inner, *outer), at(5, *outer)], [], source())
    assert spot.frames == outer


def test_a_rank_that_is_slower_in_everything_is_reported_so() -> None:
    backward = (library("torch/_tensor.py", "backward"), user(47, "main", "loss.backward()"), MAIN)
    own = [at(4, *FORWARD), at(6, *backward)]
    others = [[at(2, *FORWARD), at(3, *backward), at(5, *BACK, waits=True)]]
    spot = find_spot(own, others, source())
    assert spot.is_everywhere
    message = build_message([Slow(1, 0.0, (0,), 0.5, (0,), 20.0)], spot, others[0])
    assert "slower everywhere" in message.fix


def test_a_disk_that_does_not_answer_is_the_thing_to_look_at() -> None:
    write = Frame("/a/paceline/train/metrics.py", 263, "_append")
    spot = find_spot([at(9, write, MAIN), at(1, *FORWARD)], [[at(10, *FORWARD, waits=True)]], source())
    message = render(build_message([Slow(0, 0.0, (1,), 0.9, (1,), 10.0)], spot, []))
    assert "look whether the disk of the run's folder answers" in message


def test_nothing_of_the_users_is_no_trouble() -> None:
    spot = find_spot([at(5, library("torch/a.py", "f"))], [[at(5, waits=True)]], source())
    message = render(build_message([Slow(1, 0.0, (0, 2), 0.8, (0, 2), 10.0)], spot, []))
    first = "rank 1 makes ranks 0 and 2 wait: they have waited in collectives for 80% of the last 10 s"
    assert message.startswith(f"{first}, rank 1 for 0% [PL820]")


# ---- when


def beat(rank: int, second: int, *places: PlaceTime) -> Beat:
    count = {"0": 10 * second}
    return Beat(rank, float(second), "running", count, count, 0, False, pace=Pace(5, places))


def tell(slow: SlowRanks, seconds: range, own: PlaceTime, ranks: tuple[int, ...] = (1,)) -> list[str]:
    """Return the report while some of four ranks are at a place, and the others wait."""
    told = []
    for second in seconds:
        for rank in range(4):
            places = (own,) if rank in ranks else (at(1, *COLLECTIVE, user(31, "sync"), MAIN, waits=True),)
            slow.book.note_beat(beat(rank, second, *places), float(second))
        if (verdict := slow.read(float(second))) is not None:
            told.append(render(verdict))
    return told


def test_it_is_stated_once_for_a_place() -> None:
    slow = SlowRanks(reader(""))
    (told,) = tell(slow, range(1, 700), at(1, *LOADS))
    lines = told.splitlines()
    assert lines[0] == (
        "rank 1 makes ranks 0, 2 and 3 wait: they have waited in collectives for 100% of the last 10 s, "
        "rank 1 for 0% [PL820]"
    )
    assert lines[1].startswith(
        "  rank 1 is in the data loader, asleep in time.sleep, 100% of the time (ranks"
    )
    assert "  ranks 0, 2 and 3 wait in all_reduce, mostly\n      at /job/train.py:31 in sync\n" in told
    assert "num_workers" in told


def test_a_rank_is_reported_once_at_whatever_place() -> None:
    slow = SlowRanks(reader(""))
    assert len(tell(slow, range(1, 100), at(1, *LOADS))) == 1
    assert tell(slow, range(100, 900), at(1, user(100, "work", "work()"), MAIN)) == []
    assert len(tell(slow, range(900, 1300), at(1, *LOADS), ranks=(2,))) == 1


def test_ranks_that_are_slow_at_one_place_are_reported_together() -> None:
    slow = SlowRanks(reader(""))
    for second in range(1, 40):
        for rank in range(8):
            places = (at(1, *LOADS),) if rank in (2, 5) else (at(1, *BACK, waits=True),)
            slow.book.note_beat(beat(rank, second, *places), float(second))
        if (verdict := slow.read(float(second))) is not None:
            break
    assert verdict is not None
    first = "ranks 2 and 5 make ranks 0, 1, 3, 4, 6 and 7 wait: they have waited in collectives for 100%"
    assert verdict.headline.startswith(first)
    assert verdict.places[0].ranks == (2, 5)


# ---- real ranks


def test_a_slow_rank_is_named_while_the_job_runs(tmp_path: Path) -> None:
    with Launched(tmp_path, paceline_run("--nproc-per-node", "3", str(UNEVEN), "1", "0.1")) as job:
        job.wait_for(r"\[PL820\]\n(?:  .*\n)+  paceline explain", _END_S)
        (job.work / "stop").touch()
        assert job.wait(_END_S) == 0
        told = job.text[job.text.index("paceline: rank 1 makes ranks 0 and 2 wait: ") :]
        assert "asleep in time.sleep" in told.splitlines()[1]
        assert f"uneven.py:{line_in('# SLOW')} in prepare" in told
        assert f"uneven.py:{line_in('# WAITS')} in take_part" in told
        assert "  ranks 0 and 2 wait in all_reduce" in told
        assert job.text.count("[PL820]") == 1


@pytest.fixture
def nodes() -> Nodes:
    if reason := why_no_nodes():
        pytest.skip(reason)
    return Nodes(2)


def test_the_slow_ranks_node_names_it(tmp_path: Path, nodes: Nodes) -> None:
    with nodes, ExitStack() as stack:
        jobs = []
        for node in range(2):
            flags = ["--nnodes", "2", "--nproc-per-node", "1", "--node-rank", str(node)]
            command = paceline_run(*flags, "--master-addr", nodes.address(0), str(UNEVEN), "1", "0.1")
            job = Launched(tmp_path / str(node), command, around=partial(nodes.command, node))
            jobs.append(stack.enter_context(job))
        jobs[1].wait_for(r"\[PL820\]\n(?:  .*\n)+  paceline explain", _END_S)
        assert "rank 1 makes rank 0 wait: " in jobs[1].text
        assert f"uneven.py:{line_in('# SLOW')} in prepare" in jobs[1].text
        for job in jobs:
            (job.work / "stop").touch()
        assert [job.wait(_END_S) for job in jobs] == [0, 0]
        assert "PL820" not in jobs[0].text
