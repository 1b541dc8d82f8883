"""Fetches this rank's microbatches of a global batch, in a loader's worker.

`SetFetcher` reads data sets with an index, `StreamFetcher` those that can only be read from front to back. To
torch, both are data sets whose "index" is a `Key` and whose "sample" is an `Item`, so that
`torch.utils.data.DataLoader` provides the processes, the prefetching and the pinning.

Random numbers drawn while a sample is made (augmentation, masking) depend on (seed, epoch, sample), not on
the process that makes it: the global generators of `random`, numpy and torch are seeded from these before
every sample (about 10 us), or before every microbatch if the data set has `__getitems__`. The data set is
responsible for generators that it creates itself.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset, default_collate, get_worker_info

from paceline.data.contents import NUM_COMPARED, Digests, digest_fields, list_fields
from paceline.data.permutation import order_slice
from paceline.data.share import owned_microbatches, split_microbatches
from paceline.errors import PacelineError
from paceline.generators import preserved_generators
from paceline.torch_seams.loader import forget_worker

Collate = Callable[[list[Any]], Any]


class Key(NamedTuple):
    """The global batch to fetch.

    Attributes:
        epoch: the pass over the data.
        number: the global batch's number within it.
        start: place of its first sample in the epoch's order.
        stop: place after its last one; a stream may end before.
        last: whether the epoch ends with it; only known for data sets with an index.
    """

    epoch: int
    number: int
    start: int
    stop: int
    last: bool = False


class Item(NamedTuple):
    """A fetched `Key`; `Share` without its loader. `num_samples` is 0 past the end of a stream, and
    `start` is then the place where the stream ended. `digests` are those of the samples that were read."""

    epoch: int
    number: int
    start: int
    num_samples: int
    num_microbatches: int
    microbatches: list[tuple[int, Any]]
    last: bool
    digests: Digests


class Fetcher(Dataset[Any]):
    """The base of both fetchers.

    Args:
        name: what messages call it.
        microbatch_size: samples per microbatch.
        rank, world_size, num_slots, turns: whose microbatches to fetch, see `owned_microbatches`.
        collate: makes a microbatch of a list of samples; default torch's `default_collate`.
        compares: whether items carry digests of the samples, which the ranks compare.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        name: str,
        microbatch_size: int,
        rank: int,
        world_size: int,
        num_slots: int | None,
        turns: int,
        seed: int,
        collate: Collate | None,
        compares: bool,
    ) -> None:
        self.dataset = dataset
        self.name = name
        self.microbatch_size = microbatch_size
        self.rank = rank
        self.world_size = world_size
        self.num_slots, self.turns = num_slots, turns
        self.seed = seed
        self.collate = collate
        self.compares = compares
        self.known_epoch: int | None = None

    def __getitem__(self, key: Key) -> Item | PacelineError:
        # Errors are returned as values, because DataLoader rebuilds an exception from its text alone and
        # loses the parts.
        try:
            with preserved_generators() if get_worker_info() is None else contextlib.nullcontext():
                return self.fetch(key)
        except PacelineError as error:
            return error

    def fetch(self, key: Key) -> Item:
        """Read this rank's microbatches of one global batch."""
        raise NotImplementedError

    def pass_epoch(self, epoch: int) -> None:
        """Call the data set's `set_epoch`, if it has one, when the epoch has changed."""
        if self.known_epoch != epoch:
            set_epoch = getattr(self.dataset, "set_epoch", None)
            if callable(set_epoch):
                set_epoch(epoch)
            self.known_epoch = epoch

    def own_blocks(self, num_samples: int) -> tuple[int, list[tuple[int, int, int]]]:
        """Return the number of microbatches, and this rank's as (number, start, stop) within the global
        batch."""
        blocks = split_microbatches(num_samples, self.microbatch_size)
        own = owned_microbatches(len(blocks), self.world_size, self.rank, self.num_slots, self.turns)
        return len(blocks), [(number, *blocks[number]) for number in own]

    def make_batch(self, samples: list[Any], labels: Sequence[int], epoch: int, place: int) -> Any:
        """Collate a microbatch.

        Args:
            samples: its samples.
            labels: what to call them in a message: indices, or places in a stream.
            epoch, place: where the microbatch starts, for random numbers that a user's collate draws.
        """
        if self.collate is not None:
            seed_generators(self.seed, epoch, "collate", place)
            try:
                return self.collate(samples)
            except Exception as error:
                error.add_note(f"while collating samples {list(labels)} of {self.name}")
                raise
        if lists := _list_fields(samples[0]) if samples else "":
            raise PacelineError(
                "PL258",
                saw=f"sample {labels[0]} of {self.name} has a list of numbers ({lists}).",
                rule="torch's collate would make one tensor of each place in the list.",
                fix="Return torch.tensor(...) from the data set (of a dataset of Hugging Face: "
                '.with_format("torch")), or pass a collate function to the loader.',
            )
        try:
            return default_collate(samples)
        except Exception as error:
            raise _uncollatable(self.name, samples, labels, error) from error


