"""If ranks end, the others keep the last complete step, exactly, or nothing.

Here no rank ends: all fail in one step as if others had ended, and those that "are lost" keep nothing.
`test_lost_ranks.py` has real launchers and kills.
"""

from __future__ import annotations

import json
import logging
import logging.handlers
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from paceline.checkpoint.memory.held_states import end_keepers, find_held
from paceline.errors import PacelineError
from paceline.train.metrics import add_missing_rows
from paceline.train.state import last_step, memory_restore
from paceline.train.state.last_step import LastStep
from paceline.train.trainer import Trainer
from tests.dist.pool import Pool
from tests.train.lost_ranks import WIDTH, build_model
from tests.train.test_memory_saves import list_keepers
from tests.train.test_saving import Counting, Samples, describe

LOST = "Connection closed by peer"


class Run:
    """One start of a run whose step fails as asked."""

    def __init__(
        self, layout: str, folder: Path, build: Callable[[], nn.Module] | None = None, **settings: Any
    ) -> None:
        self.layout, self.fails_at, self.place, self.error = layout, 0, "", LOST
        self.drawn = torch.zeros(())
        self.num_forwards = 0
        self.trainer = Trainer(
            build or (lambda: build_model(layout)),
            forward=self.forward,
            loss=lambda output, batch: (output.square().sum(), len(output)),
            optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=0.05),
            schedule=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (1 + n)),
            layout=layout,
            example={"x": torch.ones(2, WIDTH)} if "tp" in layout or "pp" in layout else None,
            microbatch_size=2,
            checkpoint_mode="sharded",
            **settings,
        )
        self.loader = self.trainer.loader(Samples(), global_batch_size=16, name="train")
        self.first = self.trainer.resume(folder)
        self.between: Callable[[int], None] = lambda step: None
        self.trainer._updates["model"].optimizer.register_step_pre_hook(self.begin_update)

    def forward(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        output: Tensor = model(batch["x"]) * (1 + self.drawn)
        self.num_forwards += 1
        if self.num_forwards == 2:  # statistics have moved, generators were seeded
            self.strike("forward")
        return output

    def begin_update(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Fail after the first writes of an update, which are not those to the weights."""
        if self.trainer.step_number == self.fails_at and self.place == "update":
            for state in optimizer.state.values():
                state["exp_avg"].add_(1.0)
        self.strike("update")

    def strike(self, place: str) -> None:
        if self.trainer.step_number == self.fails_at and place == self.place:
            raise RuntimeError(self.error)

    def train(self, last: int) -> None:
        while self.trainer.step_number < last:
            for share in self.loader:
                self.between(self.trainer.step_number)
                self.drawn, self.num_forwards = torch.rand(()), 0
                np.random.rand()
                self.trainer.step(share)
                if self.trainer.step_number == last:
                    return

    def fail(self, step: int, place: str, *, is_lost: bool, error: str = LOST) -> str:
        """Take steps up to one that fails, and end as a rank does; return what was logged."""
        self.fails_at, self.place, self.error = step, place, error
        world = self.trainer.world
        with logged() as told:
            with pytest.raises(RuntimeError, match=error) as caught:
                self.train(step + 1)
            world.has_failed, world.error = True, None if is_lost else caught.value
            try:
                self.trainer.close()
            finally:
                world.has_failed, world.error = False, None
        return "\n".join(told)


@contextmanager
def logged() -> Iterator[list[str]]:
    """Yield a list that has what was logged, once the block has ended."""
    handler, logger, found = logging.handlers.BufferingHandler(100), logging.getLogger("paceline"), []
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield found
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        found += [record.getMessage() for record in handler.buffer]


def under_launcher(patch: pytest.MonkeyPatch, max_restarts: int = 3) -> None:
    patch.setenv("TORCHELASTIC_RUN_ID", "x")
    patch.setenv("TORCHELASTIC_MAX_RESTARTS", str(max_restarts))
    patch.setattr(last_step, "_LIMIT_S", 100.0)  # this machine may be busy


def normalized() -> nn.Module:
    """Return a model whose forward changes buffers that are not BatchNorm's."""
    inner = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, 2 * WIDTH))
    return nn.Sequential(inner, nn.ReLU(), nn.Linear(2 * WIDTH, 3))


def decay_more(run: Run) -> None:
    """Change an option by a factor, so that a second change of one step would have another result."""
    for group in run.trainer._updates["model"].optimizer.param_groups:
        group["weight_decay"] *= 1.5


