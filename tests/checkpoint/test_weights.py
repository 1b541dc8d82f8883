"""Fingerprints, exports and identities."""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path

import pytest
import safetensors
import torch
from safetensors.torch import load_file

from paceline.checkpoint import (
    CheckpointFolder,
    check_identity,
    describe_identity,
    export_model,
    files,
    find_checkpoint,
    hash_stored,
    hash_tensors,
    list_at,
    open_usable,
)
from paceline.checkpoint.content import prepare_whole, stream_bytes
from paceline.checkpoint.tensors import UnreadableTensorsError, read_infos
from paceline.errors import PacelineError
from tests.checkpoint.states import (
    assert_same,
    load_checkpoint,
    make_model,
    read_tensors,
    save,
    save_content,
    write_tensors,
)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return save(CheckpointFolder(tmp_path / "run", keep=3), 7)


def test_the_hash_is_what_its_docstring_states() -> None:
    model = {"b": torch.tensor([1.0, 2.0]), "a": torch.tensor(3)}
    text = (
        b'["a", "int64", []]\n' + struct.pack("<q", 3) + b'["b", "float32", [2]]\n' + struct.pack("<2f", 1, 2)
    )
    assert hash_tensors(model) == hashlib.sha256(text).hexdigest()


def test_the_hash_reports_every_difference() -> None:
    weight = torch.arange(6.0)
    models = [
        {"a": weight},
        {"b": weight},
        {"a": weight.double()},
        {"a": weight.reshape(2, 3)},
        {"a": weight.reshape(3, 2)},
        {"a": torch.nextafter(weight, torch.tensor(9.0))},
        {"a": weight, "b": weight},
        {"a": torch.tensor([-0.0])},
        {"a": torch.tensor([0.0])},
        {},
    ]
    assert len({hash_tensors(model) for model in models}) == len(models)


def test_the_hash_is_blind_to_memory() -> None:
    weight = torch.randn(4, 6)
    tied = {"b": weight, "a": weight}
    apart = {"a": weight.clone(), "b": weight.t().contiguous().t()}
    assert hash_tensors(tied) == hash_tensors(apart)


def test_the_hash_survives_the_disk(checkpoint: Path) -> None:
    assert hash_tensors(load_checkpoint(checkpoint).model) == hash_tensors(make_model(7))


def test_hash_and_export_read_small_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = {
        "w": torch.randn(33, 7),
        "n": torch.tensor(5),
        "none": torch.empty(0, 3),
        "row": torch.randn(1, 99),
    }
    path = save_content(
        CheckpointFolder(tmp_path, keep=1), 1, prepare_whole(model, {}, {}, None), identity={}
    )
    monkeypatch.setattr("paceline.checkpoint.content._BLOCK_BYTES", 64)
    unread = open_usable(path).model
    sizes = [len(data) for name in model for data in stream_bytes(unread[name])]
    assert max(sizes) <= 64
    assert hash_stored(unread) == hash_tensors(model)
    export_model(path, tmp_path / "m.safetensors")
    assert_same(dict(sorted(load_file(tmp_path / "m.safetensors").items())), dict(sorted(model.items())))


def test_an_export_reads_with_the_library(checkpoint: Path, tmp_path: Path) -> None:
    num_bytes = export_model(checkpoint, tmp_path / "model.safetensors")
    assert num_bytes == (tmp_path / "model.safetensors").stat().st_size
    assert_same(
        dict(sorted(load_file(tmp_path / "model.safetensors").items())), dict(sorted(make_model(7).items()))
    )
    with safetensors.safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_an_export_converts_floats_only(tmp_path: Path) -> None:
    model = {"w": torch.randn(3), "n": torch.tensor(5)}
    path = save_content(
        CheckpointFolder(tmp_path, keep=1), 1, prepare_whole(model, {}, {}, None), identity={}
    )
    export_model(path, tmp_path / "m.safetensors", torch.bfloat16)
    again = load_file(tmp_path / "m.safetensors")
    assert_same(again["w"], model["w"].bfloat16())
    assert_same(again["n"], model["n"])


