"""Jobs that have stopped: who is named as the cause."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import paceline
from paceline.phrases import name_ranks
from paceline.watch.protocol.report import Frame, Group, Stack, Verdict
from paceline.watch.reasoning.hang import explain_hang
from tests.watch.situations import (
    BACKWARD,
    COLLECTIVE,
    LOADER,
    Job,
    call,
    library,
    reader,
    user,
)


def explain(job: Job, text: str = "") -> Verdict:
    verdict = explain_hang(job.seen, reader(text))
    assert verdict is not None
    return verdict


def build(world_size: int, *waiting: int, number: int = 57) -> Job:
    """Some ranks wait in one all_reduce; where the others are, the test says."""
    job = Job(world_size)
    for rank in waiting:
        job.waits(rank, call(number - 1, done=True, age_s=70), call(number, age_s=62))
    return job


BEFORE = call(56, done=True, age_s=70)


def test_the_first_line_states_it_all() -> None:
    job = build(4, 0, 1, 3)
    job.is_in(2, user(88, "fetch", "time.sleep(wait)"), user(20), calls=[BEFORE])
    verdict = explain(job)
    assert verdict.code == "PL800"
    assert verdict.headline == (
        "rank 2 never reached all_reduce number 57 of world, where ranks 0, 1 and 3 have waited 62 s at "
        "/job/train.py:31 in step: it is asleep in time.sleep at /job/train.py:88 in fetch"
    )
    assert [place.ranks for place in verdict.places] == [(0, 1, 3), (2,)]
    assert verdict.places[0].what == "waits in all_reduce number 57 of world (float32 [128])"


@pytest.mark.parametrize(
    ("stack", "words"),
    [
        (LOADER, "waits for the data loader"),
        ((library("threading.py", "wait"), library("queue.py", "get")), "waits for a queue"),
        ((library("threading.py", "wait"),), "waits for a lock or an event"),
        ((library("threading.py", "_wait_for_tstate_lock"),), "waits for a thread"),
        ((library("subprocess.py", "_try_wait"),), "waits for a program"),
        ((library("ssl.py", "read"), library("http/client.py", "_read_status")), "waits for the network"),
        ((user(5, text="with self._lock:"),), "waits for a lock"),
        ((user(5, text="answer = input('go on? ')"),), "waits for input"),
        ((user(5, text="sleep(600)"),), "is asleep in time.sleep"),
        ((user(5, text="libc.sleep(seconds)"),), "it is asleep at"),
        (
            (library("torch/distributed/distributed_c10d.py", "destroy_process_group"),),
            "destroy_process_group",
        ),
        ((user(5, text="x = x @ x"),), "it is idle (uses no CPU) at /job/train.py:5"),
    ],
)
def test_what_a_rank_does_instead(stack: tuple[Frame, ...], words: str) -> None:
    job = build(2, 0)
    job.is_in(1, *stack, user(20), calls=[BEFORE])
    assert words in explain(job).headline


def test_a_rank_that_computes() -> None:
    job = build(2, 0)
    job.is_in(1, user(20, "fit", "while True:"), calls=[BEFORE])
    job.process(1, cpu_share=0.99, state="running")
    assert "it computes (99% of a core) at /job/train.py:20 in fit" in explain(job).headline


@pytest.mark.parametrize(
    ("exit_code", "words"),
    [
        (0, "it has ended (exit code 0)"),
        (3, "it has ended (exit code 3)"),
        (-9, "it was killed by SIGKILL"),
    ],
)
def test_a_rank_that_has_ended(exit_code: int, words: str) -> None:
    job = build(4, 0, 1, 3)
    job.ends(2, exit_code)
    verdict = explain(job)
    assert verdict.code == "PL801"
    assert verdict.headline.endswith(words)


def test_several_ranks_have_ended() -> None:
    job = build(4, 0)
    for rank in (1, 2, 3):
        job.ends(rank)
    verdict = explain(job)
    assert verdict.headline.startswith(
        "ranks 1-3 never reached all_reduce number 57 of world, where rank 0 has"
    )
    assert verdict.headline.endswith("they have ended (exit code 0)")


def test_a_rank_at_the_end_of_its_script() -> None:
    job = build(2, 0)
    job.is_in(1, library("threading.py", "_shutdown"), phase="leaving", calls=[BEFORE])
    verdict = explain(job)
    assert verdict.code == "PL801"
    assert "it has reached the end of its script, and waits for a thread to end" in verdict.headline


def test_a_stopped_rank_even_if_it_had_come() -> None:
    job = build(3, 0, 1, 2)
    del job.reports[2]
    job.process(2, state="stopped")
    verdict = explain(job)
    assert verdict.code == "PL809"
    assert "it is stopped" in verdict.headline
    assert "kill -CONT 1002" in verdict.fix


def test_a_stopped_rank_that_had_issued_the_call() -> None:
    job = build(3, 0, 1, 2)
    job.process(2, state="stopped")
    verdict = explain(job)
    assert verdict.code == "PL809"
    assert verdict.headline.startswith("rank 2 does not finish all_reduce number 57 of world")


def test_an_unreachable_node() -> None:
    job = build(8, 0, 1, 2, 3)
    for rank in range(4, 8):
        job.process(rank, state="unreachable", node="node-b")
    verdict = explain(job)
    assert verdict.code == "PL812"
    assert verdict.headline.startswith("ranks 4-7 never reached")
    assert "they are on node-b, which does not answer" in verdict.headline


def test_a_rank_that_does_not_answer_is_reported_by_its_native_stack() -> None:
    job = build(2, 0)
    job.process(1, native=(library("torch/utils/data/dataloader.py", "_get_data"), user(20)), cpu_share=0.0)
    assert "it waits for the data loader at /job/train.py:20" in explain(job).headline


# ---- several causes, chains and circles


def test_the_root_is_who_everybody_waits_for_in_the_end() -> None:
    rows = [Group("1", "tp", (0, 1)), Group("2", "tp", (2, 3)), Group("3", "dp", (0, 2))]
    job = Job(4, [*rows, Group("4", "dp", (1, 3))])
    job.waits(0, call(7, group="1", at=40))  # for rank 1
    job.waits(1, call(9, group="4", at=50))  # for rank 3
    job.waits(2, call(7, group="2", at=40))  # for rank 3
    job.is_in(3, *LOADER, user(12))
    verdict = explain(job)
    assert verdict.code == "PL800"
    assert verdict.headline.startswith("rank 3 never reached all_reduce number ")
    assert "Ranks 0 and 2 wait for the same rank indirectly, in other calls." in verdict.more


def test_a_root_is_not_hidden_by_another_of_fewer() -> None:
    groups = [Group("1", "a", (0, 1)), Group("2", "b", (2, 3, 4, 5))]
    job = Job(6, groups)
    job.waits(0, call(3, group="1"))
    job.is_in(1, user(70, text="time.sleep(9)"))
    for rank in (2, 3, 4):
        job.waits(rank, call(8, group="2"))
    job.is_in(5, *LOADER, user(12))
    verdict = explain(job)
    assert verdict.headline.startswith("rank 5 never reached all_reduce number 8 of b (ranks 2-5)")
    assert verdict.more == ("Also waited for: rank 1 is asleep in time.sleep at /job/train.py:70 in main.",)


def test_a_rank_that_ended_is_no_cause_while_nobody_waits_for_it() -> None:
    job = Job(4, [Group("1", "trainers", (0, 1, 2))])
    job.ends(3)
    for rank in (0, 1):
        job.waits(rank, call(4, group="1"))
    job.is_in(2, *LOADER, user(12))
    assert explain(job).headline.startswith("rank 2 never reached")


def test_a_death_is_the_cause_and_not_who_waits_elsewhere() -> None:
    job = build(4, 0, 1)
    job.is_in(2, *LOADER, user(12), calls=[BEFORE])
    job.ends(3, -11)
    verdict = explain(job)
    assert verdict.headline.endswith("it was killed by SIGSEGV")
    assert verdict.more == ("Also waited for: rank 2 waits for the data loader at /job/train.py:12 in main.",)


def test_two_groups_in_a_circle() -> None:
    groups = [Group("1", "tp", (0, 1)), Group("2", "dp", (0, 1))]
    job = Job(2, groups)
    job.waits(0, call(7, group="1", at=40))
    job.waits(1, call(9, group="2", at=50))
    verdict = explain(job)
    assert verdict.code == "PL806"
    assert verdict.headline == (
        "ranks 0 and 1 have waited 60 s for each other: rank 0 waits in all_reduce number 7 of tp at "
        "/job/train.py:40 in step for rank 1, and rank 1 waits in all_reduce number 9 of dp at "
        "/job/train.py:50 in step for rank 0"
    ).replace("of tp at", "of tp (ranks 0 and 1) at").replace("of dp at", "of dp (ranks 0 and 1) at")


def test_a_circle_of_three_in_a_2x2_mesh_with_others_behind() -> None:
    pairs = [(0, 1), (1, 2), (0, 2)]
    job = Job(4, [Group(str(n + 1), f"pair{n}", pair) for n, pair in enumerate(pairs)])
    job.waits(0, call(1, group="1"))
    job.waits(1, call(1, group="2"))
    job.waits(2, call(1, group="3"))
    job.waits(3, call(1))
    verdict = explain(job)
    assert verdict.code == "PL806"
    assert verdict.headline.startswith("ranks 0-2 have waited")


def test_everybody_sends_first() -> None:
    job = Job(2)
    job.waits(0, call(1, "send", peer=1, at=20))
    job.waits(1, call(1, "send", peer=0, at=20))
    verdict = explain(job)
    assert verdict.code == "PL808"
    assert (
        "rank 0 waits in send number 1 to rank 1 at /job/train.py:20 in step for rank 1" in verdict.headline
    )


def test_how_many_tensors_have_come_so_far() -> None:
    job = Job(2)
    sent = [call(n, "send", peer=1, at=20, done=True) for n in range(1, 5)]
    job.waits(0, *sent, call(9, at=30))
    job.waits(1, call(5, "recv", peer=0, at=25))
    verdict = explain(job)
    assert verdict.code == "PL808"
    assert "Rank 0 has sent 4 tensors to rank 1 so far; rank 1 waits for number 5." in verdict.more
    job = Job(2)
    job.waits(0, call(1, "send", peer=1, at=20))
    job.waits(1, call(1, "send", peer=0, at=20))
    assert "Rank 1 has received nothing from rank 0 so far; rank 0 sends number 1." in explain(job).more


def test_a_receive_without_a_send() -> None:
    job = Job(3)
    job.waits(0, call(4, "recv", peer=1, at=20))
    job.ends(1)
    job.ends(2)
    verdict = explain(job)
    assert verdict.code == "PL808"
    assert verdict.headline.startswith("rank 1 never sent what rank 0 waits for (recv number 4 from rank 1)")


def test_a_receive_behind_a_collective_that_waits_for_the_receiver() -> None:
    job = Job(2)
    job.waits(0, call(4, "recv", peer=1, at=20))
    job.waits(1, call(9, at=50))
    assert explain(job).code == "PL808"


def test_a_pair_that_met_is_not_blamed() -> None:
    job = Job(3)
    job.waits(0, call(4, "recv", peer=1))
    job.waits(1, call(4, "send", peer=0))
    job.waits(2, call(9))
    assert explain(job).code != "PL808"


# ---- groups, joining


def test_all_ranks_wait_in_new_group_after_one_that_some_made_alone() -> None:
    inside = library("torch/distributed/distributed_c10d.py", "new_group")
    job = Job(4, [Group("1", "", (0, 1))])
    for rank in range(4):
        job.is_in(rank, inside, user(36, "compare"))
    verdict = explain(job)
    assert verdict.code == "PL807"
    assert "ranks 0 and 1 have made group 1" in verdict.headline
    same = Job(4, [Group("1", "", (0, 1, 2, 3))])
    for rank in range(4):
        same.is_in(rank, inside, user(36, "compare"))
    assert explain(same).code == "PL813"


def test_new_group_on_its_members_alone() -> None:
    making = (library("torch/distributed/distributed_c10d.py", "_store_based_barrier"),)
    making += (library("torch/distributed/distributed_c10d.py", "new_group"),)
    job = Job(4)
    for rank in (0, 1):
        job.is_in(rank, *making, user(19, "make_groups"))
    for rank in (2, 3):
        job.waits(rank, call(1, at=60))
    verdict = explain(job)
    assert verdict.code == "PL807"
    assert verdict.headline.startswith(
        "ranks 2 and 3 never reached new_group, where ranks 0 and 1 have waited 30 s"
    )
    assert "they wait in all_reduce number 1 of world" in verdict.headline


def test_a_rank_that_comes_late_to_a_mesh() -> None:
    making = (library("torch/distributed/distributed_c10d.py", "new_group"),)
    making += (library("torch/distributed/device_mesh.py", "init_device_mesh"),)
    job = Job(2)
    job.is_in(0, *making, user(19))
    job.is_in(1, user(40, text="time.sleep(5)"))
    verdict = explain(job)
    assert verdict.code == "PL807"
    assert verdict.headline.startswith("rank 1 never reached init_device_mesh")


JOINING = (
    library("torch/distributed/rendezvous.py", "_create_c10d_store"),
    library("torch/distributed/distributed_c10d.py", "init_process_group"),
)


def test_a_rank_missing_at_init() -> None:
    job = Job(3)
    for rank in (0, 1):
        job.is_in(rank, *JOINING, user(19, "setup"), phase="joining")
    job.is_in(2, user(30, "download", "time.sleep(delay)"))
    verdict = explain(job)
    assert verdict.code == "PL810"
    assert verdict.headline.startswith(
        "rank 2 never reached init_process_group, where ranks 0 and 1 have waited"
    )


def test_a_rank_that_was_never_started() -> None:
    job = Job(2)
    job.is_in(0, *JOINING, user(19), phase="joining")
    job.process(1, pid=0)
    verdict = explain(job)
    assert verdict.code == "PL810"
    assert verdict.headline.endswith("it was never started")


def test_the_ranks_that_look_elsewhere_are_named() -> None:
    job = Job(3)
    for rank in range(3):
        job.is_in(rank, *JOINING, user(3, "<module>"), phase="joining")
        meets = f"address node0, port {29500 + (rank == 1)}, for 3 ranks"
        job.reports[rank] = dataclasses.replace(job.reports[rank], meets=meets)
    verdict = explain(job)
    assert verdict.code == "PL810"
    assert verdict.headline.startswith(
        "ranks try to meet at different addresses: rank 1 at address node0, port 29501, for 3 ranks; "
        "ranks 0 and 2 at address node0, port 29500, for 3 ranks: ranks 0 and 2 have waited"
    )


def test_all_join_at_different_places() -> None:
    text = "import os\nos.environ['MASTER_PORT'] = str(find_port())\ndist.init_process_group('gloo')\n"
    job = Job(2)
    for rank in (0, 1):
        job.is_in(rank, *JOINING, user(3, "<module>"), phase="joining")
    verdict = explain(job, text)
    assert verdict.code == "PL810"
    assert "none of the 2 is missing" in verdict.headline
    assert verdict.more[0].startswith(
        "Likely cause: the script sets MASTER_PORT itself: `os.environ['MASTER_PORT']"
    )


@pytest.mark.parametrize(
    ("arguments", "is_own"),
    [
        ("'gloo', timeout=datetime.timedelta(seconds=5)", False),
        ("backend=name, device_id=device", False),
        ("'gloo', rank=0", True),
        ("'gloo', 'tcp://node0:29500'", True),
    ],
)
def test_only_arguments_that_say_where_ranks_meet_are_a_cause(arguments: str, is_own: bool) -> None:
    job = Job(2)
    for rank in (0, 1):
        job.is_in(rank, *JOINING, user(1, "<module>"), phase="joining")
    said = " ".join(explain(job, f"dist.init_process_group({arguments})\n").more)
    assert ("the script itself sets how the ranks meet" in said) == is_own


def test_where_a_wrong_world_size_comes_from() -> None:
    text = (
        'parser.add_argument("--world-size", type=int, default=3)\n'
        'rank = int(os.environ["RANK"])\n'
        'dist.init_process_group("gloo", rank=rank, world_size=args.world_size)\n'
        'address = f"tcp://127.0.0.1:{find_free_port()}"\n'
        'dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world_size)\n'
    )
    said = []
    for line in (3, 5):
        job = Job(2)
        for rank in (0, 1):
            job.is_in(rank, *JOINING, user(line, "<module>"), phase="joining")
        said.append(explain(job, text).more[0])
    assert "default=3)` (/job/train.py:1)" in said[0]
    assert 'with `address = f"tcp://127.0.0.1:{find_free_port()}"` (/job/train.py:4)' in said[1]


# ---- nobody waits, or nobody is missing


def test_nobody_waits_in_a_collective() -> None:
    job = Job(2)
    for rank in range(2):
        job.is_in(rank, user(5, text="with lock:"), calls=[BEFORE])
    verdict = explain(job)
    assert verdict.code == "PL811"
    assert verdict.headline == (
        "no rank waits in a collective, and none has made progress for 30 s: "
        "ranks 0 and 1 wait for a lock at /job/train.py:5 in main"
    )


def test_all_have_come_and_it_does_not_complete() -> None:
    verdict = explain(build(4, 0, 1, 2, 3))
    assert verdict.code == "PL813"
    assert verdict.headline.startswith("all ranks have reached all_reduce number 57 of world")


def test_a_broadcast_from_different_roots() -> None:
    job = Job(2)
    for rank in range(2):
        job.waits(rank, call(3, "broadcast"))
    verdict = explain(job)
    assert verdict.code == "PL802"
    assert "different roots" in verdict.headline
    assert "one root" in verdict.rule


def test_a_job_that_is_over_has_no_verdict() -> None:
    job = Job(2)
    job.ends(0)
    job.ends(1, 1)
    assert explain_hang(job.seen) is None


def test_asynchronous_calls_do_not_hide_what_a_rank_does() -> None:
    job = build(2, 0)
    # Rank 1 has issued number 57 and goes on to sleep; 0 waits in 58.
    job.waits(0, call(57, done=True), call(58, age_s=20))
    job.is_in(1, user(90, text="time.sleep(99)"), calls=[call(57)])
    verdict = explain(job)
    assert verdict.headline.startswith("rank 1 never reached all_reduce number 58")
    assert "it is asleep" in verdict.headline


def test_a_wait_for_asynchronous_work_is_a_wait() -> None:
    job = build(2, 1)
    job.is_in(0, user(33, text="work.wait()"), calls=[call(57)])
    job.is_in(1, *LOADER, user(12), calls=[BEFORE])
    assert explain(job).headline.startswith("rank 1 never reached all_reduce number 57")


def test_a_thread_may_wait_for_the_main_thread() -> None:
    job = build(2, 0)
    job.is_in(1, *LOADER, user(12), calls=[BEFORE])
    report = job.reports[0]
    main = Stack("MainThread", (library("threading.py", "join"), user(8)))
    other = Stack("trainer", (*COLLECTIVE, user(31, "step")))
    job.reports[0] = replace(report, stacks=(main, other))
    assert explain(job).headline.startswith("rank 1 never reached all_reduce number 57")


# ---- causes in the source


LOOP = """\
def train(rank):
    for epoch in range(3):
        for x, y in loader:
            if y is None:
                return
            try:
                loss.backward()
            except StopIteration:
                break
            except RuntimeError:
                print("skipped")
    if rank == 0:
        evaluate()
        dist.barrier()


