"""Starting a world: one process, ranks that meet or don't, and that nothing is left switched on."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

import paceline.world
from paceline.errors import PacelineError
from paceline.mesh import build_mesh, join_senders
from paceline.place import usable_cores
from paceline.recipe.layout import Layout
from paceline.world import start
from tests.dist.pool import Pool, RankError

TORCH_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in TORCH_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    yield
    assert not dist.is_initialized()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def place_of(rank: int, world_size: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def set_place(monkeypatch: pytest.MonkeyPatch, place: Mapping[str, str]) -> None:
    for name, value in place.items():
        monkeypatch.setenv(name, value)


# ---- one process


def test_a_plain_process_is_a_world_of_one() -> None:
    with start(device="cpu") as world:
        assert (world.rank, world.world_size, world.is_main, world.launcher) == (0, 1, True, "single")
        assert world.device == torch.device("cpu")
        assert world.backend == "gloo"
        x = torch.ones(2)
        dist.all_reduce(x)
        assert x.tolist() == [1, 1]
        assert world.broadcast_object({"a": 1}) == {"a": 1}
        world.barrier()
    assert not dist.is_initialized()


def test_a_world_of_one_opens_no_port(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("opened a store on a port")

    monkeypatch.setattr(dist, "TCPStore", refuse)
    start(device="cpu").close()


def test_close_twice_and_without_with() -> None:
    world = start(device="cpu")
    assert dist.is_initialized()
    world.close()
    world.close()
    assert not dist.is_initialized()


@pytest.mark.parametrize("error", [SystemExit(143), PacelineError("PL999", saw="a", rule="b", fix="c")])
def test_exceptions_pass_unchanged_and_the_group_is_destroyed(error: BaseException) -> None:
    with pytest.raises(type(error)) as caught, start(device="cpu"):
        raise error
    assert caught.value is error
    assert not dist.is_initialized()


def test_a_group_that_exists_is_joined_and_left_alone() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with start(device="cpu") as world:
            assert (world.rank, world.world_size, world.backend) == (0, 1, "gloo")
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()


def test_generators_are_seeded() -> None:
    def draw(seed: int) -> tuple[float, float, float]:
        with start(device="cpu", seed=seed):
            return random.random(), float(np.random.rand()), torch.rand(()).item()

    first = draw(3)
    assert draw(3) == first
    assert all(a != b for a, b in zip(draw(4), first, strict=True))


def test_threads_are_set_and_restored() -> None:
    before = torch.get_num_threads()
    with start(device="cpu", threads_per_rank=before + 1):
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before
    with start(device="cpu"):
        assert torch.get_num_threads() == usable_cores()
    assert torch.get_num_threads() == before


def test_deterministic_is_switched_on_and_back() -> None:
    def state() -> tuple[object, ...]:
        return (
            torch.are_deterministic_algorithms_enabled(),
            torch.utils.deterministic.fill_uninitialized_memory,
            torch.backends.cudnn.deterministic,
            torch.backends.cudnn.benchmark,
        )

    before = state()
    with start(device="cpu", deterministic=True) as world:
        assert world.deterministic
        assert state() == (True, False, True, False)
    assert state() == before


def test_a_failed_start_restores_what_it_switched(monkeypatch: pytest.MonkeyPatch) -> None:
    set_place(monkeypatch, place_of(1, 2, free_port()))
    with pytest.raises(PacelineError):
        start(device="cpu", deterministic=True, timeout_s=0.3)
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize(
    ("settings", "code"),
    [
        ({"device": "tpu"}, "PL305"),
        ({"device": "cuda:1"}, "PL305"),
        ({"device": "cpu", "backend": "carrier-pigeon"}, "PL308"),
        ({"device": "cpu", "backend": "nccl"}, "PL308"),
        ({"timeout_s": 0}, "PL313"),
        ({"timeout_s": -1}, "PL313"),
        ({"timeout_s": float("nan")}, "PL313"),
        ({"seed": -1}, "PL313"),
        ({"seed": 1.5}, "PL400"),
        ({"threads_per_rank": 0}, "PL313"),
        ({"threads_per_rank": "all"}, "PL400"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, object], code: str) -> None:
    with pytest.raises(PacelineError) as caught:
        start(**settings)  # type: ignore[arg-type]
    assert caught.value.code == code
    value = next(reversed(settings.values()))
    assert repr(value) in str(caught.value)


def test_cuda_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(PacelineError, match="finds no CUDA device") as caught:
        start(device="cuda")
    assert caught.value.code == "PL306"
    with start() as world:
        assert world.device.type == "cpu"


def test_threads_in_a_forked_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paceline.world, "FORKED", True)
    with pytest.raises(PacelineError) as caught:
        start(device="cpu", threads_per_rank=2)
    assert caught.value.code == "PL316"
    with start(device="cpu"):
        assert torch.get_num_threads() == 1


# ---- ranks that don't meet


def test_the_port_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        set_place(monkeypatch, place_of(0, 2, port))
        with pytest.raises(PacelineError, match=rf"127.0.0.1:{port}: the port is taken") as caught:
            start(device="cpu", timeout_s=5)
    assert caught.value.code == "PL309"


def test_nobody_there(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    set_place(monkeypatch, place_of(1, 2, port))
    with pytest.raises(PacelineError, match=rf"rank 1 of 2 found no store at 127.0.0.1:{port}") as caught:
        start(device="cpu", timeout_s=0.5)
    assert caught.value.code == "PL310"


def test_no_such_host(monkeypatch: pytest.MonkeyPatch) -> None:
    set_place(monkeypatch, {**place_of(1, 2, 1234), "MASTER_ADDR": "no-such-host.invalid"})
    with pytest.raises(PacelineError, match=r"no-such-host\.invalid:1234") as caught:
        start(device="cpu", timeout_s=0.3)
    assert caught.value.code == "PL310"


def test_missing_ranks_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    set_place(monkeypatch, place_of(0, 3, free_port()))
    with pytest.raises(PacelineError, match=r"1 of 3 ranks met .* missing: rank 1, 2") as caught:
        start(device="cpu", timeout_s=0.5)
    assert caught.value.code == "PL311"


def test_half_set_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(PacelineError, match="Missing: WORLD_SIZE") as caught:
        start()
    assert caught.value.code == "PL300"


# ---- several ranks


def look_around(world):
    return world.rank, world.world_size, world.launcher, world.broadcast_object(world.rank + 5, src=1)


def test_ranks_know_themselves(ranks: Pool) -> None:
    assert ranks.run(look_around, nproc=3) == [(rank, 3, "torchrun", 6) for rank in range(3)]


@pytest.mark.parametrize("nproc", [2, 4])
def test_without_an_agent_rank_0_hosts_the_store(ranks: Pool, nproc: int) -> None:
    """As where somebody sets the variables by hand; rank 0 must not leave while others still read."""
    env = {"TORCHELASTIC_USE_AGENT_STORE": "", "MASTER_PORT": str(free_port())}
    assert [seen[0] for seen in ranks.run(look_around, nproc=nproc, env=env)] == list(range(nproc))


def draw(world):
    return random.random(), torch.rand(2).tolist(), torch.get_num_threads()


def test_all_ranks_draw_the_same(ranks: Pool) -> None:
    first, second = ranks.run(draw, start={"seed": 7, "threads_per_rank": "auto"})
    assert first == second
    assert first[2] == max(1, usable_cores() // 2)


def leave_while_another_is_stuck(world):
    if world.rank == 0:
        raise ValueError("leaving")
    dist.barrier()


def test_an_exception_leaves_although_peers_are_stuck(ranks: Pool) -> None:
    began = time.monotonic()
    with pytest.raises(RankError) as caught:
        ranks.run(leave_while_another_is_stuck, nproc=3, timeout_s=20)
    assert isinstance(caught.value.causes[0], ValueError)
    assert time.monotonic() - began < 12


def start_again(first_to_fail):
    if os.environ["RANK"] == first_to_fail:
        with pytest.raises(RuntimeError):  # nobody else is in that store
            dist.init_process_group(
                "gloo", store=dist.HashStore(), rank=1, world_size=2, timeout=timedelta(seconds=1)
            )
    with start(device="cpu", threads_per_rank=1) as world:
        x = torch.tensor(world.rank)
        dist.all_reduce(x)
        return x.item()


def test_a_rank_that_could_not_start_can_start_again(ranks: Pool) -> None:
    assert ranks.run(start_again, args=("1",), world=False, timeout_s=15) == [1, 1]


def start_beside_a_slow_one():
    """Return when the slow rank had its group, and when the other's start returned."""
    import time

    from paceline import world as module

    init = module._init_group
    connected_s = 0.0

    def init_slowly(*args):
        nonlocal connected_s
        init(*args)
        time.sleep(0.5)
        connected_s = time.monotonic()

    if os.environ["RANK"] == "1":
        module._init_group = init_slowly
    try:
        with start(device="cpu", threads_per_rank=1):
            return connected_s or time.monotonic()
    finally:
        module._init_group = init


