"""Nodes with disks of their own: each rank works in another folder, as a node with another disk would."""

from __future__ import annotations

import errno
import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.checkpoint import files, list_at, verify
from paceline.checkpoint.manifest import dump_manifest, read_manifest
from paceline.checkpoint.names import step_of
from paceline.errors import PacelineError
from paceline.train.state import disks as disks_of_ranks
from tests.dist.pool import Pool
from tests.train.state.test_sharded import CASES, GLOBAL_BATCH, build_trainer, describe
from tests.train.test_layouts import Tokens

LAYOUTS = {"full": "dp_replicate", "sharded": "dp_shard"}


def work(
    world: Any, places: list[str], mode: str, num_steps: int, copies: Any = "auto", fault: str = ""
) -> tuple[int, str | None] | str:
    """Each rank goes on in its own folder, saving each step; gives the first step and the hash at the end."""
    os.makedirs(places[world.rank], exist_ok=True)
    os.chdir(places[world.rank])
    disks_of_ranks._APPEARS_S = 0.1
    layout = f"{LAYOUTS[mode]}={world.world_size}" if world.world_size > 1 else ""
    trainer = build_trainer(layout, *CASES["odd"], mode, checkpoint_copies=copies, max_failed_saves=1)
    try:
        loader = trainer.loader(Tokens(), global_batch_size=GLOBAL_BATCH)
        first = trainer.resume("run")
        with files.inject(fail(fault if world.rank == 1 else "")):
            while trainer.step_number < first + num_steps:
                for share in loader:
                    if trainer.step(share).number == first + num_steps:
                        break
                    trainer.save(wait=True)
            if num_steps:
                trainer.save(wait=True)
        return first, describe(trainer)
    except PacelineError as error:
        return f"{error} {error.on_every_rank}"
    finally:
        trainer.close()
        os.chdir("/")


def fail(fault: str) -> files.FaultHook:
    """Break rank 1's disk: not at all, by filling it, or by refusing all writes."""

    def hook(operation: str, path: Path, start: int, num_bytes: int) -> int | None:
        if fault == "full" and operation == "write" and path.suffix == ".safetensors":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if fault == "read-only" and operation == "make":
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return None

    return hook


@pytest.fixture(scope="module")
def undisturbed(ranks: Pool, tmp_path_factory: pytest.TempPathFactory) -> str:
    ((_, found),) = ranks.run(work, 1, ([str(tmp_path_factory.mktemp("alone"))], "full", 4))
    return str(found)


@pytest.fixture(scope="module", params=LAYOUTS)
def saved(ranks: Pool, tmp_path_factory: pytest.TempPathFactory, request: Any) -> tuple[str, Path]:
    """Three disks after two steps, in one of the modes."""
    base = tmp_path_factory.mktemp("disks")
    places = [str(base / name) for name in "abc"]
    assert [first for first, _ in ranks.run(work, 3, (places, request.param, 2))] == [0, 0, 0]
    return request.param, base


@pytest.fixture
def disks(saved: tuple[str, Path], tmp_path: Path) -> Callable[[str], list[str]]:
    """A copy of the disks; gives the folders of the nodes named."""
    shutil.copytree(saved[1], tmp_path, dirs_exist_ok=True)
    return lambda names: [str(tmp_path / name) for name in names]


def newest(place: str) -> Path:
    return list_at(Path(place) / "run")[-1]


def assert_one_history(places: list[str], last: int) -> None:
    for place in places:
        rows = [json.loads(line) for line in (Path(place) / "run" / "metrics.jsonl").read_text().splitlines()]
        assert [row["step"] for row in rows] == list(range(1, last + 1)), place


def test_every_file_is_on_two_disks(saved: tuple[str, Path], disks: Callable[[str], list[str]]) -> None:
    places = disks("abc")
    manifest = read_manifest(newest(places[0]))
    assert manifest.step == 2
    assert all(read_manifest(newest(place)) == manifest for place in places)
    for name in manifest.files:
        assert sum((newest(place) / name).exists() for place in places) == 2, name
        assert len(manifest.holders[name]) == 2
    lacking = [{finding.code for finding in verify(newest(place))} for place in places]
    assert all(codes <= {"PL551"} for codes in lacking)
    assert {"PL551"} in lacking
    assert_one_history(places, 2)


@pytest.mark.parametrize("nodes", ["bc", "ac", "ab", "cba", "abx", "baac"])
def test_any_node_may_be_lost_moved_or_new(
    ranks: Pool, disks: Callable[[str], list[str]], saved: tuple[str, Path], undisturbed: str, nodes: str
) -> None:
    places = disks(nodes)
    found = ranks.run(work, len(nodes), (places, saved[0], 2))
    assert all(len(each) == 2 for each in found), found
    assert [first for first, _ in found] == [2] * len(nodes)
    assert found[0][1] == undisturbed
    assert_one_history(places, 4)
    assert all(step_of(path) in (2, 3, 4) for place in places for path in list_at(Path(place) / "run"))


def test_an_altered_file_is_replaced_by_another_nodes(
    ranks: Pool, disks: Callable[[str], list[str]], saved: tuple[str, Path], undisturbed: str
) -> None:
    places = disks("abc")
    for path in newest(places[0]).iterdir():
        if path.name != "manifest.json":
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 1
            path.write_bytes(data)
    found = ranks.run(work, 3, (places, saved[0], 2))
    assert [first for first, _ in found] == [2, 2, 2]
    assert found[0][1] == undisturbed
    assert (Path(places[0]) / "run" / "checkpoints" / "corrupt-step-00000002").is_dir()
    for place in places:
        assert {finding.code for finding in verify(list_at(Path(place) / "run")[0])} <= {"PL551"}


