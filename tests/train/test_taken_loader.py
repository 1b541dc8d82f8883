"""`trainer.loader(DataLoader(...))`: a torch loader's samples, once each, the same on any number of ranks."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, WeightedRandomSampler

import paceline
from tests.dist.pool import Pool

LENGTHS = [1 + (7 * n) % 5 for n in range(23)]
DATA = [torch.full((length,), float(n)) for n, length in enumerate(LENGTHS)]


class ByLength(torch.utils.data.Sampler[list[int]]):
    """Batches of samples of about equal length, of different sizes, in another order in each epoch."""

    def __iter__(self) -> Iterator[list[int]]:
        order = sorted(torch.randperm(len(DATA)).tolist(), key=LENGTHS.__getitem__)
        batches = [order[:5], order[5:12], order[12:16], order[16:23]]
        yield from (batches[n] for n in torch.randperm(4))

    def __len__(self) -> int:
        return 4


def pad(samples: list[Tensor]) -> Tensor:
    return nn.utils.rnn.pad_sequence(samples, batch_first=True, padding_value=-1.0)


def build(kind: str) -> DataLoader[Any]:
    if kind == "lengths":
        return DataLoader(DATA, batch_sampler=ByLength(), collate_fn=pad)  # type: ignore[arg-type]
    weights = torch.arange(23.0)
    return DataLoader(DATA, batch_size=8, sampler=WeightedRandomSampler(weights, 20), collate_fn=pad)  # type: ignore[arg-type]


def find_loss(output: Tensor, batch: Tensor) -> tuple[Tensor, int]:
    is_real = batch >= 0
    return ((output.squeeze(-1) - 0.1) ** 2 * is_real).sum(), int(is_real.sum())


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(1, 1).double()


def build_trainer() -> paceline.Trainer:
    return paceline.Trainer(
        build_model(),
        forward=lambda model, batch: model(batch.double().unsqueeze(-1) / 23),
        loss=find_loss,
        optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1),
        dtype="fp64",
        microbatch_size=2,
    )


def train(
    world: paceline.World, kind: str, folder: str, stop: int | None
) -> tuple[list[Any], list[float], float]:
    """Return this rank's samples by step, the losses and the trained weight."""
    trainer = build_trainer()
    loader = trainer.loader(build(kind), epochs=2)
    trainer.resume(folder)
    seen, losses = [], []
    for share in loader:
        seen.append([int(row[0]) for _, batch in share.microbatches for row in batch])
        step = trainer.step(share)
        losses.append(step.loss)
        if step.number == stop:
            trainer.save(wait=True)
            break
    return seen, losses, trainer.model.weight.item()


@pytest.mark.parametrize("kind", ["lengths", "weights"])
def test_a_sampler_gives_a_plain_loop_on_any_ranks(ranks: Pool, tmp_path: Path, kind: str) -> None:
    [(alone, losses, weight)] = ranks.run(train, nproc=1, args=(kind, str(tmp_path / "one"), None))
    if kind == "lengths":
        assert sorted(map(len, alone[:4])) == [4, 5, 7, 7]
        assert [sorted(chain.from_iterable(alone[n : n + 4])) for n in (0, 4)] == [list(range(23))] * 2
        assert alone[:4] != alone[4:]
    else:
        assert list(map(len, alone)) == [8, 8, 4] * 2
        assert 0 not in chain.from_iterable(alone)  # its weight is 0
    model = build_model()  # the independent truth: plain torch on these very samples
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for indices, loss in zip(alone, losses, strict=True):
        batch = pad([DATA[n] for n in indices])
        total, count = find_loss(model(batch.double().unsqueeze(-1) / 23), batch)
        assert loss == pytest.approx((total / count).item(), rel=1e-12)
        optimizer.zero_grad()
        (total / count).backward()
        optimizer.step()
    assert weight == pytest.approx(model.weight.item(), rel=1e-12)
    ranks.run(train, nproc=3, args=(kind, str(tmp_path / "more"), 2))  # stopped in the middle of an epoch
    two = ranks.run(train, nproc=2, args=(kind, str(tmp_path / "more"), None))
    assert [
        list(chain.from_iterable(parts)) for parts in zip(*(seen for seen, _, _ in two), strict=True)
    ] == alone[2:]
    assert [result[1:] for result in two] == [(losses[2:], weight)] * 2


class Encoding(UserDict[str, Any]):
    """Like transformers' BatchEncoding, which `tokenizer.pad` returns."""

    def __init__(self, data: Any = None, encoding: Any = None) -> None:
        super().__init__(data)

    def __getattr__(self, name: str) -> Any:
        if name == "data":
            raise AttributeError(name)
        return self.data[name]


def encode(samples: list[Tensor]) -> dict[str, Any]:
    return {"x": pad(samples), "length": torch.tensor(list(map(len, samples)))}


def encode_as_object(samples: list[Tensor]) -> Encoding:
    return Encoding(encode(samples))


def train_on(world: paceline.World, collate: Any, num_workers: int) -> tuple[float, int]:
    trainer = paceline.Trainer(
        build_model(),
        forward=lambda model, batch: model(batch["x"].double().unsqueeze(-1) / 23),
        loss=lambda output, batch: find_loss(output, batch.x if isinstance(batch, Encoding) else batch["x"]),
        optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1),
        dtype="fp64",
        microbatch_size=2,
    )
    for share in trainer.loader(DATA, global_batch_size=6, collate=collate, num_workers=num_workers):
        trainer.step(share)
    outputs = list(trainer.predict(trainer.loader(DATA, global_batch_size=6, shuffle=False, collate=collate)))
    trainer.step(collate(DATA[world.rank * 3 : world.rank * 3 + 3]))
    return trainer.model.weight.item(), sum(len(batch["x"]) for _, batch in outputs)


def test_a_batch_may_be_a_mapping_that_is_no_dict(ranks: Pool) -> None:
    expected = ranks.run(train_on, nproc=2, args=(encode, 0))
    assert expected[0][1] == len(DATA)
    assert ranks.run(train_on, nproc=2, args=(encode_as_object, 0)) == expected
    with paceline.start() as world:  # from a worker it comes pickled
        assert train_on(world, encode_as_object, 1) == train_on(world, encode, 0)
