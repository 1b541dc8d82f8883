"""Bytes per rank under tp, counted from the storages of all tensors alive, against `plan/model_state.py`; and
activations that are kept for backward, against what the arithmetic of a block says.

Of one block, in units of A, the activation between blocks (samples x sequence x width), with I for the inner
width over the width. Whole under tp: input, normalised input and output of both norms. Divided: queries,
keys, values and the attention's output, and the four of the inner width.

| layout | kept |
|---|---|
| one process | 6 + 4 + 4 I |
| tp = t | 6 + (4 + 4 I) / t |
| tp = t, sequence | 2 + (4 + 4 + 4 I) / t |

The form is that of Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models",
equations 2 and 4. Theirs divides the last row's 2 as well: they gather the inputs of attention and
feed-forward a second time in backward, we keep them whole.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline import Trainer
from paceline.models.gpt import Gpt
from paceline.plan.model_state import Instant, Sizes, plan_memory
from paceline.plan.parameters import list_parameters
from paceline.recipe import Layout, Recipe, parse_recipe
from paceline.recipe.schema import GptModel
from tests.dist.pool import Pool
from tests.parallel.tensor.test_traffic import sum_losses
from tests.parallel.test_shard_memory import live_bytes

HIDDEN, INNER, HEADS, VOCAB, LENGTH, SAMPLES = 128, 352, 4, 512, 16, 2


def build_recipe(layers: int) -> Recipe:
    return parse_recipe(
        {
            "model": {
                "kind": "gpt",
                "layers": layers,
                "hidden": HIDDEN,
                "heads": HEADS,
                "ffn_hidden": INNER,
                "tie_embeddings": False,
            },
            "data": {"kind": "text", "files": ["python-stdlib"], "seq_len": LENGTH},
            "train": {"steps": 1, "global_batch_size": 8, "microbatch_size": SAMPLES},
            "optimizer": {"kind": "adamw", "lr": 1e-3},
        }
    )


def build_gpt(layers: int) -> Gpt:
    torch.manual_seed(0)
    section = build_recipe(layers).model
    assert isinstance(section, GptModel)
    return Gpt(section, VOCAB, LENGTH)


def build_trainer(layout: str, layers: int, forward: Any) -> Trainer:
    ids = torch.zeros(2, LENGTH, dtype=torch.int64)
    return Trainer(
        build_gpt(layers),
        forward=forward,
        loss=sum_losses,
        optimizer=lambda named: torch.optim.AdamW([p for _, p in named], fused=True),
        layout=layout,
        example={"ids": ids, "targets": ids},
        reduction="fast",
        microbatch_size=SAMPLES,
    )


def measure_state(world: Any, layout: str, num_microbatches: int) -> dict[str, int]:
    """Return bytes at the instants of the third step, and when the model was built."""
    seen: dict[str, int] = {}
    before = live_bytes()
    place = 0

    def see(instant: str) -> None:
        if instant == "built" or trainer.step_number == 3:
            seen[instant] = live_bytes() - before

    def forward(model: nn.Module, batch: dict[str, Tensor]) -> Any:
        nonlocal place
        if torch.is_grad_enabled():  # not in the trial that finds the plan
            place += 1
            if place % num_microbatches == 1 % num_microbatches:
                see("at_rest")
            if place % num_microbatches == 0 and num_microbatches > 1:
                see("between")
        output = model(batch["ids"])
        if torch.is_grad_enabled() and place % num_microbatches == 0:
            see("after_forward")
        return output

    trainer = build_trainer(layout, 4, forward)
    place = 0
    see("built")
    trainer.on_gradients(lambda gradients: see("after_backward"))
    tokens = torch.randint(VOCAB, (64, LENGTH))
    data = [{"ids": each, "targets": each.roll(-1)} for each in tokens]
    dp = world.world_size // Layout.parse(layout).tp
    size = num_microbatches * dp * SAMPLES
    shares = iter(trainer.loader(data, global_batch_size=size, shuffle=False))
    for _ in range(3):
        trainer.step(next(shares))
    see("after_step")
    return seen


@pytest.mark.parametrize(
    ("layout", "num_microbatches"),
    [
        ("tp=2", 1),
        ("tp=2", 2),
        ("tp=2 sequence=true", 1),
        ("tp=4", 1),
        ("dp_shard=2 tp=2 zero=3", 1),
        ("dp_shard=2 tp=2 zero=3", 2),
        ("dp_shard=2 tp=2 zero=2", 2),
        ("dp_shard=2 tp=2 zero=1", 2),
        ("dp_replicate=2 tp=2", 1),
    ],
)
def test_state_follows_the_plan(ranks: Pool, layout: str, num_microbatches: int) -> None:
    parsed = Layout.parse(layout)
    nproc = (parsed.dp_replicate or 1) * parsed.dp_shard * parsed.tp
    parameters = list_parameters(build_recipe(4), VOCAB)
    resolved = parsed.resolve(nproc)
    plan = plan_memory(parameters, resolved, Sizes(num_microbatches=num_microbatches))
    wanted: dict[str, float] = {instant: memory.total for instant, memory in plan.items()}
    # DDP's buckets are there, but no tensor of Python shows them before the first gradient.
    wanted["built"] = plan["at_rest"].parameters
    if num_microbatches == 1:
        del wanted["between"]
    for seen in ranks.run(measure_state, nproc, (layout, num_microbatches), timeout_s=60):
        buffers = 2 * LENGTH * (HIDDEN // HEADS) * 4  # of the rotary positions
        assert {key: value - buffers for key, value in seen.items()} == pytest.approx(wanted, rel=0.05)


def test_tp_divides_all_but_norms() -> None:
    parameters = list_parameters(build_recipe(4), VOCAB)
    instants: list[Instant] = ["at_rest", "after_step"]
    for instant in instants:
        one, two, four = (
            plan_memory(parameters, Layout.parse(f"tp={tp}").resolve(tp))[instant].total for tp in (1, 2, 4)
        )
        assert one / two == pytest.approx(2, rel=0.01)
        assert one / four == pytest.approx(4, rel=0.02)


def keep_bytes(model: nn.Module) -> int:
    """Return the bytes of the storages that a forward keeps for backward, without the model's own."""
    own = {t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers()]}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    ids = torch.zeros(SAMPLES, LENGTH, dtype=torch.int64)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model(ids)
    assert output is not None  # alive until here, and so is all that it keeps
    return sum(kept.values())


