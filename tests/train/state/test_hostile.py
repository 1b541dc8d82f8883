"""Checkpoints that were changed and hashed again: what `verify` calls valid loads, the rest is left out.

Each case changes the newest of two checkpoints and states its new hashes in the manifest. If `verify` finds
it valid, the run resumes from it and takes a step; else the run resumes from the older one and logs why.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from paceline.checkpoint import is_usable, verify
from paceline.checkpoint.hashed import FileRecord, hash_file
from paceline.checkpoint.manifest import FILE_NAME, Manifest, dump_manifest, read_manifest
from paceline.errors import PacelineError
from paceline.train.trainer import Trainer
from tests.dist.pool import Pool
from tests.train.test_resume import noted_warnings

# Of what only the run can know: its settings, its model, its optimizer, its data, its communication hook.
OF_THE_RUN = {"PL515", "PL531", "PL511", "PL259", "PL526"}
NEWEST = "checkpoints/step-00000002"
VALUES = ["delete", None, "x", -1, [], {}, 1e400, 10**40]


class Average:
    def __init__(self) -> None:
        self.value = torch.zeros(3)

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def start(folder: str, mode: str, num_steps: int) -> int:
    """Resume, take steps, save after each; return the step that the run was resumed from."""
    trainer = Trainer(
        lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)),
        forward=lambda model, x: model(x),
        loss=lambda output, x: output.square().mean(),
        optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-3),
        schedule=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (n + 1)),
        checkpoint_mode=mode,
        microbatch_size=4,
        asynchronous_saves=False,
        keep=3,
        recipe_toml="[model]\n",
    )
    trainer.track(average=Average())
    loader = trainer.loader(list(torch.arange(96.0).reshape(32, 3).sin()), global_batch_size=4, name="train")
    try:
        first = trainer.resume(folder)
        for batch in loader:
            trainer.step(batch)
            if num_steps > 1:
                trainer.save()
            if trainer.step_number >= first + num_steps:
                break
    finally:
        trainer.close()
    return first


def seal(path: Path, change: Callable[[dict[str, Any]], None] | None = None) -> None:
    """State the hashes of a checkpoint's files as they are now."""
    old = read_manifest(path)
    identity = dict(old.identity)
    if change is not None:
        change(identity)
    files = {name: hash_file(path / name) for name in old.files if (path / name).exists()}
    manifest = Manifest(old.step, files, identity)
    (path / FILE_NAME).write_bytes(dump_manifest(manifest))


def edit_json(path: Path, change: Callable[[Any], None]) -> None:
    table = json.loads(path.read_bytes())
    change(table)
    path.write_text(json.dumps(table))