class Blocks(nn.Module):
    """A model of two blocks, for two stages, without buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


BUILDS: dict[str, Callable[[], nn.Module]] = {"spectral": normalized, "no buffers": Blocks}
BETWEEN: dict[str, Callable[[Run], None]] = {"decay": decay_more}


def lose(
    world: Any, folder: str, layout: str, lost: tuple[int, ...], place: str, kind: str = ""
) -> tuple[int, bool, str]:
    """Return where a start goes on from after step 5 has failed, and whether it ends as without failure."""
    build, between = BUILDS.get(kind), BETWEEN.get(kind)

    def begin(name: str) -> Run:
        run = Run(layout, Path(folder) / name, build)
        if between is not None:
            run.between = lambda step: between(run)
        return run

    alone = begin("alone")
    alone.train(9)
    expected = describe(alone.trainer)
    alone.trainer.close()
    with pytest.MonkeyPatch.context() as patch:
        under_launcher(patch)
        torch.manual_seed(world.seed)
        np.random.seed(world.seed)
        run = begin("run")
        run.train(2)
        run.trainer.save(wait=True)
        told = run.fail(5, place, is_lost=world.rank in lost)
        keeps = place == "forward" and world.rank not in lost
        assert not keeps or "step 4 stays in memory" in told, told
        world.barrier()
        torch.manual_seed(7)  # a new process has other generators
        np.random.seed(7)
        with logged() as restored:
            again = begin("run")
        again.train(9)
        found = again.first, describe(again.trainer) == expected, "\n".join([told, *restored])
        again.trainer.close()
    return found


def read_steps(folder: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("layout", "lost", "place", "first"),
    [
        ("dp_replicate=2", (1,), "forward", 4),
        ("dp_replicate=2", (0,), "forward", 4),
        ("dp_replicate=2", (), "update", 2),
        ("dp_replicate=2 dp_shard=2", (3,), "forward", 4),
        # The ranks that are left have all parts together, although neither replica has.
        ("dp_replicate=2 dp_shard=2", (0, 3), "forward", 4),
        ("dp_replicate=2 dp_shard=2", (1, 3), "forward", 2),
        ("dp_replicate=2 tp=2", (0,), "forward", 4),
    ],
)
def test_a_start_goes_on_from_the_last_step_that_the_ranks_left_hold(
    ranks: Pool, tmp_path: Path, layout: str, lost: tuple[int, ...], place: str, first: int
) -> None:
    nproc = 2 if layout == "dp_replicate=2" else 4
    for starts, is_equal, told in ranks.run(lose, nproc=nproc, args=(str(tmp_path), layout, lost, place)):
        assert starts == first, told
        assert is_equal
    assert read_steps(tmp_path / "run") == list(range(1, 10))
    assert list_keepers(tmp_path / "run") == []


@pytest.mark.parametrize("kind", ["spectral", "decay"])
def test_what_a_forward_and_the_loop_have_changed_is_as_after_the_last_step(
    ranks: Pool, tmp_path: Path, kind: str
) -> None:
    args = (str(tmp_path), "dp_replicate=2", (1,), "forward", kind)
    for starts, is_equal, told in ranks.run(lose, args=args):
        assert starts == 4, told
        assert is_equal


def test_an_update_that_has_begun_leaves_nothing_also_without_buffers(ranks: Pool, tmp_path: Path) -> None:
    args = (str(tmp_path), "dp_replicate=2", (), "update", "no buffers")
    for starts, is_equal, _ in ranks.run(lose, args=args):
        assert starts == 2
        assert is_equal


class Counter(nn.Module):
    """A module whose forward changes a buffer from the fifth step on."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, 3)
        self.register_buffer("count", torch.zeros(()))
        self.num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        if self.num_calls > 16:
            self.count += 1
        output: Tensor = self.inner(x)
        return output


MODELS: dict[str, Callable[[], nn.Module]] = {"buffer": Counter, "pipeline": Blocks}


def hold(world: Any, folder: str, layout: str, kind: str) -> tuple[int, str]:
    """Return how many keepers hold something after step 5 has failed, and what was logged."""
    settings: dict[str, Any] = {}
    if kind == "off":
        settings["memory_on_failure"] = False
    if kind == "hook":
        settings = {"comm_hook": (None, allreduce_hook), "reduction": "fast"}
    if kind == "compress":
        settings = {"compress": {"kind": "int8"}}
    with pytest.MonkeyPatch.context() as patch:
        under_launcher(patch, 0 if kind == "restarts" and world.rank == 1 else 3)
        run = Run(layout, Path(folder), MODELS.get(kind), **settings)
        if kind == "track":
            run.trainer.track(count=Counting())
        if kind == "weights":
            run.between = lambda step: next(run.trainer.models["model"].parameters()).detach().mul_(1.0)
        if kind == "memory":
            patch.setattr(last_step, "read_free_memory", lambda: 1000)
        if kind == "slow":
            patch.setattr(last_step, "_LIMIT_S", 0.1)
            patch.setattr(LastStep, "_keep", lambda *_: time.sleep(1.0) or "")
        if kind == "pipeline":  # only one stage calls the whole forward
            run.between = lambda step: run.strike("between")
        place = "between" if kind == "pipeline" else "forward"
        error = "my own error" if kind == "own error" else LOST
        told = run.fail(5 - (kind == "pipeline"), place, is_lost=False, error=error)
        world.barrier()
        held = find_held(Path(folder).absolute(), os.getppid())
        world.barrier()
        if world.is_main:
            end_keepers(held)
    return sum(map(len, held.values())), told


