"""Functions that run on rank 0 alone, and whose results the others get."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline.checkpoint import CheckpointFolder, open_usable
from paceline.checkpoint.content import prepare_whole
from paceline.errors import PacelineError
from paceline.train.state.transfer import gather, load_on_main, run_on_main
from tests.checkpoint.states import save_content
from tests.dist.pool import Pool, RankError


def answer(world: Any) -> tuple[Any, int]:
    calls: list[int] = []
    value = run_on_main(world, lambda: (calls.append(world.rank), {"from": world.rank})[1])
    return value, len(calls)


def test_rank_0_does_it_and_all_know(ranks: Pool) -> None:
    for nproc in (1, 3):
        results = ranks.run(answer, nproc=nproc)
        assert results == [({"from": 0}, int(rank == 0)) for rank in range(nproc)]


def fail(world: Any) -> None:
    def do() -> None:
        raise PacelineError("PL999", saw="saw.", rule="rule.", fix="fix.")

    run_on_main(world, do)


def test_an_error_of_ours_is_raised_on_all(ranks: Pool) -> None:
    with pytest.raises(RankError) as caught:
        ranks.run(fail, nproc=3)
    assert [str(caught.value.causes[rank]) for rank in range(3)] == ["saw. rule. fix. [PL999]"] * 3


def gather_all(world: Any, lengths: list[list[int]]) -> list[list[bytes]]:
    return [gather(world, bytes([world.rank]) * each[world.rank]) for each in lengths]


def test_values_of_any_length_are_gathered(ranks: Pool) -> None:
    # A pickle of bytes is a few bytes longer than these, so some fit into the first message to the byte.
    lengths = [[0, 7, 4000], [10_000, 0, 1], *([each] * 3 for each in range(4065, 4090))]
    for found in ranks.run(gather_all, nproc=3, args=(lengths,)):
        for each, values in zip(lengths, found, strict=True):
            assert values == [bytes([rank]) * length for rank, length in enumerate(each)]


def transfer(world: Any) -> tuple[Any, bool]:
    wide = torch.arange(12.0).reshape(3, 4)
    tree = {
        "wide": wide,
        "turned": wide.t(),
        "sliced": wide[:, 1::2],
        "same": wide,
        "low": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
        "flags": torch.tensor([True, False]),
        "whole": torch.tensor(2**60),
        "nothing": torch.zeros(0, 3),
        "nan": torch.tensor(math.nan),
        "turns": torch.tensor([1 + 2j]),
        "deep": [{"x": (torch.ones(2), None, "text", 3, b"bytes", True, 0.5)}],
        "array": np.arange(3),
    }
    return load_on_main(world, lambda: tree), world.is_main


def test_trees_of_tensors_arrive_to_the_bit(ranks: Pool) -> None:
    first, *others = ranks.run(transfer, nproc=3)
    for tree, _ in others:
        assert tree.keys() == first[0].keys()
        for key, value in first[0].items():
            if isinstance(value, torch.Tensor):
                assert (tree[key].dtype, tree[key].shape) == (value.dtype, value.shape)
                assert torch.equal(tree[key].nan_to_num(), value.nan_to_num())
        (deep,) = tree["deep"]
        ones, *rest = deep["x"]
        assert torch.equal(ones, torch.ones(2))
        assert rest == [None, "text", 3, b"bytes", True, 0.5]
        assert tree["array"].tolist() == [0, 1, 2]


def load_and_fail(world: Any) -> None:
    def load() -> Any:
        raise PacelineError("PL999", saw="saw.", rule="rule.", fix="fix.")

    load_on_main(world, load)


def test_a_load_that_fails_fails_on_all(ranks: Pool) -> None:
    with pytest.raises(RankError) as caught:
        ranks.run(load_and_fail)
    assert sorted(caught.value.causes) == [0, 1]


def load_and_find_a_file_gone(world: Any, folder: str) -> None:
    """Rank 0 finds tensors whose file is removed before they are sent."""

    def load() -> Any:
        path = save_content(
            CheckpointFolder(folder, keep=1),
            1,
            prepare_whole({"a": torch.ones(3), "b": torch.ones(4)}, {}, {}, None),
            identity={},
        )
        found = open_usable(path).model
        (path / "part-00000.safetensors").unlink()
        return found

    load_on_main(world, load)


def test_what_can_not_be_read_meanwhile_fails_on_all(ranks: Pool, tmp_path: Path) -> None:
    with pytest.raises(RankError) as caught:
        ranks.run(load_and_find_a_file_gone, args=(str(tmp_path),))
    assert ["[PL506]" in str(caught.value.causes[rank]) for rank in range(2)] == [True, True]
