"""The pool itself: results by rank, errors with tracebacks, hangs that end, state that doesn't leak."""

from __future__ import annotations

import os
import signal
import time
import warnings

import pytest
import torch
import torch.distributed as dist

from paceline.errors import PacelineError
from tests.dist.pool import Pool, RankError


def sum_of_ranks(world, start):
    x = torch.tensor(start + world.rank)
    dist.all_reduce(x)
    return world.rank, x.item()


def fail_on(world, rank):
    if world.rank == rank:
        raise ValueError(f"broken on {rank}")
    dist.barrier()


def fail_with_our_error(world):
    raise PacelineError("PL999", saw="saw.", rule="rule.", fix="fix.")


def hang_on(world, rank):
    def the_stuck_function():
        time.sleep(1000)

    dist.barrier()
    if world.rank == rank:
        the_stuck_function()
    return world.rank


def die_on(world, rank):
    dist.barrier()
    if world.rank == rank:
        os.kill(os.getpid(), signal.SIGKILL)


def spoil(world):
    os.environ["SPOILT"] = "1"
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(2)
    torch.set_grad_enabled(False)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return os.getpid()


def inspect(world):
    state = (
        os.environ.get("SPOILT"),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_num_threads(),
        torch.is_grad_enabled(),
        signal.getsignal(signal.SIGTERM),
    )
    return os.getpid(), state


def warn(world):
    warnings.warn("careful", stacklevel=1)


def return_a_lambda(world):
    return lambda: None


def no_world(word):
    return word, os.environ["RANK"], dist.is_initialized()


@pytest.mark.parametrize("nproc", [1, 2, 4])
def test_results_come_by_rank(ranks: Pool, nproc: int) -> None:
    total = 10 * nproc + sum(range(nproc))
    assert ranks.run(sum_of_ranks, nproc=nproc, args=(10,)) == [(rank, total) for rank in range(nproc)]


def test_a_warm_call_is_quick(ranks: Pool) -> None:
    ranks.run(sum_of_ranks, args=(0,))
    began = time.monotonic()
    for _ in range(5):
        ranks.run(sum_of_ranks, args=(0,))
    assert (time.monotonic() - began) / 5 < 1.0


def test_an_exception_comes_back_with_its_traceback(ranks: Pool) -> None:
    with pytest.raises(RankError, match=r"in fail_on(?s:.)*ValueError: broken on 1") as caught:
        ranks.run(fail_on, args=(1,))
    assert isinstance(caught.value.causes[1], ValueError)


def test_an_error_of_ours_comes_back_as_it_is(ranks: Pool) -> None:
    with pytest.raises(RankError) as caught:
        ranks.run(fail_with_our_error)
    cause = caught.value.causes[0]
    assert isinstance(cause, PacelineError)
    assert str(cause) == "saw. rule. fix. [PL999]"


def test_a_hang_ends_with_the_stacks_and_the_pool_goes_on(ranks: Pool) -> None:
    before = ranks.run(inspect)
    began = time.monotonic()
    with pytest.raises(RankError, match="the_stuck_function") as caught:
        ranks.run(hang_on, args=(1,), timeout_s=2.5)
    assert time.monotonic() - began < 15
    assert caught.value.stuck == [1]
    after = ranks.run(inspect)
    assert before[0][0] == after[0][0]
    assert before[1][0] != after[1][0]


def test_a_call_that_is_interrupted_leaves_nothing_to_the_next() -> None:
    def interrupt(number: int, frame: object) -> None:
        raise TimeoutError

    pool = Pool()
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        assert len(pool.run(sum_of_ranks, args=(1,))) == 2
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        with pytest.raises(TimeoutError):
            pool.run(hang_on, args=(1,))
        assert pool.run(sum_of_ranks, args=(1,)) == [(0, 3), (1, 3)]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        pool.close()


def test_a_rank_that_dies_is_replaced(ranks: Pool) -> None:
    with pytest.raises(RankError, match="exit code -9") as caught:
        ranks.run(die_on, args=(0,))
    assert caught.value.exit_codes == {0: -9}
    assert [rank for rank, _ in ranks.run(sum_of_ranks, args=(0,))] == [0, 1]


def test_what_a_test_leaves_behind_is_reset(ranks: Pool) -> None:
    (pid, clean), *_ = ranks.run(inspect)
    assert ranks.run(spoil)[0] == pid
    assert ranks.run(inspect)[0] == (pid, clean)
    assert clean[:5] == (None, torch.float32, False, 1, True)


def test_warnings_are_errors_in_ranks(ranks: Pool) -> None:
    with pytest.raises(RankError, match="careful"):
        ranks.run(warn)


def test_a_result_that_cannot_travel_is_reported(ranks: Pool) -> None:
    with pytest.raises(RankError, match="can't be sent back"):
        ranks.run(return_a_lambda)


def test_without_a_world(ranks: Pool) -> None:
    assert ranks.run(no_world, args=("hi",), world=False) == [("hi", "0", False), ("hi", "1", False)]
