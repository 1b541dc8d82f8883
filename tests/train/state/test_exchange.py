"""Files on their way from disk to disk: what is altered, cut or missing never arrives as a file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from paceline.checkpoint.copies import FileTransfer
from paceline.checkpoint.hashed import FileRecord, hash_file
from paceline.train.state import exchange as exchanging
from paceline.train.state.disks import Disks, SharedDisk
from paceline.train.state.exchange import exchange
from tests.dist.pool import Pool

LENGTH = 60


def send_damaged(world: Any, base: str) -> tuple[list[str], dict[str, str], list[str]]:
    """Rank 0 has files that were damaged after their hashes were taken; each byte once, each length, none."""
    disks = Disks((SharedDisk((0,), "node0"), SharedDisk((1,), "node1")), world.rank)
    folder = Path(base) / str(world.rank)
    folder.mkdir()
    whole = bytes(os.urandom(LENGTH) if world.rank == 0 else LENGTH)
    whole = world.broadcast_object(whole)
    (reference := Path(base) / f"whole-{world.rank}").write_bytes(whole)
    record = hash_file(reference)
    damaged: dict[str, bytes | None] = {"good": whole, "missing": None}
    for place in range(LENGTH):
        damaged[f"flipped-{place}"] = whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :]
        damaged[f"cut-{place}"] = whole[:place]
    if world.is_main:
        for name, data in damaged.items():
            if data is not None:
                (folder / name).write_bytes(data)
    files: dict[str, FileRecord] = dict.fromkeys(damaged, record)
    plan = [FileTransfer(name, 0, 1) for name in damaged]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchanging, "BLOCK_BYTES", 25)  # three blocks per file
        failed = exchange(world, disks, plan, files, lambda name: folder / name, lambda name: folder / name)
    there = sorted(path.name for path in folder.iterdir())
    return sorted(damaged), {each.name: problem for each, problem in failed.items()}, there


def test_nothing_that_is_damaged_arrives(ranks: Pool, tmp_path: Path) -> None:
    (names, failed, _), (_, also_failed, arrived) = ranks.run(send_damaged, 2, (str(tmp_path),))
    assert failed == also_failed
    assert arrived == ["good"]
    assert sorted([*failed, "good"]) == names
    assert all(name in problem for name, problem in failed.items())
