"""torch.compile and deterministic mode, as settings of a run."""

from __future__ import annotations

import functools
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.train.trainer import Trainer
from paceline.world import World, start
from tests.dist.pool import Pool, RankError
from tests.train.cases import (
    Trained,
    apart,
    assert_ranks_agree,
    digits_recipe,
    take_steps,
    tensors_apart,
    text_recipe,
    train_recipe_table,
)

needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on CPU"
)


def count_graphs(do: Any) -> tuple[Any, int]:
    """Return the result of `do`, and how many graphs were compiled meanwhile."""
    import torch._dynamo
    import torch._inductor.config as inductor

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    # One thread: a pool of compiling processes would outlive the test.
    with warnings.catch_warnings(), inductor.patch(compile_threads=1):
        warnings.simplefilter("ignore")  # the compiler's modules use what torch itself has deprecated
        result = do()
    return result, torch._dynamo.utils.counters["stats"]["unique_graphs"]


def train_small(world: World, compile: bool) -> Any:
    def run() -> tuple[Trained, float]:
        trainer = Trainer(
            lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1)),
            forward=lambda model, batch: model(batch[0]),
            loss=lambda output, batch: ((output - 1).square().sum(), len(output)),
            optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.05),
            microbatch_size=4,
            compile=compile,
        )
        data = torch.utils.data.TensorDataset(torch.randn(32, 6, generator=torch.Generator().manual_seed(0)))
        trained = take_steps(trainer, trainer.loader(data, global_batch_size=16), 5)
        valid = trainer.evaluate(trainer.loader(data, global_batch_size=16, shuffle=False))
        return trained, valid.loss

    return count_graphs(run)


def train_traced(world: World) -> Any:
    """Traces and splits graphs as always, and runs them without the compiler's kernels, which take long."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
        return train_small(world, True)


def check_compiled(eager: Any, results: list[Any]) -> None:
    ((plain, valid), num_graphs) = eager
    assert num_graphs == 0
    assert_ranks_agree([trained for (trained, _), _ in results])
    for (trained, compiled_valid), num_graphs in results:
        assert num_graphs >= 1, "something was compiled"
        assert apart(plain.losses, trained.losses) < 1e-5
        assert compiled_valid == pytest.approx(valid, rel=1e-5)
    assert tensors_apart(plain.tensors, results[0][0][0].tensors) < 1e-5


def test_compile_reaches_a_model_of_torchs_own_classes(ranks: Pool) -> None:
    """The compiler passes over their frames, so that Module.compile() would do nothing for them."""
    eager = ranks.run(train_small, nproc=1, args=(False,))[0]
    for nproc in (1, 2):
        check_compiled(eager, ranks.run(train_traced, nproc=nproc, timeout_s=60.0))


@needs_compiler
@pytest.mark.slow
def test_a_compiled_model_trains_to_about_the_same(ranks: Pool, tmp_path: Path) -> None:
    env = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
    eager = ranks.run(train_small, nproc=1, args=(False,))[0]
    check_compiled(eager, ranks.run(train_small, nproc=2, args=(True,), timeout_s=350.0, env=env))


def train_compiled_recipe(world: World, table: dict[str, Any], settings: list[str]) -> Any:
    return count_graphs(lambda: train_recipe_table(world, table, settings, 4))


@needs_compiler
@pytest.mark.slow
def test_a_compiled_recipe_trains_to_about_the_same(ranks: Pool, tmp_path: Path) -> None:
    """With dropout off, as compiled graphs draw other random numbers."""
    table = text_recipe(tmp_path)
    settings = ["model.dropout=0.0", "train.global_batch_size=4", "train.microbatch_size=2"]
    ((eager, _),) = ranks.run(train_compiled_recipe, nproc=1, args=(table, settings))
    compiled = [*settings, "train.compile=true"]
    env = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
    results = ranks.run(train_compiled_recipe, args=(table, compiled), timeout_s=350.0, env=env)
    assert_ranks_agree([trained for trained, _ in results])
    for trained, num_graphs in results:
        assert num_graphs >= 1
        assert apart(eager.losses, trained.losses) < 1e-5


# ---- deterministic kernels


class Scatter(nn.Module):
    """Uses an operation that has no deterministic kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).put_(torch.tensor([0]), torch.tensor([1.0]), accumulate=False)


def step_with_put(world: World) -> str | None:
    trainer = Trainer(
        Scatter(),
        loss=lambda output, batch: (output.sum(), len(output)),
        optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1),
    )
    return trainer.step(torch.randn(3, 4)).skipped


def test_deterministic_mode_refuses_what_has_no_deterministic_kernel(ranks: Pool) -> None:
    assert ranks.run(step_with_put, nproc=1) == [None]
    with pytest.raises(RankError, match="put_ does not have a deterministic implementation"):
        ranks.run(step_with_put, nproc=1, start={"deterministic": True})


def train_recipes(world: World, tables: list[dict[str, Any]]) -> list[str]:
    assert torch.are_deterministic_algorithms_enabled() == world.deterministic
    return [train_recipe_table(world, table, [], 3).hash for table in tables]


def test_all_recipes_train_in_deterministic_mode(ranks: Pool, tmp_path: Path) -> None:
    tables = [text_recipe(tmp_path / "a", "gpt"), text_recipe(tmp_path / "b", "encoder"), digits_recipe()]
    results = [
        ranks.run(train_recipes, args=(tables,), start={"deterministic": True}, timeout_s=60.0)
        for _ in range(2)
    ]
    assert results[0] == results[1]
    assert results[0][0] == results[0][1]


def test_the_mode_ends_with_the_world() -> None:
    assert not torch.are_deterministic_algorithms_enabled()
    with start(device="cpu", threads_per_rank=1, deterministic=True):
        assert torch.are_deterministic_algorithms_enabled()
    assert not torch.are_deterministic_algorithms_enabled()
