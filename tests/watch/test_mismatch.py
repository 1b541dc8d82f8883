"""Calls that don't fit together, and above all those that do."""

from __future__ import annotations

import pytest

from paceline.watch.protocol.report import Call, Group, Verdict
from paceline.watch.reasoning.hang import explain_hang
from paceline.watch.reasoning.mismatch import find_mismatch, find_shared_names, find_stuck_mismatch
from tests.watch.situations import BACKWARD, Job, call, line_of, reader, user

WORLD = {"0": Group("0", "default_pg", (0, 1, 2, 3))}


def judge(*by_rank: list[Call]) -> Verdict | None:
    return find_mismatch(dict(enumerate(by_rank)), WORLD)


def must(verdict: Verdict | None) -> Verdict:
    assert verdict is not None
    return verdict


def test_another_operation() -> None:
    verdict = must(judge([call(5)], [call(5, "broadcast", at=40)], [call(5)], [call(5)]))
    assert verdict.code == "PL802"
    assert verdict.headline == (
        "different collectives in number 5 of world: ranks 0, 2 and 3 call all_reduce at "
        "/job/train.py:31 in step and rank 1 calls broadcast at /job/train.py:40 in step"
    )
    assert [place.ranks for place in verdict.places] == [(0, 2, 3), (1,)]
    assert verdict.places[1].what == "calls broadcast number 5 of world (float32 [128])"


def test_sizes() -> None:
    verdict = must(judge([call(5)], [call(5, sizes=[(96,)])]))
    assert verdict.code == "PL803"
    assert "rank 0 gives [128] at" in verdict.headline
    assert "rank 1 gives [96] at" in verdict.headline


@pytest.mark.parametrize("operation", ["broadcast", "reduce", "all_gather", "reduce_scatter"])
def test_sizes_of_other_operations(operation: str) -> None:
    verdict = must(judge([call(5, operation)], [call(5, operation, sizes=[(96,)])]))
    assert verdict.code == "PL803"


def test_dtypes() -> None:
    verdict = must(judge([call(5)], [call(5, dtypes=["float64"])]))
    assert verdict.code == "PL804"
    assert "rank 1 gives float64" in verdict.headline


def test_reduce_operation() -> None:
    verdict = must(judge([call(5, op="sum")], [call(5, op="max")]))
    assert verdict.code == "PL805"
    assert "rank 0 gives sum" in verdict.headline
    assert "rank 1 gives max" in verdict.headline


def test_root() -> None:
    verdict = must(judge([call(5, "broadcast", peer=0)], [call(5, "broadcast", peer=1)]))
    assert verdict.code == "PL802"
    assert "different roots" in verdict.headline
    assert "rank 1 calls broadcast with root 1" in verdict.headline
    assert "needs one root" in verdict.rule


def test_the_first_of_several_is_reported() -> None:
    swapped = [call(7, "broadcast", at=40, age_s=50), call(8, age_s=40)]
    verdict = must(judge([call(7, age_s=50), call(8, "broadcast", at=40, age_s=40)], swapped))
    assert "number 7 of world" in verdict.headline


def test_the_earliest_group_is_reported() -> None:
    groups = {**WORLD, "1": Group("1", "tp", (0, 1))}
    calls = {
        0: [call(9, age_s=10), call(3, group="1", age_s=50)],
        1: [call(9, "broadcast", age_s=10), call(3, "barrier", group="1", age_s=50)],
    }
    verdict = must(find_mismatch(calls, groups))
    assert "number 3 of tp (ranks 0 and 1)" in verdict.headline


def test_a_call_left_out_is_an_order_not_a_size() -> None:
    # Rank 1 has skipped the call at line 31, at which it was in the round before.
    rounds = [call(1, at=31, done=True), call(2, at=35, sizes=[(7,)], done=True)]
    verdict = must(judge([*rounds, call(3, at=31)], [*rounds, call(3, at=35, sizes=[(7,)])]))
    assert verdict.code == "PL802"
    assert "different calls" in verdict.headline


def test_branches_with_different_sizes_stay_sizes() -> None:
    assert must(judge([call(1, at=31)], [call(1, at=35, sizes=[(7,)])])).code == "PL803"


def test_buckets_of_one_line_are_sizes() -> None:
    mine, its = (call(4, inside=BACKWARD, sizes=[(n,)]) for n in (100, 90))
    verdict = must(judge([mine], [its]))
    assert verdict.code == "PL803"
    assert "in backward at" in verdict.headline


SCRIPT = """\
def main(rank):
    for epoch in range(10):
        for batch in loader:
            loss = model(batch)
            loss.backward()
        if stopping.should_stop(loss):
            break
    dist.barrier()
    if rank == 0:
        dist.all_reduce(total)
    dist.broadcast(total, 0)
"""


