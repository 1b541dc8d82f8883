"""Messages and bytes of ranks under tp, counted at the library by axis, compared with theory.

For one microbatch of L blocks, A being the numbers of an activation between blocks:

| | forward | backward |
|---|---|---|
| embedding | all-reduce of A | |
| attention, L times | all-reduce of A | all-reduce of A |
| feed-forward, L times | all-reduce of A | all-reduce of A |
| head | | all-reduce of A |
| loss | all-reduces of three numbers per token | |

With `sequence` those of the blocks become an all-gather and a reduce-scatter each (ours is an all-to-all,
which sends the same). Bytes are those that one rank sends on a ring, as in `plan/traffic.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from paceline import Trainer
from paceline.comm.tree import plan_reduction
from paceline.models.gpt import Gpt
from paceline.plan.parameters import count_parameters, list_parameters
from paceline.plan.recipe_costs import of_recipe
from paceline.plan.step import cut_stages
from paceline.plan.traffic import count_sent
from paceline.recipe import Layout, Recipe, parse_recipe
from tests.dist import recorder
from tests.dist.pool import Pool
from tests.dist.recorder import RECORD, count_recorded

LAYERS, HIDDEN, VOCAB, LENGTH, SAMPLES = 3, 64, 96, 24, 2
TOKENS = SAMPLES * LENGTH
ACTIVATION = TOKENS * HIDDEN


class Sent(NamedTuple):
    """One collective of this rank.

    Attributes:
        axis: the mesh's, or "world".
        kind: of the collective.
        numel: of its input.
        dtype: of that.
    """

    axis: str
    kind: str
    numel: int
    dtype: str

    def num_bytes(self, num_ranks: int) -> float:
        factor = {
            "all_reduce": 2 * (num_ranks - 1) / num_ranks,
            "all_to_all": (num_ranks - 1) / num_ranks,
            "all_gather": num_ranks - 1,
        }[self.kind]
        return factor * self.numel * {"Float": 4, "Double": 8}[self.dtype]


def build_recipe(settings: Sequence[str] = ()) -> Recipe:
    return parse_recipe(
        {
            "model": {"kind": "gpt", "layers": LAYERS, "hidden": HIDDEN, "heads": 4, "tie_embeddings": False},
            "data": {"kind": "text", "files": ["python-stdlib"], "seq_len": LENGTH},
            "train": {"steps": 1, "global_batch_size": 8, "microbatch_size": SAMPLES},
            "optimizer": {"kind": "adamw", "lr": 1e-3},
        },
        settings,
    )


def sum_losses(logits: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    targets = batch["targets"].flatten()
    return F.cross_entropy(logits.flatten(0, 1), targets, reduction="sum"), targets.numel()


def build_trainer(layout: str, bucket_cap_mb: float = 25.0, **settings: Any) -> Trainer:
    torch.manual_seed(0)
    ids = torch.zeros(2, LENGTH, dtype=torch.int64)
    return Trainer(
        Gpt(build_recipe().model, VOCAB, LENGTH),  # type: ignore[arg-type]
        forward=lambda model, batch: model(batch["ids"]),
        loss=sum_losses,
        optimizer=lambda named: torch.optim.AdamW([p for _, p in named], fused=True),
        layout=layout,
        example={"ids": ids, "targets": ids},
        microbatch_size=SAMPLES,
        clip_norm=1.0,
        ddp={"bucket_cap_mb": bucket_cap_mb},
        **{"reduction": "fast", **settings},
    )


def read_steps(
    world: Any, layout: str, rounds: tuple[int, ...], bucket_cap_mb: float = 25.0
) -> list[list[Sent]]:
    """Return by number of microbatches per rank the collectives of one step after the first ones."""
    trainer = build_trainer(layout, bucket_cap_mb)
    tokens = torch.randint(VOCAB, (64, LENGTH))
    data = [{"ids": each, "targets": each.roll(-1)} for each in tokens]
    dp = world.world_size // Layout.parse(layout).tp
    found = []
    for k in rounds:
        shares = iter(trainer.loader(data, global_batch_size=k * dp * SAMPLES, shuffle=False))
        for share in (next(shares), next(shares)):  # DDP's first steps order its buckets
            trainer.step(share)
        share = next(shares)
        since = count_recorded()
        trainer.step(share)
        found.append(_read(since))
    return found


def _read(since: int) -> list[Sent]:
    found = []
    for entry in recorder._entries():
        if entry["record_id"] >= since:
            name = entry["profiling_name"].removeprefix("gloo:").replace("allgather", "all_gather")
            kind = next(k for k in ("all_reduce", "all_to_all", "all_gather") if k in name)
            axis = entry["process_group"][1].removeprefix("mesh_").replace("default_pg", "world")
            numel = sum(torch.Size(sizes).numel() for sizes in entry["input_sizes"])
            found.append(Sent(axis, kind, numel, entry["input_dtypes"][0]))
    return found


def split_axes(sent: list[Sent]) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    """(what blocks and loss send, what is agreed on once per step in fp64); by kind and numbers."""
    activations = [(each.kind, each.numel) for each in sent if each.dtype == "Float"]
    return activations, [(each.kind, each.numel) for each in sent if each.dtype == "Double"]


# What a rank sends in one microbatch, in order.
SUM = ("all_reduce", ACTIVATION)
LOSS = [("all_reduce", TOKENS), ("all_reduce", 2 * TOKENS)]
PLAIN = [SUM, *[SUM, SUM] * LAYERS, *LOSS, SUM, *[SUM, SUM] * LAYERS]


def plan_bytes(layout: str, k: int, axis: str) -> float:
    """Return the bytes of `paceline plan` for a rank that has k microbatches."""
    degrees = Layout.parse(layout).close()
    sets = [f"train.global_batch_size={k * degrees.dp * SAMPLES}", 'train.reduction="fast"']
    costs = of_recipe(build_recipe(sets), VOCAB)
    return count_sent(costs, degrees, cut_stages(costs, degrees))[axis]


def count_loss(k: int, tp: int) -> float:
    """Return the bytes of the loss's sums, which no plan counts."""
    return k * 2 * (tp - 1) / tp * 4 * 3 * TOKENS


