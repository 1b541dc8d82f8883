"""Data that ranks do not share: refused by name, or stated with `shard="mine"`. Each sample is used once."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, Subset

from paceline.errors import PacelineError
from paceline.train.trainer import Trainer
from paceline.world import start
from tests.dist.pool import Pool

NUM_SAMPLES = 32


@pytest.fixture
def alone() -> Iterator[None]:
    """A world of this process."""
    with start(threads_per_rank=1):
        yield


Sample = dict[str, Tensor]


def build(**settings: Any) -> Trainer:
    torch.manual_seed(0)
    return Trainer(
        nn.Linear(4, 4, dtype=torch.float64),
        forward=lambda model, batch: model(batch["x"]),
        loss=lambda output, batch: (output.square().sum(), len(output)),
        optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.01),
        dtype="fp64",
        **{"microbatch_size": 2} | settings,
    )


def features(number: int) -> Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(4, generator=generator, dtype=torch.float64)


class Numbers(IterableDataset[Sample]):
    """Samples that show their number; which ones, and in which order, depends on the rank."""

    def __init__(self, kind: str, rank: int, size: int) -> None:
        self.kind, self.rank, self.size = kind, rank, size

    def list(self) -> Any:
        mine = range(self.rank, NUM_SAMPLES, self.size)
        blocks = np.array_split(np.arange(NUM_SAMPLES), self.size)
        odd = self.rank == 1
        return {
            "split by rank": mine,
            "files by rank": blocks[self.rank],
            "files in another order": np.concatenate([*reversed(blocks)] if odd else blocks),
            "shuffled by rank": np.random.default_rng().permutation(NUM_SAMPLES),
            "late": [*range(16), *(range(31, 15, -1) if odd else range(16, 32))],
            "a sample skipped": [n for n in range(NUM_SAMPLES) if not (odd and n == 9)],
            "uneven": range(20) if not self.rank else range(20, NUM_SAMPLES),
        }.get(self.kind, range(NUM_SAMPLES))

    def __iter__(self) -> Iterator[Sample]:
        own = np.random.default_rng()
        for number in self.list():
            x = features(int(number))
            if self.kind == "noise of its own":
                x = x + torch.from_numpy(own.standard_normal(4))
            elif self.kind == "noise":
                x = x + torch.randn(4) + np.random.rand()
            elif self.kind == "no numbers":
                x = torch.ones(4, dtype=torch.float64)
            yield {"number": torch.tensor(0 if self.kind == "no numbers" else int(number)), "x": x}


def numbers_of(share: Any) -> list[int]:
    return [int(n) for _, batch in share.microbatches for n in batch["number"]]


def read(trainer: Trainer, data: Any, **options: Any) -> tuple[str, int, list[int]]:
    """Train for an epoch; return the code of the error, the steps taken and this rank's samples."""
    seen: list[int] = []
    before = trainer.step_number
    try:
        for share in trainer.loader(data, global_batch_size=8, epochs=1, **options):
            trainer.step(share)
            seen += numbers_of(share)
    except PacelineError as error:
        return error.code, trainer.step_number - before - 1, seen
    return "", trainer.step_number - before, seen


REFUSED = ["split by rank", "files by rank", "files in another order", "shuffled by rank"]
FINE = ["the same", "noise", "noise of its own", "no numbers"]


def read_all(world: Any, layout: str) -> dict[str, tuple[str, int, list[int]]]:
    found = {}
    for kind in [*REFUSED, *FINE, "late", "a sample skipped"]:
        trainer = build(layout=layout, example={"x": torch.ones(2, 4, dtype=torch.float64)})
        data = Numbers(kind, world.rank, world.world_size)
        found[kind] = read(trainer, data)
        trainer.close()
    return found


@pytest.mark.parametrize("layout", ["dp_replicate=2", "dp_shard=2", "tp=2"])
def test_streams_that_ranks_do_not_share_are_refused(ranks: Pool, layout: str) -> None:
    first, second = ranks.run(read_all, args=(layout,))
    for kind, (code, num_taken, seen) in first.items():
        assert second[kind][:2] == (code, num_taken)
        if kind in FINE:
            assert (code, num_taken) == ("", 4), kind
            if kind != "no numbers" and layout != "tp=2":
                assert sorted(seen + second[kind][2]) == list(range(NUM_SAMPLES)), kind
        else:
            assert code == "PL668", kind
            assert num_taken == {"late": 2, "a sample skipped": 1}.get(kind, 0), kind


class Table(Dataset[Sample]):
    def __init__(self, numbers: Any) -> None:
        self.numbers = list(numbers)

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, place: int) -> Sample:
        number = int(self.numbers[place])
        return {"number": torch.tensor(number), "x": features(number) + 0.1 * torch.randn(4)}


