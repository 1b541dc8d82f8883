"""The time of a step against closed formulas and brute force."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest

from benchmarks.plan.quantiles import find_quantiles
from paceline.pipeline.orders import make_schedule
from paceline.pipeline.simulate import Costs as StageTimes
from paceline.pipeline.simulate import simulate
from paceline.plan.cluster import Cluster, Processor, Wire, read_cluster
from paceline.plan.costs import ModelCosts, ModelPart, Product, Transformer, of_transformer
from paceline.plan.fit import Constants, find_interval, load_constants, load_fit
from paceline.plan.model_state import Sizes
from paceline.plan.parameters import Parameter
from paceline.plan.recipe_costs import of_recipe
from paceline.plan.step import StepModel, _Rank, cut_stages, find_strides
from paceline.recipe import Layout, load_recipe

PLAIN = Constants(
    product=1, half_inner=1e-9, attention=1, moved=1, inside=1, between=1, inside_s=0, between_s=0, call_s=0,
    contention=0, straggle=0,
)  # fmt: skip
CHIP = Processor("test", {4: 1e12}, 1.0, 1e11, 1e30, 0.0)


def cluster(nodes: int, ranks: int, inside: float = 1e9, between: float = 1e8) -> Cluster:
    return Cluster(nodes, ranks, CHIP, Wire(0.0, inside), Wire(0.0, between))


def costs(num_blocks: int = 4, width: int = 512, **words: object) -> ModelCosts:
    block = ModelPart(
        (Product(64, width, width),),
        input_bytes=4,
        width_bytes=64 * width * 4,
        num_sums=2,
        parameters=(Parameter("w", (width, width), "b", 0),),
    )
    return ModelCosts("test", ModelPart(), (block,) * num_blocks, ModelPart(), **words)  # type: ignore[arg-type]


@pytest.mark.parametrize(("degree", "stride"), [(2, 1), (8, 1), (4, 2)])
def test_collectives_take_the_formulas_of_rings_inside_a_node(degree: int, stride: int) -> None:
    machine = cluster(1, 8)
    assert machine.time("all_reduce", 1e9, degree, stride) == pytest.approx(2 * (degree - 1) / degree)
    assert machine.time("all_gather", 1e9, degree, stride) == pytest.approx((degree - 1) / degree)


def test_groups_that_leave_a_node_share_its_links() -> None:
    machine = cluster(2, 8)  # 0.1 GB/s per rank between nodes, 0.8 GB/s of a node
    whole = machine.time("all_gather", 1e9, 16, 1)
    pairs = machine.time("all_gather", 1e9, 2, 8)
    assert whole == pytest.approx(15 / 16 / 0.8)  # one ring uses all eight links
    assert pairs == pytest.approx(1 / 2 / 0.1)  # eight rings at once have one each


def test_compute_alone_is_operations_over_rate() -> None:
    model = costs(global_batch=8, microbatch=2, clips=False, sizes=Sizes(num_moments=0))
    step = StepModel(model, cluster(1, 1), PLAIN).time(Layout(dp_replicate=1))
    flops = 3 * 8 * 4 * 2 * 64 * 512 * 512
    fill = 2 * 64 * 512
    assert step.compute == pytest.approx(flops / 1e12 * (fill + 60 * 128 * 128) / fill, rel=1e-3)
    assert step.communication == 0


def test_attention_takes_the_rate_that_a_probe_has_measured_for_it() -> None:
    scores, values = (Product(128, k, c, "heads", 4, True, 0.5) for k, c in ((16, 128), (128, 16)))
    block = ModelPart((scores, values), input_bytes=4, width_bytes=4)
    model = ModelCosts("test", ModelPart(), (block,), ModelPart(), global_batch=8, microbatch=2, clips=False)
    rows = ((128.0, 16.0, 128.0, 4, 1e12),)
    slow = tuple((*row[:4], 1e9) for row in rows)
    chip = replace(CHIP, measured=rows, attention=slow)
    step = StepModel(model, replace(cluster(1, 1), processor=chip), PLAIN).time(Layout(dp_replicate=1))
    flops = 2 * 0.5 * 4 * 2 * 128 * 16 * 128
    assert step.compute == pytest.approx(8 * (1 + 2.5) * flops / 1e9)


def brute_force(computes: list[float], gathers: list[float], sums: list[float], ahead: int) -> float:
    """Return the end of the later stream, by stepping through events."""
    num, ends, gathered = len(computes), [math.inf] * len(computes), [math.inf] * len(computes)
    queue = [("gather", 0)]
    for place in range(num):
        queue += [
            ("gather", k) for k in range(1, num) if k == place + ahead or (place == 0 and 0 < k < ahead)
        ]
        queue.append(("sum", place))
    wire = now = 0.0
    for place in range(num):
        for kind, k in [
            q for q in queue if q[0] == "gather" and gathered[q[1]] == math.inf and q[1] <= place + ahead
        ]:
            assert kind == "gather"
            wire = max(wire, now) + gathers[k] if gathers[k] else wire
            gathered[k] = wire if gathers[k] else 0.0  # whole already
        now = max(now, gathered[place]) + computes[place]
        ends[place] = now
        if sums[place]:
            wire = max(wire, now) + sums[place]
    return max(now, wire)


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_two_streams_wait_for_each_other(ahead: int) -> None:
    for numbers in itertools.product((0.0, 1.0, 3.0), repeat=6):
        computes, gathers = [1.0, 2.0, *numbers[:1]], list(numbers[1:4])
        sums = [numbers[4], numbers[5], 1.0]
        model = costs(3, prefetch=ahead)
        layout = Layout(dp_replicate=1, dp_shard=2)
        rank = _Rank(StepModel(model, cluster(1, 2), PLAIN), layout, find_strides(layout), model.blocks)
        found = rank._expose(computes, gathers, sums)
        assert found == pytest.approx(brute_force(computes, gathers, sums, ahead) - sum(computes))


def test_a_hidden_sum_costs_nothing_and_a_long_one_what_sticks_out() -> None:
    fast, slow = (
        StepModel(costs(8, global_batch=64, microbatch=32), cluster(1, 2, inside=rate), PLAIN)
        for rate in (1e12, 1e9)
    )
    layout = Layout(dp_replicate=2)
    assert fast.time(layout).data < 0.02 * fast.time(layout).total
    assert slow.time(layout).data > fast.time(layout).data


def test_the_bubble_of_equal_stages_is_the_formula() -> None:
    model = costs(8, global_batch=8, microbatch=1, clips=False, sizes=Sizes(num_moments=0))
    step = StepModel(model, cluster(1, 4, inside=1e30), PLAIN).time(Layout(pp=4, dp_replicate=1))
    assert step.bubble / step.compute == pytest.approx(3 / 8, rel=0.02)  # (P - 1) / M over the ideal
    assert step.bubble / step.total == pytest.approx(3 / 11, rel=0.03)  # (P - 1) / (P - 1 + M) over all


def test_a_long_pipeline_is_continued_from_a_short_one() -> None:
    model = costs(4, microbatch=1)
    times = [
        StepModel(replace(model, global_batch=num), cluster(1, 2), PLAIN)
        .time(Layout(pp=2, dp_replicate=1))
        .total
        for num in (16, 17, 18)
    ]
    assert times[2] - times[1] == pytest.approx(times[1] - times[0], rel=1e-6)


@pytest.mark.parametrize(("schedule", "ranks"), [("1f1b", 2), ("1f1b", 4), ("zero_bubble", 4)])
def test_ranks_wait_for_slow_messages_of_every_microbatch(schedule: str, ranks: int) -> None:
    num, block_s, link = 40, 64 * 512 * 512 * 2 / 1e12, 64 * 512 * 4
    model = costs(ranks, microbatch=1, global_batch=num, clips=False, sizes=Sizes(num_moments=0))
    chip = replace(CHIP, measured=((64.0, 512.0, 512.0, 4, 1e12),))
    machine = replace(cluster(1, ranks, inside=link / (2 * block_s)), processor=chip)
    layout = Layout(pp=ranks, dp_replicate=1, schedule=schedule)
    step = StepModel(model, machine, PLAIN).time(layout)
    whole = simulate(make_schedule(schedule, ranks, num), StageTimes(message=2)).total * block_s
    assert step.total == pytest.approx(whole, rel=0.02)
    assert step.bubble > num * block_s


def test_stages_hold_all_blocks_once() -> None:
    model = costs(13)
    for layout in (
        Layout(pp=4, dp_replicate=1),
        Layout(pp=3, dp_replicate=1, schedule="interleaved", chunks=2),
    ):
        stages = cut_stages(model, layout)
        assert len(stages) == layout.num_stages
        assert sum(len(stage) for stage in stages) == 13 + 2
        assert all(any(part.input_bytes for part in stage) for stage in stages)


def test_products_of_a_transformer_have_the_known_number_of_operations() -> None:
    # Narayanan et al. 2021, equation 2, without recompute: 72 B s l h^2 (1 + s / 6 h + V / 12 l h).
    s, h, layers, vocab = 2048, 4096, 3, 51200
    sizes = Transformer(layers, h, 32, 32, 4 * h, vocab, s, gated=False, fused=False, causal=False)
    blocks = {f"b{n}": [Parameter("w", (h, h), f"b{n}")] for n in range(layers)}
    parts = of_transformer(sizes, {"before": [], **blocks, "after": []})
    flops = 3 * sum(product.flops for part in parts for product in part.products)
    assert flops == pytest.approx(72 * s * layers * h**2 * (1 + s / (6 * h) + vocab / (12 * layers * h)))


def test_quantiles_weigh_groups_equally() -> None:
    low, high = find_quantiles([0.0] * 90 + [1.0] + [2.0], ["a"] * 90 + ["b"] + ["c"], 0.8)
    assert (low, high) == (0.0, 2.0)


def test_an_interval_is_wider_where_nothing_alike_is_known() -> None:
    known, unknown = find_interval(1.0, "hardware"), find_interval(1.0, "hardware", ("a new processor",))
    assert unknown.low_s < known.low_s < 1.2
    assert unknown.high_s > known.high_s > 0.9
    assert "a new processor" in unknown.remarks[0]
    assert find_interval(1.0, "calibrated").high_s < known.high_s * 1.2


def test_the_shipped_numbers_are_possible() -> None:
    fit = load_constants()
    assert all(
        0 < share <= 1
        for share in (fit.product, fit.attention, fit.moved, fit.inside, fit.between, fit.narrow)
    )
    assert load_fit()["rows"] > 250
    assert read_cluster("2 nodes of 8 A100-80", fit.links).between is not None


def test_a_dense_block_before_mixtures_has_its_own_width() -> None:
    dense = of_recipe(load_recipe("recipes/moe-stdlib.toml")).blocks[0]
    weights = sum(math.prod(p.shape) for p in dense.parameters if len(p.shape) == 2)
    assert sum(p.inner * p.columns for p in dense.products if p.by != "heads") == weights