def test_no_rank_leaves_while_another_still_connects(ranks: Pool) -> None:
    """Its peer's start would fail with PL312."""
    started_s, connected_s = ranks.run(start_beside_a_slow_one, world=False, timeout_s=15)
    assert started_s > connected_s


def mesh_axes(world, text):
    mesh = build_mesh(Layout.parse(text), world)
    x = torch.ones(1)
    dist.all_reduce(x, group=mesh.dp_replicate.group)
    groups = [axis.group for axis in (*mesh.axes.values(), mesh.dp, mesh.model)]
    groups += [dist.group.WORLD, mesh.borrow_group(mesh.dp), join_senders(world)]
    timeouts = {group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups}
    return mesh.dp_replicate.size, x.item(), timeouts == {world.timeout_s}


@pytest.mark.parametrize("text", ["", "dp_replicate=2"])
def test_groups_of_a_mesh_have_the_timeout_of_the_start(ranks: Pool, text: str) -> None:
    assert ranks.run(mesh_axes, args=(text,)) == [(2, 2.0, True)] * 2


def test_mesh_of_another_size(ranks: Pool) -> None:
    with pytest.raises(RankError) as caught:
        ranks.run(mesh_axes, args=("dp_replicate=3",))
    cause = caught.value.causes[0]
    assert isinstance(cause, PacelineError)
    assert cause.code == "PL113"


