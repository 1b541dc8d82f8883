"""A rank that loads a sharded checkpoint reads its own part of it: the bytes are counted in the reader."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from torch import Tensor
from torch.utils._pytree import tree_leaves

from paceline.checkpoint import tensors
from paceline.parallel.placement import local
from tests.dist.pool import Pool
from tests.train.test_layout_checkpoints import (
    GLOBAL_BATCH,
    Tokens,
    build_for_four,
    build_trainer,
    fused,
    num_ranks,
)


class Counted:
    """An open file, or a slice of it, that counts the bytes of the tensors that it gives."""

    def __init__(self, real: Any, counts: list[int]) -> None:
        self._real, self._counts = real, counts

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def _count(self, tensor: Tensor) -> Tensor:
        self._counts.append(tensor.numel() * tensor.element_size())
        return tensor

    def get_tensor(self, name: str) -> Tensor:
        return self._count(self._real.get_tensor(name))

    def get_slice(self, name: str) -> Counted:
        return Counted(self._real.get_slice(name), self._counts)

    def __getitem__(self, index: Any) -> Tensor:
        return self._count(self._real[index])


@contextmanager
def counted() -> Iterator[list[int]]:
    counts: list[int] = []
    real = tensors.safetensors.safe_open
    with pytest.MonkeyPatch.context() as patch:

        def open_counted(*args: Any, **kwargs: Any) -> Counted:
            return Counted(real(*args, **kwargs), counts)

        patch.setattr(tensors.safetensors, "safe_open", open_counted)
        # Verifying reads every file on some rank, for its hash and for values that are no numbers.
        patch.setattr("paceline.checkpoint.content.find_nan", lambda path, names: "")
        yield counts


def save(world: Any, layout: str, folder: str) -> None:
    trainer = build_trainer(layout, build_for_four, fused, checkpoint_mode="sharded")
    trainer.resume(folder)
    trainer.step(next(iter(trainer.loader(Tokens(), global_batch_size=GLOBAL_BATCH))))
    trainer.save()
    trainer.close()


def load(world: Any, layout: str, folder: str) -> tuple[int, int]:
    """The bytes that this rank has read, and those that it holds."""
    trainer = build_trainer(layout, build_for_four, fused, checkpoint_mode="sharded")
    trainer.loader(Tokens(), global_batch_size=GLOBAL_BATCH)
    with counted() as counts:
        assert trainer.resume(folder) == 1
    states = trainer._updates["model"].optimizer.state.values()
    held = [*trainer.models["model"].state_dict().values(), *tree_leaves([dict(each) for each in states])]
    own = {id(each): local(each) for each in held if isinstance(each, Tensor)}
    trainer.close()
    return sum(counts), sum(each.numel() * each.element_size() for each in own.values())


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        ("dp_shard=4", "dp_shard=4"),
        ("tp=4", "dp_shard=4 zero=1"),
        ("dp_replicate=2", "dp_shard=2 tp=2"),
        pytest.param("dp_shard=4", "tp=4", marks=pytest.mark.slow),
        pytest.param("dp_shard=2 tp=2", "dp_replicate=4", marks=pytest.mark.slow),
        pytest.param("", "dp_shard=4", marks=pytest.mark.slow),
        pytest.param("dp_shard=4", "", marks=pytest.mark.slow),
    ],
)
def test_a_rank_reads_its_part(ranks: Pool, tmp_path: Any, saved: str, loaded: str) -> None:
    ranks.run(save, num_ranks(saved), (saved, str(tmp_path)), timeout_s=60)
    found = ranks.run(load, num_ranks(loaded), (loaded, str(tmp_path)), timeout_s=60)
    for num_read, num_held in found:
        assert num_held > 300_000
        assert 0.95 * num_held < num_read < 1.05 * num_held, found
