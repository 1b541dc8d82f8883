"""Why ranks failed, from what they said last: made-up jobs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from paceline.launching.ending.endings import Ending
from paceline.watch.launcher.ends import RankEnds
from paceline.watch.protocol.report import Beat, Call, Frame, Group, Report, Seen
from paceline.watch.reasoning.death import Failure, explain_failure, rewind
from paceline.watch.reasoning.source import Source
from tests.watch.situations import (
    BACKWARD,
    COLLECTIVE,
    NOW_S,
    Job,
    call,
    library,
    line_of,
    reader,
    user,
)

LOST = Ending(0, "error", 1, NOW_S, True, words="failed with RuntimeError: Connection closed by peer")
ABORT = Ending(0, "abort", -6, NOW_S, words="called std::terminate")


def falls(job: Job, rank: int, last: Ending, stack: Sequence[Frame], *calls: Call, code: Any = None) -> None:
    """End the rank, with its last report from the place of its stack."""
    job.is_in(rank, *stack, calls=calls, phase="leaving")
    job.reports[rank] = replace(job.reports[rank], last=last)
    if code is not None:
        job.process(rank, state="ended", exit_code=code)


def loses_peer(job: Job, rank: int, *calls: Call, at: int = 31) -> None:
    """Make the rank's last call raise, which then counts as done."""
    stack = (*COLLECTIVE, user(at, "step"))
    falls(job, rank, LOST, stack, *[replace(c, done=True) for c in calls], code=1)


def explain(job: Job, text: str = "", **issued: Any) -> Failure:
    for name, number in issued.items():
        rank = int(name.removeprefix("rank"))
        told = job.reports.get(rank) or Report(rank, NOW_S, "leaving", {}, (), ())
        job.reports[rank] = replace(told, issued={"0": number})
    return explain_failure(job.seen, range(job.world_size), reader(text))


def only_places(failure: Failure) -> list[tuple[tuple[int, ...], str, list[int]]]:
    assert failure.verdict is not None
    return [(place.ranks, place.what, [f.line for f in place.frames]) for place in failure.verdict.places]


# ---- collectives that don't match


def test_sizes_of_a_rank_that_gloo_aborted():
    job = Job(3)
    mine = call(7, at=40, sizes=[[1]])
    falls(job, 0, ABORT, mine.frames, call(6, at=20, done=True), mine, code=-6)
    for rank in (1, 2):
        loses_peer(job, rank, call(6, at=20), call(7, at=31, sizes=[[54]]))
    verdict = explain(job).verdict
    assert verdict is not None
    assert verdict.code == "PL803"
    assert verdict.headline == (
        "different sizes in all_reduce number 7 of world: ranks 1 and 2 give [54] at /job/train.py:31 in "
        "step and rank 0 gives [1] at /job/train.py:40 in step"
    )
    assert [(place.ranks, place.frames[0].line) for place in verdict.places] == [((1, 2), 31), ((0,), 40)]


def test_a_rank_that_took_fewer_bytes_and_went_on():
    """Gloo lets it: it fails in a later call, where its peer has gone."""
    job = Job(2)
    falls(job, 1, ABORT, COLLECTIVE, call(5, sizes=[[2, 2]]), code=-6)
    loses_peer(job, 0, call(5, sizes=[[3, 2]]), call(6, at=50), at=50)
    verdict = explain(job).verdict
    assert verdict is not None
    assert verdict.code == "PL803"
    assert "[3, 2]" in verdict.headline
    assert "[2, 2]" in verdict.headline


def test_where_the_other_ranks_were_is_reported_too():
    job = Job(4)
    falls(job, 0, ABORT, COLLECTIVE, call(7, at=40, sizes=[[1]]), code=-6)
    for rank in (1, 2):
        loses_peer(job, rank, call(7, at=31, sizes=[[54]]))
    loses_peer(job, 3, call(6, at=22), at=22)
    places = only_places(explain(job))
    assert places[2] == ((3,), "waited in all_reduce number 6 of world (float32 [128])", [22])


def test_a_mismatch_is_reported_though_a_rank_failed_by_itself():
    job = Job(2)
    falls(
        job,
        0,
        Ending(0, "error", 1, NOW_S, words="failed with IndexError: 7"),
        [user(60)],
        call(5, sizes=[[3]], done=True),
        code=1,
    )
    loses_peer(job, 1, call(5, sizes=[[2]]))
    verdict = explain(job).verdict
    assert verdict is not None
    assert verdict.code == "PL803"


