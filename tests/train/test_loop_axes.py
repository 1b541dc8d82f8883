"""A loop of a user's own under tp, sequence, cp and ep, with models of transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import paceline
from paceline.errors import PacelineError
from tests.dist.pool import Pool
from tests.train.loops import hash_state

transformers = pytest.importorskip("transformers")


def build(kind: str) -> tuple[Any, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    if kind == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=4, use_cache=False
        )
        model = transformers.GPT2LMHeadModel(config)
    else:
        config = transformers.MixtralConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_local_experts=4,
            use_cache=False,
        )
        model = transformers.MixtralForCausalLM(config)
    return model, {"input_ids": torch.randint(64, (8, 16))}


def loss_of(output: Any, batch: Any) -> torch.Tensor:
    logits, ids = output.logits[:, :-1], batch["input_ids"][:, 1:]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())


class Rows(torch.utils.data.Dataset[Any]):
    def __init__(self, batch: Any) -> None:
        self.ids = batch["input_ids"]

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        return {"input_ids": self.ids[index % 8].roll(index // 8)}


def run(world: Any, kind: str, layout: str, how: str, clips: str = "ours") -> str:
    model, example = build(kind)
    data = Rows(example)
    common: dict[str, Any] = {"layout": layout, "example": example, "microbatch_size": 2}
    if how == "trainer":
        trainer = paceline.Trainer(
            model,
            optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-2),
            loss=loss_of,
            clip_norm=0.5,
            **common,
        )
        for batch in trainer.loader(data, global_batch_size=8, epochs=1):
            trainer.step(batch)
        return hash_state(trainer.whole_state())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loop = paceline.Loop(model, optimizer, **common)
    try:
        for step in loop.loader(data, global_batch_size=8, epochs=1):
            for batch in step:
                loss = loss_of(model(**batch), batch)
                if how == "plain":
                    loss.backward()
                else:
                    step.backward(loss)
            if clips == "ours":
                step.clip_grad_norm_(0.5)
            else:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    except PacelineError as error:
        return f"{error.code} {'step.clip_grad_norm_' in str(error)}"
    return hash_state(loop.whole_state())


@pytest.mark.parametrize("layout", ["tp=2", "cp=2", "tp=2 sequence"])
def test_axes_have_the_bits_of_trainer(ranks: Pool, layout: str) -> None:
    layout = "tp=2 sequence=true" if layout.endswith("sequence") else layout
    found = {how: ranks.run(run, 2, ("gpt2", layout, how))[0] for how in ("trainer", "plain", "explicit")}
    assert len(set(found.values())) == 1, found


def test_experts_need_a_backward_of_the_step(ranks: Pool) -> None:
    expected = ranks.run(run, 1, ("mixtral", "", "trainer"))[0]
    assert ranks.run(run, 2, ("mixtral", "ep=2", "explicit"))[0] == expected
    assert ranks.run(run, 2, ("mixtral", "ep=2", "plain"))[0].startswith("PL645")


def test_torchs_clipping_under_tp_ends_in_an_error(ranks: Pool) -> None:
    assert ranks.run(run, 2, ("gpt2", "tp=2", "plain", "torch"))[0] == "PL418 True"
