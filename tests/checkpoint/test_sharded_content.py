"""Checkpoints of several writers on disk: read in any part, and never when something is wrong."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from safetensors.torch import load_file

from paceline.checkpoint import (
    CheckpointFolder,
    export_model,
    hash_stored,
    hash_tensors,
    is_usable,
    open_usable,
    tree,
    verify,
)
from paceline.checkpoint.content import PreparedShare, Stored, list_model, write_files
from paceline.checkpoint.hashed import FileRecord, hash_file
from paceline.checkpoint.manifest import FILE_NAME, Manifest, dump_manifest, read_manifest
from paceline.checkpoint.part import Part
from paceline.checkpoint.summary import summarize
from paceline.errors import PacelineError
from tests.checkpoint.states import RECIPE, assert_same, load_checkpoint, make_state, write_tensors

WEIGHT, BIAS = torch.arange(35.0).reshape(7, 5), torch.arange(4.0)
MODEL = {"bias": BIAS, "head": WEIGHT, "weight": WEIGHT}
MOMENT = torch.arange(35.0).reshape(7, 5) / 3
OPTIMIZER = {"kind": "Adam", "parameters": {"weight": {"state": {"step": torch.tensor(2.0), "m": MOMENT}}}}
PARTS = [
    Part((7, 5), (((0, 4),), ((0, 1), (3, 4)))),
    Part((7, 5), (((0, 4),), ((1, 3), (4, 5)))),
    Part((7, 5), (((4, 7),), ((0, 5),))),
]


def cut(whole: torch.Tensor, part: Part) -> torch.Tensor:
    for dim, runs in enumerate(part.runs):
        kept = torch.tensor([i for run in runs for i in range(*run)])
        whole = whole.index_select(dim, kept)
    return whole


def make_shares() -> list[PreparedShare]:
    """Write the shares of three ranks that have the weight in parts."""
    structures, named = {}, {}
    for group, value in (("optimizer", OPTIMIZER), ("state", make_state(1))):
        structures[group], tensors = tree.encode(value, group)
        named |= {f"{group}/{name}": tensor for name, tensor in tensors.items()}
    moment = next(name for name, tensor in named.items() if tensor is MOMENT)
    shares = []
    for rank, part in enumerate(PARTS):
        tensors = {"model/weight": cut(WEIGHT, part), moment: cut(MOMENT, part)}
        parts = dict.fromkeys(tensors, part)
        if rank == 1:
            tensors["model/bias"] = BIAS
        if rank:
            shares.append(PreparedShare(rank, tensors, parts, 999))
        else:
            own = {name: tensor for name, tensor in named.items() if name != moment}
            tied = {"model/head": "model/weight"}
            shares.append(PreparedShare(0, own | tensors, parts, 999, tied, structures, RECIPE))
    return shares


def save(folder: Path, shares: list[PreparedShare], step: int = 1) -> Path:
    with CheckpointFolder(folder, keep=2).begin(step, num_bytes=999, identity={"made_by": "a"}) as save:
        records: dict[str, FileRecord] = {}
        for share in shares:
            records |= write_files(share.list_files(), save.folder)
        return save.commit(records)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return save(tmp_path / "run", make_shares())


def test_parts_come_back_whole(checkpoint: Path, tmp_path: Path) -> None:
    assert verify(checkpoint) == []
    loaded = load_checkpoint(checkpoint)
    assert_same(loaded.model, MODEL)
    assert loaded.model["head"] is loaded.model["weight"]
    assert_same(loaded.optimizer, OPTIMIZER)
    assert_same(loaded.state, make_state(1))
    assert loaded.recipe_toml == RECIPE
    assert hash_stored(open_usable(checkpoint).model) == hash_tensors(MODEL)
    export_model(checkpoint, tmp_path / "m.safetensors")
    assert_same(dict(sorted(load_file(tmp_path / "m.safetensors").items())), MODEL)
    summary = summarize(checkpoint)
    assert (summary.num_parameters, summary.loss, summary.findings) == (39, 1 / 7, [])
    assert {name: info.shape for name, info in summary.tensors.items()} == {
        name: tuple(tensor.shape) for name, tensor in MODEL.items()
    }


def test_any_part_can_be_read(checkpoint: Path) -> None:
    unread = open_usable(checkpoint).model["weight"]
    rows = [((0, 7),), ((2, 5),), ((0, 1), (6, 7)), ()]
    columns = [((0, 5),), ((1, 4),), ((0, 2), (3, 5))]
    for runs in itertools.product(rows, columns):
        part = Part((7, 5), runs)
        if part.num_elements:
            assert_same(unread.read(part), cut(WEIGHT, part))
        else:
            assert unread.read(part).shape == (0, part.shape[1])


def test_each_file_is_opened_once(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    real = safetensors.safe_open

    def count(path: Path, framework: str) -> Any:
        opened.append(path.name)
        return real(path, framework=framework)

    unread = list_model(Stored(checkpoint))
    monkeypatch.setattr(safetensors, "safe_open", count)
    for _ in range(3):
        for tensor in unread.values():
            tensor.read()
    assert sorted(opened) == [f"part-0000{rank}.safetensors" for rank in range(3)]


# Damage


def flip_each_byte(checkpoint: Path, every: int) -> None:
    for path in sorted(checkpoint.iterdir()):
        whole = path.read_bytes()
        for place in range(0, len(whole), every):
            data = bytearray(whole)
            data[place] ^= 1 << place % 8
            path.write_bytes(data)
            findings = verify(checkpoint)
            assert findings, (path, place)
            assert findings[0].where == str(path), place
            assert not is_usable(findings)
            with pytest.raises(PacelineError):
                load_checkpoint(checkpoint)
        path.write_bytes(whole)
    assert verify(checkpoint) == []


def test_a_flipped_bit_is_found_and_its_file_named(checkpoint: Path) -> None:
    flip_each_byte(checkpoint, 37)


def test_a_flipped_bit_in_any_byte_is_found(checkpoint: Path) -> None:
    flip_each_byte(checkpoint, 1)


def test_a_file_that_is_cut_or_removed_is_named(checkpoint: Path) -> None:
    for path in sorted(checkpoint.iterdir()):
        whole = path.read_bytes()
        for damage in (Path.unlink, lambda path: os.truncate(path, 0), lambda path: os.truncate(path, 9)):
            damage(path)
            findings = verify(checkpoint)
            assert [finding.where for finding in findings] == [str(path)]
            assert not is_usable(findings)
            path.write_bytes(whole)


def test_a_share_that_is_missing_is_not_committed(tmp_path: Path) -> None:
    first = save(tmp_path / "run", make_shares(), step=1)
    for shares, words in (
        (make_shares()[:2], "lack numbers of model/weight"),
        (
            [*make_shares(), PreparedShare(3, {"model/bias": BIAS}, {}, 9)],
            "have the same elements of model/bias",
        ),
    ):
        with pytest.raises(PacelineError, match=words) as caught:
            save(tmp_path / "run", shares, step=2)
        assert caught.value.code == "PL508"
        assert CheckpointFolder(tmp_path / "run", keep=2).steps() == {1: first}
        assert [path.name for path in first.parent.iterdir() if path.name.startswith(".tmp")] == []


# Manifests and files that somebody made on purpose, with right hashes


def seal(checkpoint: Path, **changes: Any) -> None:
    """Make the hashes right again after a change."""
    manifest = read_manifest(checkpoint)
    files = {name: hash_file(checkpoint / name) for name in manifest.files}
    fields = {"step": 1, "files": files, "identity": {}} | changes
    (checkpoint / FILE_NAME).write_bytes(dump_manifest(Manifest(**fields)))


def reseal(checkpoint: Path, old: bytes, new: bytes) -> None:
    """Change the text of the manifest, and correct its own hash."""
    text = (checkpoint / FILE_NAME).read_bytes().replace(old, new)
    blank = re.sub(rb'"manifest_sha256": "[0-9a-f]{64}"', b'"manifest_sha256": "' + b"0" * 64 + b'"', text)
    digits = hashlib.sha256(blank).hexdigest().encode()
    (checkpoint / FILE_NAME).write_bytes(blank.replace(b"0" * 64, digits))


def rewrite(checkpoint: Path, parts: dict[str, Any], tensors: dict[str, torch.Tensor], **more: Any) -> None:
    """Put another share in place of rank 2's."""
    path = checkpoint / "part-00002.safetensors"
    path.unlink()
    write_tensors(path, tensors, metadata={"parts": json.dumps(parts), **more})
    seal(checkpoint)


