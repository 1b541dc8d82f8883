"""Verification by all ranks together: each file is hashed once, and all get the findings of `verify`."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from paceline.checkpoint import CheckpointFolder, verify
from paceline.checkpoint import validity as validity_module
from paceline.checkpoint.hashed import FileRecord, hash_file
from paceline.errors import PacelineError
from paceline.finding import Finding
from paceline.train.state import verified
from paceline.train.state.verified import SharedVerification, share_out
from tests.checkpoint.states import FILES, save
from tests.dist.pool import Pool


def find(world: Any, folder: str, blind: str = "") -> tuple[str, list[str], list[str], bool]:
    """The name of what is found or the error, the files that this rank hashed, and what is skipped.

    Rank 1 does not see the folder or cannot read a file, as `blind` says.
    """
    hashed: list[str] = []
    skipped: list[str] = []
    is_blind = world.rank == 1 and blind

    def count(path: Path) -> FileRecord:
        if is_blind == "file":
            raise PermissionError(13, "Permission denied")
        hashed.append(path.name)
        return hash_file(path)

    def skip(path: Path, findings: list[Finding]) -> None:
        skipped.extend(f"{path.name}: {finding.code} {finding.saw}" for finding in findings)

    own = Path(folder) / ("elsewhere" if is_blind == "folder" else "")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(validity_module, "hash_file", count)
        patch.setattr(verified, "warn_of_skip", skip)
        checks = SharedVerification(world, CheckpointFolder(own, keep=3))
        try:
            path = checks.find_newest()
            found = "none" if path is None else path.name
        except PacelineError as error:
            return str(error), sorted(hashed), skipped, error.on_every_rank
    return found, sorted(hashed), skipped, False


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-2] ^= 4
    file.write_bytes(data)


@pytest.mark.parametrize("blind", ["", "folder", "file"])
def test_each_file_is_hashed_once(ranks: Pool, tmp_path: Path, blind: str) -> None:
    folder = CheckpointFolder(tmp_path, keep=3)
    save(folder, 1)
    path = save(folder, 2, size=4096)
    found = ranks.run(find, nproc=3, args=(str(tmp_path), blind))
    names = sorted(name for name in FILES if name != "manifest.json")
    assert [each[0] for each in found] == ["step-00000002"] * 3
    assert sorted(name for _, hashed, _, _ in found for name in hashed) == names
    if blind:
        assert found[1][1] == [], "the others do its part"
        return
    sizes = {name: (path / name).stat().st_size for name in names}
    counts = [sum(sizes[name] for name in hashed) for _, hashed, _, _ in found]
    assert max(counts) <= sum(sizes.values()) / 3 + max(sizes.values())
    assert min(counts) > 0


@pytest.mark.parametrize("blind", ["", "file"])
def test_whatever_is_altered_is_named_on_all_ranks(ranks: Pool, tmp_path: Path, blind: str) -> None:
    save(CheckpointFolder(tmp_path / "whole", keep=3), 1)
    path = save(CheckpointFolder(tmp_path / "whole", keep=3), 2)
    for name in FILES:
        out = tmp_path / "altered"
        shutil.copytree(tmp_path / "whole", out)
        altered = out / path.relative_to(tmp_path / "whole")
        flip(altered / name)
        told = [f"{altered.name}: {finding.code} {finding.saw}" for finding in verify(altered)]
        assert name in told[0]
        found = ranks.run(find, nproc=3, args=(str(out), blind))
        assert [each[0] for each in found] == ["step-00000001"] * 3
        assert found[0][2] == told
        assert found[1][2] == found[2][2] == []
        shutil.rmtree(out)


def test_no_valid_checkpoint_is_an_error_on_all_ranks(ranks: Pool, tmp_path: Path) -> None:
    assert [each[0] for each in ranks.run(find, args=(str(tmp_path),))] == ["none", "none"]
    folder = CheckpointFolder(tmp_path, keep=3)
    flip(save(folder, 1) / "part-00000.safetensors")
    (save(folder, 2) / "state.json").unlink()
    for told, _, _, is_on_every_rank in ranks.run(find, args=(str(tmp_path),)):
        assert "PL509" in told
        assert is_on_every_rank
        assert "step-00000002: state.json is missing." in told
        assert "step-00000001: part-00000.safetensors was altered" in told


def test_files_are_shared_out_by_size() -> None:
    sizes = {f"part-{rank}": 100 for rank in range(4)} | {"head": 3, "tail": 2}
    assert share_out(sizes, 4) == [["part-0", "head"], ["part-1", "tail"], ["part-2"], ["part-3"]]
    assert share_out({}, 2) == [[], []]
    assert verified.share_out({"one": 5}, 3) == [["one"], [], []]
