"""The samples of a loader, and the position at which it resumes. Worker processes: test_loader_workers.py."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset, IterableDataset, Subset, default_collate

from paceline.data.loader import Loader, Position
from paceline.data.permutation import order_slice
from paceline.data.share import Share
from paceline.errors import PacelineError


class Numbers(Dataset[int]):
    """Sample i is the number i."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> int:
        assert 0 <= index < self.num_samples
        return index


class Stream(IterableDataset[int]):
    """The same numbers, front to back."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.num_samples))


class Noisy(Dataset[dict[str, Any]]):
    """Draws from all three global generators for each sample."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"index": index, **draw()}


class NoisyBlocks(Noisy):
    def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
        return [self[index] for index in indices]


class NoisyStream(IterableDataset[dict[str, Any]]):
    """Shuffles itself in a small buffer with the global generators, as streams in the wild do."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        buffer: list[int] = []
        for number in range(20):
            buffer.append(number)
            if len(buffer) > 4:
                yield {"index": buffer.pop(random.randrange(5)), **draw()}
        while buffer:
            yield {"index": buffer.pop(), **draw()}


def draw() -> dict[str, float]:
    normals = [float(np.random.normal()) for _ in range(3)]  # odd: half of a pair stays behind
    return {"python": random.random(), "numpy": sum(normals), "torch": float(torch.rand(()))}


def make(dataset: Any, **options: Any) -> Loader:
    return Loader(dataset, **{"global_batch_size": 8, "microbatch_size": 3, "seed": 1, **options})


def samples_of(share: Share) -> list[Any]:
    """Return a rank's samples, as numbers or as dicts of numbers."""
    samples: list[Any] = []
    for _, batch in share.microbatches:
        if isinstance(batch, dict):
            rows = zip(*(column.tolist() for column in batch.values()), strict=True)
            samples += [dict(zip(batch, row, strict=True)) for row in rows]
        else:
            samples += batch.tolist()
    return samples


def global_batches(shares_by_rank: list[list[Share]]) -> list[list[Any]]:
    """Every global batch's samples in order, put together from the ranks'; checks what each share says."""
    batches = []
    for shares in zip(*shares_by_rank, strict=True):
        first = shares[0]
        assert {(s.epoch, s.number, s.start, s.last) for s in shares} == {
            (first.epoch, first.number, first.start, first.last)
        }
        numbers = [number for share in shares for number, _ in share.microbatches]
        assert numbers == list(range(first.num_microbatches))
        places = [range_ for share in shares for range_ in share.samples]
        assert [place for range_ in places for place in range_] == list(range(first.num_samples))
        assert all(len(s.samples) == len(s.microbatches) for s in shares)
        assert len({len(range_) for range_ in places[:-1]}) <= 1  # as microbatches are cut
        batch = [sample for share in shares for sample in samples_of(share)]
        assert len(batch) == first.num_samples
        batches.append(batch)
    return batches


@settings(max_examples=60)
@given(
    num_samples=st.integers(1, 60),
    global_batch_size=st.integers(1, 20),
    world_size=st.integers(1, 6),
    drop_last=st.booleans(),
    kind=st.sampled_from(["set", "in order", "stream"]),
    data=st.data(),
)
def test_each_sample_once_per_epoch(
    num_samples: int, global_batch_size: int, world_size: int, drop_last: bool, kind: str, data: st.DataObject
) -> None:
    microbatch_size = data.draw(st.integers(1, global_batch_size))
    drop_last = drop_last and num_samples >= global_batch_size
    loaders = [
        make(
            Stream(num_samples) if kind == "stream" else Numbers(num_samples),
            global_batch_size=global_batch_size,
            microbatch_size=microbatch_size,
            world_size=world_size,
            rank=rank,
            drop_last=drop_last,
            shuffle=False if kind == "in order" else None,
        )
        for rank in range(world_size)
    ]
    for epoch in range(2):
        assert {loader.epoch for loader in loaders} == {epoch}
        batches = global_batches([list(loader) for loader in loaders])
        flat = [sample for batch in batches for sample in batch]
        expected = order_slice(
            num_samples, 0, num_samples, seed=1, epoch=epoch, shuffle=kind == "set"
        ).tolist()
        kept = num_samples - num_samples % global_batch_size if drop_last else num_samples
        assert flat == expected[:kept]
        assert all(len(batch) == global_batch_size for batch in batches[:-1])
        if kind != "stream":
            assert len(loaders[0]) == len(batches)


