"""Bytes that a training step sends over cp, and over ep beside cp: counted at torch's API, exactly.

Left out are the agreement of a step (float64) and the comparison of copies (16 bytes), which do not depend on
the model.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from paceline.plan.recipe_costs import of_recipe
from paceline.plan.step import cut_stages
from paceline.plan.traffic import count_sent, list_part_calls
from paceline.recipe import Layout
from paceline.recipe.load import parse_recipe
from paceline.train.run import build_data, build_loader, build_trainer
from tests.dist.pool import Pool
from tests.train.test_experts import recipe_table

# Of the recipe: 16 samples in microbatches of 5, and of `GPT` in fewer key and value heads than heads.
LENGTH, HIDDEN, LAYERS, NUM_EXPERTS, CHOICES = 32, 16, 2, 4, 2
GPT = {"kind": "gpt", "layers": LAYERS, "hidden": HIDDEN, "heads": 4, "kv_heads": 2, "dropout": 0.1}
FLOAT = 4  # bytes of fp32


@dataclass
class Sent:
    """The bytes and messages that a rank sends to others in one step.

    Attributes:
        sent: bytes, by axis and kind of message.
        messages: their numbers, one per call.
        counts: of the rows for each expert that travel over ep, each list by rank of the group.
        place: this rank's number in that group.
    """

    sent: Counter[str] = field(default_factory=Counter)
    messages: Counter[str] = field(default_factory=Counter)
    counts: list[list[int]] = field(default_factory=list)
    place: int = 0

    def add(self, key: str, sent_bytes: int) -> None:
        self.sent[key] += sent_bytes
        self.messages[key] += 1


def count_step(world: Any, table: dict[str, Any], layout: str) -> tuple[Sent, int, int]:
    """Return what this rank sends in a step, and the bytes of the gradients that cp adds up, and dp."""
    recipe = parse_recipe(table, [f"layout.{word}" for word in layout.split()])
    data = build_data(recipe)
    trainer = build_trainer(recipe, data, 1)
    shares = iter(build_loader(recipe, trainer, data.train, train=True))
    trainer.step(next(shares))  # the first one has trial forwards, and compares settings
    mesh, found = trainer._mesh, Sent()
    assert mesh is not None
    over_cp = dist.get_process_group_ranks(mesh.cp.group)
    real = {name: getattr(dist, name) for name in ("all_to_all_single", "all_gather", "all_reduce")}

    def all_to_all_single(
        into: Tensor, given: Tensor, received: Any = None, sent: Any = None, **kw: Any
    ) -> Any:
        members = dist.get_process_group_ranks(kw["group"])
        place, width = members.index(world.rank), math.prod(given.shape[1:]) * given.element_size()
        numbers = [len(given) // len(members)] * len(members) if sent is None else list(sent)
        axis = "cp" if members == over_cp else "ep"
        kind = {torch.int64: "counts", torch.float32: "rows" if given.dim() > 1 else "parts"}.get(given.dtype)
        if kind == "counts":
            found.counts.append(given.view(len(members), -1).sum(1).tolist())
            found.place = place
        if kind is not None:
            found.add(f"{axis} {kind}", (sum(numbers) - numbers[place]) * width)
        return real["all_to_all_single"](into, given, received, sent, **kw)

    def all_gather(parts: list[Tensor], own: Tensor, **kw: Any) -> Any:
        if own.numel() > 4:
            # Activations [batch, positions, width]; keys and values are one tensor of more dimensions.
            kind = "whole" if own.dim() == 3 else "keys"
            found.add(f"cp {kind}", (len(parts) - 1) * own.nbytes)
        return real["all_gather"](parts, own, **kw)

    def all_reduce(tensor: Tensor, *args: Any, **kw: Any) -> Any:
        axis = "cp" if dist.get_process_group_ranks(kw["group"]) == over_cp else "dp"
        if tensor.dtype != torch.float64:  # the agreement
            found.add(f"{axis} gradients", tensor.nbytes)
        return real["all_reduce"](tensor, *args, **kw)

    with pytest.MonkeyPatch.context() as patch:
        for function in (all_to_all_single, all_gather, all_reduce):
            patch.setattr(dist, function.__name__, function)
        trainer.step(next(shares))
    sizes = {name: p.nbytes for name, p in trainer.model.named_parameters() if ".experts." not in name}
    trainer.close()
    # Blocks see rows; a mixture, which is in the last block, gets whole sequences.
    mixture = "layers.1.mlp." if recipe.model.kind == "moe" else "none"
    partial = [n for name, n in sizes.items() if name.startswith("layers.") and not name.startswith(mixture)]
    return found, sum(partial), sum(sizes.values())


def whole_bytes(num_samples: int) -> int:
    """A of the formulas: one whole activation of all samples that a rank computes in a step."""
    return num_samples * LENGTH * HIDDEN * FLOAT


@pytest.mark.parametrize(
    ("by", "n"),
    [
        ("heads", 2),
        ("gather", 2),
        pytest.param("gather", 4, marks=pytest.mark.slow),
    ],
)
def test_a_step_sends_over_cp_what_the_formulas_say(ranks: Pool, tmp_path: Path, by: str, n: int) -> None:
    table = {**recipe_table(tmp_path, "fp32"), "model": GPT}
    table["train"]["microbatch_size"] = 5
    whole, num_microbatches = whole_bytes(16), 4  # 5, 5, 5 and 1 samples
    keys, calls = whole // 2, LAYERS * num_microbatches
    attention = {
        "heads": {"cp parts": (2 * calls * 4, 2 * LAYERS * (n - 1) * (2 * whole + 2 * keys) // n // n)},
        "gather": {
            "cp keys": (calls, LAYERS * (n - 1) * 2 * keys // n),
            "cp parts": (calls, LAYERS * (n - 1) * 2 * keys // n),
        },
    }
    for found, gradients, _ in ranks.run(count_step, n, (table, f"cp={n} cp_by={by}")):
        expected = {
            **attention[by],
            # The last block's output in forward, the first one's gradient in backward.
            "cp whole": (2 * num_microbatches, 2 * (n - 1) * whole // n),
            "cp gradients": (1, gradients),
        }
        assert {key: (found.messages[key], sent) for key, sent in found.sent.items()} == expected
        recipe = parse_recipe(table, ['train.reduction="fast"'])
        layout = Layout.parse(f"cp={n} cp_by={by}").close()
        costs = of_recipe(recipe)
        planned = count_sent(costs, layout, cut_stages(costs, layout))["cp"]
        summed = 2 * (n - 1) * gradients / n
        assert planned == pytest.approx(sum(found.sent.values()) - gradients + summed)


def count_passed(world: Any, table: dict[str, Any], layout: str) -> int:
    """Return the bytes that this rank sends to other stages in a step."""
    recipe = parse_recipe(table, [f"layout.{word}" for word in layout.split()])
    data = build_data(recipe)
    trainer = build_trainer(recipe, data, 1)
    shares = iter(build_loader(recipe, trainer, data.train, train=True))
    for _ in range(2):  # the first one has trial forwards, the second one sends the order of dimensions
        trainer.step(next(shares))
    sent, send = [0], dist.isend

    def isend(tensor: Tensor, *args: Any, **words: Any) -> Any:
        sent[0] += tensor.nbytes
        return send(tensor, *args, **words)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "isend", isend)
        trainer.step(next(shares))
    trainer.close()
    return sent[0]


def test_a_step_sends_gradients_of_tied_embeddings_over_pp(ranks: Pool, tmp_path: Path) -> None:
    """The last stage, with the gradient of each microbatch; the first one sends their sum back."""
    table = {**recipe_table(tmp_path, "fp32"), "model": GPT}
    table["train"] |= {"microbatch_size": 5, "reduction": "fast"}
    first, last = ranks.run(count_passed, 2, (table, "pp=2"))
    costs, layout = of_recipe(parse_recipe(table)), Layout.parse("pp=2").close()
    weight, num_microbatches = costs.before.num_parameters * FLOAT, 4  # 5, 5, 5 and 1 samples
    assert (first, last) == (whole_bytes(16) + weight, whole_bytes(16) + num_microbatches * weight)
    planned = count_sent(costs, layout, cut_stages(costs, layout))["pp"]
    assert planned == pytest.approx(last, rel=0.2)  # the last microbatch counts as the part of a whole one


@pytest.mark.parametrize(
    ("layout", "samples"), [("cp=2 ep=2", [16, 16]), ("dp_replicate=2 cp=2 ep=4", [10, 10, 6, 6])]
)
def test_a_step_sends_over_ep_and_cp_what_the_formulas_say(
    ranks: Pool, tmp_path: Path, layout: str, samples: list[int]
) -> None:
    """With m ranks of cp that share experts, each takes the rows of some; d data ranks hold these."""
    table = recipe_table(tmp_path, "fp32")
    table["train"] |= {"microbatch_size": 5, "reduction": "fast"}
    m, n, d = 2, 2, len(samples) // 2
    found = ranks.run(count_step, len(samples), (table, layout))
    row = HIDDEN * FLOAT
    mixture = of_recipe(parse_recipe(table)).blocks[-1]
    for (own, gradients, replicated), num_samples in zip(found, samples, strict=True):
        whole, rounds = whole_bytes(num_samples), 4 if d == 1 else 2
        assert own.sent["cp parts"] == 2 * LAYERS * (n - 1) * 4 * whole // n // n
        # Both ends of the blocks, and of the mixture: one gather in forward and one in backward.
        assert own.sent["cp whole"] == 4 * (n - 1) * whole // n
        assert own.sent["cp gradients"] == gradients
        # Answers in forward and gradients of rows in backward, to the m - 1 other ranks of cp.
        assert own.messages["cp rows"] == 2 * rounds
        if d > 1:
            assert own.sent["ep counts"] == rounds * 8 * NUM_EXPERTS // m * (d - 1) // d
            assert own.messages["ep rows"] == 4 * rounds
            assert own.sent["dp gradients"] == replicated, "experts have no copies here"
        if num_samples == 16:
            calls = list(list_part_calls(mixture, Layout.parse(layout).close(), 16, repeats=False))
            planned = sum(call.sent_bytes for call in calls if call.axis == "cp")
            alike = own.sent["cp parts"] / LAYERS + own.sent["cp whole"] / 2 + own.sent["cp rows"]
            assert planned == pytest.approx(alike, rel=0.15), "of one block with a mixture"
        over_cp, over_others = (
            ("parts", "whole", "gradients", "rows"),
            ("ep counts", "ep rows", "dp gradients"),
        )
        assert set(own.sent) == {*(f"cp {kind}" for kind in over_cp), *(over_others if d > 1 else ())}
    # The ranks of cp together have each row once: all choices of the tokens of their data rank.
    choices = sum(samples) // n * LENGTH * CHOICES
    assert sum(own.sent["cp rows"] for own, *_ in found) == 2 * (m - 1) * choices * row
    if d > 1:
        leaving = sum(sum(each) - each[own.place] for own, *_ in found for each in own.counts)
        assert 0 < leaving < choices
        assert sum(own.sent["ep rows"] for own, *_ in found) == 4 * leaving * row
