"""Which device a rank computes on, with tables of devices that are made up."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from paceline import world
from paceline.devices import SeenDevices, choose_alone, choose_devices, see_devices
from paceline.errors import PacelineError
from paceline.place import RankPlace
from paceline.world import start
from tests.dist.pool import Pool, RankError

H100, A100 = "NVIDIA H100", "NVIDIA A100"


@pytest.mark.parametrize(("backend", "bound"), [("gloo", None), ("cpu:gloo,cuda:nccl", "cuda:1")])
def test_a_device_is_bound_with_nccl_alone(backend: str, bound: str | None) -> None:
    """With one bound, torch splits the world's group for each axis, which gloo has no way to do."""
    with mock.patch.object(dist, "init_process_group") as init:
        place = RankPlace(launcher="torchrun", rank=0, world_size=2, local_rank=0, local_world_size=2)
        world._init_group(mock.Mock(), place, backend, torch.device("cuda", 1), 5.0)
    assert str(init.call_args.kwargs["device_id"]) == str(bound)


def node(number: int, num_ranks: int, uuids: str, *, name: str = H100, **settings: Any) -> list[SeenDevices]:
    """Return the ranks of a node that all see the same devices; one letter stands for each."""
    names = (name,) * len(uuids)
    seen = SeenDevices("auto", False, f"host{number}", number, 0, num_ranks, names, tuple(uuids))
    return [replace(seen, **{"local_rank": rank, **settings}) for rank in range(num_ranks)]


def own(number: int, uuids: str, **settings: Any) -> list[SeenDevices]:
    """Return the ranks of a node that each see one device."""
    return [
        replace(rank, uuids=(uuid,), names=(H100,))
        for rank, uuid in zip(node(number, len(uuids), "", **settings), uuids, strict=True)
    ]


def pairs(*uuids: str) -> list[SeenDevices]:
    """Return the ranks of a node that each see two devices."""
    ranks = zip(node(0, len(uuids), ""), uuids, strict=True)
    return [replace(rank, uuids=tuple(pair), names=(H100, H100)) for rank, pair in ranks]


GOOD: dict[str, tuple[list[SeenDevices], list[int | None]]] = {
    "a device per rank": (node(0, 4, "abcd"), [0, 1, 2, 3]),
    "more devices than ranks": (node(0, 2, "abcd"), [0, 1]),
    "two nodes": ([*node(0, 2, "ab"), *node(1, 2, "cd")], [0, 1, 0, 1]),
    "each rank sees its own": (own(0, "abcd"), [0, 0, 0, 0]),
    "each rank sees two of its own": (
        pairs("ab", "cd"),
        [0, 0],
    ),
    "one rank of a node with own devices": ([*own(0, "ab"), *node(1, 1, "cdef")], [0, 0, 0]),
    "no devices": (node(0, 4, ""), [None] * 4),
    "the CPU is asked for": (node(0, 2, "", asked="cpu"), [None, None]),
    "gloo shares a device": (node(0, 3, "a", shares=True), [0, 0, 0]),
    "gloo shares two": (node(0, 4, "ab", shares=True), [0, 1, 0, 1]),
}


@pytest.mark.parametrize("case", GOOD)
def test_ranks_get_a_device_each(case: str) -> None:
    ranks, expected = GOOD[case]
    assert choose_devices(ranks) == expected