def test_an_older_step_counts_where_the_newest_is_not_whole(
    ranks: Pool, disks: Callable[[str], list[str]], saved: tuple[str, Path], undisturbed: str
) -> None:
    places = disks("abc")
    for place in places:
        (newest(place) / "state.json").unlink(missing_ok=True)
    found = ranks.run(work, 3, (places, saved[0], 3))
    assert [first for first, _ in found] == [1, 1, 1]
    assert found[0][1] == undisturbed
    assert_one_history(places, 4)


def test_without_a_whole_step_the_run_does_not_begin_again(
    ranks: Pool, disks: Callable[[str], list[str]], saved: tuple[str, Path]
) -> None:
    places = disks("abc")
    for place in places:
        for path in list_at(Path(place) / "run"):
            (path / "state.json").unlink(missing_ok=True)
    for text in ranks.run(work, 3, (places, saved[0], 1)):
        assert "step 2: state.json is on none of the disks; step 1: state.json is on none" in text
        assert text.endswith("[PL555] True")
    for place in places:
        shutil.rmtree(Path(place) / "run" / "checkpoints")
    for text in ranks.run(work, 3, (places, saved[0], 1)):
        assert "noted that step 2 was saved" in text
        assert text.endswith("[PL550] True")


@pytest.mark.parametrize("fault", ["full", "read-only"])
def test_a_disk_that_fails_on_one_node_keeps_the_earlier_checkpoints(
    ranks: Pool, disks: Callable[[str], list[str]], saved: tuple[str, Path], undisturbed: str, fault: str
) -> None:
    places = disks("abc")
    for text in ranks.run(work, 3, (places, saved[0], 2, "auto", fault)):
        assert "(rank 1 on " in text or "from " in text
        assert ("No space left on device" if fault == "full" else "Read-only file system") in text or (
            "The disk is full" in text
        )
        assert text.endswith("[PL508] True")
    assert [path.name for path in list_at(Path(places[1]) / "run")] == ["step-00000001", "step-00000002"]
    assert not list(Path(places[0]).glob("run/checkpoints/.tmp-*"))
    found = ranks.run(work, 3, (places, saved[0], 2))
    assert found[0] == (2, undisturbed)


def test_more_copies_than_disks_are_refused(ranks: Pool, tmp_path: Path) -> None:
    for places, where in ((["a", "b"], "2 disks"), (["a", "a"], "one folder")):
        full = [str(tmp_path / place) for place in places]
        for text in ranks.run(work, 2, (full, "full", 1, 3)):
            assert f"checkpoint.copies = 3, and the run's folder is on {where}" in text
            assert text.endswith("[PL552] True")
        assert not (tmp_path / "a" / "run" / "checkpoints").exists()


def test_a_copied_checkpoint_of_another_run_is_refused(
    ranks: Pool, disks: Callable[[str], list[str]], saved: tuple[str, Path], tmp_path: Path
) -> None:
    places = disks("abc")
    ranks.run(work, 1, ([str(tmp_path / "other")], "full", 3))
    stranger = newest(str(tmp_path / "other"))
    shutil.copytree(stranger, Path(places[2]) / "run" / "checkpoints" / stranger.name)
    for text in ranks.run(work, 3, (places, saved[0], 1)):
        assert "step-00000003 on " in text
        assert text.endswith("[PL526] True")


def test_a_wrong_clock_on_one_node_does_not_matter(
    ranks: Pool, disks: Callable[[str], list[str]], saved: tuple[str, Path], undisturbed: str
) -> None:
    places = disks("abc")
    for path in Path(places[1]).rglob("*"):
        os.utime(path, (4e9, 4e9))  # written in the year 2096, by its clock
    found = ranks.run(work_with_a_wrong_clock, 3, (places, saved[0], 2))
    assert found[0] == (2, undisturbed)
    assert_one_history(places, 4)


def work_with_a_wrong_clock(world: Any, places: list[str], mode: str, num_steps: int) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        if world.rank == 0:
            patch.setattr(time, "time", lambda: 1e9)
        return work(world, places, mode, num_steps)


def name_another_file(path: Path, name: str) -> None:
    """Make a manifest name another file, with a right hash of its own."""
    manifest = read_manifest(path)
    named = {name if old == "state.json" else old: record for old, record in manifest.files.items()}
    (path / "manifest.json").write_bytes(dump_manifest(replace(manifest, files=named, holders={})))


def link_away(path: Path) -> None:
    """Put a link to a manifest elsewhere in its place."""
    (path / "manifest.json").rename(path.parent / "elsewhere")
    (path / "manifest.json").symlink_to(path.parent / "elsewhere")


HOSTILE: dict[str, Callable[[Path], None]] = {
    "a path upwards": lambda path: name_another_file(path, "../../../stolen"),
    "an absolute path": lambda path: name_another_file(path, f"{path.parent.parent}/stolen"),
    "a symbolic link": link_away,
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_manifest_on_one_disk_is_passed_over(
    ranks: Pool,
    disks: Callable[[str], list[str]],
    saved: tuple[str, Path],
    undisturbed: str,
    tmp_path: Path,
    case: str,
) -> None:
    places = disks("abc")
    HOSTILE[case](newest(places[2]))
    found = ranks.run(work, 3, (places, saved[0], 2))
    assert found[0] == (2, undisturbed)
    assert not list(tmp_path.rglob("stolen"))