def read_tables(world: Any) -> list[str]:
    """Return the codes of data sets that differ by rank, in training and in evaluation."""
    mine, every = range(world.rank, NUM_SAMPLES, 2), range(NUM_SAMPLES)
    files = every if world.rank else [*every[16:], *every[:16]]
    found = []
    for data in (Subset(Table(every), list(mine)), Table(mine), Table(files), Table(every)):
        found.append(read(build(), data)[0])
    for data in (Table(mine), Table(every), Numbers("split by rank", world.rank, 2), Numbers("noise", 0, 2)):
        trainer = build()
        try:
            trainer.evaluate(trainer.loader(data, global_batch_size=8, shuffle=False))
            found.append("")
        except PacelineError as error:
            found.append(error.code)
    return found


def test_tables_and_evaluations_too(ranks: Pool) -> None:
    for found in ranks.run(read_tables):
        assert found == ["PL668", "PL668", "PL668", "", "PL668", "", "PL668", ""]


def brought(world: Any) -> list[str]:
    """Return the codes for batches of the user's own: different ones on ranks of tp, and twice the same."""
    found = []
    for layout, by_rank in (("tp=2", True), ("tp=2", False), ("dp_replicate=2", True)):
        trainer = build(layout=layout, example={"x": torch.ones(2, 4, dtype=torch.float64)})
        generator = torch.Generator().manual_seed(world.rank if by_rank else 0)
        try:
            for _ in range(4):
                trainer.step({"x": torch.randn(4, 4, generator=generator, dtype=torch.float64)})
            found.append("")
        except PacelineError as error:
            found.append(error.code)
    trainer = build()
    return [*found, read(trainer, Numbers("the same", 0, 2), shard="mine")[0]]


def test_ranks_of_one_model_bring_the_same_batches(ranks: Pool) -> None:
    assert ranks.run(brought) == [["PL668", "", "", "PL419"]] * 2


def plain_loop(batches: list[list[int]], model: nn.Linear) -> Tensor:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for numbers in batches:
        optimizer.zero_grad()
        x = torch.stack([features(number) for number in numbers])
        model(x).square().sum().div(len(numbers)).backward()
        optimizer.step()
    return model.weight.detach()


def train_own(
    world: Any, kind: str, folder: str, stop: int, drop_last: bool = False
) -> tuple[list[list[int]], Any, int]:
    """Train two epochs on this rank's own data; return its samples by step."""
    trainer = build(layout=f"dp_replicate={world.world_size}" if world.world_size > 1 else "")
    data: Any = Numbers(kind, world.rank, world.world_size)
    if kind == "table":
        data = Table(range(world.rank, NUM_SAMPLES, world.world_size))
    trainer.resume(folder)
    batches = []
    for share in trainer.loader(data, global_batch_size=8, epochs=2, shard="mine", drop_last=drop_last):
        batches.append(numbers_of(share))
        trainer.step(share)
        if trainer.step_number == stop:
            trainer.save(wait=True)
            break
    weight = trainer.model.weight.detach().clone()
    trainer.close()
    return batches, weight, trainer.step_number


def joined(found: list[Any]) -> list[list[int]]:
    return [list(itertools.chain(*parts)) for parts in zip(*(each[0] for each in found), strict=True)]