BAD: dict[str, tuple[list[SeenDevices], str, str]] = {
    "one has fallen off the bus": (
        node(0, 8, "abcdefg"),
        "PL307",
        "8 ranks on this node, but 7 CUDA devices",
    ),
    "asked for": (node(0, 4, "ab", asked="cuda"), "PL307", "4 ranks on this node, but 2 CUDA devices"),
    "a node has none": (
        [*node(0, 2, "ab"), *node(1, 2, "", trouble="torch cannot use its driver")],
        "PL307",
        "2 ranks on node 1 (host1), but 0 CUDA devices: torch cannot use its driver; another node shows 2",
    ),
    "a node has fewer": (
        [*node(0, 2, "ab"), *node(1, 2, "c")],
        "PL307",
        "2 ranks on node 1 (host1), but 1 CUDA devices; another node shows 2",
    ),
    "all ranks see the same one": (own(0, "aa"), "PL307", "2 ranks on this node, but 1 CUDA devices"),
    "two see one of two": (
        pairs("ab", "ca"),
        "PL307",
        "ranks 0 and 1 would both compute on NVIDIA H100 a of host0",
    ),
    "none": (node(0, 2, "", asked="cuda"), "PL306", "finds no CUDA device"),
    "one rank asks for the CPU": (
        [*node(0, 1, "a", local_world_size=2), *node(0, 1, "", asked="cpu", local_world_size=2)],
        "PL307",
        'device="cpu" on a rank of this node',
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_ranks_without_a_device_of_their_own_are_refused(case: str) -> None:
    ranks, code, saw = BAD[case]
    with pytest.raises(PacelineError) as caught:
        choose_devices(ranks)
    assert caught.value.code == code
    assert saw in caught.value.saw


def test_a_rank_whose_group_exists_takes_its_local_rank_or_its_only_device() -> None:
    assert choose_alone(node(0, 4, "abcd")[2]) == torch.device("cuda", 2)
    assert choose_alone(node(0, 4, "c")[2]) == torch.device("cuda", 0)
    assert choose_alone(node(0, 4, "")[2]) == torch.device("cpu")
    with pytest.raises(PacelineError, match="4 ranks on this node, but 3"):
        choose_alone(node(0, 4, "abc")[1])


@contextmanager
def devices(uuids: str, *, name: str = H100, available: bool = True, forked: bool = False) -> Iterator[None]:
    """Let torch show devices that do not exist."""
    with (
        mock.patch("torch.cuda.device_count", return_value=len(uuids)),
        mock.patch("torch.cuda.is_available", return_value=bool(uuids) and available),
        mock.patch("torch.cuda._is_in_bad_fork", return_value=forked),
        mock.patch(
            "torch.cuda.get_device_properties", lambda number: SimpleNamespace(name=name, uuid=uuids[number])
        ),
    ):
        yield


def test_a_rank_describes_the_devices_that_it_sees() -> None:
    place = RankPlace("mpi", 3, 4, 1, 2, 1, 2)
    with devices("ab"):
        seen = see_devices("auto", None, place)
        assert (seen.names, seen.uuids, seen.trouble) == ((H100, H100), ("a", "b"), "")
        assert (seen.node_rank, seen.local_rank, seen.local_world_size) == (1, 1, 2)
        assert see_devices("cpu", None, place).uuids == ()
        assert [see_devices("auto", name, place).shares for name in (None, "gloo", "cpu:gloo,cuda:nccl")] == [
            False,
            True,
            False,
        ]


def test_a_fork_of_a_process_that_has_asked_for_devices_is_refused() -> None:
    """`torch.cuda.is_available()` in a notebook is enough. On the CPU, and without GPUs, it does no harm."""
    place = RankPlace("single")
    with devices("ab", available=False, forked=True):
        with pytest.raises(PacelineError, match="is_available") as caught:
            see_devices("auto", None, place)
        assert caught.value.code == "PL324"
        assert see_devices("cpu", None, place).uuids == ()
    with devices("", forked=True):
        assert see_devices("auto", None, place).uuids == ()


def test_the_cpu_of_a_machine_with_gpus_is_not_taken_in_silence(caplog: pytest.LogCaptureFixture) -> None:
    with devices("ab", available=False), start() as world:
        assert world.device.type == "cpu"
    [record] = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "training on the CPU of a machine with GPUs" in record.getMessage()
    assert "cannot use its driver" in record.getMessage()
    caplog.clear()
    with start():
        assert not [record for record in caplog.records if record.name == "paceline.devices"]


def start_with(uuids: str) -> None:
    with devices(uuids):
        start(timeout_s=20).close()


def test_every_rank_raises_the_same_error(ranks: Pool) -> None:
    with pytest.raises(RankError) as caught:
        ranks.run(start_with, 3, ("ab",), world=False)
    assert len(caught.value.causes) == 3
    assert len({str(error) for error in caught.value.causes.values()}) == 1
    assert "3 ranks on this node, but 2 CUDA devices" in str(caught.value.causes[0])