def edit_tensors(path: Path, change: Callable[[dict[str, Any], dict[str, str]], None]) -> None:
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        metadata = file.metadata() or {}
    tensors = load_file(path)
    change(tensors, metadata)
    save_file(tensors, path, metadata)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the paths of all values that Paceline itself writes and reads again."""
    if path:
        yield path
    # The inside of these is torch's or the user's.
    if path[-1:] in (("schedule",), ("groups",), ("tracked",), ("run",), ("other",)):
        return
    if isinstance(value, dict):
        for key, item in value.items():
            yield from places(item, (*path, key))


def put(table: Any, path: tuple[Any, ...], value: Any) -> None:
    for key in path[:-1]:
        table = table[key]
    if value == "delete":
        del table[path[-1]]
    else:
        table[path[-1]] = value


def deep(kind: str) -> str:
    return '{"a": ' * 100_000 + "1" + "}" * 100_000 if kind == "dict" else "[" * 100_000 + "]" * 100_000


def weights(path: Path) -> Path:
    return path / "part-00000.safetensors"


def change_weights(path: Path, change: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
    def edit(tensors: dict[str, Any], _metadata: dict[str, str]) -> None:
        found = change(tensors.pop("model/0.weight"))
        if found is not None:
            tensors["model/0.weight"] = found

    edit_tensors(weights(path), edit)


def add_metadata(path: Path, **words: str) -> None:
    edit_tensors(weights(path), lambda _tensors, metadata: metadata.update(words))


def text(name: str, content: str | bytes) -> Callable[[Path], None]:
    data = content.encode() if isinstance(content, str) else content
    return lambda path: (path / name).write_bytes(data) and None


def state(change: Callable[[Any], None], name: str = "state.json") -> Callable[[Path], None]:
    return lambda path: edit_json(path / name, change)


def scalar(dtype: str, shape: list[int] | None = None) -> dict[str, Any]:
    if shape is None:
        return {"$": "scalar", "dtype": dtype, "base64": ""}
    return {"$": "array", "dtype": dtype, "shape": shape, "name": "rng.numpy.keys"}


CASES: dict[str, Callable[[Path], None]] = {
    "parts nested deep": lambda path: add_metadata(path, parts=deep("dict")),
    "aliases nested deep": lambda path: add_metadata(path, aliases=deep("list")),
    "parts of infinite size": lambda path: add_metadata(path, parts='{"0.weight": {"whole": [1e400]}}'),
    "state nested deep": text("state.json", deep("list")),
    "state nested too deep": state(lambda table: table.update(x=json.loads("[" * 300 + "]" * 300))),
    "state is a list": text("state.json", "[]"),
    "state is null": text("state.json", "null"),
    "state is no UTF-8": text("state.json", b"\xff\xfe\xfa"),
    "recipe is no UTF-8": text("recipe.toml", b"\xff\xfe\xfa"),
    "optimizer is empty": text("optimizer.json", "{}"),
    "dtype of 10^12 bytes": state(lambda table: table.update(x=scalar("V1000000000000"))),
    "array of 10^12 values": state(lambda table: table["rng"]["numpy"].update(keys=scalar("<u4", [10**12]))),
    "array of negative size": state(lambda table: table["rng"]["numpy"].update(keys=scalar("<u4", [-1, -624]))),  # noqa: E501
    "another dtype": state(lambda table: table["rng"]["numpy"].update(keys=scalar("|O", [624]))),
    "dict with a dict as key": state(lambda table: table.update(x={"$": "dict", "items": [[{}, 1]]})),
    "step of another": state(lambda table: table["counters"].update(step=7)),
    "position without a loader": state(lambda table: table["loaders"].pop("train")),
    "object without a state": state(lambda table: table["tracked"].pop("average")),
    "a state that an object does not take": state(lambda table: table["tracked"].update(average=[])),
    "a schedule's count that is a word": state(
        lambda table: table["updates"]["model"]["schedule"].update(_step_count="x")
    ),
    "a unit that is no power of two": state(lambda table: table["updates"]["model"].update(unit=3.0)),
    "a unit that is no float": state(lambda table: table["updates"]["model"].update(unit=10**400)),
    "frozen is null": state(lambda table: table["updates"]["model"].update(frozen=None)),
    "more samples than an epoch has": state(lambda table: table["loaders"]["train"].update(samples=33)),
    "index of a generator": state(lambda table: table["rng"]["numpy"].update(position=10**9)),
    "NaN among the weights": lambda path: change_weights(path, lambda t: t.where(t > 0, torch.nan)),
    "weights of another shape": lambda path: change_weights(path, lambda t: t.T.contiguous()),
    "weights of integers": lambda path: change_weights(path, lambda t: t.long()),
    "no weights": lambda path: change_weights(path, lambda t: None),
    "shape of a parameter": state(
        lambda table: table["model"]["parameters"]["0.weight"].update(shape=[3, 4]), "optimizer.json"
    ),
    "group of a parameter": state(
        lambda table: table["model"]["parameters"]["0.weight"].update(group=9), "optimizer.json"
    ),
}  # fmt: skip


def attack(world: Any, folder: str, mode: str, num_random: int) -> list[str]:
    """Try all cases; return what went wrong."""
    base = Path(folder) / "run"
    start(str(base), mode, 2)
    wrong = []

    def attempt(name: str, change: Callable[[Path], None], identity: Any = None) -> None:
        run = Path(folder) / "changed"
        shutil.copytree(base, run)
        change(run / NEWEST)
        seal(run / NEWEST, identity)
        is_valid = is_usable(verify(run / NEWEST))
        try:
            with noted_warnings() as told:
                first: Any = start(str(run), mode, 1)
        except PacelineError as error:
            first = error.code
        except Exception as error:
            first = f"{type(error).__name__}: {error}"[:200]
        lines = [line for line in told if "is left out" in line]
        good = (first == 2 or first in OF_THE_RUN) if is_valid else (first == 1 and len(lines) == 1)
        if not good:
            wrong.append(f"{name}: valid={is_valid}, {first!r}, {lines}")
        shutil.rmtree(run)

    for name, change in CASES.items():
        attempt(name, change)
    for key in ("run", "generation", "paceline", "world_size", "save"):
        for value in (None, [], {"a": 1}, "x", -1):
            attempt(
                f"identity.{key}={value}",
                lambda path: None,
                lambda table, k=key, v=value: put(table, (k,), v),
            )
    draw = random.Random(7)
    for number in range(num_random):
        name = ("state.json", "optimizer.json")[number % 3 == 2]
        table = json.loads((base / NEWEST / name).read_bytes())
        path, value = draw.choice(list(places(table))), draw.choice(VALUES)
        attempt(
            f"{name} {path}={value}",
            lambda folder, n=name, p=path, v=value: edit_json(folder / n, lambda t: put(t, p, v)),
        )
    return wrong


@pytest.mark.parametrize(
    ("mode", "num_random"),
    [("full", 20), pytest.param("sharded", 150, marks=pytest.mark.slow)],
)
def test_what_is_valid_loads_and_the_rest_is_left_out(
    ranks: Pool, tmp_path: Path, mode: str, num_random: int
) -> None:
    assert ranks.run(attack, nproc=1, args=(str(tmp_path), mode, num_random)) == [[]]


def test_a_manifest_of_many_names_gives_few_findings(tmp_path: Path) -> None:
    record = FileRecord(num_bytes=1, sha256="0" * 64)
    files = {f"x-{number:04d}.safetensors": record for number in range(1000)}
    (tmp_path / FILE_NAME).write_bytes(dump_manifest(Manifest(step=1, files=files, identity={})))
    found = verify(tmp_path)
    assert {finding.code for finding in found} == {"PL500"}
    assert len(found) == 101
    assert "files after these were not checked" in found[-1].saw