@pytest.mark.parametrize("kind", ["split by rank", "uneven", "table"])
def test_a_rank_s_own_data_are_used_once(ranks: Pool, tmp_path: Path, kind: str) -> None:
    whole = ranks.run(train_own, args=(kind, str(tmp_path / "whole"), 99))
    steps = joined(whole)
    assert len(steps) == {"uneven": 10}.get(kind, 8)  # 20 samples at 4 per step take 5 of an epoch's steps
    epochs = steps[: len(steps) // 2], steps[len(steps) // 2 :]
    for epoch in epochs:
        assert sorted(itertools.chain(*epoch)) == list(range(NUM_SAMPLES))
    if kind == "table":  # shuffled, and otherwise in each epoch
        assert epochs[0] != epochs[1]
    else:
        torch.manual_seed(0)
        expected = plain_loop(steps, nn.Linear(4, 4, dtype=torch.float64))
        torch.testing.assert_close(whole[0][1], expected)
    for stop in (3, len(steps) // 2):  # in the middle of an epoch, and at its end
        folder = str(tmp_path / f"stopped{stop}")
        begun = ranks.run(train_own, args=(kind, folder, stop))
        ended = ranks.run(train_own, args=(kind, folder, 99))
        assert joined(begun) + joined(ended) == steps
        assert torch.equal(ended[0][1], whole[0][1])


def test_other_ranks_resume_own_data_only_between_epochs(ranks: Pool, tmp_path: Path) -> None:
    for stop in (3, 4):
        ranks.run(train_own, args=("split by rank", str(tmp_path / str(stop)), stop))
    steps = joined(ranks.run(train_own, 1, args=("split by rank", str(tmp_path / "4"), 99)))
    assert sorted(itertools.chain(*steps)) == list(range(NUM_SAMPLES))
    assert ranks.run(code_of_resume, 1, args=(str(tmp_path / "3"),)) == ["PL669"]


def code_of_resume(world: Any, folder: str) -> str:
    with pytest.raises(PacelineError) as caught:
        train_own(world, "split by rank", folder, 99)
    assert "12 samples into epoch 0 on 2 data ranks" not in str(caught.value)
    assert "24 samples into epoch 0 on 2 data ranks" in str(caught.value)
    return caught.value.code


def test_with_drop_last_the_epoch_ends_with_the_shortest(ranks: Pool, tmp_path: Path) -> None:
    steps = joined(ranks.run(train_own, args=("uneven", str(tmp_path), 99, True)))
    assert [len(step) for step in steps] == [8] * 6


@pytest.mark.parametrize("options", [{"shard": "yours"}, {"shard": "mine", "microbatch_size": 8}])
def test_impossible_shards_are_refused(ranks: Pool, options: dict[str, Any]) -> None:
    assert ranks.run(code_of_loader, args=(options,)) == [["PL108", "PL400"]["yours" in options.values()]] * 2


def code_of_loader(world: Any, options: dict[str, Any]) -> str:
    trainer = build(microbatch_size=options.pop("microbatch_size", 2))
    return read(trainer, Numbers("the same", 0, 1), **options)[0]


def orders(how: str, num_workers: int = 0, folder: str = "", stop: int = 99) -> list[list[int]]:
    """Return the order of each epoch of a loop that is written in one of several ways."""
    trainer, found, data = build(), [], Table(range(10))
    if folder:
        trainer.resume(folder)
    if how == "one loader":
        loader = trainer.loader(data, global_batch_size=4)
        for _ in range(3):
            found.append([n for share in loader for n in (trainer.step(share), numbers_of(share))[1]])
        return found
    for _ in range(3):
        data = Table(range(10)) if how == "data anew" else data
        loader = trainer.loader(data, global_batch_size=4, epochs=1, num_workers=num_workers)
        found.append([])
        for share in loader:
            trainer.step(share)
            found[-1] += numbers_of(share)
            if trainer.step_number == stop:
                trainer.save(wait=True)
                return found
        loader.close()
    return found


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("how", ["loader anew", "data anew"])
def test_a_loader_made_in_every_epoch_goes_on(how: str, tmp_path: Path) -> None:
    expected = orders("one loader")
    assert len({tuple(order) for order in expected}) == 3
    assert orders(how) == expected
    for stop in (3, 4):
        folder = str(tmp_path / str(stop))
        parts = itertools.zip_longest(orders(how, folder=folder, stop=stop), orders(how, folder=folder))
        assert [(first or []) + second for first, second in parts] == expected


@pytest.mark.usefixtures("alone")
def test_other_data_and_evaluations_do_not_count(tmp_path: Path) -> None:
    trainer = build()
    first = trainer.loader(Table(range(10)), global_batch_size=4, epochs=1)
    for share in first:
        trainer.step(share)
    other = trainer.loader(Table(range(10, 20)), global_batch_size=4, epochs=1)
    assert next(iter(other)).epoch == 0
    before = trainer.evaluate(trainer.loader(first.dataset, global_batch_size=4, shuffle=False))
    assert before == trainer.evaluate(trainer.loader(first.dataset, global_batch_size=4, shuffle=False))
    trainer.resume(tmp_path)
    trainer.save(wait=True)
    resumed = build()
    resumed.resume(tmp_path)  # with the loaders that have moved, and no other
    assert resumed._saver.tracked.list_loaded() == ["loaders.loader0"]


@pytest.mark.usefixtures("alone")
def test_iterating_again_after_all_epochs_is_refused(tmp_path: Path) -> None:
    trainer = build()
    trainer.resume(tmp_path)
    loader = trainer.loader(Table(range(8)), global_batch_size=4, epochs=1)
    for share in loader:
        trainer.step(share)
    trainer.save(wait=True)
    with pytest.raises(PacelineError, match="epochs=1") as caught:
        list(loader)
    assert caught.value.code == "PL261"
    resumed = build()
    resumed.resume(tmp_path)
    assert list(resumed.loader(Table(range(8)), global_batch_size=4, epochs=1)) == [], "the run is at its end"