@settings(max_examples=60)
@given(
    num_samples=st.integers(1, 50),
    sizes=st.lists(st.integers(1, 12), min_size=2, max_size=5),
    stream=st.booleans(),
    data=st.data(),
)
def test_stopped_and_resumed_each_sample_is_used_once(
    num_samples: int, sizes: list[int], stream: bool, data: st.DataObject
) -> None:
    """Each life of the run has another world size and global batch size, and dies at any step."""
    state = None
    used: dict[int, list[int]] = {0: [], 1: []}
    for size in [*sizes, 7]:
        world_size = data.draw(st.integers(1, 4))
        loaders = [
            make(
                Stream(num_samples) if stream else Numbers(num_samples),
                global_batch_size=size,
                microbatch_size=data.draw(st.integers(1, size)) if rank == 0 else 1,
                world_size=world_size,
                rank=rank,
                epochs=2,
            )
            for rank in range(world_size)
        ]
        for loader in loaders:
            loader.microbatch_size = loader._fetcher.microbatch_size = loaders[0].microbatch_size
            if state is not None:
                loader.load_state_dict(json.loads(json.dumps(state)))
        num_steps = data.draw(st.integers(0, 12)) if size != 7 else 1000
        for number, shares in enumerate(zip(*loaders, strict=True)):
            if number == num_steps:
                break  # fetched, but no step was taken with it
            used[shares[0].epoch] += [sample for share in shares for sample in samples_of(share)]
            for loader, share in zip(loaders, shares, strict=True):
                loader.mark_consumed(share)
        assert len({json.dumps(loader.state_dict()) for loader in loaders}) == 1
        state = loaders[0].state_dict()
    for epoch in range(2):
        assert (
            used[epoch]
            == order_slice(num_samples, 0, num_samples, seed=1, epoch=epoch, shuffle=not stream).tolist()
        )
    assert state is not None
    assert state["epoch"] == 2


def test_without_a_trainer_each_loop_is_an_epoch() -> None:
    loader = make(Numbers(10))
    seen = [[share.epoch for share in loader] for _ in range(loader.epoch, 3)]
    assert seen == [[0, 0], [1, 1], [2, 2]]
    assert loader.position == Position(3, 0, 0)


def test_with_epochs_one_loop_is_the_run() -> None:
    loader = make(Numbers(10), epochs=3)
    assert [(share.epoch, share.number) for share in loader] == [(e, n) for e in range(3) for n in range(2)]
    with pytest.raises(PacelineError, match="epochs=3"):
        list(loader)
    resumed = make(Numbers(10), epochs=3)
    resumed.load_state_dict({**resumed.state_dict(), "epoch": 1, "number": 1, "samples": 8})
    assert [(s.epoch, s.number) for s in resumed] == [(1, 1), (2, 0), (2, 1)]


def test_what_was_only_yielded_comes_again() -> None:
    loader = make(Numbers(30))
    shares = iter(loader)
    first, second = next(shares), next(shares)
    loader.mark_consumed(first)
    assert loader.position == Position(0, 1, 8)
    assert samples_of(next(iter(loader))) == samples_of(second)


def test_a_skipped_batch_counts_with_the_next_one_consumed() -> None:
    loader = make(Numbers(30))
    shares = iter(loader)
    next(shares)
    share = next(shares)
    loader.mark_consumed(share)
    loader.mark_consumed(share)  # two optimizers stepped on it
    assert loader.position == Position(0, 2, 16)


def test_the_last_step_of_an_epoch_starts_the_next() -> None:
    """Otherwise a run saved there would go through an empty epoch."""
    for dataset in (Numbers(16), Stream(16), Stream(18)):
        loader = make(dataset)
        for share in loader:
            loader.mark_consumed(share)
            last = share.last
            assert loader.position == (
                Position(1) if last else Position(0, share.number + 1, share.start + 8)
            )
        assert last
        assert loader.position == Position(1)


