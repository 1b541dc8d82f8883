"""Sharded checkpoints: saved under one layout, loaded under another, the same bits."""

from __future__ import annotations

import errno
import math
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import paceline
from paceline.checkpoint import (
    files,
    find_checkpoint,
    hash_stored,
    hash_tensors,
    list_at,
    open_usable,
    verify,
)
from paceline.checkpoint.manifest import read_manifest
from paceline.checkpoint.part import Part
from paceline.checkpoint.tensors import read_into
from paceline.errors import PacelineError
from paceline.models.gpt import Gpt
from paceline.parallel.placement import local
from paceline.recipe.layout import Layout
from paceline.recipe.schema import GptModel
from tests.checkpoint.states import load_checkpoint
from tests.dist.pool import Pool, RankError
from tests.train.test_layout_checkpoints import (
    Tracker,
    build_tied_llama,
    next_token_loss,
    plain,
    run,
)
from tests.train.test_layouts import Tokens

GLOBAL_BATCH = 8


def build_odd_gpt() -> nn.Module:
    """No dimension that dp_shard cuts is a multiple of 4."""
    section = GptModel(kind="gpt", layers=2, hidden=36, heads=6, kv_heads=2, dropout=0.1)
    return Gpt(section, 66, 8)


def build_trainer(
    layout: str, model: Callable[[], nn.Module], optimizer: Any, mode: str, **more: Any
) -> paceline.Trainer:
    return paceline.Trainer(
        model,
        forward=run,
        loss=next_token_loss,
        optimizer=optimizer,
        layout=layout,
        example={"ids": torch.zeros(2, 9, dtype=torch.int64)},
        microbatch_size=2,
        dtype="fp32",
        reduction="exact",
        checkpoint_mode=mode,
        **more,
    )


def num_ranks(layout: str) -> int:
    return Layout.parse(layout).fewest_ranks


def describe(trainer: paceline.Trainer) -> str | None:
    """Return a hash of all tensors of model and optimizer, whole; on rank 0."""
    found: dict[str, Tensor] = {f"model.{name}": value for name, value in trainer.whole_state().items()}
    tree = trainer._updates["model"].optimizer_state()
    for name, each in tree["parameters"].items():
        for key, value in each["state"].items():
            if isinstance(value, Tensor):
                found[f"optimizer.{name}.{key}"] = value
    return hash_tensors(found) if trainer.world.is_main else None


def train_and_save(
    world: Any, layout: str, folder: str, case: str, num_steps: int, mode: str = "sharded"
) -> str | None:
    trainer = build_trainer(layout, *CASES[case], mode)
    loader = trainer.loader(Tokens(), global_batch_size=GLOBAL_BATCH)
    trainer.resume(folder)
    last = trainer.step_number + num_steps
    while trainer.step_number < last:
        for share in loader:
            if trainer.step(share).number == last:
                break
    trainer.save()
    found = describe(trainer)
    trainer.close()
    return found


def load_each(world: Any, layout: str, folders: list[str], case: str) -> list[str | None]:
    """Return what each checkpoint loads under one layout."""
    found = []
    for folder in folders:
        trainer = build_trainer(layout, *CASES[case], "sharded")
        trainer.loader(Tokens(), global_batch_size=GLOBAL_BATCH)
        trainer.resume(folder)
        found.append(describe(trainer))
        trainer.close()
    return found


CASES: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "odd": (build_odd_gpt, plain),
    "tied": (build_tied_llama, plain),
}
# Of these the exact reduction gives the same bits.
SAME_BITS = {"", "dp_replicate=2", "dp_replicate=4", "dp_shard=4 zero=1", "dp_shard=4"}
ALL = ["", "dp_replicate=4", "dp_shard=4 zero=1", "dp_shard=4", "dp_shard=2 tp=2", "tp=2 sequence=true"]


