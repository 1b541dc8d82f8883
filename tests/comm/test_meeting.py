"""Ranks that meet by a word of shared memory, and leave what takes long to the library."""

from __future__ import annotations

import fcntl
import os
import random
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from paceline.comm import meeting, segment
from paceline.comm.meeting import MeetingPlace
from tests.dist.pool import Pool, RankError
from tests.dist.recorder import RECORD, count_recorded, recorded_collectives

PATIENT_S = 30.0  # so long that no busy machine makes a rank lose its patience


def count_together(world: Any, num_meetings: int, patience_s: float) -> tuple[bool, int]:
    """Write a number before each meeting and read those of all after it; return whether all were right, and
    how many meetings the library took over."""
    place, chance = MeetingPlace(dist.group.WORLD), random.Random(world.rank)
    numbers = segment.share_memory(dist.group.WORLD, 2 * 8 * world.world_size)
    assert numbers is not None
    rows = numbers.numpy().view("int64").reshape(2, world.world_size)
    is_right, by_library = True, 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(meeting, "_PATIENCE_S", patience_s)
        for number in range(num_meetings):
            if chance.random() < 0.1:
                time.sleep(chance.uniform(0, 0.004))
            rows[number % 2, world.rank] = number
            by_library += place.meet() > 0
            is_right = is_right and bool((rows[number % 2] == number).all())
    return is_right, by_library


@pytest.mark.parametrize("nproc", [1, 2, 4])
def test_what_ranks_wrote_before_can_be_read_after(ranks: Pool, nproc: int) -> None:
    assert ranks.run(count_together, nproc, (2000, PATIENT_S)) == [(True, 0)] * nproc


def test_ranks_that_lose_patience_and_ranks_that_do_not_meet_alike(ranks: Pool) -> None:
    """With a patience of half a millisecond, the library takes over some meetings and not others."""
    results = ranks.run(count_together, 4, (500, 5e-4))
    assert all(is_right for is_right, _ in results)
    assert len({by_library for _, by_library in results}) == 1, "all ranks take the same way each time"
    assert results[0][1] > 0


def wait_for_one(world: Any) -> tuple[list[str], float]:
    """Return the collectives of a meeting for which one rank is late, and how long it took."""
    place = MeetingPlace(dist.group.WORLD)
    place.meet()
    before, started_s = count_recorded(), time.monotonic()
    if world.rank == 1:
        time.sleep(0.5)
    place.meet()
    took_s = time.monotonic() - started_s
    return [name for name, _ in recorded_collectives(before)], took_s


def test_who_waits_for_long_waits_in_a_collective(ranks: Pool) -> None:
    for names, took_s in ranks.run(wait_for_one, 3, env=RECORD):
        assert names == ["all_to_all"]
        assert took_s > 0.45


def meet_under_a_profiler(world: Any) -> list[int]:
    place, found = MeetingPlace(dist.group.WORLD), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(meeting, "_PATIENCE_S", PATIENT_S)
        found.append(place.meet())
        if world.rank == 0:
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
                found.append(place.meet())
            assert any("all_to_all" in event.key for event in profile.key_averages())
        else:
            found.append(place.meet())
        found.append(place.meet())
    return found


def test_a_profile_of_one_rank_shows_its_meetings(ranks: Pool) -> None:
    assert ranks.run(meet_under_a_profiler, 3) == [[0, 2, 0]] * 3


def meet_without(world: Any, missing: str) -> tuple[int, bool]:
    with pytest.MonkeyPatch.context() as patch:
        if missing == "futex":
            patch.setattr(meeting, "_FUTEX_CALLS", {})
        elif world.rank == 1:
            patch.setattr(segment, "_map_segment", lambda path, token, num_bytes: None)
        place = MeetingPlace(dist.group.WORLD)
    return place.meet(), place._file >= 0


@pytest.mark.parametrize("missing", ["futex", "memory of one rank"])
def test_without_shared_words_every_meeting_is_a_collective(ranks: Pool, missing: str) -> None:
    assert ranks.run(meet_without, 2, (missing,)) == [(1, False)] * 2


def keep_the_lock(world: Any) -> str:
    """One rank keeps the lock, as one does that is stopped while it counts itself."""
    place = MeetingPlace(dist.group.WORLD)
    place._timeout_s = 0.3
    place.meet()
    if world.rank == 1:
        fcntl.lockf(place._file, fcntl.LOCK_EX)
    dist.barrier()
    message = ""
    if world.rank == 0:
        with pytest.raises(RuntimeError) as caught:
            place.meet()
        message = str(caught.value)
    dist.barrier()
    return message


def test_a_rank_that_keeps_the_lock_is_waited_for_until_the_timeout(ranks: Pool) -> None:
    message, _ = ranks.run(keep_the_lock, 2)
    assert message == "Timed out waiting 0.3 s for a rank of this machine."


def die_before_meeting(world: Any) -> None:
    place = MeetingPlace(dist.group.WORLD)
    place.meet()
    if world.rank == 1:
        os.kill(os.getpid(), 9)
    place.meet()


def test_a_rank_that_died_is_an_error(ranks: Pool) -> None:
    with pytest.raises(RankError) as caught:
        ranks.run(die_before_meeting, 3)
    assert caught.value.exit_codes == {1: -9}


def drop_and_count(world: Any) -> int:
    """Return how many files a meeting leaves open."""

    def count_files() -> int:
        return len(os.listdir("/proc/self/fd"))

    MeetingPlace(dist.group.WORLD).meet()
    before = count_files()
    place = MeetingPlace(dist.group.WORLD)
    place.meet()
    del place
    return count_files() - before


def test_a_meeting_that_nobody_uses_leaves_nothing_open(ranks: Pool) -> None:
    assert ranks.run(drop_and_count) == [0, 0]