def place(whole: Any, *runs: Any) -> dict[str, Any]:
    return {"whole": whole, "runs": runs}


REST = cut(WEIGHT, PARTS[2])
HOSTILE: dict[str, tuple[Callable[[Path], object], str]] = {
    "a path upwards": (
        lambda path: seal(path, files={"../../../etc/passwd": FileRecord(1, "0" * 64)}),
        "cannot be a file of it",
    ),
    "an absolute path": (
        lambda path: seal(path, files={"/etc/passwd": FileRecord(1, "0" * 64)}),
        "cannot be a file of it",
    ),
    "the folder above": (
        lambda path: seal(path, files={"..": FileRecord(1, "0" * 64)}),
        "cannot be a file of it",
    ),
    "a hidden file": (
        lambda path: seal(path, files={".lock": FileRecord(1, "0" * 64)}),
        "cannot be a file of it",
    ),
    "a name with a line break": (
        lambda path: seal(path, files={"a\n": FileRecord(1, "0" * 64)}),
        "cannot be a file of it",
    ),
    "a huge size": (
        lambda path: seal(path, files={"state.json": FileRecord(10**30, "0" * 64)}),
        "the size of state.json is 1000",
    ),
    "a negative size": (
        lambda path: seal(path, files={"state.json": FileRecord(-1, "0" * 64)}),
        "the size of state.json is -1",
    ),
    "a size that is a truth": (
        lambda path: seal(path, files={"state.json": FileRecord(True, "0" * 64)}),
        "the size of state.json is True",
    ),
    "a hash that is none": (
        lambda path: seal(path, files={"state.json": FileRecord(1, "../x")}),
        "is not the hash of state.json",
    ),
    "a name twice": (
        lambda path: reseal(path, b'"recipe.toml"', b'"state.json"'),
        "names 'state.json' twice",
    ),
    "one of many names twice": (
        lambda path: (
            seal(path, files={f"part-{k:06}": FileRecord(8, "1" * 64) for k in range(100_000)}),
            reseal(path, b'"part-099999"', b'"part-099998"'),
        ),
        "names 'part-099998' twice",
    ),
    "more names than any run has": (
        lambda path: seal(path, files={f"part-{k:06}": FileRecord(8, "0" * 64) for k in range(300_000)}),
        "has more than 33,554,432 bytes",
    ),
    "a step that is no number": (
        lambda path: reseal(path, b'"step": 1', b'"step": 1e400'),
        "the step is inf",
    ),
    "deep brackets": (
        lambda path: reseal(path, b'"step": 1', b'"step": ' + b"[" * 100_000),
        "RecursionError",
    ),
    "a manifest elsewhere": (
        lambda path: (
            (path / FILE_NAME).rename(path.parent / "m"),
            (path / FILE_NAME).symlink_to(path.parent / "m"),
        ),
        "manifest.json is a symbolic link",
    ),
    "a symbolic link": (
        lambda path: (
            (path / "recipe.toml").rename(path.parent / "r"),
            (path / "recipe.toml").symlink_to(path.parent / "r"),
        ),
        "recipe.toml is not a plain file",
    ),
    "a part outside of the whole": (
        lambda path: rewrite(
            path, {"model/weight": place([7, 5], [[5, 8]], [[0, 5]])}, {"model/weight": REST}
        ),
        "the run [5, 8) in a dimension of 7",
    ),
    "an overlap that makes up for a gap": (
        lambda path: rewrite(
            path, {"model/weight": place([7, 5], [[3, 6]], [[0, 5]])}, {"model/weight": REST}
        ),
        "the same elements of model/weight",
    ),
    "a huge whole": (
        lambda path: rewrite(
            path, {"model/weight": place([10**15, 5], [[4, 7]], [[0, 5]])}, {"model/weight": REST}
        ),
        "another shape or type of model/weight",
    ),
    "a part of another shape": (
        lambda path: rewrite(
            path, {"model/weight": place([7, 5], [[4, 7]], [[0, 4]])}, {"model/weight": REST}
        ),
        "has shape [3, 5], and its part [3, 4]",
    ),
    "no parts": (lambda path: rewrite(path, {"model/weight": [1]}, {"model/weight": REST}), "not parts"),
    "tied to nothing": (
        lambda path: rewrite(
            path,
            {"model/weight": place([7, 5], [[4, 7]], [[0, 5]])},
            {"model/weight": REST},
            tied='{"model/other": "model/absent"}',
        ),
        "cannot share the tensor of model/absent",
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_what_was_made_on_purpose_is_refused(checkpoint: Path, case: str) -> None:
    spoil, words = HOSTILE[case]
    spoil(checkpoint)
    findings = verify(checkpoint)
    assert any(words in finding.saw for finding in findings), findings
    assert not is_usable(findings)
    with pytest.raises(PacelineError):
        load_checkpoint(checkpoint)