def test_dropped_rest_ends_the_epoch_when_the_batch_size_grew() -> None:
    loader = make(Numbers(20), drop_last=True, global_batch_size=16)
    loader.load_state_dict({**loader.state_dict(), "number": 1, "samples": 8})
    assert loader.position == Position(1)


def test_a_stream_resumed_at_its_end_gives_nothing_and_goes_on() -> None:
    for drop_last, samples in ((False, 20), (True, 16)):
        loader = make(Stream(20), drop_last=drop_last)
        loader.load_state_dict({**loader.state_dict(), "number": 3, "samples": samples})
        assert list(loader) == []
        assert loader.epoch == 1


def test_iterate_once_is_always_the_same_and_moves_nothing() -> None:
    for dataset in (Noisy(), NoisyStream()):
        loader = make(dataset)
        list(loader)
        state = loader.state_dict()
        once, again = ([samples_of(share) for share in loader.iterate_once()] for _ in range(2))
        assert once == again
        assert sum(len(samples) for samples in once) == 20
        assert loader.state_dict() == state
        assert [share.epoch for share in loader] == [1, 1, 1]
        assert next(loader.iterate_once()).source is None


def test_microbatches_are_collated_on_their_own() -> None:
    share = next(iter(make(Numbers(20))))
    assert [(number, len(batch)) for number, batch in share.microbatches] == [(0, 3), (1, 3), (2, 2)]
    assert (share.num_samples, share.num_microbatches) == (8, 3)


def test_more_ranks_than_microbatches_leave_some_without() -> None:
    loaders = [make(Numbers(8), world_size=5, rank=rank) for rank in range(5)]
    shares = [next(iter(loader)) for loader in loaders]
    assert [len(share.microbatches) for share in shares] == [1, 1, 1, 0, 0]
    assert {(share.num_samples, share.num_microbatches) for share in shares} == {(8, 3)}


def test_collate_of_ones_own() -> None:
    shares = list(make(Numbers(9), collate=lambda samples: {"sum": sum(samples)}))
    assert sum(batch["sum"] for share in shares for _, batch in share.microbatches) == 36


def test_lists_work_as_they_are() -> None:
    rows = [{"x": torch.full((2,), float(n))} for n in range(8)]
    (share,) = make(rows, shuffle=False)
    assert torch.equal(share.microbatches[1][1]["x"], default_collate(rows[3:6])["x"])


def test_set_epoch_is_called_before_an_epoch_is_read() -> None:
    class Told(Numbers):
        calls: ClassVar[list[int]] = []

        def set_epoch(self, epoch: int) -> None:
            self.calls.append(epoch)

    class ToldStream(Stream):
        calls: ClassVar[list[int]] = []

        def set_epoch(self, epoch: int) -> None:
            self.calls.append(epoch)

        def __iter__(self) -> Iterator[int]:
            return iter(range(100 * self.calls[-1], 100 * self.calls[-1] + self.num_samples))

    for dataset in (Told(20), ToldStream(20)):
        assert len(list(make(dataset, epochs=2))) == 6
        assert dataset.calls == [0, 1]
    batches = [samples_of(share) for share in make(ToldStream(10), epochs=2)]
    assert batches == [list(range(8)), [8, 9], list(range(100, 108)), [108, 109]]


def augmented(dataset: Any, world_size: int, **options: Any) -> dict[int, Any]:
    """Sample by index, over an epoch, with the rank's own generators in any state."""
    random.seed(world_size)
    np.random.seed(world_size)
    torch.manual_seed(world_size)
    loaders = [make(dataset, world_size=world_size, rank=rank, **options) for rank in range(world_size)]
    samples = {}
    for shares in zip(*loaders, strict=True):
        draw()
        samples.update({sample["index"]: sample for share in shares for sample in samples_of(share)})
    return samples