@pytest.mark.parametrize(
    ("kind", "layout", "reason"),
    [
        ("", "dp_replicate=2", "step 4 stays in memory for the next start"),
        ("off", "dp_replicate=2", ""),
        ("restarts", "dp_replicate=2", ""),
        ("track", "dp_replicate=2", ""),
        ("hook", "dp_replicate=2", ""),
        ("compress", "dp_replicate=2", ""),
        ("shard", "dp_shard=2", ""),
        ("pipeline", "dp_replicate=2 pp=2", ""),
        ("own error", "dp_replicate=2", ""),
        ("weights", "dp_replicate=2", "weights were changed outside of the optimizer's step"),
        ("buffer", "dp_replicate=2", "the buffer count of Counter was changed"),
        ("memory", "dp_replicate=2", "more than half of the 1000 B that are free. .*PL567"),
        ("slow", "dp_replicate=2", "the copy took longer than 0.1 s"),
    ],
)
def test_ranks_hold_nothing_where_the_state_could_be_another(
    ranks: Pool, tmp_path: Path, kind: str, layout: str, reason: str
) -> None:
    nproc = 4 if "pp" in layout else 2
    for num_held, told in ranks.run(hold, nproc=nproc, args=(str(tmp_path), layout, kind)):
        assert num_held == (0 if kind else 2)
        assert re.search(reason, told) if reason else not re.search("stay.* in memory", told), told
    assert list_keepers(tmp_path) == []


def test_a_failed_step_is_not_noted_by_a_later_save(ranks: Pool, tmp_path: Path) -> None:
    """A loop that saves when it ends, also after an error, would note a step that was not completed."""
    for num_noted in ranks.run(save_after_failure, args=(str(tmp_path),)):
        assert num_noted == 0


def save_after_failure(world: Any, folder: str) -> int:
    with pytest.MonkeyPatch.context() as patch:
        under_launcher(patch)
        run = Run("dp_replicate=2", Path(folder))
        run.fails_at, run.place = 5, "forward"
        with pytest.raises(RuntimeError):
            run.train(5)
        run.trainer._last_step.forget()
        with suppress(PacelineError):  # the ranks' statistics differ, after different microbatches
            run.trainer.save(wait=True)
        num_noted = int(run.trainer._last_step._note is not None)
        run.trainer.close()
    return num_noted


def object_to(world: Any, folder: str, kind: str) -> tuple[int, str]:
    """Return the step that a start goes on from, and what was logged."""
    path = Path(folder)
    with pytest.MonkeyPatch.context() as patch:
        under_launcher(patch)
        run = Run("dp_replicate=2", path)
        run.train(2)
        run.trainer.save(wait=True)
        kept = run.fail(5, "forward", is_lost=world.rank == 0)
        assert world.rank == 0 or "step 4 stays in memory" in kept, kept
        world.barrier()
        if world.is_main and kind == "note":
            (path / "checkpoints" / ".failed-at-00000").write_text("[5, 0]")
        if world.is_main and kind == "aside":
            (path / "checkpoints" / "failed-step-00000004").mkdir()
        if world.is_main and kind == "rows":
            (path / "metrics.jsonl").write_text('{"step": 1}\n')
        world.barrier()
        if kind == "rows":  # more than a few seconds ago, so the ranks that are left have none of them
            patch.setattr(
                memory_restore, "add_missing_rows", lambda path, _, step: add_missing_rows(path, "", step)
            )
        told = logging.handlers.BufferingHandler(100)
        logging.getLogger("paceline").addHandler(told)
        first = Run("dp_replicate=2", path).first
        logging.getLogger("paceline").removeHandler(told)
    return first, "\n".join(record.getMessage() for record in told.buffer)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("note", "a rank failed by an error of its own, which may come from this state. [PL567]"),
        ("aside", "two starts went on from this step and ended. [PL567]"),
        ("rows", "because metrics.jsonl lacks rows. [PL567]"),
    ],
)
def test_a_state_is_not_used_where_there_is_an_objection(
    ranks: Pool, tmp_path: Path, kind: str, reason: str
) -> None:
    (first, told), other = ranks.run(object_to, args=(str(tmp_path), kind))
    assert first == other[0] == 2
    assert reason in told


def test_missing_rows_are_added_and_gaps_are_reported(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    rows = "".join(f'{{"step": {step}}}\n' for step in (3, 4, 5, 6))
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"ste')
    assert add_missing_rows(path, rows, 5)
    assert read_steps(tmp_path) == [1, 2, 3, 4, 5]
    assert add_missing_rows(path, "", 5)
    assert not add_missing_rows(path, '{"step": 8}\n', 8), "6 and 7 are nowhere"
    assert add_missing_rows(path, rows, 3)
    assert read_steps(tmp_path) == [1, 2, 3]
