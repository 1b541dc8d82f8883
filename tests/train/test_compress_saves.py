"""Residuals in sharded checkpoints: every rank reads those that it needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline.checkpoint.content import Stored, StoredTensor
from paceline.checkpoint.part import Part
from tests.dist.pool import Pool
from tests.train.test_compress import are_equal, train

BEGIN = "state/residuals.model.residuals."
NUM_SUMMED = 300 * 40 + 300 + 50 * 300 + 50 + 8 * 50 + 8


def load_counting(world: Any, folder: str, options: dict[str, Any]) -> tuple[dict[str, int], Any]:
    """Resume; return how many numbers of each slot this rank has read, and the weights a step later."""
    numbers: dict[str, int] = {}
    original = StoredTensor.read

    def read(tensor: StoredTensor, part: Part | None = None) -> Any:
        if tensor.name.startswith("residuals.") and isinstance(tensor.stored, Stored):
            slot = tensor.name.split(".")[3]
            count = (part or Part.all_of(tensor.shape)).num_elements
            numbers[slot] = numbers.get(slot, 0) + count
        return original(tensor, part)

    StoredTensor.read = read  # type: ignore[method-assign]
    try:
        _, weights, _ = train(world, 4, 4, folder, 0, options)
    finally:
        StoredTensor.read = original  # type: ignore[method-assign]
    return numbers, weights


def test_every_rank_reads_the_residuals_that_it_needs(ranks: Pool, tmp_path: Path) -> None:
    expected = ranks.run(train, nproc=1, args=(1, 4))[0][1]
    options = {"checkpoint_mode": "sharded"}
    ranks.run(train, nproc=4, args=(1, 3, str(tmp_path), 0, options))
    loaded = ranks.run(load_counting, nproc=2, args=(str(tmp_path), {"checkpoint_mode": "sharded"}))
    for rank, (numbers, weights) in enumerate(loaded):
        own = {str(slot) for slot in (2 * rank, 2 * rank + 1)}
        assert {slot for slot, count in numbers.items() if count} == {*own, "sum"}
        assert all(numbers[slot] == NUM_SUMMED for slot in own)
        assert are_equal(weights, expected)
