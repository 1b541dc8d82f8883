"""Models that others wrote train under tp and dp_shard as in one process, without a line about their inside.

Tiny ones; `benchmarks/foreign_models` has realistic sizes, and its table is in docs/verify.md.
"""

from __future__ import annotations

import pytest

from benchmarks.foreign_models.models import MODELS, REALISTIC, SMALL
from benchmarks.foreign_models.run import LAYOUTS, plan_tp
from paceline.verifying.check import build_default_optimizer, resolve_layout, verify_subject
from paceline.verifying.subject import UserSubject
from tests.dist.pool import Pool
from tests.verifying.runs import PoolRunner
from tests.verifying.two_steps import TWO_STEPS


def need(name: str) -> None:
    if name != "nn.Transformer":
        pytest.importorskip("transformers", reason="these models are those of transformers")


@pytest.mark.parametrize("name", MODELS)
def test_a_foreign_model_is_the_same_as_in_one_process(ranks: Pool, name: str) -> None:
    need(name)
    subject = UserSubject(
        **MODELS[name].verify_arguments(SMALL),
        optimizer=build_default_optimizer,
        **TWO_STEPS,
    )
    verified = verify_subject(subject, [resolve_layout(x) for x in LAYOUTS], run=PoolRunner(ranks))
    assert verified.ok, list(map(str, verified.findings))
    assert not all(result.same_bits for result in verified.results), "something was split"
    assert max(result.worst_noise for result in verified.results) < 20, "the tolerance's margin is gone"


@pytest.mark.parametrize("name", [name for name, model in MODELS.items() if model.share])
def test_nearly_all_matrices_of_a_foreign_model_are_split(name: str) -> None:
    need(name)
    _, plan = plan_tp(MODELS[name], REALISTIC)
    assert plan.share >= MODELS[name].share, plan.describe()