def measure_activations(world: Any, layout: str) -> tuple[int, int]:
    """Return bytes that one block keeps: in one process, and on this rank under the layout."""
    whole, parts = {}, {}
    for layers in (1, 3):
        whole[layers] = keep_bytes(build_gpt(layers))
        trainer = build_trainer(layout, layers, lambda model, batch: model(batch["ids"]))
        parts[layers] = keep_bytes(trainer.model)
    return (whole[3] - whole[1]) // 2, (parts[3] - parts[1]) // 2


@pytest.mark.parametrize("tp", [2, 4])
def test_a_part_of_the_sequence_keeps_less(ranks: Pool, tp: int) -> None:
    unit = SAMPLES * LENGTH * HIDDEN * 4
    inner = 4 * INNER / HIDDEN
    for whole, plain in ranks.run(measure_activations, tp, (f"tp={tp}",)):
        assert whole / unit == pytest.approx(6 + 4 + inner, rel=0.05)
        assert plain / unit == pytest.approx(6 + (4 + inner) / tp, rel=0.05)
    for _, along in ranks.run(measure_activations, tp, (f"tp={tp} sequence=true",)):
        assert along / unit == pytest.approx(2 + (4 + 4 + inner) / tp, rel=0.05)
        assert along < 0.95 * plain