def test_an_export_overwrites_nothing(checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "model.safetensors"
    out.write_text("mine")
    with pytest.raises(PacelineError) as caught:
        export_model(checkpoint, out)
    assert caught.value.code == "PL513"
    out.unlink()

    def appears(operation: str, path: Path, start: int, num_bytes: int) -> None:
        if operation == "rename":
            out.write_text("mine")

    with files.inject(appears), pytest.raises(PacelineError) as caught:
        export_model(checkpoint, out)
    assert caught.value.code == "PL513"
    assert out.read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.safetensors", "run"]


def test_an_export_that_can_not_be_written(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(PacelineError, match="No such file or directory") as caught:
        export_model(checkpoint, tmp_path / "absent" / "model.safetensors")
    assert caught.value.code == "PL508"


def test_our_files_read_with_the_library(tmp_path: Path) -> None:
    tensors = {"long": torch.arange(3), "half": torch.ones(3).half(), "one": torch.tensor(True)}
    write_tensors(tmp_path / "t.safetensors", tensors)
    assert_same(dict(sorted(load_file(tmp_path / "t.safetensors").items())), dict(sorted(tensors.items())))


def test_headers_report_types_and_shapes(tmp_path: Path) -> None:
    write_tensors(tmp_path / "t", {"z": torch.ones(2, 3), "n": torch.tensor(1)})
    infos = read_infos(tmp_path / "t")
    assert list(infos) == ["n", "z"]
    assert (infos["z"].dtype, infos["z"].shape) == ("F32", (2, 3))
    assert (infos["n"].shape, infos["n"].num_elements, infos["z"].num_elements) == ((), 1, 6)


@pytest.mark.parametrize("content", [b"", b"12345678", b"\xff" * 64, (2).to_bytes(8, "little") + b"[]"])
def test_what_is_not_safetensors_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes(content)
    for read in (read_tensors, read_infos):
        with pytest.raises(UnreadableTensorsError):
            read(tmp_path / "t")


def test_paths_that_mean_a_checkpoint(checkpoint: Path, tmp_path: Path) -> None:
    earlier = save(CheckpointFolder(tmp_path / "run", keep=3), 3)
    for path in (tmp_path / "run", tmp_path / "run" / "checkpoints", checkpoint, str(checkpoint) + "/"):
        assert find_checkpoint(path) == checkpoint
    assert find_checkpoint(earlier) == earlier
    assert list_at(tmp_path / "run") == [earlier, checkpoint]
    copied = checkpoint.rename(tmp_path / "best")
    assert find_checkpoint(copied) == copied
    for wrong in (tmp_path, tmp_path / "absent", copied / "manifest.json"):
        with pytest.raises(PacelineError) as caught:
            find_checkpoint(wrong)
        assert caught.value.code == "PL514"


def test_identity_of_this_process() -> None:
    here = describe_identity("cpu", world_size=4, layout="dp_replicate=4")
    assert here["threads_per_rank"] == torch.get_num_threads()
    assert here["torch"] == str(torch.__version__)
    assert (here["device"], here["world_size"], here["layout"]) == ("cpu", 4, "dp_replicate=4")
    assert check_identity(here, dict(here)) == []


@pytest.mark.parametrize(
    "key", ["paceline", "torch", "python", "device", "processor", "threads_per_rank", "deterministic"]
)
def test_a_changed_identity_is_reported(key: str) -> None:
    here = describe_identity("cpu")
    (finding,) = check_identity(here | {key: "other"}, here)
    assert (finding.code, finding.where) == ("PL512", key)
    assert "'other'" in finding.saw
    assert repr(here[key]) in finding.saw


def test_the_number_of_ranks_may_change_freely() -> None:
    one = describe_identity("cpu", world_size=1)
    assert check_identity(one, describe_identity("cpu", world_size=2, layout="dp_replicate=2")) == []


def test_identity_names_the_job_of_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    before = describe_identity("cpu")
    assert "slurm_job" not in before
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    here = describe_identity("cpu")
    assert (here["slurm_job"], here["slurm_restart"]) == ("77", 2)
    assert check_identity(before, here) == []