def at(part: str) -> list:  # type: ignore[type-arg]
    return [user(line_of(SCRIPT, part))]


def test_early_stopping_is_found_in_the_source() -> None:
    waiting = call(9, at=at("backward()"), inside=BACKWARD)
    strayed = call(9, "barrier", at=at("barrier()"), sizes=())
    verdict = must(find_mismatch({0: [strayed], 1: [waiting], 2: [waiting]}, WORLD, reader(SCRIPT)))
    assert verdict.code == "PL802"
    assert verdict.more == (
        "Likely cause: rank 0 left the loop at /job/train.py:2 earlier, by "
        "`if stopping.should_stop(loss):` (/job/train.py:6) with `break` or at its end.",
    )


def test_a_branch_of_rank_0_is_found_in_the_source() -> None:
    extra, usual = call(9, at=at("all_reduce")), call(9, "broadcast", at=at("broadcast"))
    verdict = must(find_mismatch({0: [extra], 1: [usual], 2: [usual]}, WORLD, reader(SCRIPT)))
    assert verdict.more == (
        "Likely cause: whether /job/train.py:10 is reached depends on the rank: "
        "`if rank == 0:` (/job/train.py:9).",
    )


def test_missing_gradients_are_named() -> None:
    bucket, other = call(9, inside=BACKWARD, at=5), call(9, at=20, sizes=[(1,)])
    verdict = must(judge([bucket], [bucket], [other]))
    assert verdict.code == "PL802"
    assert "rank 2 finished backward" in verdict.more[0]
    assert "find_unused_parameters" in verdict.more[0]


# ---- no false alarms


def test_equal_calls() -> None:
    assert judge(*[[call(n, op="sum") for n in range(1, 9)]] * 4) is None


def test_a_rank_behind() -> None:
    assert judge([call(n) for n in range(1, 9)], [call(1), call(2)], []) is None


def test_a_full_buffer_has_lost_old_calls() -> None:
    assert judge([call(n) for n in range(1, 9)], [call(n) for n in range(7, 9)]) is None
    assert judge([call(1), call(2)], [call(7, "broadcast")]) is None


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("all_gather", "_allgather_base"),
        ("all_gather", "all_gather_into_tensor"),
        ("reduce_scatter", "_reduce_scatter_base"),
        ("broadcast", "_broadcast_oop"),
        ("barrier", "all_reduce_barrier"),
        ("all_to_all", "all_to_all_single"),
        ("all_gather", "ALLGATHER_coalesced"),
        ("coalesced", "all_reduce"),
        ("new_in_torch_3", "newer_in_torch_3"),
    ],
)
def test_spellings(one: str, other: str) -> None:
    assert judge([call(5, one)], [call(5, other)]) is None


def test_a_reduce_scatter_may_be_known_as_gloos_all_reduce() -> None:
    assert judge([call(5, "reduce_scatter")], [call(5, "all_reduce")]) is None
    assert must(judge([call(5, "reduce_scatter")], [call(5, "all_reduce", at=40)])).code == "PL802"


def test_shapes_with_as_many_elements() -> None:
    assert judge([call(5, sizes=[(8, 16)])], [call(5, sizes=[(128,)])]) is None
    lists = [[call(5, "reduce_scatter", sizes=s)] for s in ([(64,), (64,)], [(128,)])]
    assert judge(*lists) is None


@pytest.mark.parametrize("operation", ["all_to_all", "gather", "scatter", "barrier", "all_gather_v"])
def test_sizes_that_may_differ(operation: str) -> None:
    assert judge([call(5, operation)], [call(5, operation, sizes=[(5,)])]) is None


def test_a_scatter_has_inputs_at_its_source_alone() -> None:
    assert judge([call(5, "scatter", sizes=[(4,), (4,)])], [call(5, "scatter", sizes=())]) is None


def test_nothing_known_is_no_difference() -> None:
    assert judge([call(5, op="sum")], [call(5, sizes=(), op=None)]) is None


def test_a_bool_goes_as_a_byte() -> None:
    assert judge([call(5, dtypes=["bool"])], [call(5, dtypes=["uint8"])]) is None


def test_empty_tensors_have_no_dtype() -> None:
    one, other = call(5, "all_to_all", sizes=[(0,)]), call(5, "all_to_all", dtypes=["int64"])
    assert judge([one], [other]) is None


def test_sends_and_monitored_barriers_are_counted_apart() -> None:
    assert judge([call(5), call(1, "send", peer=1)], [call(5), call(1, "recv", peer=0)]) is None
    assert judge([call(1, "monitored_barrier", sizes=())], [call(1)]) is None


