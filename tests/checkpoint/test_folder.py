"""Committing, keeping, falling back, and what the file system may do to it."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.checkpoint import CheckpointFolder, files, is_usable, verify
from paceline.checkpoint.content import prepare_whole
from paceline.checkpoint.manifest import FORMAT_VERSION, dump_manifest, read_manifest
from paceline.errors import PacelineError
from paceline.finding import Finding
from tests.checkpoint.saver import Fault
from tests.checkpoint.states import (
    FILES,
    IDENTITY,
    assert_loaded,
    assert_same,
    list_names,
    load_checkpoint,
    load_newest,
    make_model,
    save,
    save_content,
)


@pytest.fixture
def folder(tmp_path: Path) -> CheckpointFolder:
    return CheckpointFolder(tmp_path / "run", keep=3)


class Skipped(list[tuple[Path, list[Finding]]]):
    """Collects what `load_newest` skips."""

    def __call__(self, path: Path, findings: list[Finding]) -> None:
        self.append((path, findings))


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def flip(path: Path, place: int | None = None) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if place is None else place] ^= 1
    path.write_bytes(data)


DAMAGE = {
    "removed": (Path.unlink, {"PL500", "PL503"}),
    "truncated": (truncate, {"PL501", "PL503"}),
    "flipped": (flip, {"PL502", "PL503"}),
    "emptied": (lambda path: os.truncate(path, 0), {"PL501", "PL503"}),
    "grown": (lambda path: path.write_bytes(path.read_bytes() + b" "), {"PL501", "PL503"}),
}


# What a save puts there


def test_a_checkpoint_is_plain_files(folder: CheckpointFolder) -> None:
    path = save(folder, 50)
    assert path == folder.path / "step-00000050"
    assert sorted(entry.name for entry in path.iterdir()) == sorted(FILES)
    assert verify(path) == []
    assert_loaded(load_checkpoint(path), 50)
    assert_loaded(load_checkpoint(path), 50)


def test_an_empty_run_loads_nothing(folder: CheckpointFolder) -> None:
    assert load_newest(folder) is None
    assert folder.steps() == {}
    assert not folder.path.exists()


def test_without_recipe(folder: CheckpointFolder) -> None:
    path = save_content(folder, 1, prepare_whole({}, None, {}, None), identity={})
    loaded = load_checkpoint(path)
    assert (loaded.recipe_toml, loaded.model, loaded.optimizer, loaded.state) == (None, {}, None, {})


def test_tensors_of_every_kind(folder: CheckpointFolder) -> None:
    base = torch.randn(4, 6)
    model = {
        "transposed": base.t(),
        "strided": base[::2, 1:],
        "scalar": torch.tensor(3),
        "empty": torch.empty(0, 5, dtype=torch.bfloat16),
        "bf16": base.bfloat16(),
        "fp16": base.half(),
        "fp64": base.double(),
        "bool": base > 0,
        "parameter": torch.nn.Parameter(base.clone()),
        "channels last": torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last),
        "negated": torch.view_as_complex(torch.randn(3, 2)).conj().imag,
    }
    path = save_content(folder, 1, prepare_whole(model, {}, {}, None), identity={})
    loaded = load_checkpoint(path).model
    assert list(loaded) == sorted(model)
    for name, tensor in loaded.items():
        assert type(tensor) is torch.Tensor
        assert_same(tensor, model[name].detach().clone(memory_format=torch.contiguous_format).resolve_neg())


@pytest.mark.gpu
def test_cuda_tensors_come_back_on_the_cpu(folder: CheckpointFolder) -> None:
    tensor = torch.randn(4, 6, device="cuda")
    path = save_content(
        folder, 1, prepare_whole({"w": tensor, "tied": tensor}, {"m": tensor.t()}, {}, None), identity={}
    )
    loaded = load_checkpoint(path)
    assert_same(loaded.model["w"], tensor.cpu())
    assert_same(loaded.optimizer["m"], tensor.t().cpu())


def test_tied_weights_are_stored_once(folder: CheckpointFolder) -> None:
    weight = torch.randn(256, 256)
    model = {"b.head": weight, "a.embed": weight, "c.view": weight[:1], "d.turned": weight.t()}
    path = save_content(folder, 1, prepare_whole(model, {}, {}, None), identity={})
    assert 2 <= (path / "part-00000.safetensors").stat().st_size / weight.numel() / 4 < 2.1
    loaded = load_checkpoint(path).model
    assert loaded["b.head"] is loaded["a.embed"]
    for name, tensor in model.items():
        assert_same(loaded[name], tensor.contiguous())


def test_what_was_read_lives_without_the_files(folder: CheckpointFolder) -> None:
    path = save(folder, 1)
    loaded = load_newest(folder)
    for name in FILES:
        os.truncate(path / name, 0)
    assert_loaded(loaded, 1)


def test_unstorable_state_is_refused_before_anything_is_written(folder: CheckpointFolder) -> None:
    state = {"tracked": {"ema": {"fn": print}}}
    with pytest.raises(PacelineError, match=r"state\.tracked\.ema\.fn"):
        save_content(folder, 1, prepare_whole({}, {}, state, None), identity={})
    with pytest.raises(PacelineError, match=r"model\.w is a tensor on the meta device"):
        save_content(
            folder, 1, prepare_whole({"w": torch.empty(1, device="meta")}, {}, {}, None), identity={}
        )
    assert not folder.path.parent.exists()


# Damage


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(("damage", "codes"), DAMAGE.values(), ids=DAMAGE.keys())
def test_damage_to_any_file_is_named_and_passed_over(
    folder: CheckpointFolder, name: str, damage: Any, codes: set[str]
) -> None:
    save(folder, 1)
    path = save(folder, 2)
    damage(path / name)
    skipped = Skipped()
    assert_loaded(load_newest(folder, skipped), 1)
    ((where, findings),) = skipped
    assert where == path
    assert findings == verify(path)
    assert findings[0].code in codes
    assert findings[0].where == str(path / name)
    with pytest.raises(PacelineError) as caught:
        load_checkpoint(path)
    assert name in caught.value.saw


def test_a_flipped_bit_anywhere_in_the_manifest_counts(folder: CheckpointFolder) -> None:
    manifest = save(folder, 2) / "manifest.json"
    whole = manifest.read_bytes()
    for place in range(0, len(whole), 5):
        flip(manifest, place)
        assert [finding.code for finding in verify(manifest.parent)] == ["PL503"], place
        manifest.write_bytes(whole)
    assert verify(manifest.parent) == []


def test_all_problems_at_once(folder: CheckpointFolder) -> None:
    path = save(folder, 1)
    flip(path / "part-00000.safetensors")
    truncate(path / "state.json")
    (path / "recipe.toml").unlink()
    (path / "notes.txt").write_text("mine")
    found = {(finding.code, Path(finding.where).name) for finding in verify(path)}
    assert found == {
        ("PL502", "part-00000.safetensors"),
        ("PL501", "state.json"),
        ("PL500", "recipe.toml"),
        ("PL505", "notes.txt"),
    }


def test_a_file_beside_it_does_no_harm(folder: CheckpointFolder) -> None:
    save(folder, 1)
    path = save(folder, 2)
    (path / ".nfs0001").write_text("")
    assert [finding.code for finding in verify(path)] == ["PL505"]
    assert is_usable(verify(path))
    assert_loaded(load_newest(folder), 2)


def test_files_that_do_not_fit_together(folder: CheckpointFolder) -> None:
    """Put together by hand, with right hashes."""
    keeping = CheckpointFolder(folder.path.parent, keep=9)
    one, two, three = (save(keeping, step) for step in (1, 2, 3))
    other = save_content(keeping, 4, prepare_whole(make_model(4), {}, {}, None), identity={})
    for path, name, words in (
        (two, "part-00000.safetensors", "refers to tensor 'rng.0', which no file has"),
        (
            three,
            "optimizer.json",
            "has tensor 'parameters.embed.weight.state.step', which optimizer.json never",
        ),
    ):
        shutil.copy(other / name, path / name)
        manifest = read_manifest(path)
        records = manifest.files | {name: read_manifest(other).files[name]}
        (path / "manifest.json").write_bytes(dump_manifest(type(manifest)(manifest.step, records, {})))
        findings = verify(path)
        assert {finding.code for finding in findings} == {"PL506"}
        assert words in " ".join(finding.saw for finding in findings)
    one.rename(one.with_name("step-00000009"))
    assert [finding.code for finding in verify(folder.steps()[9])] == ["PL506"]


def test_falls_back_over_several_and_warns(
    folder: CheckpointFolder, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2, 3):
        save(folder, step)
    flip(folder.steps()[3] / "part-00000.safetensors")
    (folder.steps()[2] / "manifest.json").unlink()
    with caplog.at_level(logging.WARNING):
        assert_loaded(load_newest(folder), 1)
    assert "part-00000.safetensors was altered" in caplog.text
    assert "manifest.json is missing" in caplog.text


def test_none_valid_is_an_error_and_nothing_changes(folder: CheckpointFolder) -> None:
    save(folder, 1)
    save(folder, 2)
    truncate(folder.steps()[1] / "part-00000.safetensors")
    flip(folder.steps()[2] / "state.json")
    before = {path: path.read_bytes() for path in folder.path.rglob("*") if path.is_file()}
    with pytest.raises(PacelineError) as caught:
        load_newest(folder, Skipped())
    assert caught.value.code == "PL509"
    assert "step-00000002: state.json was altered" in caught.value.saw
    assert "step-00000001: part-00000.safetensors has" in caught.value.saw
    assert before == {path: path.read_bytes() for path in folder.path.rglob("*") if path.is_file()}


def make_newer(path: Path) -> None:
    manifest = read_manifest(path)
    (path / "manifest.json").write_bytes(dump_manifest(manifest, format_version=FORMAT_VERSION + 1))


def test_a_newer_format_is_not_passed_over(folder: CheckpointFolder) -> None:
    save(folder, 1)
    path = save(folder, 2)
    make_newer(path)
    assert [finding.code for finding in verify(path)] == ["PL504"]
    for load in (lambda: load_newest(folder), lambda: load_checkpoint(path)):
        with pytest.raises(PacelineError, match=r"format version 4.*reads version 3") as caught:
            load()
        assert caught.value.code == "PL504"
    with pytest.raises(PacelineError) as caught:
        save(folder, 2)
    assert caught.value.code == "PL504"
    assert list_names(folder.path.parent) == ["step-00000001", "step-00000002"]


# Keeping


def test_keeps_the_newest(folder: CheckpointFolder) -> None:
    for step in range(1, 7):
        save(folder, step)
    assert list(folder.steps()) == [4, 5, 6]
    assert list_names(folder.path.parent) == ["step-00000004", "step-00000005", "step-00000006"]


def test_a_broken_one_does_not_count(folder: CheckpointFolder) -> None:
    for step in (1, 2, 3):
        save(folder, step)
    truncate(folder.steps()[2] / "part-00000.safetensors")
    save(folder, 4)
    assert list(folder.steps()) == [1, 2, 3, 4]
    save(folder, 5)
    assert list(folder.steps()) == [3, 4, 5]


@pytest.mark.parametrize("anew", [False, True], ids=["same process", "resumed"])
def test_broken_later_ones_never_push_out_the_newest_valid(tmp_path: Path, anew: bool) -> None:
    folder = CheckpointFolder(tmp_path, keep=1)
    save(CheckpointFolder(tmp_path, keep=9), 80)
    for step in (100, 90):
        flip(save(CheckpointFolder(tmp_path, keep=9), step) / "part-00000.safetensors")
    save(CheckpointFolder(tmp_path, keep=9), 30)
    for step in (40, 50):
        save(CheckpointFolder(tmp_path, keep=1) if anew else folder, step)
        # 80 is the newest valid one; what was just saved stays too.
        assert list(folder.steps()) == [step, 80, 90, 100]
    assert_loaded(load_newest(folder, Skipped()), 80)


def test_a_valid_checkpoint_that_breaks_later_stops_counting(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, keep=1)
    save(folder, 100)
    save(folder, 50)
    assert list(folder.steps()) == [50, 100]
    flip(folder.steps()[100] / "part-00000.safetensors")
    save(folder, 60)
    assert list(folder.steps()) == [60, 100]


def test_a_broken_checkpoint_of_the_step_is_moved_aside(
    folder: CheckpointFolder, caplog: pytest.LogCaptureFixture
) -> None:
    for count in (1, 2, 3):
        flip(save(folder, 2) / "part-00000.safetensors")
        assert len(list_names(folder.path.parent)) == count
    save(folder, 2)
    assert_loaded(load_newest(folder), 2)
    names = list_names(folder.path.parent)
    assert names == [
        "corrupt-step-00000002",
        "corrupt-step-00000002-2",
        "corrupt-step-00000002-3",
        "step-00000002",
    ]
    assert "is now corrupt-step-00000002-3" in caplog.text


def test_a_valid_checkpoint_of_the_step_is_replaced(folder: CheckpointFolder) -> None:
    save(folder, 2, size=8)
    save(folder, 2, size=16)
    assert_loaded(load_newest(folder), 2, size=16)
    assert list_names(folder.path.parent) == ["step-00000002"]


def test_other_folders_are_left_alone(folder: CheckpointFolder) -> None:
    save(folder, 1)
    (folder.path / "best").mkdir()
    (folder.path / "step-5").mkdir()
    (folder.path / "notes.txt").write_text("mine")
    for step in range(2, 6):
        save(folder, step)
    assert {"best", "step-5", "notes.txt"} <= set(list_names(folder.path.parent))
    assert list(folder.steps()) == [3, 4, 5]


# Other processes


def test_leftovers_of_dead_processes_go_at_the_next_save(folder: CheckpointFolder) -> None:
    save(folder, 1)
    for name in (".tmp-step-00000002-1234-abcd", ".trash-step-00000000-12"):
        (folder.path / name / "deep").mkdir(parents=True)
        (folder.path / name / "deep" / "file").write_text("x")
    assert_loaded(load_newest(folder), 1)  # looking removes nothing
    assert len(list_names(folder.path.parent)) == 3
    save(folder, 2)
    assert list_names(folder.path.parent) == ["step-00000001", "step-00000002"]


def test_a_live_process_keeps_others_out_and_its_files(folder: CheckpointFolder) -> None:
    save(folder, 1)
    (folder.path / ".tmp-step-00000002-1-x").mkdir()
    script = (
        "import fcntl, sys; stream = open(sys.argv[1], 'ab'); fcntl.lockf(stream, fcntl.LOCK_EX);"
        "print('locked', flush=True); sys.stdin.read()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", script, folder.path / ".lock"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"locked\n"
        with pytest.raises(PacelineError) as caught:
            save(folder, 2)
        assert caught.value.code == "PL510"
        assert list_names(folder.path.parent) == [".tmp-step-00000002-1-x", "step-00000001"]
        other.kill()
    save(folder, 2)
    assert list_names(folder.path.parent) == ["step-00000001", "step-00000002"]


def test_without_locks_it_saves_and_clears_nothing(
    folder: CheckpointFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(folder, 1)
    (folder.path / ".tmp-step-00000002-1-x").mkdir()

    def no_locks(*args: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", no_locks)
    save(folder, 2)
    save(folder, 2)
    assert list_names(folder.path.parent) == [".tmp-step-00000002-1-x", "step-00000001", "step-00000002"]


# A file system that fails


def fail() -> None:
    raise OSError(errno.EIO, "Input/output error")


def test_an_error_at_every_operation_of_a_save(tmp_path: Path) -> None:
    outcomes = []
    for operation in range(1, 1000):
        folder = CheckpointFolder(tmp_path / str(operation), keep=1)
        save(folder, 1)
        fault = Fault(operation, fail)
        try:
            with files.inject(fault):
                save(folder, 2)
            outcomes.append("saved")
        except PacelineError as error:
            outcomes.append(error.code)
        loaded = load_newest(folder)
        assert loaded is not None
        if list_names(folder.path.parent) == ["step-00000001"]:
            assert outcomes[-1] == "PL508"
            assert_loaded(loaded, 1)
        else:
            assert_loaded(loaded, 2)
        save(folder, 3)
        assert list_names(folder.path.parent) == ["step-00000003"]
        if len(fault.operations) < operation:
            break
    assert set(outcomes) == {"PL508", "saved"}
    assert outcomes.count("PL508") > 30
    assert outcomes[-1] == "saved"


@pytest.mark.parametrize("harm", ["remove", "cut"])
@pytest.mark.parametrize("name", FILES)
def test_a_file_that_vanishes_before_the_commit_fails_the_save(
    name: str, harm: str, folder: CheckpointFolder
) -> None:
    """As by a clean-up job that is too eager; the last moment is the check before the rename."""
    save(folder, 1)
    harmed: list[Path] = []

    def do_harm(operation: str, path: Path, start: int, num_bytes: int) -> None:
        # The last fsync of the new folder, when all of its files are there.
        if operation == "fsync" and path.name.startswith(".tmp-"):
            file = path / name
            if file.exists():
                harmed.append(file)
                file.unlink() if harm == "remove" else os.truncate(file, file.stat().st_size - 1)

    with files.inject(do_harm), pytest.raises(PacelineError, match=re.escape(name)) as caught:
        save(folder, 2)
    assert caught.value.code == "PL508"
    assert len(harmed) == 1
    assert list_names(folder.path.parent) == ["step-00000001"]
    assert_loaded(load_newest(folder), 1)
    save(folder, 2)
    assert_loaded(load_newest(folder), 2)


def test_a_file_that_vanishes_beside_a_replaced_checkpoint_brings_that_back(folder: CheckpointFolder) -> None:
    save(folder, 2, size=8)

    def remove(operation: str, path: Path, start: int, num_bytes: int) -> None:
        if operation == "rename" and path.name == "step-00000002":
            next(folder.path.glob(".tmp-*/part-00000.safetensors")).unlink()

    with files.inject(remove), pytest.raises(PacelineError, match=r"part-00000\.safetensors.*PL508"):
        save(folder, 2, size=16)
    assert list_names(folder.path.parent) == ["step-00000002"]
    assert_loaded(load_newest(folder), 2, size=8)


def test_a_failed_replacement_puts_the_former_one_back(folder: CheckpointFolder) -> None:
    save(folder, 2, size=8)
    calls = []

    def second_rename(operation: str, path: Path, start: int, num_bytes: int) -> None:
        if operation == "rename":
            calls.append(path.name)
            if len(calls) == 2:
                fail()

    with files.inject(second_rename), pytest.raises(PacelineError):
        save(folder, 2, size=16)
    assert calls[0] == "step-00000002"
    assert list_names(folder.path.parent) == ["step-00000002"]
    assert_loaded(load_newest(folder), 2, size=8)


def test_ctrl_c_in_a_save_leaves_nothing_behind(folder: CheckpointFolder) -> None:
    save(folder, 1)

    def interrupt() -> None:
        raise KeyboardInterrupt

    with files.inject(Fault(12, interrupt)), pytest.raises(KeyboardInterrupt):
        save(folder, 2)
    assert list_names(folder.path.parent) == ["step-00000001"]


def test_short_writes_are_carried_on(folder: CheckpointFolder) -> None:
    def at_most_seven(operation: str, path: Path, start: int, num_bytes: int) -> int | None:
        return min(num_bytes, 7) if operation == "write" else None

    with files.inject(at_most_seven):
        path = save(folder, 1)
    assert verify(path) == []
    assert_loaded(load_checkpoint(path), 1)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except FileNotFoundError:
        pytest.skip("there is no mount command")
    if done.returncode != 0:
        pytest.skip(f"may not mount a tmpfs: {done.stderr.strip()}")
    yield disk
    subprocess.run(["umount", str(disk)], check=True, timeout=10)


def test_a_full_disk(small_disk: Path) -> None:
    folder = CheckpointFolder(small_disk, keep=3)
    save(folder, 1)
    with pytest.raises(PacelineError) as caught:
        save(folder, 2, size=1 << 15)
    assert caught.value.code == "PL508"
    assert "The disk is full: step 2 needs 513.1 KiB in" in caught.value.saw
    assert list_names(small_disk) == ["step-00000001"]
    assert_loaded(load_newest(folder), 1)
    save(folder, 2)
    assert_loaded(load_newest(folder), 2)


def test_a_run_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("not a folder")
    with pytest.raises(PacelineError) as caught:
        save(CheckpointFolder(tmp_path / "run", keep=1), 1)
    assert caught.value.code == "PL508"
    assert (tmp_path / "run").read_text() == "not a folder"


def test_no_permission(folder: CheckpointFolder) -> None:
    save(folder, 1)

    def refuse(operation: str, path: Path, start: int, num_bytes: int) -> None:
        if operation == "make":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))

    with files.inject(refuse), pytest.raises(PacelineError, match="Permission denied") as caught:
        save(folder, 2)
    assert caught.value.code == "PL508"
    assert_loaded(load_newest(folder), 1)


def test_a_read_only_disk(small_disk: Path) -> None:
    folder = CheckpointFolder(small_disk, keep=3)
    save(folder, 1)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True, timeout=10)
    with pytest.raises(PacelineError, match="Read-only file system") as caught:
        save(folder, 2)
    assert caught.value.code == "PL508"
    assert_loaded(load_newest(folder), 1)


def test_a_folder_that_can_not_be_listed_is_not_an_empty_run(
    folder: CheckpointFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(folder, 1)

    def refuse(path: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(PacelineError, match="cannot be read: Permission denied") as caught:
        load_newest(folder)
    assert caught.value.code == "PL514"


def test_identity_must_fit_json_before_anything_is_written(folder: CheckpointFolder) -> None:
    with pytest.raises(TypeError):
        save_content(
            folder, 1, prepare_whole({}, {}, {}, None), identity=IDENTITY | {"device": torch.device("cpu")}
        )
    assert not folder.path.exists()