class SetFetcher(Fetcher):
    """A fetcher for data sets with `__getitem__` and `__len__`; see `Fetcher`.

    Args:
        num_samples: length of the data set.
        shuffle: whether an epoch's order is shuffled.
    """

    def __init__(self, dataset: Any, *, num_samples: int, shuffle: bool, **options: Any) -> None:
        super().__init__(dataset, **options)
        self.num_samples = num_samples
        self.shuffle = shuffle

    def fetch(self, key: Key) -> Item:
        self.pass_epoch(key.epoch)
        num_samples = key.stop - key.start
        num_microbatches, blocks = self.own_blocks(num_samples)
        first = blocks[0][1] if blocks else 0
        own_order = self._order(key, first, blocks[-1][2] if blocks else 0)
        microbatches: list[tuple[int, Any]] = []
        read: list[Any] = []
        for number, start, stop in blocks:
            place = key.start + start
            indices = own_order[start - first : stop - first]
            samples = self.read(indices, key.epoch, place)
            microbatches.append((number, self.make_batch(samples, indices, key.epoch, place)))
            read += samples if self.compares else ()
        return Item(
            *(key.epoch, key.number, key.start, num_samples, num_microbatches, microbatches, key.last),
            digests=digest_fields(read),
        )

    def _order(self, key: Key, start: int, stop: int) -> list[int]:
        """Return the indices at places `start` to `stop` of a global batch."""
        places = (key.start + start, key.start + stop)
        order = order_slice(self.num_samples, *places, seed=self.seed, epoch=key.epoch, shuffle=self.shuffle)
        return [int(index) for index in order]

    def read(self, indices: list[int], epoch: int, place: int) -> list[Any]:
        """Read samples, each with its own random numbers (with those of `place` if `__getitems__` reads
        them)."""
        get_items = getattr(self.dataset, "__getitems__", None)
        if callable(get_items):
            seed_generators(self.seed, epoch, "microbatch", place)
            try:
                samples = list(get_items(indices))
            except Exception as error:
                error.add_note(f"while reading samples {indices} of {self.name}")
                raise
            if len(samples) != len(indices):
                raise PacelineError(
                    "PL264",
                    saw=f"{self.name}.__getitems__ returned {len(samples)} samples for {len(indices)} "
                    "indices.",
                    rule="It must return one sample per index, in the order of the indices.",
                    fix="Correct __getitems__, or remove it; __getitem__ is enough.",
                )
            return samples
        samples = []
        for index in indices:
            seed_generators(self.seed, epoch, "sample", index)
            try:
                samples.append(self.dataset[index])
            except Exception as error:
                error.add_note(f"while reading sample {index} of {self.name}")
                raise
        return samples