def test_groups_of_a_mesh_by_themselves() -> None:
    rows = {str(n + 1): Group(str(n + 1), "tp", (2 * n, 2 * n + 1)) for n in range(2)}
    calls = {rank: [call(1, group=str(rank // 2 + 1), sizes=[(rank // 2 + 3,)])] for rank in range(4)}
    assert find_mismatch(calls, rows) is None


def test_a_rank_that_is_no_member_is_left_out() -> None:
    groups = {"1": Group("1", "pair", (0, 1))}
    calls = {0: [call(1, group="1")], 1: [call(1, group="1")], 2: [call(1, "broadcast", group="1")]}
    assert find_mismatch(calls, groups) is None


def test_a_rank_without_the_group() -> None:
    assert find_mismatch({0: [call(1, group="1")], 1: [call(1)]}, {}) is None


# ---- once nothing moves


def test_a_receive_of_another_size() -> None:
    calls = {0: [call(3, "send", at=20, peer=1)], 1: [call(3, "recv", at=44, peer=0, sizes=[(64,)])]}
    assert find_mismatch(calls, WORLD) is None
    verdict = must(find_stuck_mismatch(calls, WORLD))
    assert verdict.code == "PL803"
    assert "send number 3 from rank 0 to rank 1" in verdict.headline
    assert "rank 1 receives float32 [64] at /job/train.py:44" in verdict.headline


def test_receives_that_fit() -> None:
    calls = {
        0: [call(3, "send", peer=1)],
        1: [call(3, "recv", peer=0), call(4, "recv", peer=0, sizes=[(9,)])],
    }
    assert find_stuck_mismatch(calls, WORLD) is None


def test_a_gather_of_unequal_sizes_counts_once_it_is_stuck() -> None:
    calls = {0: [call(3, "gather")], 1: [call(3, "gather", sizes=[(64,)])]}
    assert must(find_stuck_mismatch(calls, WORLD)).code == "PL803"
    done = {rank: [call(3, "gather", sizes=[(64 + rank,)], done=True)] for rank in range(2)}
    assert find_stuck_mismatch(done, WORLD) is None


def test_two_groups_under_one_name() -> None:
    job = Job(4)
    for rank in range(4):
        job.groups["1"] = Group("1", "half", (0, 1) if rank < 2 else (2, 3))
        job.waits(rank, call(1, group="1"))
    found = find_shared_names({rank: report.groups for rank, report in job.reports.items()})
    assert found is not None
    assert found[0] == "1"
    verdict = must(explain_hang(job.seen))
    assert verdict.code == "PL807"
    assert verdict.headline.endswith(
        "number 1 is a group of ranks 0 and 1 on ranks 0 and 1 and a group of ranks 2 and 3 on ranks 2 and 3"
    )


def test_the_pair_of_an_all_to_all_is_named_with_its_sizes() -> None:
    even = call(5, "all_to_all", sizes=[(8,)], splits=((2, 2, 2, 2), (2, 2, 2, 2)))
    more = call(5, "all_to_all", sizes=[(9,)], splits=((2, 2, 3, 2), (2, 2, 2, 2)))
    verdict = must(judge([even], [more], [even], [even]))
    assert verdict.code == "PL803"
    assert "rank 1 sends 3 elements to rank 2" in verdict.headline
    assert "which expects 2" in verdict.headline
    # Of a functional one, the sums are known.
    even, less = (call(5, "all_to_all", splits=((16,), (size,))) for size in (16, 14))
    headline = must(judge([even], [less], [even], [even])).headline
    assert headline.endswith("the ranks send 64 elements in all, and expect 62")
    assert judge([even], [even], [even], [even]) is None
    assert judge([less], [even], [even], []) is None
    # Unequal sizes are what it is for, as long as each pair agrees.
    sent = [tuple(5 * one + other for other in range(4)) for one in range(4)]
    expected = list(zip(*sent, strict=True))
    splits = zip(sent, expected, strict=True)
    assert judge(*([call(5, "all_to_all", splits=each)] for each in splits)) is None


def test_a_block_that_a_rank_skips_is_named_though_all_are_alike() -> None:
    names = [f"blocks.{n}" for n in range(6)]
    mine = [call(n, "all_gather", module=name) for n, name in enumerate(names, 1)]
    its = [call(n, "all_gather", module=name) for n, name in enumerate(names[:2] + names[3:], 1)]
    verdict = must(judge(mine, its))
    assert verdict.code == "PL802"
    assert "rank 0 calls all_gather of the parameters of module blocks.2" in verdict.headline
    assert "rank 1 left out the call of blocks.2" in verdict.more[0]
