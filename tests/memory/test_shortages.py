"""Planted shortages end by the allocator's error: cause, module or variable, and parts are right."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import lru_cache
from typing import Any

import pytest

from tests.memory.shortages import SHORTAGES

FAST = (
    "large_batch",
    "losses_in_a_list",
    "outputs_in_a_list",
    "evaluation_without_no_grad",
    "optimizer_state",
    "one_allocation",
)
OTHERS = tuple(name for name, case in SHORTAGES.items() if name not in FAST and not case.by_kill_only)


@lru_cache
def meet(*names: str) -> dict[str, dict[str, Any]]:
    """Run into these shortages in one process, each by itself."""
    words = [sys.executable, "-m", "tests.memory.shortages", "raise", *names]
    # Freed memory goes back at once.
    environ = os.environ | {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "1000000"}
    done = subprocess.run(words, capture_output=True, text=True, timeout=280, check=False, env=environ)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    return {row["name"]: row for row in rows}


def check(name: str, found: dict[str, Any]) -> None:
    case = SHORTAGES[name]
    assert "cause" in found, found["error"]
    account, words = found["account"], found["words"]
    kinds = account["kinds"]
    assert found["cause"] == case.cause, words
    assert case.at in words.partition("\n  ")[0] + str(kinds), words
    assert case.remedy in [remedy for remedy, _, _ in found["remedies"]], words
    # The parts add up, and what is not accounted for is small beside what the shortage took.
    assert sum(kinds.values()) == pytest.approx(account["total"], rel=0.05), words
    taken = account["total"] - kinds.get("base", 0)
    assert kinds.get("rest", 0) < 0.35 * taken, words


@pytest.fixture(scope="module")
def fast() -> dict[str, dict[str, Any]]:
    return meet(*FAST)


@pytest.fixture(scope="module")
def others() -> dict[str, dict[str, Any]]:
    return meet(*OTHERS)


@pytest.mark.parametrize("name", FAST)
def test_a_shortage_is_explained(name: str, fast: dict[str, dict[str, Any]]) -> None:
    check(name, fast[name])


@pytest.mark.parametrize("name", OTHERS)
def test_a_further_shortage_is_explained(name: str, others: dict[str, dict[str, Any]]) -> None:
    check(name, others[name])