@pytest.mark.parametrize("dataset", [Noisy(), NoisyBlocks(), NoisyStream(), Subset(Noisy(), range(20))])
def test_augmentation_does_not_depend_on_the_world_size(dataset: Any) -> None:
    alone = augmented(dataset, 1)
    assert len(alone) == 20
    for key in ("python", "numpy", "torch"):
        assert len({sample[key] for sample in alone.values()}) == 20
    for world_size in (2, 3):
        assert augmented(dataset, world_size) == alone
    assert augmented(dataset, 1, seed=2) != alone


@pytest.mark.parametrize("dataset", [Noisy(), NoisyStream()])
def test_augmentation_does_not_depend_on_batch_sizes_and_resuming(dataset: Any) -> None:
    alone = augmented(dataset, 1)
    assert augmented(dataset, 2, global_batch_size=5, microbatch_size=2) == alone
    loader = make(dataset)
    loader.load_state_dict({**loader.state_dict(), "number": 1, "samples": 8})
    rest = [sample for share in loader for sample in samples_of(share)]
    assert len(rest) == 12
    assert all(sample == alone[sample["index"]] for sample in rest)


def test_augmentation_differs_between_epochs() -> None:
    loader = make(Noisy())
    first, second = ({s["index"]: s for share in loader for s in samples_of(share)} for _ in range(2))
    assert all(first[index]["torch"] != second[index]["torch"] for index in range(20))


@pytest.mark.parametrize("dataset", [Noisy(), NoisyStream()])
def test_the_ranks_own_generators_go_on_undisturbed(dataset: Any) -> None:
    def draws(disturb: bool) -> list[float]:
        random.seed(5)
        np.random.seed(5)
        torch.manual_seed(5)
        shares = iter(make(dataset))
        numbers = []
        for _ in range(2):
            if disturb:
                next(shares)
            numbers += [random.random(), float(np.random.rand()), float(torch.rand(()))]
        return numbers

    assert draws(True) == draws(False)


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        ({"global_batch_size": 0}, "PL250", "global_batch_size=0"),
        ({"microbatch_size": -1}, "PL250", "microbatch_size=-1"),
        ({"microbatch_size": 2.5}, "PL250", "microbatch_size=2.5"),
        ({"global_batch_size": True}, "PL250", "global_batch_size=True"),
        ({"epochs": 0}, "PL250", "epochs=0"),
        ({"num_workers": -1}, "PL250", "num_workers=-1"),
        ({"prefetch": 0}, "PL250", "prefetch=0"),
        ({"microbatch_size": 9}, "PL108", "microbatch_size=9 is more than global_batch_size=8"),
        ({"rank": 2, "world_size": 2}, "PL252", "rank=2 with world_size=2"),
        ({"dataset": []}, "PL253", "0 samples"),
        ({"dataset": 7}, "PL254", "neither"),
        ({"dataset": type("A", (), {"__getitem__": lambda self, n: n})()}, "PL254", "no __len__"),
        ({"dataset": Stream(9), "shuffle": True}, "PL255", "shuffle=True"),
        ({"dataset": (n for n in range(9))}, "PL256", "generator"),
        ({"dataset": [1, 2, 3], "drop_last": True}, "PL257", "3 samples"),
        ({"dataset": Stream(0)}, "PL253", "no sample in epoch 0"),
        ({"dataset": Stream(7), "drop_last": True}, "PL253", "no full batch"),
    ],
)
def test_bad_input(options: dict[str, Any], code: str, words: str) -> None:
    with pytest.raises(PacelineError) as caught:
        list(make(options.pop("dataset", Numbers(20)), **options))
    assert caught.value.code == code
    assert words in str(caught.value)


def test_pinning_is_refused_where_it_does_nothing() -> None:
    if torch.accelerator.is_available():
        pytest.skip("there is an accelerator")
    with pytest.raises(PacelineError, match="PL263"):
        make(Numbers(9), pin_memory=True)
    assert len(list(make(Numbers(9), pin_memory="auto"))) == 2


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_samples": 21}, "num_samples of the cats was 21 and is 20"),
        ({"seed": 7}, "seed of the cats was 7 and is 1"),
        ({"shuffle": False}, "shuffle of the cats was False and is True"),
        ({"kind": "stream"}, "kind of the cats was 'stream' and is 'set'"),
    ],
)
def test_a_state_of_other_data_is_refused(change: dict[str, Any], words: str) -> None:
    loader = make(Numbers(20), name="the cats")
    with pytest.raises(PacelineError, match="PL259") as caught:
        loader.load_state_dict({**loader.state_dict(), **change})
    assert words in str(caught.value)
    assert loader.position == Position()


