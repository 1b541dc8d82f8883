"""Mixtures of experts train with the bits of one process under every layout that keeps bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import paceline
from paceline.checkpoint import hash_tensors
from paceline.models.moe import MoeGpt
from paceline.recipe import parse_recipe
from paceline.recipe.schema import MoeModel
from paceline.train.tasks import balanced_token_loss
from paceline.verifying.check import resolve_layout
from tests.dist.pool import Pool
from tests.train.cases import MOE, text_recipe, train_recipe_table
from tests.verifying.runs import PoolRunner, verify_recipe

VOCAB, SEQ = 40, 8


def recipe_table(folder: Path, dtype: str = "fp64") -> dict[str, Any]:
    table = text_recipe(folder, "moe")
    table["train"] |= {"dtype": dtype}
    return table


def test_verify_finds_every_bit_the_same(ranks: Pool, tmp_path: Path) -> None:
    layouts = [resolve_layout(text) for text in ("dp_replicate=2", "dp_shard=2", "pp=2", "tp=2")]
    verified = verify_recipe(parse_recipe(recipe_table(tmp_path)), layouts, steps=2, run=PoolRunner(ranks))
    assert verified.ok, list(map(str, verified.findings))
    assert [result.same_bits for result in verified.results] == [True, True, True, False]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_recipe_ends_with_the_same_weights(ranks: Pool, tmp_path: Path, dtype: str) -> None:
    table = recipe_table(tmp_path, dtype)
    alone = ranks.run(train_recipe_table, 1, (table, [], 3))[0]
    several = ranks.run(train_recipe_table, 2, (table, ["layout.dp_replicate=2"], 3))
    assert {each.hash for each in several} == {alone.hash}
    assert several[0].losses == alone.losses


class Tokens:
    def __len__(self) -> int:
        return 22

    def __getitem__(self, place: int) -> dict[str, Tensor]:
        ids = torch.randint(0, VOCAB, (SEQ + 1,), generator=torch.Generator().manual_seed(place))
        return {"ids": ids[:-1], "targets": ids[1:]}


class OneExpert(nn.Module):
    """A model whose tokens (8 x 8 in a microbatch) all go to one expert, and never to the others."""

    def __init__(self) -> None:
        super().__init__()
        table = {"layers": 2, "hidden": 16, "heads": 2, "experts_per_token": 1, **MOE}
        torch.manual_seed(0)
        self.decoder = MoeGpt(MoeModel.model_validate(table), VOCAB, SEQ)
        gate = self.decoder.layers[1].mlp.gate.weight
        with torch.no_grad():
            gate.zero_()
        gate.requires_grad_(False)

    def forward(self, ids: Tensor) -> Any:
        return self.decoder(ids)


def train_one_expert(world: Any, layout: str) -> Any:
    batch = {key: torch.stack([Tokens()[n][key] for n in range(2)]) for key in ("ids", "targets")}
    trainer = paceline.Trainer(
        OneExpert,
        forward=lambda model, batch: model(batch["ids"]),
        loss=balanced_token_loss,
        optimizer=lambda named: torch.optim.AdamW([p for _, p in named if p.requires_grad], lr=1e-2),
        layout=layout,
        example=batch,
        microbatch_size=8,
    )
    start = trainer.whole_state()
    steps = [trainer.step(share) for share in trainer.loader(Tokens(), global_batch_size=22)]
    state = trainer.whole_state()
    if not world.is_main:
        return "", [step.loss for step in steps], []
    name = next(name for name in state if name.endswith("experts.down_proj"))
    drift = (state[name] - start[name]).flatten(1).abs().amax(1)
    return hash_tensors(state), [step.loss for step in steps], drift.tolist()


def test_an_expert_may_get_all_tokens_or_none(ranks: Pool) -> None:
    alone = ranks.run(train_one_expert, 1, ("",))[0]
    drift = sorted(alone[2])
    assert drift[-1] > 5 * drift[-2], "one expert learns, weight decay alone moves the others"
    for layout in ("dp_replicate=2", "dp_shard=2", "pp=2"):
        assert ranks.run(train_one_expert, 2, (layout,))[0] == alone, layout


MIXTURES = ("Mixtral", "Qwen3Moe")
# By kind, what its configuration needs besides: sizes of a few numbers.
LOW_RANK = {
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
}
SIZES: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 4},
    "Qwen3Moe": {"num_experts": 4, "moe_intermediate_size": 16, "head_dim": 8},
    "Olmoe": {"num_experts": 4},
    "DeepseekV3": {
        "n_routed_experts": 4,
        "moe_intermediate_size": 16,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "num_mtp_layers": 0,
        **LOW_RANK,
    },
    "GptOss": {"num_local_experts": 4, "head_dim": 8, "sliding_window": 4},  # biases, transposed matrices
}


def build_foreign(kind: str, layers: int = 2) -> nn.Module:
    import transformers

    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "num_experts_per_tok": 2,
        "max_position_embeddings": SEQ,
        "use_cache": False,
        "pad_token_id": None,
        "output_router_logits": True,  # its auxiliary loss is part of its loss
    }
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**sizes, **SIZES[kind])
    model: nn.Module = getattr(transformers, f"{kind}ForCausalLM")(config)
    return model


def train_foreign(
    world: Any,
    kind: str,
    layout: str,
    dtype: torch.dtype = torch.float32,
    *,
    layers: int = 2,
    num_samples: int = 4,
) -> Any:
    batch = {"ids": torch.stack([Tokens()[n]["ids"] for n in range(num_samples)])}
    trainer = paceline.Trainer(
        build_foreign(kind, layers).to(dtype),
        forward=lambda model, batch: model(input_ids=batch["ids"], labels=batch["ids"]).loss,
        loss=lambda loss, batch: (loss * len(batch["ids"]), torch.tensor(float(len(batch["ids"])))),
        optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-2),
        layout=layout,
        example=batch,
        microbatch_size=2,
    )
    steps = [trainer.step(batch) for _ in range(2)]
    state = trainer.whole_state()
    return [(step.loss, step.grad_norm) for step in steps], hash_tensors(state) if world.is_main else ""


def test_mixtures_of_transformers_are_cut_into_stages(ranks: Pool) -> None:
    """Their products of groups refuse fp32 on tensors without numbers.

    The other kind, and both under every schedule, are in `test_pipeline_models.py`.
    """
    pytest.importorskip("transformers", reason="these models are those of transformers")
    alone = ranks.run(train_foreign, 1, ("Mixtral", ""))[0]
    assert ranks.run(train_foreign, 2, ("Mixtral", "pp=2"))[0] == alone
