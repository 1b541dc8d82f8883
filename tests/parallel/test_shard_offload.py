"""Offload to disk: the same numbers, and training in less memory than the state needs."""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.errors import PacelineError
from paceline.parallel.shard.disk import Disk
from tests.dist.pool import Pool, RankError
from tests.parallel.sharded import Toy, build_shards, run_step, whole

MIB = 1 << 20


def train(world: Any, layout: str, offload: str, folder: str | None) -> Any:
    """Return weights and AdamW's state after three steps."""
    model = Toy()
    shards, mesh = build_shards(world, layout, model, offload=offload, offload_folder=folder)
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
            {"params": [p for p in model.parameters() if p.dim() > 1 and p.requires_grad]},
        ],
        lr=1e-2,
    )
    for step in range(3):
        run_step(shards, model, mesh.dp.rank, (2, 1), step)
        shards.step(optimizer)
    weights = {name: whole(p.detach()) for name, p in model.named_parameters()}
    state = {
        f"{name}.{key}": whole(value)
        for name, p in model.named_parameters()
        for key, value in optimizer.state.get(p, {}).items()
    }
    in_files = 0
    if shards._disk is not None:
        locals_ = [p.to_local() for p in model.parameters()]
        locals_ += [v.to_local() for s in optimizer.state.values() for v in s.values() if v.dim()]
        in_files = sum(shards._disk.holds(t) or not t.numel() for t in locals_)
        assert in_files == len(locals_)
        assert os.listdir(folder) == [], "the files have no names"
    return weights, state, in_files


@pytest.mark.parametrize("zero", [1, 3])
def test_disk_gives_the_same_numbers(ranks: Pool, tmp_path: Path, zero: int) -> None:
    layout = f"dp_shard=2 zero={zero}"
    expected = ranks.run(train, 2, (layout, "none", None))
    found = ranks.run(train, 2, (layout, "disk", str(tmp_path)))
    for a, b in zip(found, expected, strict=True):
        assert a[2] > 20
        torch.testing.assert_close(a[:2], b[:2], rtol=0, atol=0)


def offload_to_cpu(world: Any) -> list[str]:
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logger = logging.getLogger("paceline.parallel.shard.setup")
    logger.addHandler(handler := Keep())
    logger.setLevel(logging.INFO)
    build_shards(world, "dp_shard=2", Toy(), offload="cpu")
    logger.removeHandler(handler)
    return lines


def test_offload_to_cpu_states_that_it_does_nothing_there(ranks: Pool) -> None:
    assert (
        ranks.run(offload_to_cpu, 2)
        == [["shard: offload=cpu changes nothing for a model that is on the CPU"]] * 2
    )


def refusal(world: Any, folder: str) -> str:
    with pytest.raises(PacelineError) as caught:
        build_shards(world, "dp_shard=2", Toy(), offload="disk", offload_folder=folder)
    return str(caught.value)


def test_folders_that_are_no_use_are_refused(ranks: Pool, tmp_path: Path) -> None:
    missing = str(tmp_path / "missing")
    for message in ranks.run(refusal, 2, (missing,)):
        assert missing in message
        assert "PL445" in message
    shm = Path("/dev/shm")
    if shm.is_dir() and os.access(shm, os.W_OK):
        for message in ranks.run(refusal, 2, (str(shm),)):
            assert "/dev/shm is of type tmpfs" in message
            assert "PL444" in message


class Wide(nn.Module):
    """40 blocks of 4 MiB."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(1024, 1024, bias=False)) for _ in range(40))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + 0.1 * block(x)
        return x


def train_wide(world: Any, offload: str, folder: str, group: str) -> list[float]:
    """Return the losses of three steps with AdamW, in a control group or in none."""
    model = Wide()
    if group:
        (Path(group) / "cgroup.procs").write_text(str(os.getpid()))
    try:
        shards, mesh = build_shards(world, "dp_shard=2", model, offload=offload, offload_folder=folder)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        losses = []
        for _ in range(3):
            for parameter in model.parameters():
                parameter.grad = None
            shards.begin((1, 1))
            with shards.synchronising(True, mesh.dp.rank):
                loss = model(torch.ones(2, 1024)).square().mean()
                shards.backward(loss)
            shards.step(optimizer)
            losses.append(loss.item())
        return losses
    finally:
        if group:
            (Path(group).parent / "cgroup.procs").write_text(str(os.getpid()))


@pytest.fixture
def little_memory() -> Iterator[Path]:
    """A control group with 240 MiB: half of the 480 that parameters and AdamW's state take."""
    own = Path("/proc/self/cgroup").read_text()
    names = [line.split(":")[2] for line in own.splitlines() if line.split(":")[1] == "memory"]
    base = Path("/sys/fs/cgroup/memory" + (names[0].rstrip("/") if names else ""))
    group = base / f"paceline-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(240 * MIB))
    except OSError as error:
        if group.is_dir():
            group.rmdir()
        pytest.skip(f"no control group for memory can be made here: {error}")
    yield group
    (group / "memory.force_empty").write_text("0")
    group.rmdir()


def test_disk_trains_in_half_of_the_memory_of_its_state(
    ranks: Pool, little_memory: Path, tmp_path: Path
) -> None:
    if shutil.disk_usage(tmp_path).free < 2000 * MIB:
        pytest.skip("not enough room on the disk")
    folder, group = str(tmp_path), str(little_memory)
    found = ranks.run(train_wide, 2, ("disk", folder, group), timeout_s=120)
    with pytest.raises(RankError) as caught:
        ranks.run(train_wide, 2, ("none", folder, group), timeout_s=60)
    assert -9 in caught.value.exit_codes.values(), caught.value
    expected = ranks.run(train_wide, 2, ("none", folder, ""), timeout_s=60)
    assert found == expected
    assert expected[0][2] < expected[0][1] < expected[0][0]


def test_memory_at_the_address_of_a_freed_tensor_is_left_alone(tmp_path: Path) -> None:
    """Dropping its pages would zero whatever the heap keeps there."""
    disk = Disk(str(tmp_path))
    moved = disk.move(torch.ones(mmap.PAGESIZE))
    assert disk.holds(moved)
    address, num_bytes = moved.untyped_storage().data_ptr(), moved.untyped_storage().nbytes()
    del moved
    system_mmap = ctypes.CDLL(None).mmap
    system_mmap.restype = ctypes.c_void_p
    system_mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long]
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x100000  # MAP_FIXED_NOREPLACE
    memory = system_mmap(address, num_bytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
    if memory != address:
        pytest.skip("the system has given the address to something else")
    other = torch.frombuffer((ctypes.c_uint8 * num_bytes).from_address(address), dtype=torch.float32)
    other.fill_(7.0)
    assert not disk.holds(other)
    disk.write_back(other)
    assert bool((other == 7.0).all())