def check_matrix(ranks: Pool, folder: Path, case: str, layouts: list[str]) -> None:
    saved = {}
    folders = {layout: folder / layout.replace(" ", "_") / "run" for layout in layouts}
    for layout in layouts:
        args = (layout, str(folders[layout]), case, 2)
        saved[layout] = ranks.run(train_and_save, num_ranks(layout), args, timeout_s=60)[0]
        path = find_checkpoint(folders[layout])
        assert len(list(path.glob("part-*"))) == num_ranks(layout)
        assert verify(path) == []
        whole = load_checkpoint(path)
        assert hash_stored(open_usable(path).model) == hash_tensors(whole.model)
    for layout in layouts:
        args = (layout, [str(each) for each in folders.values()], case)
        found = ranks.run(load_each, num_ranks(layout), args, timeout_s=120)[0]
        assert found == list(saved.values()), layout
    assert len({saved[layout] for layout in SAME_BITS & set(layouts)}) == 1


@pytest.mark.parametrize("case", CASES)
def test_every_layout_loads_what_every_other_saved(ranks: Pool, tmp_path: Path, case: str) -> None:
    check_matrix(ranks, tmp_path, case, ALL)


def test_a_run_goes_on_under_either_mode_and_any_data_parallel_layout(ranks: Pool, tmp_path: Path) -> None:
    (whole,) = ranks.run(train_and_save, 1, ("", str(tmp_path / "one"), "odd", 6, "full"))
    for layout, mode in (("dp_shard=2", "sharded"), ("dp_replicate=2", "full"), ("", "sharded")):
        args = (layout, str(tmp_path / "many"), "odd", 2, mode)
        found = ranks.run(train_and_save, num_ranks(layout), args)[0]
    assert found == whole
    assert [len(list(path.glob("part-*"))) for path in list_at(tmp_path / "many")] == [2, 1, 1]
    hashes = [hash_stored(open_usable(find_checkpoint(tmp_path / name)).model) for name in ("one", "many")]
    assert hashes[0] == hashes[1]
    identities = [read_manifest(path).identity for path in list_at(tmp_path / "many")]
    assert len({identity["run"] for identity in identities}) == 1
    assert [identity["generation"] for identity in identities] == [1, 2, 3]


@pytest.mark.parametrize("layout", ["dp_replicate=4", "dp_shard=4", "dp_shard=2 tp=2"])
def test_ranks_write_about_as_much(ranks: Pool, tmp_path: Path, layout: str) -> None:
    ranks.run(train_and_save, 4, (layout, str(tmp_path), "odd", 1))
    path = find_checkpoint(tmp_path)
    loaded = load_checkpoint(path)
    tensors = [*loaded.model.values(), *(t for t in tree_leaves(loaded.optimizer) if isinstance(t, Tensor))]
    most = max(tensor.numel() * tensor.element_size() for tensor in tensors)
    written = [
        sum(
            t.numel() * t.element_size()
            for name, t in load_file(file).items()
            if not name.startswith("state/")
        )
        for file in sorted(path.glob("part-*"))
    ]
    assert len(written) == 4
    assert sum(written) == sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    assert max(written) - min(written) <= most


# What goes wrong on some ranks only


def save_with_a_fault(world: Any, folder: str, layout: str) -> list[str]:
    """The message where rank 1's disk is full; then a save that works."""
    trainer = build_trainer(layout, *CASES["odd"], "sharded")
    loader = trainer.loader(Tokens(), global_batch_size=GLOBAL_BATCH)
    trainer.resume(folder)
    messages = []
    batches = iter(loader)
    for fails in (False, True, False):
        trainer.step(next(batches))

        def fault(operation: str, path: Path, start: int, num_bytes: int, fails: bool = fails) -> None:
            if fails and world.rank == 1 and operation == "write":
                raise OSError(errno.ENOSPC, "No space left on device")

        try:
            with files.inject(fault):
                trainer.save(wait=True)
        except PacelineError as error:
            messages.append(str(error))
    trainer.close()
    return messages


