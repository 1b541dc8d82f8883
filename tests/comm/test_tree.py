"""The order of an exact sum: the same whoever brings what."""

from __future__ import annotations

import functools
import itertools
import operator
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.comm.tree import (
    ReductionPlan,
    TreeSum,
    find_sibling,
    join_leaves,
    plan_reduction,
)
from paceline.data.share import count_owned, list_numbers, owned_microbatches


def write_sum(left: str, right: str) -> str:
    return f"({left}+{right})"


def sum_as(num_owned: tuple[int, ...]) -> str:
    """Return the whole sum as a formula, computed as ranks with such shares would."""
    plan = plan_reduction(num_owned)
    places, start = [], 0
    for subtrees, count in zip(plan.subtrees, num_owned, strict=True):
        tree = TreeSum(plan.num_leaves, write_sum)
        for leaf in range(start, start + count):
            tree.push((leaf, leaf + 1), str(leaf))
        assert tuple(subtree for subtree, _ in tree.subtrees) == subtrees
        places += [value for _, value in tree.subtrees]
        start += count
    for left, right in plan.additions:
        places[left] = write_sum(places[left], places[right])
    return places[0]


@pytest.mark.parametrize(
    ("num_leaves", "formula"),
    [
        (1, "0"),
        (2, "(0+1)"),
        (3, "((0+1)+2)"),
        (4, "((0+1)+(2+3))"),
        (5, "(((0+1)+(2+3))+4)"),
        (6, "(((0+1)+(2+3))+(4+5))"),
        (7, "(((0+1)+(2+3))+((4+5)+6))"),
    ],
)
def test_the_tree_of_one_rank(num_leaves: int, formula: str) -> None:
    assert sum_as((num_leaves,)) == formula


@given(st.integers(1, 70), st.integers(1, 12))
def test_even_shares_make_the_same_sum(num_leaves: int, num_ranks: int) -> None:
    shares = tuple(len(owned_microbatches(num_leaves, num_ranks, rank)) for rank in range(num_ranks))
    assert sum_as(shares) == sum_as((num_leaves,))


@given(st.lists(st.integers(0, 9), min_size=1, max_size=12).filter(any))
def test_any_shares_make_the_same_sum(shares: list[int]) -> None:
    assert sum_as(tuple(shares)) == sum_as((sum(shares),))


@given(st.integers(1, 200), st.data())
def test_a_block_is_few_whole_nodes(num_leaves: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, num_leaves))
    stop = data.draw(st.integers(start, num_leaves))
    subtrees = join_leaves(range(start, stop), num_leaves)
    assert [leaf for subtree in subtrees for leaf in range(*subtree)] == list(range(start, stop))
    assert len(subtrees) <= 2 * max(1, (stop - start).bit_length())
    for left, right in itertools.pairwise(subtrees):
        assert find_sibling(left, num_leaves) != right


@given(st.integers(1, 70).flatmap(lambda n: st.permutations(range(n))))
def test_leaves_may_come_in_any_order(leaves: list[int]) -> None:
    tree = TreeSum(len(leaves), write_sum)
    for leaf in leaves:
        tree.push((leaf, leaf + 1), str(leaf))
    assert [value for _, value in tree.subtrees] == [sum_as((len(leaves),))]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 6, 8, 16])
@pytest.mark.parametrize("share", [1, 2, 4, 8])
def test_even_shares_of_a_power_of_two_are_one_node_each(num_ranks: int, share: int) -> None:
    plan = plan_reduction((share,) * num_ranks)
    assert [len(subtrees) for subtrees in plan.subtrees] == [1] * num_ranks
    assert plan.num_subtrees == num_ranks


def test_ranks_without_microbatches_bring_nothing() -> None:
    plan = plan_reduction((1, 1, 0, 0))
    assert plan == ReductionPlan(2, (((0, 1),), ((1, 2),), (), ()), ((0, 1),))
    assert plan_reduction((0, 0)) == ReductionPlan(0, ((), ()), ())


def test_a_left_to_right_sum_would_show() -> None:
    """The reason for all this: in floating point the orders differ, in the tree they can't."""
    chance = random.Random(3)
    numbers = [chance.uniform(-1, 1) for _ in range(13)]

    def total(shares: tuple[int, ...]) -> float:
        plan, start, places = plan_reduction(shares), 0, []
        for count in shares:
            tree = TreeSum(13, lambda left, right: left + right)
            for leaf in range(start, start + count):
                tree.push((leaf, leaf + 1), numbers[leaf])
            places += [value for _, value in tree.subtrees]
            start += count
        for left, right in plan.additions:
            places[left] += places[right]
        return places[0]

    totals = {total(shares) for shares in [(13,), (7, 6), (5, 4, 4), (1,) * 13, (0, 13, 0), (2, 11)]}
    assert len(totals) == 1
    assert totals != {functools.reduce(operator.add, numbers)}


@given(st.integers(1, 6), st.integers(1, 4), st.integers(0, 40))
def test_ranks_that_take_turns_have_every_microbatch_once(replicas: int, turns: int, num_leaves: int) -> None:
    num_owned = count_owned(num_leaves, replicas * turns)
    own = [list_numbers(num_owned, turns, rank) for rank in range(replicas * turns)]
    assert tuple(map(len, own)) == num_owned
    assert sorted(number for each in own for number in each) == list(range(num_leaves))
    for replica in range(replicas):  # what a round brings, and each replica as a whole, are consecutive
        block = own[replica * turns : (replica + 1) * turns]
        in_turn = [each[number] for number in range(40) for each in block if number < len(each)]
        assert in_turn == list(range(min(in_turn, default=0), min(in_turn, default=0) + len(in_turn)))
