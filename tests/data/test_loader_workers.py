"""The loader with real worker processes."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from paceline.data.loader import Loader
from paceline.data.permutation import order_slice
from paceline.errors import PacelineError
from tests.data.test_loader import (
    Noisy,
    NoisyStream,
    Numbers,
    Stream,
    augmented,
    global_batches,
    make,
    samples_of,
)


class SelfSharding(IterableDataset[int]):
    """Shards itself by worker, as torch's documentation recommends."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        return iter(range(first, 21, step))


class Told(IterableDataset[int]):
    """Gives its epoch and its process."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[dict[str, int]]:
        for number in range(20):
            yield {"number": number, "epoch": self.epoch, "process": os.getpid()}


class ToldSet(Told, Dataset[dict[str, int]]):
    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> dict[str, int]:
        return {"number": index, "epoch": self.epoch, "process": os.getpid()}


class Indexed:
    """`ToldSet` without being iterable."""

    def __init__(self) -> None:
        self.told = ToldSet()

    def set_epoch(self, epoch: int) -> None:
        self.told.set_epoch(epoch)

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> dict[str, int]:
        return self.told[index]


@pytest.mark.parametrize("num_workers", [0, 1, 2])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_each_sample_of_a_stream_once(world_size: int, num_workers: int) -> None:
    """The classic silent bug: every rank, or every worker, gives the whole stream."""
    for dataset in (Stream(21), SelfSharding()):
        loaders = [
            make(dataset, world_size=world_size, rank=rank, num_workers=num_workers)
            for rank in range(world_size)
        ]
        for _ in range(2):
            batches = global_batches([list(loader) for loader in loaders])
            assert batches == [list(range(8)), list(range(8, 16)), list(range(16, 21))]
        for loader in loaders:
            loader.close()


@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_each_sample_of_a_set_once(num_workers: int) -> None:
    loaders = [make(Numbers(21), world_size=2, rank=rank, num_workers=num_workers) for rank in range(2)]
    for epoch in range(2):
        flat = [n for batch in global_batches([list(loader) for loader in loaders]) for n in batch]
        assert flat == order_slice(21, 0, 21, seed=1, epoch=epoch).tolist()


@pytest.mark.parametrize("kind", [Numbers, Stream])
def test_resumed_in_the_middle_with_other_workers(kind: Any) -> None:
    """What workers have loaded ahead is not consumed."""
    state = None
    used: list[int] = []
    for num_workers, num_steps in ((2, 3), (0, 2), (3, 4), (1, 100)):
        loader = make(kind(40), global_batch_size=3, microbatch_size=2, num_workers=num_workers, epochs=2)
        if state is not None:
            loader.load_state_dict(state)
        for number, share in enumerate(loader):
            if number == num_steps:
                break
            used += samples_of(share)
            loader.mark_consumed(share)
        state = loader.state_dict()
        loader.close()
    shuffle = kind is Numbers
    assert used == [
        n for e in range(2) for n in order_slice(40, 0, 40, seed=1, epoch=e, shuffle=shuffle).tolist()
    ]


@pytest.mark.parametrize("kind", [Numbers, Stream])
def test_broken_off_and_iterated_again(kind: Any) -> None:
    """The same worker processes serve again, and nothing that they had loaded ahead comes through."""
    loader = make(kind(40), num_workers=2)
    shares = iter(loader)
    first = next(shares)
    next(shares)
    shares.close()
    loader.mark_consumed(first)
    order = order_slice(40, 0, 40, seed=1, epoch=0, shuffle=kind is Numbers).tolist()
    assert [n for share in loader for n in samples_of(share)] == order[8:]
    assert [share.epoch for share in loader] == [1] * 5


@pytest.mark.parametrize("dataset", [Told(), Indexed()])
def test_workers_stay_and_hear_of_each_epoch(dataset: Any) -> None:
    loader = make(dataset, num_workers=2)
    processes = set()
    for epoch in range(3):
        samples = [sample for share in loader for sample in samples_of(share)]
        assert {sample["epoch"] for sample in samples} == {epoch}
        processes |= {sample["process"] for sample in samples}
    assert len(processes) == 2
    assert os.getpid() not in processes


@pytest.mark.parametrize("dataset", [Noisy(), NoisyStream()])
def test_augmentation_does_not_depend_on_workers(dataset: Any) -> None:
    alone = augmented(dataset, 1)
    assert augmented(dataset, 1, num_workers=2) == alone
    assert augmented(dataset, 2, num_workers=1) == alone


class Broken(Numbers):
    def __getitem__(self, index: int) -> int:
        return self.read_the_file(index)

    def read_the_file(self, index: int) -> int:
        raise ValueError("torn file")


def test_errors_in_workers_show_the_users_lines() -> None:
    loader = make(Broken(9), num_workers=1, shuffle=False)
    with pytest.raises(ValueError, match="torn file") as caught:
        list(loader)
    text = "".join(traceback.format_exception(caught.value))
    assert "in read_the_file" in text
    assert "while reading sample 0 of the data set" in text


def test_our_errors_come_out_of_workers_whole() -> None:
    rows = [{"x": torch.zeros(3 if n != 5 else 4)} for n in range(8)]
    with pytest.raises(PacelineError) as caught:
        list(make(rows, shuffle=False, num_workers=1))
    assert caught.value.code == "PL258"
    assert caught.value.saw.startswith("sample 5 of the data set does not match sample 3")


class Slow(Numbers):
    def __getitem__(self, index: int) -> int:
        time.sleep(0.005)
        return index


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_workers_outlive_the_signals_that_stop_a_run(signum: signal.Signals) -> None:
    """They go to all processes, and the rank still wants to finish its step."""
    loader = make(Slow(60), num_workers=2)
    shares = iter(loader)
    samples = samples_of(next(shares))
    for worker in processes_of(loader):
        os.kill(worker.pid, signum)
    samples += [sample for share in shares for sample in samples_of(share)]
    assert sorted(samples) == list(range(60))


def test_close_ends_the_workers_and_iterating_starts_new_ones() -> None:
    loader = make(Numbers(30), num_workers=2)
    list(loader)
    workers = processes_of(loader)
    assert all(worker.is_alive() for worker in workers)
    loader.close()
    for worker in workers:
        worker.join(10)
    assert not any(worker.is_alive() for worker in workers)
    assert [share.epoch for share in loader] == [1] * 4


def test_a_forgotten_loader_ends_its_workers_at_once() -> None:
    """Also in a garbage cycle, whose parts Python ends in any order."""
    for in_cycle in (False, True):
        loader = make(Numbers(30), num_workers=2)
        shares = iter(loader)
        next(shares)
        workers = processes_of(loader)
        if in_cycle:
            loader.myself = loader  # type: ignore[attr-defined]
        start_s = time.perf_counter()
        del loader, shares
        gc.collect()
        assert time.perf_counter() - start_s < 4
        assert not any(worker.is_alive() for worker in workers)


def test_a_process_that_ends_takes_its_workers_along() -> None:
    code = """