@pytest.mark.parametrize("tp", [2, 4])
def test_one_sum_per_attention_and_feed_forward_and_pass(ranks: Pool, tp: int) -> None:
    rounds = (1, 3)
    for found in ranks.run(read_steps, tp, (f"tp={tp}", rounds), env=RECORD):
        for k, sent in zip(rounds, found, strict=True):
            activations, agreed = split_axes(sent)
            assert activations == PLAIN * k
            # Losses and weights of k microbatches with the header; then the norm, once per step.
            assert [kind for kind, _ in agreed] == ["all_reduce", "all_gather"]
            assert agreed[1] == ("all_gather", 1)
            floats = [each for each in sent if each.dtype == "Float"]
            total = sum(each.num_bytes(tp) for each in floats)
            assert total == plan_bytes(f"tp={tp}", k, "tp") + count_loss(k, tp)


@pytest.mark.parametrize("tp", [2, 4])
def test_along_the_sequence_blocks_send_the_same_bytes(ranks: Pool, tp: int) -> None:
    rounds = (1, 2)
    gather, scatter = ("all_gather", ACTIVATION // tp), ("all_to_all", ACTIVATION)
    pairs = [gather, scatter] * 2 * LAYERS
    # The embedding's sum is made whole and cut; the blocks' output is made whole for the head.
    forward, backward = [SUM, *pairs, gather], [SUM, *pairs, gather]
    for found in ranks.run(read_steps, tp, (f"tp={tp} sequence=true", rounds), env=RECORD):
        for k, sent in zip(rounds, found, strict=True):
            activations, agreed = split_axes(sent)
            norms = activations.pop()
            # Each rank has the norms' gradients of its part of the sequence: summed once per step.
            assert norms == ("all_reduce", 2 * LAYERS * HIDDEN)
            assert activations == [*forward, *LOSS, *backward] * k
            assert len(agreed) == 2
            floats = [each for each in sent if each.dtype == "Float"]
            total = sum(each.num_bytes(tp) for each in floats)
            gathers = 2 * k * Sent("", *gather, "Float").num_bytes(tp)
            ends = gathers + Sent("", *norms, "Float").num_bytes(tp) + count_loss(k, tp)
            assert total - ends == plan_bytes(f"tp={tp} sequence=true", k, "tp")


def test_recompute_sums_in_attention_again(ranks: Pool) -> None:
    # Not in the feed-forward, the last of a block: nothing in backward needs the block's output.
    block = [SUM, SUM, SUM]
    expected = [SUM, *[SUM, SUM] * LAYERS, *LOSS, SUM, *block * LAYERS]
    for (sent,) in ranks.run(read_steps, 2, ("tp=2 recompute=block", (1,)), env=RECORD):
        assert split_axes(sent)[0] == expected


@pytest.mark.parametrize("zero", [2, 3])
def test_shards_of_parts_send_the_parts_only(ranks: Pool, zero: int) -> None:
    rounds = (1, 2)
    layout = f"dp_shard=2 tp=2 zero={zero}"
    for found in ranks.run(read_steps, 4, (layout, rounds), env=RECORD):
        for k, sent in zip(rounds, found, strict=True):
            measured = sum(each.num_bytes(2) for each in sent if each.axis == "dp_shard")
            # The plan divides norms, too.
            assert measured == pytest.approx(plan_bytes(layout, k, "dp_shard"), rel=0.01)
            assert {each.axis for each in sent} == {"dp_shard", "tp", "world"}
            sums = [each for each in sent if each.axis == "tp" and each.numel == ACTIVATION]
            assert len(sums) == k * (2 + 4 * LAYERS)
            # Losses and weights; then each rank's part of the norm.
            small = [(each.kind, each.dtype) for each in sent if each.axis == "world"]
            assert small == [("all_reduce", "Double"), ("all_gather", "Double")]
            assert [each.numel for each in sent if each.axis == "world"][1] == 1


def test_loss_stays_cut_under_sharding(ranks: Pool) -> None:
    for (sent,) in ranks.run(read_steps, 4, ("dp_shard=2 tp=2", (1,)), env=RECORD):
        assert [(each.kind, each.numel) for each in sent if each.axis == "tp"] == PLAIN


@pytest.mark.parametrize("layout", ["dp_replicate=2", "dp_replicate=2 tp=2"])
def test_replicas_sum_once_per_step(ranks: Pool, layout: str) -> None:
    rounds = (1, 4)
    degrees = Layout.parse(layout)
    plan = plan_bytes(layout, 1, "dp_replicate")
    axis = "dp_replicate" if degrees.tp > 1 else "world"
    for found in ranks.run(read_steps, 2 * degrees.tp, (layout, rounds), env=RECORD):
        for sent in found:
            summed = [each for each in sent if each.axis == axis and each.kind == "all_reduce"]
            gradients = sum(each.num_bytes(2) for each in summed if each.dtype == "Float")
            # Without no_sync four microbatches would send it four times.
            assert gradients == pytest.approx(plan, rel=0.01)


@pytest.mark.parametrize(
    ("layout", "cap_mb", "num_calls"),
    [
        ("dp_replicate=2", 0.01, 23),
        ("dp_replicate=2", 0.1, 6),
        ("dp_replicate=2", 25.0, 1),
        ("dp_replicate=2 dp_shard=2", 25.0, LAYERS + 1),
    ],
)
def test_gradients_travel_in_the_planned_calls(
    ranks: Pool, layout: str, cap_mb: float, num_calls: int
) -> None:
    degrees = Layout.parse(layout)
    axis = "dp_replicate" if degrees.dp_shard > 1 else "world"
    for (sent,) in ranks.run(read_steps, degrees.dp, (layout, (1,), cap_mb), env=RECORD):
        own = [each for each in sent if (each.axis, each.dtype) == (axis, "Float")]
        summed = [each for each in own if each.kind == "all_reduce"]
        assert len(summed) == num_calls
        total = sum(each.num_bytes(degrees.dp_replicate) for each in summed)
        assert total == pytest.approx(plan_bytes(layout, 1, "dp_replicate"), rel=0.01)


def count_exact(world: Any, num_samples: int, cap_mb: float) -> list[int]:
    """Return the bytes that this rank sends in exact sums in two steps."""
    trainer = build_trainer("", cap_mb, reduction="exact")
    tokens = torch.randint(VOCAB, (64, LENGTH))
    data = [{"ids": each, "targets": each.roll(-1)} for each in tokens]
    shares = iter(trainer.loader(data, global_batch_size=num_samples, shuffle=False))
    exact = trainer._updates["model"].runner._exact
    found = []
    for _ in range(2):
        before = exact.ranks.exchange.sent_bytes
        trainer.step(next(shares))
        found.append(exact.ranks.exchange.sent_bytes - before)
    return found


@pytest.mark.parametrize(("num_ranks", "num_samples", "cap_mb"), [(2, 12, 25.0), (2, 8, 0.01), (3, 14, 0.1)])
def test_exact_sums_send_a_whole_per_subtree_and_one_more(
    ranks: Pool, num_ranks: int, num_samples: int, cap_mb: float
) -> None:
    num = num_samples // SAMPLES
    own = -(-num // num_ranks)
    shares = tuple(max(0, min(own, num - own * rank)) for rank in range(num_ranks))
    subtrees = len(plan_reduction(shares).subtrees[0])
    whole = 4 * count_parameters(list_parameters(build_recipe(), VOCAB))
    sent = ranks.run(count_exact, num_ranks, (num_samples, cap_mb))[0]
    # Chunks of a vector differ by a number if the ranks do not divide it.
    slack = 0 if num_ranks == 2 else 100
    expected = (subtrees + 1) * (num_ranks - 1) / num_ranks * whole
    assert sent == [pytest.approx(expected, rel=0, abs=slack)] * 2