@pytest.mark.parametrize("change", [{"samples": -1}, {"epoch": "one"}, {"number": None}, {"samples": True}])
def test_a_mangled_state_is_refused(change: dict[str, Any]) -> None:
    loader = make(Numbers(20))
    with pytest.raises(PacelineError, match="PL260"):
        loader.load_state_dict({**loader.state_dict(), **change})
    with pytest.raises(PacelineError, match="PL260"):
        loader.load_state_dict({"epoch": 1})


def test_a_stream_that_shrank_is_refused() -> None:
    loader = make(Stream(20))
    loader.load_state_dict({**loader.state_dict(), "number": 3, "samples": 24})
    with pytest.raises(PacelineError, match="ended after 20 samples, but the run is at sample 24"):
        list(loader)


@pytest.mark.parametrize(
    "meddle",
    [
        lambda loader: list(loader),
        lambda loader: loader.load_state_dict(loader.state_dict()),
        lambda loader: next(loader.iterate_once()),
        lambda loader: loader.close(),
    ],
)
def test_an_iteration_inside_another_is_refused(meddle: Any) -> None:
    loader = make(Numbers(30))
    shares = iter(loader)
    next(shares)
    meddle(loader)
    with pytest.raises(PacelineError, match="PL261"):
        next(shares)


def test_a_stream_has_no_length_but_fits_into_list() -> None:
    loader = make(Stream(20))
    with pytest.raises(TypeError, match="is a stream"):
        len(loader)
    assert len(list(loader)) == 3


def test_odd_samples_are_named() -> None:
    rows = [{"x": torch.zeros(3 if n != 5 else 4)} for n in range(8)]
    with pytest.raises(PacelineError, match="PL258") as caught:
        list(make(rows, shuffle=False, name="the rows"))
    assert "sample 5 of the rows does not match sample 3" in str(caught.value)
    with pytest.raises(PacelineError, match="sample 6 of the rows cannot be made into a batch"):
        list(make([*range(6), object(), 7], shuffle=False, name="the rows"))


def test_errors_of_the_users_code_keep_their_kind_and_report_the_sample() -> None:
    class Broken(Numbers):
        def __getitem__(self, index: int) -> int:
            return {4: 1}[index]

    class BrokenStream(Stream):
        def __iter__(self) -> Iterator[int]:
            yield from range(5)
            raise KeyError("torn file")

    with pytest.raises(KeyError) as caught:
        list(make(Broken(9), shuffle=False, name="the cats"))
    assert caught.value.__notes__ == ["while reading sample 0 of the cats"]
    loader = make(BrokenStream(9), name="the cats")
    for _ in range(2):  # the second time it must not look like a stream that ended
        with pytest.raises(KeyError) as caught:
            list(loader)
        assert caught.value.__notes__ == ["while reading the cats after sample 5"]

    def collate(samples: list[int]) -> int:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no") as failed:
        list(make(Numbers(3), shuffle=False, collate=collate))
    assert failed.value.__notes__ == ["while collating samples [0, 1, 2] of the data set"]


def test_getitems_must_give_one_sample_per_index() -> None:
    class Short(Numbers):
        def __getitems__(self, indices: list[int]) -> list[int]:
            return indices[1:]

    with pytest.raises(PacelineError, match=r"PL264") as caught:
        list(make(Short(9)))
    assert "returned 2 samples for 3 indices" in str(caught.value)


def test_only_own_samples_are_read() -> None:
    """Reading what other ranks compute on would cost a world size times the time."""

    class Counting(Numbers):
        reads: ClassVar[Counter[int]] = Counter()

        def __getitem__(self, index: int) -> int:
            self.reads[index] += 1
            return index

    dataset = Counting(30)
    for rank in range(3):
        list(make(dataset, world_size=3, rank=rank))
    assert set(dataset.reads.values()) == {1}
    assert len(dataset.reads) == 30