@pytest.mark.parametrize("layout", ["dp_shard=2", "tp=2", "dp_replicate=2"])
def test_a_disk_that_is_full_on_one_rank_stops_the_save_on_all(
    ranks: Pool, tmp_path: Path, layout: str
) -> None:
    first, second = ranks.run(save_with_a_fault, 2, (str(tmp_path), layout))
    assert first == second
    (message,) = first
    assert "PL508" in message
    assert "rank 1" in message
    assert [path.name for path in list_at(tmp_path)] == ["step-00000001", "step-00000003"]
    assert [verify(path) for path in list_at(tmp_path)] == [[], []]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir() if path.name.startswith(".tmp")] == []


def work_apart(world: Any, folder: str, mode: str, num_steps: int) -> tuple[str | None, str | None]:
    """Rank 1 has another disk: it works in another folder."""
    os.makedirs(f"{folder}/{world.rank}", exist_ok=True)
    os.chdir(f"{folder}/{world.rank}")
    try:
        return train_and_save(world, "dp_shard=2", "run", "odd", num_steps, mode), None
    except PacelineError as error:
        return None, str(error)
    finally:
        os.chdir(folder)


def lose_the_folder(world: Any, folder: str) -> str:
    """Rank 1 sees the folder at the start, and another one when it saves."""
    os.chdir(folder)
    trainer = build_trainer("dp_shard=2", *CASES["odd"], "sharded")
    trainer.resume("run")
    if world.rank == 1:
        os.makedirs("elsewhere")
        os.chdir("elsewhere")
    try:
        outcome = trainer.save().outcome
        assert outcome is not None
        return str(outcome.error)
    finally:
        os.chdir(folder)
        trainer.close()


def test_without_the_share_of_a_rank_nothing_is_committed(ranks: Pool, tmp_path: Path) -> None:
    messages = ranks.run(lose_the_folder, 2, (str(tmp_path),))
    assert messages[0] == messages[1]
    assert "part-00001.safetensors is missing" in messages[0]
    assert "PL508" in messages[0]
    assert list((tmp_path / "run" / "checkpoints").glob("*step*")) == []


def test_a_rank_that_does_not_see_the_files_is_sent_its_parts(ranks: Pool, tmp_path: Path) -> None:
    saved = ranks.run(train_and_save, 2, ("dp_shard=2", str(tmp_path / "0" / "run"), "odd", 2))[0]
    found = ranks.run(work_apart, 2, (str(tmp_path), "full", 0))
    assert found[0] == (saved, None)


class Average:
    """An average that only rank 1 has of one weight."""

    def __init__(self, world: Any, model: nn.Module) -> None:
        self.state = {
            name: p.detach().clone()
            for name, p in model.named_parameters()
            if world.rank == 1 or "layers.1" not in name
        }

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def save_an_average(world: Any, folder: str) -> str:
    trainer = build_trainer("tp=2", *CASES["odd"], "sharded")
    trainer.track(average=Average(world, trainer.model))
    trainer.resume(folder)
    try:
        trainer.save()
    except PacelineError as error:
        return str(error)
    finally:
        trainer.close()
    return ""


def test_ranks_that_hold_different_things_are_refused(ranks: Pool, tmp_path: Path) -> None:
    messages = ranks.run(save_an_average, 2, (str(tmp_path),))
    assert messages[0] == messages[1]
    assert "PL395" in messages[0]
    assert not (tmp_path / "checkpoints").exists()


def test_a_checkpoint_of_another_run_is_not_taken_for_ones_own(ranks: Pool, tmp_path: Path) -> None:
    for name, num_steps in (("one", 1), ("other", 2)):
        ranks.run(train_and_save, 1, ("", str(tmp_path / name), "odd", num_steps))
    (stranger,) = list_at(tmp_path / "other")
    shutil.copytree(stranger, tmp_path / "one" / "checkpoints" / stranger.name)
    with pytest.raises(RankError, match="PL526"):
        ranks.run(train_and_save, 1, ("", str(tmp_path / "one"), "odd", 1))