def uneven(loader):
    for x, y in loader:
        loss.backward()


def guarded(rank):
    if rank != 0:
        return
    dist.barrier()
"""


def test_a_barrier_for_rank_0_alone() -> None:
    job = Job(2)
    job.waits(0, call(1, "barrier", at=[user(14, "train")], sizes=()))
    job.ends(1)
    assert explain(job, LOOP).more == (
        "Likely cause: whether /job/train.py:14 is reached depends on the rank: "
        "`if rank == 0:` (/job/train.py:12).",
    )


def test_a_way_out_for_other_ranks() -> None:
    job = Job(2)
    job.waits(0, call(1, "barrier", at=[user(25, "guarded")], sizes=()))
    job.ends(1)
    assert "`if rank != 0:` (/job/train.py:23)" in explain(job, LOOP).more[0]


def test_uneven_batches() -> None:
    job = Job(2)
    job.waits(0, call(1, at=[user(19, "uneven")], inside=BACKWARD))
    job.ends(1)
    more = explain(job, LOOP).more
    assert more[0].startswith(
        "Likely cause: rank 1 ran fewer iterations of the loop `for x, y in loader:` (/job/train.py:18)"
    )


def test_a_call_that_was_left_out_is_named_by_the_lines_that_follow() -> None:
    """Rank 1 has left out one of two calls of an iteration, and reaches the end one call early."""
    lines = [7, 9] * 5
    job = Job(2)
    job.waits(0, *(call(n, at=line, done=n < 10) for n, line in enumerate(lines, 1)))
    fewer = [call(n, at=line, done=True) for n, line in enumerate(lines[:5] + lines[6:], 1)]
    job.is_in(1, user(12), calls=fewer)
    (only,) = explain(job, LOOP).more
    assert only == ("Likely cause: rank 1 left out the call at /job/train.py:9, which is number 6 on rank 0.")


def test_a_rank_that_left_the_loop_is_no_matter_of_groups() -> None:
    text = "for batch in loader:\n    step(batch)\n    if rank == 0 and late:\n        break\nevaluate()\n"
    job = Job(2)
    job.waits(0, call(4, at=[user(2, "<module>")], group="dp"))
    job.waits(1, call(4, at=[user(5, "<module>")], group="world"))
    verdict = explain(job, text)
    assert verdict.code == "PL802"
    assert "rank 1 left the loop at /job/train.py:1 earlier" in verdict.more[0]


def test_a_round_that_a_rank_left_early_is_not_the_end_of_the_loop() -> None:
    text = "for batch in loader:\n    if unlucky: continue\n    barrier()\nprint()\n"
    job = Job(2)
    job.waits(0, call(4, at=[user(3, "<module>")]))
    job.is_in(1, user(4, "<module>"), calls=[call(n, at=3, done=True) for n in (1, 2, 3)])
    clue = next(line for line in explain(job, text).more if line.startswith("Likely"))
    assert "rank 1 left a round of the loop at /job/train.py:1 early, by `if unlucky: continue`" in clue
    assert "with `if" not in clue


def test_no_line_is_blamed_that_nobody_is_known_to_have_run() -> None:
    text = "with model.no_sync():\n    train()\nloss.backward()\ndist.barrier()\n"
    job = Job(2)
    job.waits(0, call(3, at=[user(3, "<module>")], inside=BACKWARD))
    job.waits(1, call(3, "barrier", at=[user(4, "<module>")], sizes=()))
    assert "train.py:1" not in " ".join(explain(job, text).more)


def test_a_return_and_a_swallowed_exception() -> None:
    job = Job(2)
    job.waits(0, call(1, at=[user(7, "train")], inside=BACKWARD))
    job.ends(1)
    first, second = explain(job, LOOP).more
    assert "`except RuntimeError:` (/job/train.py:10) continues without raising" in first
    assert "by `if y is None:` (/job/train.py:4) with `return`" in second


def test_no_line_of_the_package_is_a_cause() -> None:
    """`paceline train` has no frames of a user: those of the package stand for them."""
    ours = str(Path(paceline.__file__).parent / "parallel" / "exact.py")
    job = Job(2)
    job.waits(0, call(1, at=[user(7, "train", file=ours)], inside=BACKWARD))
    job.ends(1)
    assert explain(job, LOOP).more == ()
    job.is_in(1, user(11, "train", "print('skipped')", file=ours))
    assert not any(ours in text or "exact.py" in text for text in explain(job, LOOP).more)


def test_a_rank_in_a_handler() -> None:
    job = Job(2)
    job.waits(0, call(1, at=[user(7, "train")], inside=BACKWARD))
    job.is_in(1, user(11, "train", "print('skipped')"))
    more = explain(job, LOOP).more
    assert more[0] == (
        "Likely cause: an exception on rank 1 led into `except RuntimeError:` (/job/train.py:10); the "
        "others had none."
    )


def test_a_branch_of_any_condition() -> None:
    text = "labels = load()\nif labels is None:\n    dist.barrier()  # wait\ntime.sleep(5)\n"
    job = Job(2)
    job.waits(0, call(1, "barrier", at=[user(3, "<module>")], sizes=()))
    job.is_in(1, user(4, "<module>", "time.sleep(5)"))
    assert explain(job, text).more == (
        "Possible cause: /job/train.py:3 is reached only if `if labels is None:` (/job/train.py:2) "
        "lets it, which may differ between ranks.",
    )


def test_a_rank_behind_in_a_loop_has_not_left_it() -> None:
    job = Job(2)
    job.waits(0, call(1, at=[user(19, "uneven")], inside=BACKWARD))
    job.is_in(1, *LOADER, user(18, "uneven"))
    assert explain(job, LOOP).more == ()


def test_ranks_that_got_on_have_not_left_a_loop_too_early() -> None:
    job = Job(2)
    job.waits(0, call(1, at=[user(14, "train")]))
    job.is_in(1, *LOADER, user(3, "train"))
    assert not any("rank 0" in text for text in explain(job, LOOP.replace("if rank == 0:", "if True:")).more)


def test_a_native_stack_gets_its_text_from_the_source() -> None:
    job = build(2, 0)
    job.process(1, native=(user(1),))
    assert "it is asleep at /job/train.py:1" in explain(job, "libc.sleep(3)\n").headline


def test_no_source_is_no_clue() -> None:
    job = Job(2)
    job.waits(0, call(1, "barrier", at=[user(14, "train")], sizes=()))
    job.ends(1)
    assert explain(job).more == ()


# ---- many ranks


def test_64_ranks_in_a_mesh_stay_short() -> None:
    rows = [Group(f"r{n}", "tp", tuple(range(8 * n, 8 * n + 8))) for n in range(8)]
    columns = [Group(f"c{n}", "dp", tuple(range(n, 64, 8))) for n in range(8)]
    job = Job(64, [*rows, *columns])
    for rank in range(64):
        if rank // 8 == 1:
            job.waits(rank, call(57, group="r1", at=40, age_s=62))
        else:
            job.waits(rank, call(9, group=f"c{rank % 8}", at=50))
    job.is_in(13, *LOADER, user(12))
    verdict = explain(job)
    assert verdict.code == "PL800"
    assert verdict.headline.startswith(
        "rank 13 never reached all_reduce number 57 of tp (ranks 8-15), where ranks 8-12, 14 and 15 have"
    )
    assert len(verdict.places) == 3
    assert verdict.places[0].ranks == tuple(r for r in range(64) if r // 8 != 1)
    assert verdict.places[0].what == "waits in all_reduce number 9 of dp (float32 [128])"
    assert len(verdict.headline) < 300
    assert "56 other ranks wait for the same rank indirectly, in other calls." in verdict.more


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ([2], "rank 2"),
        ([0, 1], "ranks 0 and 1"),
        (range(32), "ranks 0-31"),
        ([3, 1, 0], "ranks 0, 1 and 3"),
        ([0, 1, 2, 5, 7, 8, 9], "ranks 0-2, 5 and 7-9"),
        (range(0, 64, 8), "ranks 0, 8 ... 56 (8 of them)"),
        ([0, 2, 5, 7, 9, 11, 20], "ranks 0, 2, 5, 7, 9 and 2 others"),
    ],
)
def test_ranks_in_words(ranks: list[int], words: str) -> None:
    assert name_ranks(ranks) == words


def test_the_verdict_needs_no_torch() -> None:
    rooms = "paceline.watch.reasoning.hang, paceline.watch.reasoning.render"
    code = f"import sys, {rooms}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_of_messages_under_way_the_one_that_was_never_sent_counts() -> None:
    job = Job(3)
    job.waits(0, call(7, "send", peer=2, age_s=63), call(4, "recv", peer=1, age_s=62))
    job.waits(2, call(7, "recv", peer=0, age_s=62))
    job.is_in(1, user(88, "fetch", "time.sleep(wait)"))
    verdict = explain(job)
    assert verdict.headline.startswith("rank 1 never sent what rank 0 waits for (recv number 4 from rank 1)")


def test_ranks_that_join_under_one_number() -> None:
    job = Job(3)
    for rank, number in enumerate((0, 0, 2)):
        job.is_in(rank, library("torch/distributed/distributed_c10d.py", "init_process_group"), user(4))
        job.reports[rank] = replace(job.reports[rank], phase="joining", joins_as=number)
    verdict = explain(job)
    assert verdict.code == "PL810"
    assert verdict.headline.startswith("ranks 0 and 1 join as rank 0 at /job/train.py:4")
    assert "a number of its own" in verdict.rule


def test_the_line_of_a_loaders_worker_is_named() -> None:
    text = "for batch in loader:\n    dist.all_reduce(batch)\n\n\ndef load():\n    with LOCK:\n"
    job = Job(2)
    job.waits(0, call(1, at=[user(2, "<module>")]))
    job.is_in(1, *LOADER, user(1, "<module>"))
    job.process(1, native=(user(6, "load"), library("torch/utils/data/_utils/worker.py", "_worker_loop")))
    assert "whose worker is at `with LOCK:` (/job/train.py:6)" in explain(job, text).headline


def test_the_branches_of_sender_and_receiver_are_no_cause_once_they_have_met() -> None:
    text = "if rank == 0:\n    dist.send(x, 1)\nelse:\n    dist.recv(x, 0)\ndist.barrier()\n"
    for number, is_cause in ((21, False), (1, True)):
        job = Job(2)
        job.waits(0, call(1, "barrier", at=[user(5, "<module>")]))
        job.waits(1, call(number, "recv", peer=0, at=[user(4, "<module>")]))
        clues = explain(job, text).more
        assert any("depends on the rank" in clue for clue in clues) == is_cause


def test_schedules_of_different_lengths_are_the_cause() -> None:
    job = Job(2)
    job.waits(0, call(4, "recv", peer=1))
    job.waits(1, call(8, "recv", peer=0))
    for rank, number in ((0, 4), (1, 8)):
        job.reports[rank] = replace(job.reports[rank], num_microbatches=number)
    verdict = explain(job)
    assert verdict.code == "PL808"
    assert verdict.more[0].endswith("numbers of microbatches: rank 0 has 4 and rank 1 has 8.")
    assert "n_microbatches" in verdict.fix