# ---- a peer that has ended

TRAIN = """
def sync(rank):
    if rank == 0:
        dist.all_reduce(total)  # HERE
def run(files):
    if not files:
        sys.exit(0)  # LEAVES
    sync(rank)  # CALLS
run(files)
"""
HERE, LEAVES, CALLS = (line_of(TRAIN, f"# {name}") for name in ("HERE", "LEAVES", "CALLS"))


def test_a_peer_that_called_exit():
    job = Job(3)
    falls(
        job,
        2,
        Ending(2, "exit", 0, NOW_S, words="called sys.exit(0)"),
        [user(LEAVES, "run")],
        call(3, done=True),
        code=0,
    )
    for rank in (0, 1):
        wait = call(4, at=[user(77, "sync"), user(CALLS, "run")], op="sum")
        falls(job, rank, LOST, (*COLLECTIVE, *wait.frames[2:]), replace(wait, done=True), code=1)
    failure = explain(job, TRAIN, rank2=3)
    assert failure.verdict is not None
    assert failure.verdict.code == "PL801"
    assert failure.verdict.headline == (
        "rank 2 never reached all_reduce number 4 of world, where ranks 0 and 1 have waited 60 s at "
        f"/job/train.py:77 in sync: it called sys.exit(0) at /job/train.py:{LEAVES} in run"
    )
    assert only_places(failure) == [
        ((0, 1), "waited in all_reduce number 4 of world (float32 [128], sum)", [77, CALLS]),
        ((2,), "called sys.exit(0)", [LEAVES]),
    ]
    assert any("`if not files:`" in clue for clue in failure.verdict.more)


def test_a_peer_that_came_to_its_end():
    """It left no last words, and its beats tell how far it was."""
    job = Job(2)
    job.ends(1)
    loses_peer(job, 0, call(4, at=HERE), at=HERE)
    verdict = explain(job, TRAIN, rank1=3).verdict
    assert verdict is not None
    assert verdict.code == "PL801"
    assert "it has ended (exit code 0)" in verdict.headline
    assert any("`if rank == 0:`" in clue for clue in verdict.more)


@pytest.mark.parametrize(
    ("state", "status", "words"),
    [
        ("sleeping", None, "has reached the end of its script"),  # the interpreter clears up still
        ("ended", None, "has ended (exit code 0)"),  # its status is on the way
        ("ended", 0, "has ended (exit code 0)"),
    ],
)
def test_a_peer_that_is_just_leaving_has_ended(state, status, words):
    job, kept = Job(2), RankEnds()
    loses_peer(job, 0, call(2, "reduce"))
    kept.note_beat(Beat(1, NOW_S, "leaving", {"0": 1}, {"0": 1}, 0, is_waiting=False))
    kept.note_report(job.reports[0])
    if status is not None:
        kept.note_status(1, status)
    job.process(1, state=state)
    failure = explain_failure(kept.add_to(job.seen, job.processes), range(2), reader(""))
    assert failure.verdict is not None
    assert failure.verdict.code == "PL801"
    assert words in failure.verdict.headline


def test_the_closing_report_of_a_peer_shows_what_it_never_sent():
    job, kept = Job(2), RankEnds()
    loses_peer(job, 0, *(call(number, "recv", peer=1) for number in (1, 2, 3)))
    job.reports[0] = replace(job.reports[0], num_microbatches=3)
    kept.note_beat(Beat(1, NOW_S, "leaving", {}, {}, 0, is_waiting=False))
    sent = tuple(call(number, "send", peer=0, done=True) for number in (1, 2))
    kept.note_report(Report(1, NOW_S, "leaving", {}, sent, (), num_microbatches=2))
    job.process(1, state="ended")
    verdict = explain_failure(kept.add_to(job.seen, job.processes), range(2), reader("")).verdict
    assert verdict is not None
    assert verdict.headline.startswith("rank 1 never sent what rank 0 waits for (recv number 3 from rank 1)")
    assert "rank 0 has 3 and rank 1 has 2" in verdict.more[0]