# ---- a real launcher

# Rank 0 is late for the second world, whose peers must not take the first one's addresses for its own.
SCRIPT = """
import sys, time, torch, torch.distributed as dist
from paceline.world import start
for late_s in (0, 1):
    if late_s and world.is_main:
        time.sleep(late_s)
    with start(device="cpu", timeout_s=30) as world:
        x = torch.tensor([world.rank + 1])
        dist.all_reduce(x)
        sys.stdout.write(f"{world.launcher} {world.rank} of {world.world_size} sum {x.item()}\\n")
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def test_torchrun(script: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        str(script),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90)
    expected = [f"torchrun {rank} of 2 sum 3" for rank in (0, 0, 1, 1)]
    assert sorted(done.stdout.splitlines()) == expected, done.stderr


@pytest.mark.gpu
def test_cuda() -> None:
    with start() as world:
        assert world.device == torch.device("cuda", 0)
        assert world.backend == "cpu:gloo,cuda:nccl"
        for device in ("cpu", "cuda"):
            x = torch.ones(3, device=device)
            dist.all_reduce(x)
            assert x.tolist() == [1, 1, 1]
        world.barrier()
        assert world.broadcast_object("hi") == "hi"


def test_without_a_world_there_is_no_current_one() -> None:
    with pytest.raises(PacelineError, match=r"paceline\.start\(\).*\[PL315\]"):
        paceline.world.current_world()
