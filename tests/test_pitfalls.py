"""The table of pitfalls: each proof is there, and enough of them are named."""

from __future__ import annotations

from benchmarks.pitfalls.count import find_wrong, main, read_rows


def test_every_row_has_its_proof() -> None:
    rows = read_rows()
    assert [int(row["number"]) for row in rows] == list(range(1, 61))
    assert find_wrong(rows) == []


def test_a_proof_of_something_else_counts_as_none() -> None:
    (first, *_) = read_rows()
    assert find_wrong([{**first, "code": "PL999"}])
    assert find_wrong([{**first, "proof": "tests/watch/sentinels/planted.py::no_such"}])


def test_enough_are_named() -> None:
    assert main() == 0