def test_a_peer_that_is_just_leaving_by_an_error_has_failed():
    job, kept = Job(2), RankEnds()
    loses_peer(job, 0, call(2, "reduce"))
    falls(job, 1, Ending(1, "error", 1, NOW_S, words="failed with ValueError: no rows"), [user(7, "load")])
    kept.note_beat(Beat(1, NOW_S, "leaving", {"0": 1}, {"0": 1}, 0, is_waiting=False))
    for report in job.reports.values():
        kept.note_report(report)
    assert explain_failure(kept.add_to(job.seen, job.processes), range(2), reader("")).verdict is None


def test_a_peer_that_came_to_the_call_before_it_ended_is_not_to_blame():
    job = Job(2)
    job.ends(1)
    loses_peer(job, 0, call(4))
    assert explain(job, rank1=4).verdict is None


def test_a_peer_whose_last_words_hold_the_call_is_not_to_blame():
    job = Job(2)
    falls(
        job,
        1,
        Ending(1, "exit", 0, NOW_S, words="called sys.exit(0)"),
        [user(60)],
        call(4, done=True),
        code=0,
    )
    loses_peer(job, 0, call(4))
    assert explain(job, rank1=3).verdict is None


@pytest.mark.parametrize("code", [-9, 7, None])
def test_a_peer_that_failed_by_itself_or_nobody_knows_how_is_no_verdict(code):
    job = Job(2)
    job.ends(1, code)
    loses_peer(job, 0, call(4))
    failure = explain(job)
    assert failure.verdict is None
    assert [(place.ranks, place.what) for place in failure.others] == [
        ((0,), "waited in all_reduce number 4 of world (float32 [128])")
    ]


def test_a_lost_peer_where_nobody_is_seen_to_have_gone():
    """It is on a node that has told nothing."""
    job = Job(2)
    loses_peer(job, 0, call(4))
    assert explain(job).verdict is None


def test_an_error_on_another_node_is_reported_in_words():
    job = Job(3)
    falls(job, 1, Ending(1, "error", 1, NOW_S, words="failed with ValueError: 3"), [user(21, "load")], code=1)
    loses_peer(job, 0, call(4))
    del job.processes[2]  # on a node that has told nothing
    failure = explain_failure(job.seen, [0])
    assert failure.verdict is None
    told = [(p.ranks, p.what, p.frames[0].line) for p in failure.failed]
    assert told == [((1,), "failed with ValueError: 3", 21)]
    assert [p.ranks for p in failure.others] == [(0,)]


TIMEOUT = replace(LOST, words="failed with RuntimeError: Timed out waiting 3000ms for recv")


def test_a_timeout_is_a_hang_that_torch_has_ended():
    job = Job(2)
    wait = call(4, age_s=3.0)
    falls(job, 0, TIMEOUT, wait.frames, replace(wait, done=True), code=1)
    job.is_in(1, user(60, "fetch", "time.sleep(60)"), calls=[call(3, done=True)])
    failure = explain(job)
    assert failure.verdict is not None
    assert failure.verdict.code == "PL800"
    assert "rank 1 never reached all_reduce number 4 of world" in failure.verdict.headline
    assert "it is asleep in time.sleep at /job/train.py:60 in fetch" in failure.verdict.headline
    assert [what for _, what, _ in only_places(failure)] == [
        "waited in all_reduce number 4 of world (float32 [128])",
        "is asleep in time.sleep",
    ]


def test_a_timeout_where_a_rank_is_on_a_node_that_reported_nothing_is_no_verdict():
    job = Job(2)
    wait = call(4, age_s=3.0)
    falls(job, 0, TIMEOUT, wait.frames, replace(wait, done=True), code=1)
    del job.processes[1]
    assert explain(job).verdict is None


def test_a_lost_connection_to_a_rank_that_lives_is_no_verdict():
    job = Job(2)
    loses_peer(job, 0, call(4))
    job.is_in(1, user(60, "fetch", "time.sleep(60)"), calls=[call(3, done=True)])
    assert explain(job).verdict is None


def test_a_receive_from_a_peer_that_has_ended():
    job = Job(2)
    sent = [call(n, "send", peer=0, done=True) for n in (1, 2)]
    falls(
        job,
        1,
        Ending(1, "exit", 0, NOW_S, words="called sys.exit(0)"),
        [user(60)],
        call(9, done=True),
        *sent,
        code=0,
    )
    got = [call(n, "recv", peer=1) for n in (1, 2, 3)]
    loses_peer(job, 0, *got)
    verdict = explain(job).verdict
    assert verdict is not None
    assert verdict.code == "PL808"
    assert "rank 1 never sent what rank 0 waits for (recv number 3 from rank 1)" in verdict.headline
    assert "it called sys.exit(0)" in verdict.headline


