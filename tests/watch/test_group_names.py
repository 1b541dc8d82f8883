"""Verdicts on ranks that called `new_group` in different ways."""

from __future__ import annotations

from dataclasses import replace

from paceline.watch.protocol.report import Group, Verdict
from paceline.watch.reasoning.hang import explain_hang
from tests.watch.situations import Job, call, library, user

NEW_GROUP = library("torch/distributed/distributed_c10d.py", "new_group")


def tell(job: Job, counts: list[int]) -> Verdict:
    for rank, count in enumerate(counts):
        made_at = {name: user(19, "pair") for name in job.reports[rank].groups if name != "0"}
        job.reports[rank] = replace(job.reports[rank], num_named=count, made_at=made_at)
    verdict = explain_hang(job.seen)
    assert verdict is not None
    assert verdict.code == "PL807"
    return verdict


def test_ranks_that_skipped_a_group_are_named_with_the_line_that_made_it() -> None:
    job = Job(4, [Group("1", "", (0, 1))])
    for rank in range(4):
        job.is_in(rank, NEW_GROUP, user(36, "compare"))
    assert tell(job, [3, 3, 2, 2]).headline.startswith(
        "ranks 2 and 3 never called new_group for group number 1, of ranks 0 and 1, which ranks 0 and 1 made "
        "at /job/train.py:19 in pair; now ranks 2 and 3 wait in new_group at /job/train.py:36 in compare"
    )


def test_ranks_that_skipped_a_group_while_its_members_wait_elsewhere() -> None:
    job = Job(4, [Group("1", "", (0, 1))])
    for rank in range(4):
        if rank < 2:
            job.waits(rank, call(1, "barrier"))
        else:
            job.is_in(rank, NEW_GROUP, user(36, "compare"))
    assert tell(job, [3, 3, 2, 2]).headline.startswith(
        "ranks 2 and 3 never called new_group for group number 1"
    )


def test_ranks_that_are_not_in_a_group_have_called_for_it_all_the_same() -> None:
    job = Job(4, [Group("1", "", (0, 1))])
    for rank in range(4):
        if rank < 3:
            job.is_in(rank, NEW_GROUP, user(36, "compare"))
        else:
            job.waits(rank, call(1, "barrier"))
    # All but rank 3 have come to a second call, after the first by all.
    assert tell(job, [3, 3, 3, 2]).headline.startswith("rank 3 never reached new_group")


def test_two_groups_under_one_name_and_who_skipped_which() -> None:
    job = Job(3)
    for rank, members in enumerate([(0, 1), (0, 1), (1, 2)]):
        job.groups["1"] = Group("1", "", members)
        job.waits(rank, call(1, "barrier"))
    # Ranks 0 and 1 have called for the second group too; rank 1 is in it.
    verdict = tell(job, [3, 3, 2])
    assert "a group of ranks 0 and 1 on ranks 0 and 1 at /job/train.py:19 in pair" in verdict.headline
    assert verdict.headline.startswith(
        "rank 2 never called new_group for the group of ranks 0 and 1: number 1 is"
    )


def test_ranks_that_make_groups_at_different_lines() -> None:
    job = Job(3)
    for rank in range(3):
        job.is_in(rank, NEW_GROUP, user(12, "readers") if rank == 0 else user(36, "compare"))
    assert tell(job, [2, 2, 2]).headline == (
        "ranks 1 and 2 never reached new_group at /job/train.py:12 in readers, where rank 0 has waited 30 s: "
        "ranks 1 and 2 wait in new_group at /job/train.py:36 in compare"
    )
