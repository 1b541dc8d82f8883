"""Residuals in sharded checkpoints: every rank writes those that it holds, and reads those that it needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from paceline.checkpoint.content.protocol import StoredTensor
from paceline.checkpoint.content.sharded import ShardedStored
from paceline.checkpoint.names import CHECKPOINTS
from paceline.checkpoint.part import Part
from paceline.checkpoint.tensors import read_header
from tests.dist.pool import Pool
from tests.train.test_compress import are_equal, train

BEGIN = "state/residuals.model.residuals."
NUM_SUMMED = 300 * 40 + 300 + 50 * 300 + 50 + 8 * 50 + 8


def list_written(folder: Path) -> list[dict[str, list[int]]]:
    """Return by file the residuals in it, with their shapes."""
    [checkpoint] = (folder / CHECKPOINTS).glob("step-*")
    files = sorted(checkpoint.glob("part-*.safetensors"))
    return [
        {
            name.removeprefix(BEGIN): list(info.shape)
            for name, info in read_header(file)[0].items()
            if BEGIN in name
        }
        for file in files
    ]


def save_counting(world: Any, folder: str, options: dict[str, Any]) -> int:
    """Train and save; return how many tensors were sent as objects to rank 0."""
    gathered: list[Any] = []
    original = dist.gather_object

    def gather_object(value: Any, *args: Any, **kwargs: Any) -> None:
        gathered.extend(value)
        original(value, *args, **kwargs)

    dist.gather_object = gather_object
    try:
        train(world, 1, 3, folder, 0, options)
    finally:
        dist.gather_object = original
    return len(gathered)


@pytest.mark.parametrize("layout", ["", "dp_shard=4"])
def test_every_rank_writes_the_residuals_that_it_holds(ranks: Pool, tmp_path: Path, layout: str) -> None:
    options = {"checkpoint_mode": "sharded", "layout": layout}
    assert ranks.run(save_counting, nproc=4, args=(str(tmp_path), options)) == [0, 0, 0, 0]
    written = list_written(tmp_path)
    names = [f"{n}.{kind}" for n in (0, 2, 4) for kind in ("weight", "bias")]
    for rank, found in enumerate(written):
        own = {name for name in found if not name.startswith("sum.")}
        assert own == {f"{rank}.{name}" for name in names}
    numbers = [
        sum(torch.Size(shape).numel() for name, shape in found.items() if name.startswith("sum."))
        for found in written
    ]
    assert sum(numbers) == NUM_SUMMED
    assert max(numbers) < 0.4 * NUM_SUMMED


def load_counting(world: Any, folder: str, options: dict[str, Any]) -> tuple[dict[str, int], Any]:
    """Resume; return how many numbers of each slot this rank has read, and the weights a step later."""
    numbers: dict[str, int] = {}
    original = StoredTensor.read

    def read(tensor: StoredTensor, part: Part | None = None) -> Any:
        if tensor.name.startswith("residuals.") and isinstance(tensor.stored, ShardedStored):
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
    options = {"checkpoint_mode": "sharded", "layout": "dp_shard=4"}
    ranks.run(save_counting, nproc=4, args=(str(tmp_path), options))
    loaded = ranks.run(load_counting, nproc=2, args=(str(tmp_path), {"checkpoint_mode": "sharded"}))
    for rank, (numbers, weights) in enumerate(loaded):
        own = {str(slot) for slot in (2 * rank, 2 * rank + 1)}
        assert {slot for slot, count in numbers.items() if count} == {*own, "sum"}
        assert all(numbers[slot] == NUM_SUMMED for slot in own)
        assert are_equal(weights, expected)
