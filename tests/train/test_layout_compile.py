"""compile=True under layouts: the same numbers, and the blocks really are compiled."""

from __future__ import annotations

import functools
import shutil
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from paceline.models.gpt import Gpt
from paceline.recipe.schema import GptModel
from tests.dist.pool import Pool
from tests.train.test_layouts import Tokens, build_trainer, distance

STEPS = 2


def build_shallow() -> nn.Module:
    section = GptModel(kind="gpt", layers=2, hidden=32, heads=4, kv_heads=4, dropout=0.1)
    return Gpt(section, 64, 8)


def train_all(world: Any, layouts: list[str], compiles: bool, backend: str) -> list[dict[str, Any]]:
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        # The compiler imports parts of torch that torch itself deprecates, and looks at .grad of its inputs.
        warnings.simplefilter("ignore")
        patch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
        return [_train(layout, compiles) for layout in layouts]


def _train(layout: str, compiles: bool) -> dict[str, Any]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    trainer = build_trainer(layout, model=build_shallow, compile=compiles)
    found: dict[str, Any] = {"layout": layout, "losses": [], "norms": []}
    for share in trainer.loader(Tokens(), global_batch_size=8):
        step = trainer.step(share)
        found["losses"].append(step.loss)
        found["norms"].append(step.grad_norm)
        if step.number == STEPS:
            break
    found["valid"] = trainer.evaluate(trainer.loader(Tokens(), global_batch_size=8, shuffle=False)).loss
    found["end"] = trainer.whole_state()
    found["frames"] = torch._dynamo.utils.counters["frames"]["ok"]
    found["breaks"] = dict(torch._dynamo.utils.counters["graph_break"])
    trainer.close()
    return found


def compare(ranks: Pool, nproc: int, layouts: list[str], backend: str) -> None:
    ((one,),) = ranks.run(train_all, 1, ([""], False, backend))
    for of_rank in ranks.run(train_all, nproc, (layouts, True, backend), timeout_s=240):
        for found in of_rank:
            assert found["losses"] == pytest.approx(one["losses"], rel=1e-11), found["layout"]
            assert found["norms"] == pytest.approx(one["norms"], rel=1e-10), found["layout"]
            assert found["valid"] == pytest.approx(one["valid"], rel=1e-11), found["layout"]
            assert found["frames"] > 0, found
            if found["end"]:
                assert distance(one["end"], found["end"]) < 1e-8, found["layout"]


def test_compiled_layouts(ranks: Pool) -> None:
    """Graphs are cut and differentiated as always; without the compiler's own kernels, which take long."""
    compare(ranks, 1, [""], "aot_eager")
    compare(ranks, 2, ["dp_shard=2", "tp=2", "pp=2"], "aot_eager")


@pytest.mark.slow
def test_compiled_stages_beside_other_axes(ranks: Pool) -> None:
    compare(ranks, 4, ["pp=2 dp_shard=2", "pp=2 dp_shard=2 zero=3", "pp=2 dp_replicate=2"], "aot_eager")


def test_recompute_of_compiled_blocks(ranks: Pool) -> None:
    compare(ranks, 1, ["recompute=block", "recompute=selective"], "aot_eager")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on CPU")
@pytest.mark.parametrize(
    ("nproc", "layout"),
    [
        (1, ""),
        (2, "dp_replicate=2"),
        (2, "dp_shard=2"),
        (2, "tp=2"),
        (2, "dp_shard=2 recompute=selective"),
        (4, "dp_shard=2 tp=2"),
        (2, "pp=2"),
    ],
)
def test_compiled_layouts_with_kernels(ranks: Pool, nproc: int, layout: str) -> None:
    compare(ranks, nproc, [layout], "inductor")