@dataclass
class Loading:
    """The memory that loading took on one rank, in bytes.

    Attributes:
        most: of its tensors at a time.
        read: from files.
        own: of its parts of the weights and the optimizer's state.
        whole: of the whole of them.
    """

    most: int
    read: int
    own: int
    whole: int


def load_and_count(world: Any, layout: str, folder: str) -> Loading:
    trainer = build_trainer(layout, *CASES["odd"], "sharded")
    read = 0

    def count(path: Path, name: str, source: Part, wanted: Part, found: Tensor, files: Any) -> None:
        nonlocal read
        blocks = [found[here].numel() for here, _ in wanted.overlap(source)]
        read += sum(blocks) * found.element_size() if not name.startswith("state/") else 0
        read_into(path, name, source, wanted, found, files)

    with pytest.MonkeyPatch.context() as patch, Tracker() as loading:
        patch.setattr("paceline.checkpoint.content.read_into", count)
        trainer.resume(folder)
    update = trainer._updates["model"]
    held = [*trainer.model.parameters(), *tree_leaves(list(update.optimizer.state.values()))]
    own = sum(local(t).numel() * t.element_size() for t in held if isinstance(t, Tensor) and t.dim())
    whole = sum(math.prod(update.placement.whole_shape(n, p)) for n, p in trainer.model.named_parameters())
    trainer.close()
    return Loading(loading.most_bytes, read, own, whole * 4 * 4)


def test_no_rank_holds_more_than_its_parts(ranks: Pool, tmp_path: Path) -> None:
    ranks.run(train_and_save, 1, ("", str(tmp_path), "odd", 1))
    for layout in ("dp_shard=4", "tp=2 dp_shard=2"):
        for found in ranks.run(load_and_count, 4, (layout, str(tmp_path))):
            # Weights and three moments: what is read is its own part, and twice that is held at a time.
            assert found.own < 0.4 * found.whole
            assert found.read == pytest.approx(found.own, rel=0.05)
            assert found.most < 2.1 * found.own + 0.1 * found.whole


def build_two(world: Any) -> paceline.Trainer:
    """Two models with an optimizer each; one has buffers."""

    def normed() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))

    def step(update: Callable[[str, Any], Any]) -> None:
        update("one", lambda models, batch: models["one"](batch["x"]).square().mean())
        update("two", lambda models, batch: models["two"](batch["x"]).abs().mean())

    def adam(named: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam([p for _, p in named], lr=1e-2)

    return paceline.Trainer(
        {"one": normed, "two": lambda: nn.Linear(6, 2)},
        optimizer={"one": adam, "two": adam},
        step=step,
        layout=f"dp_replicate={world.world_size}",
        microbatch_size=2,
        checkpoint_mode="sharded",
    )


def train_two(world: Any, folder: str, num_steps: int) -> str | None:
    trainer = build_two(world)
    trainer.resume(folder)
    for number in range(num_steps):
        trainer.step({"x": torch.ones(2, 6) * (number + world.rank)})
    trainer.save()
    found = {
        f"{name}.{key}": t for name, model in trainer.models.items() for key, t in model.state_dict().items()
    }
    for name, update in trainer._updates.items():
        for number, tensor in enumerate(tree_leaves(update.optimizer_state())):
            if isinstance(tensor, Tensor):
                found[f"optimizer.{name}.{number}"] = tensor
    trainer.close()
    return hash_tensors(found)


def test_several_models_and_buffers_come_back(ranks: Pool, tmp_path: Path) -> None:
    saved = ranks.run(train_two, 2, (str(tmp_path), 2))[0]
    (path,) = list_at(tmp_path)
    assert [file.name for file in sorted(path.glob("part-*"))] == [
        f"part-0000{n}.safetensors" for n in (0, 1)
    ]
    assert ranks.run(train_two, 1, (str(tmp_path), 0)) == [saved]