from tests.data.test_loader_workers import Numbers, make, processes_of
loader = make(Numbers(30), num_workers=2)
shares = iter(loader)
next(shares)
print(*[worker.pid for worker in processes_of(loader)])
"""
    start_s = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert time.perf_counter() - start_s < 30
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 2
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


class Large(Numbers):
    """Samples of which a few fill the pipe from a worker to its rank."""

    def __getitem__(self, index: int) -> Any:
        return bytes(1 << 18)


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_a_killed_process_leaves_no_workers(method: str, tmp_path: Path) -> None:
    """They wait for room in a pipe that nobody reads any more, and that never breaks: all hold its end."""
    code = """
import multiprocessing, os, signal, sys, time
multiprocessing.set_start_method(sys.argv[1])
from tests.data.test_loader_workers import Large, make, processes_of
loader = make(Large(300), num_workers=3, prefetch=20)
shares = iter(loader)
next(shares)
time.sleep(0.5)
print(*[worker.pid for worker in processes_of(loader)], flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    # Their output goes to a file: a pipe would stay open with them.
    with (tmp_path / "out").open("w+") as out:
        done = subprocess.run([sys.executable, "-c", code, method], stdout=out, timeout=60, check=False)
        out.seek(0)
        pids = [int(pid) for pid in out.read().split()]
    assert done.returncode == -signal.SIGKILL
    assert len(pids) == 3
    end = time.monotonic() + 15
    while (left := [pid for pid in pids if is_running(pid)]) and time.monotonic() < end:
        time.sleep(0.1)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert left == []


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def processes_of(loader: Loader) -> list[Any]:
    iterator: Any = loader._torch_loader._iterator
    return list(iterator._workers)