def test_a_receive_from_a_peer_whose_sends_nobody_knows_is_no_verdict():
    job = Job(2)
    job.ends(1)
    loses_peer(job, 0, call(3, "recv", peer=1))
    assert explain(job, rank1=9).verdict is None


def test_only_a_member_of_the_group_is_missing():
    pair = Group("1", "pair", (0, 1))
    job = Job(3, [pair])
    job.ends(2)
    loses_peer(job, 0, call(4, group="1"))
    loses_peer(job, 1, call(4, group="1"))
    assert explain(job, rank2=0).verdict is None


# ---- where no verdict is


def test_ranks_that_are_on_their_way_out_are_not_reported():
    job = Job(4)
    job.ends(0, -9)
    job.waits(1, call(4))
    job.is_in(2)  # no answer from its main thread
    job.is_in(3, user(50, "load"))
    places = [(place.ranks, place.what) for place in explain(job).others]
    assert places == [
        ((1,), "waits in all_reduce number 4 of world (float32 [128])"),
        ((3,), "is idle (uses no CPU)"),
    ]


def test_an_exit_in_compiled_code_or_by_a_library_is_reported_with_its_line():
    job = Job(2)
    falls(job, 1, Ending(1, "exit", 7, NOW_S, words="called os._exit(7)"), [user(21, "check")], code=7)
    loses_peer(job, 0, call(4))
    failure = explain(job)
    assert failure.verdict is None
    assert [(p.ranks, p.what, p.frames[0].line) for p in failure.failed] == [((1,), "called os._exit(7)", 21)]
    assert [p.ranks for p in failure.others] == [(0,)]


def test_an_error_with_a_traceback_is_not_reported_again():
    job = Job(2)
    falls(job, 1, Ending(1, "error", 1, NOW_S, words="failed with ValueError: 3"), [user(21, "load")], code=1)
    loses_peer(job, 0, call(4))
    failure = explain(job)
    assert (failure.verdict, failure.failed) == (None, ())
    assert [p.ranks for p in failure.others] == [(0,)]


# ---- back to the instant before


def open_numbers(seen: Seen, rank: int) -> list[int]:
    return [c.number for c in rewind(seen, Source()).reports[rank].calls if not c.done]


def test_the_call_at_the_line_of_the_exception_is_open_again():
    job = Job(2)
    loses_peer(job, 0, call(4, at=31, age_s=3), call(5, at=31, age_s=2), call(6, at=35, age_s=1), at=31)
    assert open_numbers(job.seen, 0) == [5]


def test_a_call_of_backward_is_open_again():
    job = Job(2)
    stack = (*BACKWARD, user(48, "train"))
    within = call(9, at=[user(48, "train")], inside=BACKWARD, done=True, age_s=1)
    falls(job, 0, LOST, stack, call(8, at=48, done=True, age_s=2), within, code=1)
    assert open_numbers(job.seen, 0) == [9]
    assert rewind(job.seen, Source()).processes[0].state == "sleeping"


def test_an_asynchronous_call_is_open_again_where_it_was_waited_for():
    job = Job(2)
    stack = [user(90, "finish", "handle.wait()")]
    falls(job, 0, LOST, stack, call(9, at=48, done=True), code=1)
    assert open_numbers(job.seen, 0) == [9]


def test_no_call_is_open_where_the_exception_came_from_elsewhere():
    job = Job(2)
    stack = [library("urllib/request.py", "urlopen"), user(90, "fetch", "urlopen(address)")]
    falls(job, 0, LOST, stack, call(9, at=48, done=True), code=1)
    assert open_numbers(job.seen, 0) == []


def test_open_calls_stay_as_they_are():
    job = Job(2)
    falls(job, 0, LOST, COLLECTIVE, call(8, done=True), call(9), code=1)
    assert open_numbers(job.seen, 0) == [9]


def test_how_a_process_will_end_is_known_from_its_last_words():
    job = Job(1)
    falls(job, 0, Ending(0, "exit", 3, NOW_S, words="called sys.exit(3)"), [user(5)])
    process = rewind(job.seen, Source()).processes[0]
    assert (process.state, process.exit_code) == ("ended", 3)
