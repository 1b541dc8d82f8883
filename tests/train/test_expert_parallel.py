"""Experts that ranks share: the bits of one process, 1/ep of the memory, and messages as the formula says."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import paceline
from paceline.checkpoint import hash_tensors
from paceline.data import build_data
from paceline.errors import PacelineError
from paceline.models.moe import Experts
from paceline.parallel.experts.mixtures import open_experts
from paceline.parallel.placement import local
from paceline.plan.costs import ModelPart
from paceline.plan.model_state import plan_recipe_memory
from paceline.plan.traffic import list_part_calls
from paceline.recipe import Layout
from paceline.recipe import parse_recipe as parse
from paceline.recipe.load import parse_recipe
from paceline.train.run import build_loader, build_trainer
from paceline.verifying.check import resolve_layout
from tests.dist.pool import Pool
from tests.train.test_experts import SIZES, build_foreign, recipe_table, train_foreign, train_one_expert
from tests.verifying.runs import PoolRunner, verify_recipe

REPLICAS = {"dp_replicate=2 ep=2": 2, "dp_replicate=4 ep=2": 4, "dp_replicate=4 ep=4": 4}
SHARDS = {"dp_shard=2 ep=2": 2, "dp_replicate=2 dp_shard=2 ep=4": 4}
LAYOUTS = {**REPLICAS, **SHARDS, "pp=2 dp_replicate=2 ep=2": 4, "pp=2 dp_shard=2 ep=2": 4}
SCHEDULES = ("gpipe", "interleaved chunks=2", "bfs chunks=2", "zero_bubble", "zbv")


def list_settings(layout: str) -> list[str]:
    return [f"layout.{word}" for word in layout.split()]


def train(world: Any, table: dict[str, Any], layout: str, num_steps: int, folder: str = "") -> Any:
    recipe = parse_recipe(table, list_settings(layout))
    data = build_data(recipe)
    trainer = build_trainer(recipe, data, 20)
    loader, steps = build_loader(recipe, trainer, data.train, train=True), []
    if folder:
        trainer.resume(folder)
    while trainer.step_number < num_steps:
        for share in loader:
            steps.append(trainer.step(share))
            if trainer.step_number == num_steps:
                break
    if folder:
        trainer.save(wait=True)
    measured = trainer.evaluate(build_loader(recipe, trainer, data.valid, train=False))
    state = trainer.whole_state()
    numbers = [(step.loss, step.grad_norm) for step in steps], measured
    trainer.close()
    return numbers, hash_tensors(state) if world.is_main else ""


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_weights_have_the_bits_of_one_process(ranks: Pool, tmp_path: Path, dtype: str) -> None:
    """With clipping. Ranks have different numbers of microbatches; some have none at the end of an epoch."""
    table = recipe_table(tmp_path, dtype)
    table["train"] |= {"clip_norm": 0.05, "microbatch_size": 3}
    alone = ranks.run(train, 1, (table, "", 6))[0]
    assert max(norm for _, norm in alone[0][0]) > 0.05
    for layout, num_ranks in LAYOUTS.items():
        assert ranks.run(train, num_ranks, (table, layout, 6))[0] == alone, layout


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_of_a_pipeline_keeps_the_bits(ranks: Pool, tmp_path: Path, schedule: str) -> None:
    table = recipe_table(tmp_path, "fp32")
    table["model"] |= {"layers": 4}
    table["train"] |= {"microbatch_size": 3}
    layout = f"pp=2 dp_replicate=2 ep=2 schedule={schedule}"
    assert ranks.run(train, 4, (table, layout, 6))[0] == ranks.run(train, 1, (table, "", 6))[0]


@pytest.mark.parametrize("kind", ["block", "selective"])
def test_recompute_sends_tokens_again(ranks: Pool, tmp_path: Path, kind: str) -> None:
    """Ranks without a microbatch take part."""
    table = recipe_table(tmp_path, "bf16")
    table["train"] |= {"microbatch_size": 3}
    alone = ranks.run(train, 1, (table, f"recompute={kind}", 6))[0]
    for layout, num_ranks in LAYOUTS.items():
        assert ranks.run(train, num_ranks, (table, f"{layout} recompute={kind}", 6))[0] == alone, layout


def test_an_expert_may_get_all_tokens_or_none(ranks: Pool) -> None:
    alone = ranks.run(train_one_expert, 1, ("",))[0]
    for layout, num_ranks in LAYOUTS.items():
        assert ranks.run(train_one_expert, num_ranks, (layout,))[0] == alone, layout


@pytest.mark.parametrize("mode", ["full", "sharded"])
def test_a_checkpoint_goes_on_under_another_layout(ranks: Pool, tmp_path: Path, mode: str) -> None:
    table = recipe_table(tmp_path, "fp32")
    table["checkpoint"] = {"mode": mode}
    chain = {"dp_replicate=2 ep=2": 2, "dp_shard=2": 2, "dp_replicate=4 ep=4": 4, "": 1, **LAYOUTS}
    alone = ranks.run(train, 1, (table, "", 2 * len(chain)))[0]
    losses, found, folder = [], None, str(tmp_path / "run")
    for number, (layout, num_ranks) in enumerate(list(chain.items()), start=1):
        found = ranks.run(train, num_ranks, (table, layout, 2 * number, folder))[0]
        losses += found[0][0]
    assert found is not None
    assert losses == alone[0][0]
    assert found[1] == alone[1]


def count_bytes(world: Any, table: dict[str, Any], layout: str) -> tuple[int, ...]:
    """Return the bytes of experts, of their gradients and their optimizer state, and of all parameters."""
    recipe = parse_recipe(table, list_settings(layout))
    data = build_data(recipe)
    trainer = build_trainer(recipe, data, 1)
    trainer.step(next(iter(build_loader(recipe, trainer, data.train, train=True))))
    experts = [p for name, p in trainer.model.named_parameters() if ".experts." in name]
    optimizer = trainer._updates["model"].optimizer
    moments = [m for p in experts for m in optimizer.state[p].values() if m.dim()]
    gradients = [p.grad for p in experts if p.grad is not None]
    assert len(gradients) == len(experts) == 2
    assert len(moments) == 4
    counted = (experts, gradients, moments, list(trainer.model.parameters()))
    return tuple(sum(local(t.detach()).untyped_storage().nbytes() for t in each) for each in counted)


@pytest.mark.parametrize("reduction", ["exact", "fast"])
def test_a_rank_has_its_part_of_the_experts(ranks: Pool, tmp_path: Path, reduction: str) -> None:
    table = recipe_table(tmp_path, "fp32")
    table["train"] |= {"reduction": reduction}
    whole = ranks.run(count_bytes, 1, (table, ""))[0]
    assert whole[0] == 4 * 4 * (2 * 16 + 16) * 16, "4 experts of 3 matrices, in fp32"
    for layout, num_ranks in (REPLICAS | SHARDS).items():
        degree = Layout.parse(layout).ep
        planned = plan_recipe_memory(parse_recipe(table), Layout.parse(layout).close())["after_step"]
        for own in ranks.run(count_bytes, num_ranks, (table, layout)):
            assert own[:3] == tuple(size // degree for size in whole[:3]), layout
            assert own[3] == planned.parameters, layout


def count_messages(world: Any, table: dict[str, Any], layout: str) -> Any:
    """Return every exchange of one step: type, width, and rows or numbers for each rank of ep."""
    recipe = parse_recipe(table, list_settings(layout))
    data = build_data(recipe)
    trainer = build_trainer(recipe, data, 1)
    shares = iter(build_loader(recipe, trainer, data.train, train=True))
    trainer.step(next(shares))  # the first one has trial forwards
    exchanges: list[tuple[str, int, list[int], Any]] = []
    real = dist.all_to_all_single

    def count(output: Any, given: Any, received: Any = None, sent: Any = None, **words: Any) -> Any:
        width = math.prod(given.shape[1:])
        numbers = given.tolist() if sent is None else list(sent)
        if given.dtype != torch.uint8:  # with which the exact reduction meets
            exchanges.append((str(given.dtype), width, numbers, dist.get_rank(words["group"])))
        return real(output, given, received, sent, **words)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_to_all_single", count)
        trainer.step(next(shares))
    return exchanges


@pytest.mark.parametrize(
    ("dtype", "type_bytes", "recompute", "num_exchanges"),
    [("fp32", 4, "none", 4), ("bf16", 2, "none", 4), ("bf16", 2, "block", 6)],
)
def test_messages_are_those_of_the_formula(
    ranks: Pool, tmp_path: Path, dtype: str, type_bytes: int, recompute: str, num_exchanges: int
) -> None:
    table = recipe_table(tmp_path, dtype)
    table["train"] |= {"microbatch_size": 3}
    layout, degree, width = f"dp_replicate=4 ep=2 recompute={recompute}", 2, 16
    per_rank = ranks.run(count_messages, 4, (table, layout))
    # Besides rows, each forward exchanges their numbers once.
    num_messages = num_exchanges + num_exchanges // 2 - 1
    # 6 microbatches of 3 samples on 4 ranks: the first two run 2 rounds of one mixture, the others 1.
    assert [len(each) for each in per_rank] == [num_messages * n for n in (2, 2, 1, 1)]
    leaving = choices = sent_bytes = 0
    for exchanges in per_rank:
        for kind, row_width, numbers, place in exchanges:
            if kind == "torch.int64":
                assert len(numbers) == 4, "a number per expert"
                own = sum(numbers[place * 2 : place * 2 + 2])
                choices += sum(numbers)
                leaving += sum(numbers) - own
            else:
                assert (kind, row_width) == ({4: "torch.float32", 2: "torch.bfloat16"}[type_bytes], width)
                sent_bytes += (sum(numbers) - numbers[place]) * row_width * type_bytes
    num_forwards = num_exchanges // 2 - 1
    choices, leaving = choices // num_forwards, leaving // num_forwards
    assert choices == 16 * 32 * 2, "2 experts for each of 32 tokens of 16 samples"
    # On the way and back, in each forward and in backward; about (n-1)/n of all rows leave their rank.
    assert sent_bytes == num_exchanges * leaving * width * type_bytes
    assert leaving == pytest.approx(choices * (degree - 1) / degree, rel=0.15)
    part = ModelPart(routed_bytes=choices * width * type_bytes, input_bytes=1)
    repeats = "recompute=block" in layout
    calls = list_part_calls(part, Layout.parse(layout).close(), 1, repeats=repeats)
    planned = sum(call.sent_bytes for call in calls)
    assert sent_bytes == pytest.approx(planned, rel=0.15), "of all ranks together"


def test_verify_finds_every_bit_the_same(ranks: Pool, tmp_path: Path) -> None:
    layouts = [resolve_layout(text) for text in LAYOUTS]
    verified = verify_recipe(parse(recipe_table(tmp_path)), layouts, steps=2, run=PoolRunner(ranks))
    assert verified.ok, list(map(str, verified.findings))
    assert all(result.same_bits for result in verified.results)


def hook_experts(world: Any, table: dict[str, Any]) -> str:
    recipe = parse_recipe(table, list_settings("dp_replicate=2 ep=2"))
    data = build_data(recipe)
    trainer = build_trainer(recipe, data, 1)
    name = next(name for name, _ in trainer.model.named_parameters() if name.endswith("experts.down_proj"))
    dict(trainer.model.named_parameters())[name].register_hook(lambda gradient: None)
    share = next(iter(build_loader(recipe, trainer, data.train, train=True)))
    with pytest.raises(PacelineError) as caught:
        trainer.step(share)
    return str(caught.value)


def test_a_hook_that_would_see_parts_is_refused(ranks: Pool, tmp_path: Path) -> None:
    for text in ranks.run(hook_experts, 2, (recipe_table(tmp_path),)):
        assert "PL657" in text
        assert "down_proj" in text


@pytest.mark.parametrize("kind", SIZES)
def test_mixtures_of_transformers_have_the_bits_of_one_process(ranks: Pool, kind: str) -> None:
    """Unmodified, with their auxiliary losses. Of four replicas, two have no microbatch."""
    pytest.importorskip("transformers", reason="these models are those of transformers")
    alone = ranks.run(train_foreign, 1, (kind, ""))[0]
    for layout, num_ranks in LAYOUTS.items():
        assert ranks.run(train_foreign, num_ranks, (kind, layout))[0] == alone, layout


@pytest.mark.parametrize("kind", SIZES)
def test_one_process_computes_what_transformers_does(kind: str) -> None:
    """Its other implementations take no fp64."""
    pytest.importorskip("transformers", reason="these models are those of transformers")
    ids = torch.randint(0, 40, (2, 8), generator=torch.Generator().manual_seed(0))
    found = {}
    for way in ("eager", "paceline"):
        model = build_foreign(kind).double()
        if way == "paceline":
            open_experts(model)
        else:
            model.set_experts_implementation(way)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        found[way] = {"loss": loss.detach(), **gradients}
    torch.testing.assert_close(found["paceline"], found["eager"], rtol=1e-10, atol=1e-12)


class TwiceTheSame(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Experts(4, 16, 16), Experts(4, 16, 16)
        self.second.down_proj = self.first.down_proj


class CalledTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts, self.scale = Experts(4, 16, 16), nn.Parameter(torch.ones(16))
        for weight in self.experts.parameters():
            nn.init.normal_(weight)

    def forward(self, rows: torch.Tensor) -> Any:
        counts = torch.tensor([len(rows), 0, 0, 0])
        return self.experts(self.experts(rows * self.scale, counts), counts)


def step_twice(world: Any) -> str:
    trainer = paceline.Trainer(
        CalledTwice(),
        forward=lambda model, batch: model(batch["x"]),
        loss=lambda output, batch: (output.sum(), torch.tensor(1.0)),
        optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1),
        layout="dp_replicate=2 ep=2",
        microbatch_size=2,
    )
    with pytest.raises(PacelineError) as caught:
        trainer.step({"x": torch.ones(4, 16)})
    return str(caught.value)


def test_a_mixture_that_is_called_twice_is_refused(ranks: Pool) -> None:
    for text in ranks.run(step_twice, 2):
        assert "PL661" in text
        assert "experts is called after experts" in text


BAD = {
    "tied experts": (TwiceTheSame, "PL659", "first.down_proj, second.down_proj"),
}


def lay_out_bad(world: Any, name: str) -> str:
    build = BAD[name][0]
    with pytest.raises(PacelineError) as caught:
        paceline.Trainer(
            build(),
            forward=lambda model, batch: batch,
            loss=lambda output, batch: (output.sum(), output.sum()),
            optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1),
            layout="dp_replicate=2 ep=2",
        )
    return str(caught.value)


@pytest.mark.parametrize("name", BAD)
def test_experts_that_cannot_be_shared_are_refused_by_name(ranks: Pool, name: str) -> None:
    _, code, words = BAD[name]
    for text in ranks.run(lay_out_bad, 2, (name,)):
        assert code in text
        assert words in text
