"""Every model under every schedule: the bits of one process. Some of these run always: `test_pipeline.py`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from torch import nn

from benchmarks.foreign_models.models import MODELS as FOREIGN
from benchmarks.foreign_models.models import SMALL
from paceline.checkpoint import hash_tensors
from tests.dist.pool import Pool
from tests.parallel.stages.models import MODELS
from tests.train import test_experts as experts
from tests.train.test_pipeline import build, train

TWO = (
    "pp=2",
    "pp=2 schedule=gpipe",
    "pp=2 schedule=interleaved chunks=2",
    "pp=2 schedule=bfs chunks=2",
    "pp=2 schedule=zero_bubble",
    "pp=2 schedule=zbv",
)
FOUR = ("pp=4", "pp=4 schedule=zero_bubble")
# Enough blocks for four stages.
SIZE = replace(SMALL, layers=4)


def build_tied_llama() -> nn.Module:
    import transformers

    model: nn.Module = FOREIGN["Llama"].build(SIZE)
    config = model.config
    config.tie_word_embeddings = True
    return transformers.LlamaForCausalLM(config)


def train_foreign(world: Any, name: str, layouts: tuple[str, ...]) -> list[Any]:
    """Loss, norm and a hash of all weights after a step, per layout."""
    arguments = FOREIGN[name.removesuffix(", tied")].verify_arguments(SIZE)
    model = build_tied_llama if name.endswith(", tied") else arguments["model_fn"]
    batch = arguments["batch_fn"](1)
    found = []
    for layout in layouts:
        trainer = build(layout, model, forward=arguments["forward"], loss=arguments["loss"], example=batch)
        step, state = trainer.step(batch), trainer.whole_state()
        found.append((step.loss, step.grad_norm, hash_tensors(state) if world.is_main else ""))
        trainer.close()
    return found


def check(ranks: Pool, run: Any, name: Any) -> None:
    [alone] = ranks.run(run, 1, (name, ("",)), timeout_s=100)[0]
    assert ranks.run(run, 2, (name, TWO), timeout_s=300)[0] == [alone] * len(TWO)
    assert ranks.run(run, 4, (name, FOUR), timeout_s=300)[0] == [alone] * len(FOUR)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_models_that_are_hard_to_cut(ranks: Pool, name: str) -> None:
    check(ranks, train, MODELS[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", [*FOREIGN, "Llama, tied"])
def test_models_of_others(ranks: Pool, name: str) -> None:
    if name != "nn.Transformer":
        pytest.importorskip("transformers", reason="these models are those of transformers")
    check(ranks, train_foreign, name)


def train_mixture(world: Any, kind: str, layouts: tuple[str, ...]) -> list[Any]:
    """Return the same for a mixture of experts, whose auxiliary loss is part of its loss."""
    return [experts.train_foreign(world, kind, layout, layers=4, num_samples=8) for layout in layouts]


@pytest.mark.slow
@pytest.mark.parametrize("kind", experts.MIXTURES)
def test_mixtures_with_their_auxiliary_loss(ranks: Pool, kind: str) -> None:
    pytest.importorskip("transformers", reason="these models are those of transformers")
    check(ranks, train_mixture, kind)
