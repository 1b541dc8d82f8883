"""Yields each rank its share of every global batch, and tracks the run's position in the data.

The order of samples depends on (seed, epoch) only (`permutation.py`). A global batch is the next
`global_batch_size` samples of it, cut into microbatches (`share.py`), and each rank fetches those that it
computes on. So each sample is used exactly once per epoch, the ragged end included, and a position (epoch,
samples) means the same on any number of ranks.

    for epoch in range(loader.epoch, 3):
        for share in loader:
            trainer.step(share)

Position: it moves when the trainer marks a share as consumed (`mark_consumed`), not when one is prefetched or
yielded, so a checkpoint never skips samples that no step has used. A share that the user skips counts as
consumed with the next one that is. Iterating again after a break continues after the last consumed share.
Iterating to the end finishes the epoch, whether or not anything was marked: without a trainer the loader
behaves like any other, with a full pass per `for`.
"""

from __future__ import annotations

import collections.abc
import itertools
import os
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch
from torch.utils.data import DataLoader, IterableDataset

from paceline.data.fetching import Collate, Fetcher, Item, Key, SetFetcher, StreamFetcher
from paceline.data.fingerprint import fingerprint_data
from paceline.data.own_shards import Exchange, count_own_samples, join_own, moved_error
from paceline.data.sampled import Sampled
from paceline.data.share import Share, count_owned, split_microbatches
from paceline.data.workers import end_workers, let_workers_be_killed, prepare_worker
from paceline.errors import PacelineError
from paceline.seeds import derive_seed

__all__ = ["Loader", "Position", "Share"]


class Position(NamedTuple):
    """The place where the next global batch starts.

    Attributes:
        epoch: the pass over the data, from 0.
        number: global batches of this epoch consumed.
        samples: samples of this epoch consumed. The truth when the global batch size changes.
        by_rank: samples of this epoch that each data rank has consumed of its own data; only with
            `shard="mine"`, and empty at the start of an epoch.
    """

    epoch: int = 0
    number: int = 0
    samples: int = 0
    by_rank: tuple[int, ...] = ()