class StreamFetcher(Fetcher):
    """A fetcher for data sets that can only be iterated over; see `Fetcher`.

    Every worker of every rank reads the whole stream and keeps its own part. So each sample is used once for
    any number of workers, provided that the stream is the same for all of them. To ensure this, torch's
    `get_worker_info()` returns None inside the stream, because one that shards itself by worker would
    silently lose samples. The stream's random numbers have their own generators, seeded from (seed, epoch)
    when it is opened.

    Args:
        drop_last: whether a ragged end is left out.
    """

    def __init__(self, dataset: Any, *, drop_last: bool, **options: Any) -> None:
        super().__init__(dataset, **options)
        self.drop_last = drop_last
        self._epoch: int | None = None
        self._stream: Iterator[Any] = iter(())
        self._place = 0  # Of the next sample that is not taken.
        self._ahead: deque[Any] = deque()  # samples from there on, read to see whether the stream ends
        self._generators: _GeneratorStates | None = None

    def fetch(self, key: Key) -> Item:
        size = key.stop - key.start
        with self._stream_generators(key.epoch):
            if self._epoch != key.epoch or key.start < self._place:
                self._open(key.epoch)
            self._skip_to(key.start)
            # One more sample shows whether this batch is the last; a ragged one to drop needs a whole batch
            # more.
            wanted = 2 * size if self.drop_last else size + 1
            self._ahead.extend(self._next(wanted - len(self._ahead)))
        last = len(self._ahead) < wanted
        if len(self._ahead) < (size if self.drop_last else 1):
            return Item(key.epoch, key.number, self._place, 0, 0, [], True, {})
        samples = [self._ahead.popleft() for _ in range(min(size, len(self._ahead)))]
        digests = digest_fields(samples) if self.compares else {}  # before a collate function changes them
        self._place += len(samples)
        num_microbatches, blocks = self.own_blocks(len(samples))
        microbatches = []
        for number, start, stop in blocks:
            place = key.start + start
            labels = range(place, key.start + stop)
            microbatches.append((number, self.make_batch(samples[start:stop], labels, key.epoch, place)))
        return Item(
            *(key.epoch, key.number, key.start, len(samples), num_microbatches, microbatches, last), digests
        )

    def find_random_fields(self, epoch: int) -> set[str]:
        """Read the first samples of an epoch twice, and return the fields that differ. Only for a stream
        whose ranks differ: it is then opened again."""
        readings = []
        for _ in range(2):
            with preserved_generators():
                self._open(epoch)
                readings.append(digest_fields(list(self._next(NUM_COMPARED))))
                self._epoch = None
        first, second = readings
        return {name for name in {*first, *second} if first.get(name) != second.get(name)}

    def _open(self, epoch: int) -> None:
        forget_worker()
        self.pass_epoch(epoch)
        seed_generators(self.seed, epoch, "stream", 0)
        self._epoch, self._place = epoch, 0
        self._ahead.clear()
        self._stream = iter(self.dataset)

    def _skip_to(self, place: int) -> None:
        while self._ahead and self._place < place:
            self._ahead.popleft()
            self._place += 1
        for _ in self._next(place - self._place):
            self._place += 1

    def _next(self, count: int) -> Iterator[Any]:
        try:
            yield from itertools.islice(self._stream, max(count, 0))
        except Exception as error:
            error.add_note(f"while reading {self.name} after sample {self._place + len(self._ahead)}")
            raise

    @contextlib.contextmanager
    def _stream_generators(self, epoch: int) -> Iterator[None]:
        # Batches must not affect the stream, so its generators continue where they were.
        if self._generators is not None and self._epoch == epoch:
            self._generators.restore()
        try:
            yield
        except Exception:
            self._epoch = None  # A broken iterator looks like an ended one: open it anew next time.
            raise
        self._generators = _GeneratorStates()


def seed_generators(seed: int, epoch: int, what: str, place: int) -> None:
    """Seed the global CPU generators of `random`, numpy and torch from a hash of the arguments."""
    text = f"{seed}:{epoch}:{what}:{place}"
    number = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
    random.seed(number)
    np.random.seed(number & 0xFFFFFFFF)
    torch.default_generator.manual_seed(number & 0x7FFFFFFFFFFFFFFF)


class _GeneratorStates:
    """The states of the global CPU generators when it was created."""

    def __init__(self) -> None:
        self.python = random.getstate()
        self.numpy = np.random.get_state()
        self.torch = torch.default_generator.get_state()

    def restore(self) -> None:
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.default_generator.set_state(self.torch)


def _list_fields(sample: Any) -> str:
    """Return the fields of a sample that are lists of three or more whole numbers, such as tokens."""
    fields = list_fields(sample) if not _is_list(sample) else [("the sample", sample)]
    return ", ".join(name for name, value in fields if _is_list(value))


def _is_list(value: Any) -> bool:
    return isinstance(value, list) and len(value) > 2 and all(type(each) is int for each in value)


def _uncollatable(name: str, samples: list[Any], labels: Sequence[int], error: Exception) -> PacelineError:
    """Return PL258, naming the first sample that fails to collate alone or together with the first one."""

    def fails(*some: Any) -> bool:
        try:
            default_collate(list(some))
        except Exception:
            return True
        return False

    alone = [label for label, sample in zip(labels, samples, strict=True) if fails(sample)]
    if alone:
        saw = f"sample {alone[0]} of {name} cannot be made into a batch: {error}."
    else:
        odd = [n for n, sample in enumerate(samples) if fails(samples[0], sample)]
        saw = f"samples {list(labels)} of {name} cannot be made into a batch: {error}."
        if odd:
            saw = f"sample {labels[odd[0]]} of {name} does not match sample {labels[0]}: {error}."
    return PacelineError(
        "PL258",
        saw=saw,
        rule="Samples are tensors, numbers, texts, or dicts, tuples and lists of these, of equal shapes.",
        fix="Pad or crop them in the data set, or pass a collate function to the loader.",
    )
