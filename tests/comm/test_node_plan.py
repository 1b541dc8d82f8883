"""Tells which additions of a reduction a node makes by itself."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paceline.comm.node_plan import split_by_node
from paceline.comm.tree import plan_reduction


def test_nodes_of_neighbours_keep_one_sum_each() -> None:
    split = split_by_node(plan_reduction((1, 1, 1, 1)), (0, 0, 1, 1))
    assert split.within == (((0, 1),), ((2, 3),))
    assert split.kept == ((0,), (2,))
    assert split.between == ((0, 2),)


def test_nodes_of_every_other_rank_keep_all_subtrees() -> None:
    split = split_by_node(plan_reduction((2, 2, 2, 2)), (0, 1, 0, 1))
    assert split.within == ((), ())
    assert split.kept == ((0, 2), (1, 3))
    assert split.between == ((0, 1), (2, 3), (0, 2))


def test_a_node_without_microbatches_keeps_nothing() -> None:
    split = split_by_node(plan_reduction((2, 2, 0, 0)), (0, 0, 1, 1))
    assert split.kept == ((0,), ())
    assert split.between == ()


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3)), min_size=1, max_size=8))
def test_all_additions_are_made_once_and_in_an_order_that_works(ranks: list[tuple[int, int]]) -> None:
    plan = plan_reduction(tuple(count for count, _ in ranks))
    numbers = sorted({node for _, node in ranks})
    split = split_by_node(plan, [numbers.index(node) for _, node in ranks])
    made = [pair for pairs in split.within for pair in pairs] + list(split.between)
    assert sorted(made) == sorted(plan.additions)
    # Texts of the sums: each place holds the sum of its subtrees, in brackets that show the order.
    expected, found = ({place: str(place) for place in range(plan.num_subtrees)} for _ in range(2))
    for texts, order in ((expected, plan.additions), (found, made)):
        for left, right in order:
            texts[left] = f"({texts[left]}+{texts.pop(right)})"
    assert found == expected
    assert sorted(place for places in split.kept for place in places) == sorted(
        set(range(plan.num_subtrees)) - {right for pairs in split.within for _, right in pairs}
    )