class Loader:
    """An iterable over `Share`s, one per global batch; its position is saved and restored on any number of
    ranks.

    Data sets with `__getitem__` and `__len__` are shuffled; `__getitems__` is used if it exists. Any other
    iterable is a stream: every worker of every rank reads all of it and keeps its own part (batches alternate
    between workers). Resuming reads it again up to the position, which takes as long as the first time. A
    stream must be the same on every rank and on every reading of an epoch; ranks compare samples of every
    global batch. The data set's `set_epoch(epoch)` is called if it exists, in the workers too.

    Data that each rank has a part of already (own files, `split_dataset_by_node`) need `shard="mine"`. Each
    rank then draws its part of every global batch from its own data, in its own order. A rank whose data end
    first gives no more samples, so the last global batches are smaller; with `drop_last` the epoch ends
    there. Iterating is collective, with one small collective per global batch. The position is exact on
    the same number of data ranks; on another number only the start of an epoch can be resumed (PL669).

    Resuming a run compares its data: a data set with a `content_hash` (a text) by that, any other with an
    index by a few samples (`fingerprint.py`).

    Augmentation by the global generators of `random`, numpy and torch does not depend on the number of
    ranks or workers (`fetching.py`), and the rank's own generators are left as they were.

    Without `epochs`, each iteration yields the rest of the current epoch. With `epochs=N`, one iteration
    continues to the end of the N-th epoch, resumed or not. Only one iteration may run at a time, and none
    may begin after the N-th epoch, except as the first one of a resumed run.

    Args:
        dataset: the data; see above.
        global_batch_size: samples per step over all ranks.
        microbatch_size: samples per forward; the unit that ranks share out.
        rank, world_size: who this is among those that share the data out.
        num_slots, turns: how microbatches are distributed, see `owned_microbatches`; without effect on data
            that are this rank's own.
        seed: seed of the order and of augmentation.
        shuffle: default True for data sets with an index, False for streams, which cannot be.
        drop_last: leave out a ragged global batch at the end of an epoch.
        epochs: passes in all; default: one per iteration.
        num_workers: worker processes; 0 loads in the rank itself. They live as long as the loader.
        prefetch: global batches that each worker loads ahead.
        pin_memory: page-locked memory; "auto": where there is a GPU.
        collate: makes a microbatch of a list of samples; default torch's `default_collate`.
        name: what messages call the data.
        compares: whether shares of a stream carry digests of its samples, which ranks compare.
        exchange: gathers a row of numbers from every data rank, for data that are this rank's own.

    Raises:
        PacelineError: PL250 to PL257, PL263 for bad arguments; while iterating PL258 to PL264.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        global_batch_size: int,
        microbatch_size: int,
        rank: int = 0,
        world_size: int = 1,
        num_slots: int | None = None,
        turns: int = 1,
        seed: int = 0,
        shuffle: bool | None = None,
        drop_last: bool = False,
        epochs: int | None = None,
        num_workers: int = 0,
        prefetch: int = 2,
        pin_memory: bool | Literal["auto"] = False,
        collate: Collate | None = None,
        name: str = "the data set",
        compares: bool = False,
        exchange: Exchange | None = None,
    ) -> None:
        _check_number("global_batch_size", global_batch_size, 1)
        _check_number("microbatch_size", microbatch_size, 1)
        _check_number("world_size", world_size, 1)
        _check_number("rank", rank, 0)
        _check_number("num_workers", num_workers, 0)
        _check_number("prefetch", prefetch, 1)
        if epochs is not None:
            _check_number("epochs", epochs, 1)
        if rank >= world_size:
            raise PacelineError(
                "PL252",
                saw=f"rank={rank} with world_size={world_size}.",
                rule="Ranks are numbered from 0 to world_size - 1.",
                fix="Pass the rank and world size of the run, or use trainer.loader(...).",
            )
        if microbatch_size > global_batch_size:
            raise PacelineError(
                "PL108",
                saw=f"microbatch_size={microbatch_size} is more than global_batch_size={global_batch_size}.",
                rule="A global batch is cut into microbatches.",
                fix=f"Set microbatch_size to {global_batch_size} or less.",
            )
        self.name, self.dataset = name, dataset
        self.random_fields: set[str] = set()
        self._exchange, self._rank, self._world_size = exchange, rank, world_size
        self._drawn_size = global_batch_size
        if exchange is not None:
            sizes = (global_batch_size, microbatch_size, world_size)
            self._drawn_size = count_own_samples(*sizes, rank=rank, num_slots=num_slots)
        self.num_samples = _count_samples(dataset, name)
        self.global_batch_size = global_batch_size
        self.microbatch_size = microbatch_size
        self.seed = seed
        self.shuffle = self._choose_shuffle(shuffle)
        self.drop_last = drop_last
        self.epochs = epochs
        self.num_workers = num_workers
        if drop_last and self.num_samples is not None and self.num_samples < self._drawn_size:
            raise PacelineError(
                "PL257",
                saw=f"drop_last=True with {self.num_samples} samples and "
                f"global_batch_size={global_batch_size}.",
                rule="An epoch without a full batch would be empty.",
                fix=f"Set drop_last=False, or global_batch_size to {self.num_samples} or less.",
            )
        self._position, self._first_epoch, self._has_begun = Position(), 0, False
        self._turn = 0
        self._sampler = _Sampler()
        self._fetcher = self._build_fetcher(dataset, rank, world_size, num_slots, turns, collate, compares)
        self._torch_loader = self._build_torch_loader(num_workers, prefetch, _choose_pinning(pin_memory))
        # Holds torch's loader until ours is deleted: in a garbage cycle its queues would go first, and ending
        # each worker would take 10 s. So nothing in torch's loader may refer to ours.
        weakref.finalize(self, end_workers, self._torch_loader, os.getpid())

    def __repr__(self) -> str:
        size = "a stream" if self.num_samples is None else f"{self.num_samples} samples"
        return (
            f"Loader({self.name}: {size} in batches of {self.global_batch_size}, microbatches of "
            f"{self.microbatch_size}; epoch {self.epoch}, batch {self._position.number})"
        )

    @property
    def epoch(self) -> int:
        """The epoch that the next global batch belongs to, from 0."""
        return self._position.epoch

    @cached_property
    def content_hash(self) -> str | None:
        """A hash of the data's content, or None; reads some samples on first use."""
        return None if self.is_own else fingerprint_data(self._fetcher, self.num_workers)

    @property
    def is_own(self) -> bool:
        """Whether the data are this rank's own part, rather than the whole data."""
        return self._exchange is not None

    @property
    def has_moved(self) -> bool:
        """Whether a global batch was consumed, or a position restored."""
        return self._position != Position(self._first_epoch)

    def begin_with(self, epoch: int) -> None:
        """Start with this epoch and count `epochs` from there, unless the loader has begun."""
        if not self._has_begun and not self.has_moved:
            self._position, self._first_epoch = Position(epoch), epoch

    @property
    def is_complete(self) -> bool:
        """Whether all `epochs` were given out."""
        return self._last_epoch is not None and self.epoch >= self._last_epoch

    @property
    def position(self) -> Position:
        """The place where the next global batch starts."""
        return self._position

    def __len__(self) -> int:
        """Return the number of global batches in a full epoch; raise a TypeError for streams."""
        if self.num_samples is None or self.is_own:
            kind = "divided by the user" if self.is_own else "a stream"
            raise TypeError(f"{self.name} is {kind}, so its length is not known in advance.")
        if isinstance(self.dataset, Sampled) and self.dataset.num_batches is not None:
            return self.dataset.num_batches
        return _count_batches(self.num_samples, self.global_batch_size, self.drop_last)

    def __iter__(self) -> Iterator[Share]:
        if self._has_begun and self.is_complete:
            raise PacelineError(
                "PL261",
                saw=f"{self.name} was iterated over again, after its epochs={self.epochs}.",
                rule="epochs= counts the passes of the whole run, so that a resumed run knows what is left. "
                "One iteration makes all of them.",
                fix="Set epochs= to the number of passes and iterate once. Or leave epochs out, and iterate "
                "once per epoch: for epoch in range(loader.epoch, 3).",
            )
        self._has_begun = True
        self._turn += 1
        self._fetcher.known_epoch = None  # Another loader over the same data set may have set another epoch.
        return self._give_out(self._turn)

    def mark_consumed(self, share: Share) -> None:
        """Move the position behind this share; the trainer calls it after the step. A share that was
        marked before changes nothing."""
        assert share.source is self, "a share goes back to the loader that yielded it"
        if share.last:
            behind = Position(share.epoch + 1)
        else:
            behind = Position(share.epoch, share.number + 1, share.start + share.num_samples, share.by_rank)
        self._position = max(self._position, behind)

    def iterate_once(self) -> Iterator[Share]:
        """Return the whole of epoch 0, without moving the position: each pass has the same samples with the
        same random numbers, as evaluation wants them. Ends another iteration under way."""
        self._turn += 1
        self._fetcher.known_epoch = None
        return self._give_out_epoch(Position(), self._turn, source=None)

    def state_dict(self) -> dict[str, Any]:
        """Return the position and the settings behind it, as JSON-able values; the same on every rank."""
        own: dict[str, Any] = {"by_rank": list(self._position.by_rank)} if self.is_own else {}
        own |= {"first_epoch": self._first_epoch} if self._first_epoch else {}
        return own | {
            "kind": self._kind,
            "num_samples": None if self.is_own else self.num_samples,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "global_batch_size": self.global_batch_size,
            "epoch": self._position.epoch,
            "number": self._position.number,
            "samples": self._position.samples,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where a loader stopped, on any number of ranks, workers and microbatches. With another
        global batch size it continues with the next sample, and batches are cut anew from there.

        Raises:
            PacelineError: PL260 not such a state; PL259 of other data or of another order; PL669 of ranks'
                own data on another number of them.
        """
        expected = self.state_dict()
        by_rank = tuple(state.get("by_rank", ()))
        missing = [key for key in expected if key not in state and key not in ("by_rank", "first_epoch")]
        counts = {key: state.get(key) for key in ("epoch", "number", "samples", "global_batch_size")}
        if missing or any(type(count) is not int or count < 0 for count in counts.values()):
            raise PacelineError(
                "PL260",
                saw=f"loader state {dict(state)!r}.",
                rule=f"It must have {', '.join(expected)}, as returned by state_dict().",
                fix="Pass what state_dict() of a loader returned.",
            )
        for key in ("kind", "num_samples", "seed", "shuffle"):
            if state[key] != expected[key]:
                raise PacelineError(
                    "PL259",
                    saw=f"{key} of {self.name} was {state[key]!r} and is {expected[key]!r}.",
                    rule="A position means the same samples only for the same data in the same order.",
                    fix=f"Go back to {key}={state[key]!r}, or start a new run.",
                )
        if by_rank and len(by_rank) != self._world_size:
            raise moved_error(self.name, counts, len(by_rank), self._world_size)
        self._turn += 1
        position = Position(counts["epoch"] or 0, counts["number"] or 0, counts["samples"] or 0, by_rank)
        if self.num_samples is not None and not self.is_own:
            num_left = self.num_samples - position.samples
            if not _count_batches(num_left, self.global_batch_size, self.drop_last):
                position = Position(position.epoch + 1)  # The rest is less than a batch and is dropped.
        self._position, self._first_epoch = position, state.get("first_epoch", 0)

    def close(self) -> None:
        """End the workers. Iterating again starts new ones."""
        self._turn += 1
        end_workers(self._torch_loader, os.getpid())

    def find_random_fields(self, epoch: int) -> set[str]:
        """Return the fields of a stream's samples that differ if they are read again."""
        assert isinstance(self._fetcher, StreamFetcher)
        return self._fetcher.find_random_fields(epoch)

    @property
    def _last_epoch(self) -> int | None:
        """The epoch at which the iteration ends."""
        return None if self.epochs is None else self._first_epoch + self.epochs

    def _give_out(self, turn: int) -> Iterator[Share]:
        while self._last_epoch is None or self._position.epoch < self._last_epoch:
            self._check_turn(turn)
            epoch = self._position.epoch
            yield from self._give_out_epoch(self._position, turn, source=self)
            self._position = max(self._position, Position(epoch + 1))
            if self.epochs is None:
                return

    def _give_out_epoch(self, start: Position, turn: int, source: Loader | None) -> Iterator[Share]:
        if self.is_own:
            for share in self._join_own(start):
                yield replace(share, source=source)
                self._check_turn(turn)
            return
        for item in self._fetch_epoch(start):
            num_owned = count_owned(item.num_microbatches, self._fetcher.world_size, self._fetcher.num_slots)
            cuts = split_microbatches(item.num_samples, self.microbatch_size)
            yield Share(
                epoch=item.epoch,
                number=item.number,
                num_samples=item.num_samples,
                num_owned=num_owned,
                microbatches=item.microbatches,
                samples=[range(*cuts[number]) for number, _ in item.microbatches],
                start=item.start,
                last=item.last,
                source=source,
                digests=item.digests,
                turns=self._fetcher.turns,
            )
            self._check_turn(turn)
            if item.last:
                return

    def _join_own(self, start: Position) -> Iterator[Share]:
        by_rank = start.by_rank or (0,) * self._world_size
        items = self._fetch_epoch(start._replace(samples=by_rank[self._rank]))
        first = Share(start.epoch, start.number, 0, (), [], start=start.samples, by_rank=by_rank)
        assert self._exchange is not None
        return join_own(items, first, self._rank, self.microbatch_size, self.drop_last, self._exchange)

    def _fetch_epoch(self, start: Position) -> Iterator[Item]:
        """Yield the items from a position to the end of its epoch, as the workers deliver them."""
        stops = self.dataset.list_stops(start.epoch) if isinstance(self.dataset, Sampled) else None
        if stops is None:
            self._sampler.keys = _list_keys(start, self._drawn_size, self.num_samples, self.drop_last)
        else:
            self._sampler.keys = _list_cut_keys(start, stops)
        with warnings.catch_warnings():
            _ignore_worker_warnings()
            items = iter(self._torch_loader)
        let_workers_be_killed(items)
        for item in items:
            if isinstance(item, PacelineError):
                raise item
            if item.num_samples:
                yield item
                continue
            if item.start == 0 or item.start < start.samples:
                raise self._short_stream(item.start, start)
            return

    @property
    def _kind(self) -> str:
        return ("own " if self.is_own else "") + ("stream" if self.num_samples is None else "set")

    def _choose_shuffle(self, shuffle: bool | None) -> bool:
        if self.num_samples is not None:
            return shuffle is not False
        if shuffle:
            raise PacelineError(
                "PL255",
                saw=f"shuffle=True, but {self.name} is a stream.",
                rule="A stream is read in its own order; its samples cannot be shuffled without an index.",
                fix="Leave shuffle out, and shuffle in the stream, seeded in its set_epoch(epoch).",
            )
        return False

    def _build_fetcher(
        self,
        dataset: Any,
        rank: int,
        world_size: int,
        num_slots: int | None,
        turns: int,
        collate: Collate | None,
        compares: bool,
    ) -> Fetcher:
        if self.is_own:  # the fetcher then yields all that it reads
            rank, world_size, turns = 0, 1, 1
        options = {
            "name": self.name,
            "microbatch_size": self.microbatch_size,
            "rank": rank,
            "world_size": world_size,
            "num_slots": num_slots,
            "turns": turns,
            # Otherwise ranks would draw the same order, and the same random numbers for other samples.
            "seed": derive_seed(self.seed, "own", self._rank) if self.is_own else self.seed,
            "collate": collate,
            "compares": self.is_own or (compares and self.num_samples is None),
        }
        if self.num_samples is None:
            return StreamFetcher(dataset, drop_last=self.drop_last, **options)
        return SetFetcher(dataset, num_samples=self.num_samples, shuffle=self.shuffle, **options)

    def _build_torch_loader(self, num_workers: int, prefetch: int, pin_memory: bool) -> DataLoader[Any]:
        with warnings.catch_warnings():
            _ignore_worker_warnings()
            return DataLoader(
                self._fetcher,
                batch_size=None,
                sampler=self._sampler,
                collate_fn=_keep,
                num_workers=num_workers,
                prefetch_factor=prefetch if num_workers else None,
                persistent_workers=num_workers > 0,
                pin_memory=pin_memory,
                worker_init_fn=prepare_worker,
                generator=torch.Generator(),  # Otherwise it draws from the rank's own generator.
            )

    def _check_turn(self, turn: int) -> None:
        if turn != self._turn:
            raise PacelineError(
                "PL261",
                saw=f"{self.name} was iterated over, restored or closed inside another iteration over it.",
                rule="A loader has one position.",
                fix="Leave the outer loop first, or make a second loader for the inner one.",
            )

    def _short_stream(self, num_samples: int, start: Position) -> PacelineError:
        if num_samples < start.samples:
            return PacelineError(
                "PL259",
                saw=f"{self.name} ended after {num_samples} samples, but the run is at sample "
                f"{start.samples}.",
                rule="A stream must yield the same samples each time that an epoch is read.",
                fix="Restore the data that the run was started with, or start a new run.",
            )
        return PacelineError(
            "PL253",
            saw=f"{self.name} yielded no full batch in epoch {start.epoch}."
            if self.drop_last
            else f"{self.name} yielded no sample in epoch {start.epoch}.",
            rule="A stream must yield samples each time that it is iterated over.",
            fix="Make its __iter__ start from the beginning, and check its files.",
        )


class _Sampler:
    """A sampler that passes torch's loader the keys of the current epoch; torch asks anew per iteration."""

    def __init__(self) -> None:
        self.keys: Iterator[Key] = iter(())

    def __iter__(self) -> Iterator[Key]:
        return self.keys


def _keep(item: Any) -> Any:
    """Return an item unchanged, unlike torch's `default_convert`, which turns a user's arrays into
    tensors."""
    return item


def _list_keys(
    start: Position, global_batch_size: int, num_samples: int | None, drop_last: bool
) -> Iterator[Key]:
    """Yield the global batches from a position to the end of its epoch; without end for a stream, as only a
    worker sees where that ends."""
    epoch, number, samples, _ = start
    num_batches = None
    if num_samples is not None:
        num_batches = _count_batches(num_samples - samples, global_batch_size, drop_last)
    for batch in itertools.count() if num_batches is None else range(num_batches):
        stop = samples + global_batch_size
        if num_samples is not None:
            stop = min(stop, num_samples)
        yield Key(epoch, number + batch, samples, stop, batch + 1 == num_batches)
        samples = stop


def _list_cut_keys(start: Position, stops: Sequence[int]) -> Iterator[Key]:
    """Yield the global batches of data that are cut already, given by the places after them."""
    for number, (first, stop) in enumerate(itertools.pairwise((0, *stops))):
        if stop > start.samples:
            yield Key(start.epoch, number, max(first, start.samples), stop, stop == stops[-1])


def _count_batches(num_samples: int, global_batch_size: int, drop_last: bool) -> int:
    return num_samples // global_batch_size if drop_last else -(-num_samples // global_batch_size)


def _ignore_worker_warnings() -> None:
    """Ignore two warnings: the number of workers is the user's choice, and forking beside threads is
    torch's."""
    warnings.filterwarnings("ignore", message="This DataLoader will create")
    warnings.filterwarnings("ignore", message=".*use of fork", category=DeprecationWarning)


def _check_number(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise PacelineError(
            "PL250",
            saw=f"{name}={value!r}.",
            rule=f"It is a whole number of at least {least}.",
            fix=f"Set {name}={least} or more.",
        )


def _choose_pinning(pin_memory: bool | Literal["auto"]) -> bool:
    if pin_memory == "auto":
        return torch.cuda.is_available()
    if pin_memory and not torch.accelerator.is_available():
        raise PacelineError(
            "PL263",
            saw="pin_memory=True on a machine without a GPU.",
            rule="Page-locked memory only serves copies to a GPU.",
            fix='Set pin_memory="auto".',
        )
    return bool(pin_memory)


def _count_samples(dataset: Any, name: str) -> int | None:
    """Return the length of a data set with an index, None for a stream."""
    if isinstance(dataset, collections.abc.Iterator):
        raise PacelineError(
            "PL256",
            saw=f"{name} is a {type(dataset).__name__}, which can be read only once.",
            rule="Every epoch, and every resumed run, reads the data from the beginning.",
            fix="Pass an object whose __iter__ starts from the beginning each time, for example a torch "
            "IterableDataset.",
        )
    has_index = hasattr(dataset, "__getitem__") and not isinstance(dataset, IterableDataset)
    if has_index and hasattr(dataset, "__len__"):
        num_samples = len(dataset)
        if num_samples == 0:
            raise PacelineError(
                "PL253",
                saw=f"{name} has 0 samples.",
                rule="There is nothing to train on.",
                fix="Check its files and filters.",
            )
        return num_samples
    if not hasattr(dataset, "__iter__"):
        saw = "__getitem__ but no __len__" if has_index else "neither __getitem__ and __len__ nor __iter__"
        raise PacelineError(
            "PL254",
            saw=f"{name}, a {type(dataset).__name__}, has {saw}.",
            rule="Data has an index (__getitem__ and __len__) or is a stream (__iter__).",
            fix="Add a __len__ that returns the number of samples." if has_index else "Pass a torch Dataset.",
        )
    return None
