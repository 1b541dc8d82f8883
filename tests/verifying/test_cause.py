"""From numbers to causes, without ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from paceline.errors import PacelineError
from paceline.recipe import Layout
from paceline.verifying.case import Case
from paceline.verifying.cause import diagnose
from paceline.verifying.check import _describe_unexplained
from paceline.verifying.closeness import (
    Difference,
    Noise,
    find_factor,
    find_rounding,
    looks_masked,
    measure_distance,
)
from paceline.verifying.layouts import EventDifference, Observed
from paceline.verifying.parts import Place, find_part
from paceline.verifying.reference import Facts, WatchedFacts
from paceline.verifying.watch import Event, ModuleFacts


@pytest.fixture
def matrix() -> Tensor:
    return torch.randn(12, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_distance(matrix: Tensor) -> None:
    assert measure_distance(matrix, matrix.clone()) == 0
    assert measure_distance(matrix, matrix + 1e-3) == pytest.approx(1e-3)
    assert measure_distance(matrix, matrix[1:]) == float("inf")
    assert measure_distance(matrix, matrix.float()) == float("inf"), "another type is another tensor"
    holey = matrix.clone()
    holey[0, 0] = torch.nan
    assert measure_distance(holey, holey.clone()) == 0
    assert measure_distance(matrix, holey) == float("inf")
    assert measure_distance(torch.tensor([1, 2]), torch.tensor([1, 5])) == 3
    assert measure_distance(torch.zeros(0), torch.zeros(0)) == 0


def test_factor(matrix: Tensor) -> None:
    assert find_factor(matrix, 2 * matrix) == pytest.approx(2)
    assert find_factor(matrix, matrix.flip(0)) is None
    assert find_factor(torch.zeros(3), torch.ones(3)) is None


def test_rounding_and_masks(matrix: Tensor) -> None:
    for dtype, name in ((torch.bfloat16, "bf16"), (torch.float16, "fp16"), (torch.float32, "fp32")):
        rounded = matrix.to(dtype).double()
        assert find_rounding(matrix, rounded) == name
        assert find_rounding(matrix, rounded / 7) == "", "the size is another"
        assert find_rounding(matrix / 7, rounded / 7) == ""
        assert find_rounding(matrix / 7, rounded / 7, (1.0, 7.0)) == name
        halves = [part.to(dtype).double() for part in (0.3 * matrix, 0.7 * matrix)]
        assert find_rounding(matrix, halves[0] + halves[1]) == name, "a sum of what was rounded"
    single = matrix.float()
    assert find_rounding(single, single.bfloat16().float()) == "bf16"
    for like in (
        2 * matrix,
        matrix * (1 + 2**-10),
        matrix + 1e-3 * matrix.sin(),
        matrix + 1e-3 * matrix.flip(0),
    ):
        assert find_rounding(matrix, like) == "", "differences of that size, and no rounding"
    big = matrix.repeat(10, 10)
    one, other = (torch.dropout(big, 0.3, True) for _ in range(2))
    assert looks_masked(one, other, 1e-12)
    assert not looks_masked(one, 2 * one, 1e-12)
    assert not looks_masked(one.relu(), (one + 0.1).relu(), 1e-12), "other zeros, and the rest differs too"


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("dim", [0, 1])
def test_a_ranks_part_is_found(matrix: Tensor, dim: int, rank: int) -> None:
    places = [Place("tp", 2, rank)]
    for part in (
        matrix.chunk(2, dim)[rank],
        torch.cat([piece.chunk(2, 0)[rank] for piece in matrix.chunk(3, 0)]),  # heads of q, k and v
    ):
        found = find_part(matrix, part, places)
        assert found is not None
        assert torch.equal(found, part)
    assert find_part(matrix, matrix, places) is matrix
    assert find_part(matrix, matrix[:5], places) is None
    assert find_part(matrix, matrix[:6, :3], places) is None


# ---- causes

FACTS = Facts(
    numbers={"1/loss/": 2.0},
    noise={},
    clip_norm=1.0,
    num_tensors=5,
    num_microbatches=[4, 4],
    tied=[["embed.weight", "head.weight"]],
    draws=[],
)
WATCHED = WatchedFacts(
    order={
        "|0|in|0": 0,
        "block|0|in|0": 1,
        "block.up|0|in|0": 2,
        "block.up|0|out|0": 3,
        "block.down|0|in|0": 4,
    }
    | {"block.down|0|out|0": 5, "block|0|out|0": 6, "|0|out|0": 7},
    modules={
        "": ModuleFacts("Model", 0.0, False),
        "block": ModuleFacts("Block", 0.1, False),
        "block.up": ModuleFacts("Linear", 0.0, True),
        "block.down": ModuleFacts("Linear", 0.0, True),
    },
    losses=dict.fromkeys(range(4), (8.0, 4.0)),
    parameters=["block.up.weight", "block.down.weight"],
)
LAYOUT = Layout(dp_replicate=2, tp=2)


def differ(
    kind: str, name: str = "", ranks: tuple[int, ...] = (0, 1, 2, 3), step: int = 1, **seen: object
) -> list[Difference]:
    shape = {"size": 0.5, "tolerance": 1e-13, "rounding": 1e-13, "scale": 1.0} | seen
    return [Difference(step, kind, name, rank, **shape) for rank in ranks]  # type: ignore[arg-type]


def event(text: str, rank: int = 0, *, gradient: bool = False, **seen: object) -> EventDifference:
    shape = {"size": 0.5, "tolerance": 1e-13, "scale": 1.0, "factor": None, "looks_masked": False}
    shape |= {"rounded_to": "", **seen}
    return EventDifference(
        order=WATCHED.order[text],
        microbatch=0,
        event=Event.parse(text),
        gradient=gradient,
        rank=rank,
        **shape,  # type: ignore[arg-type]
    )


def observe(events: dict[int, list[EventDifference]] | None = None, **seen: object) -> list[Observed]:
    """Ranks 0 and 1 ran microbatches 0 and 1, ranks 2 and 3 the others."""
    found = []
    for rank in range(4):
        ran = [0, 1] if rank < 2 else [2, 3]
        observed = Observed(rank=rank, ran=ran, losses=dict.fromkeys(ran, (8.0, 4.0)))
        observed.differences = (events or {}).get(rank, [])
        found.append(replace(observed, **seen))  # type: ignore[arg-type]
    return found


def explain(differences: list[Difference], observed: list[Observed]) -> tuple[str, str, str]:
    finding = diagnose(Case(LAYOUT, "fp64", replace(FACTS, watched=WATCHED), differences, observed))
    assert finding.where.startswith("dp_replicate=2 tp=2, step ")
    return finding.code, finding.where.partition("step ")[2], finding.saw


def test_an_output_that_differs_is_put_to_its_module() -> None:
    down = [event("block.down|0|out|0", rank, factor=0.5) for rank in range(4)]
    code, where, saw = explain(differ("loss"), observe({rank: [down[rank]] for rank in range(4)}))
    assert (code, where) == ("PL701", "1, block.down")
    assert "in the output of block.down" in saw
    assert "on all 4 ranks" in saw
    assert "0.5 times the reference's: dp_replicate=2" in saw


def test_code_between_two_modules_is_put_to_their_parent() -> None:
    inside = event("block.down|0|in|0", 3, size=1e-9)
    code, where, saw = explain(differ("loss"), observe({3: [inside]}))
    assert (code, where) == ("PL701", "1, block")
    assert "in the code of block, after block.up and before block.down" in saw
    assert "on rank 3 only" in saw


@pytest.mark.parametrize(
    ("seen", "code"),
    [
        ({"looks_masked": True}, "PL702"),
        ({"rounded_to": "bf16", "size": 1e-3}, "PL712"),
    ],
)
def test_how_an_output_differs_reports_the_cause(seen: dict[str, object], code: str) -> None:
    assert explain(differ("loss"), observe({0: [event("block.up|0|out|0", **seen)]}))[0] == code


def test_weights_from_before_the_update() -> None:
    output = event("block.up|0|out|0")
    found = explain(differ("loss", step=2), observe({0: [output]}))
    assert found[:2] == ("PL701", "2, block.up"), "nothing shows that it is the weights"
    copies = {"block.up": ("cached", 0)}
    found = explain(differ("loss", step=2), observe({0: [output]}, stale_copies=copies))
    assert found[:2] == ("PL714", "2, block.up")
    assert "attribute cached holds one as it was before the first step" in found[2]
    watched = replace(WATCHED, order=WATCHED.order | {"block.up|0|weight weight|0": 2})
    with_weight = replace(output, event=Event.parse("block.up|0|weight weight|0"), order=2, stale=1)
    facts = replace(FACTS, watched=watched)
    case = Case(LAYOUT, "fp64", facts, differ("loss", step=2), observe({0: [with_weight]}))
    assert "block.up.weight that the forward of block.up uses" in diagnose(case).saw
    assert "as it was after step 1" in diagnose(case).saw
    rounded = observe({0: [replace(with_weight, rounded_to="bf16")]})
    assert diagnose(replace(case, observed=rounded)).code == "PL712"


def test_another_batch() -> None:
    assert explain(differ("loss"), observe({1: [event("|0|in|0", 1)]}))[:2] == ("PL716", "1, the batch")


def test_backward_starts_at_the_end() -> None:
    events = {0: [event(text, gradient=True) for text in ("block.up|0|out|0", "block.down|0|in|0")]}
    code, where, saw = explain(differ("gradient", "block.up.weight"), observe(events))
    assert (code, where) == ("PL707", "1, block.down")
    assert "the gradient that block.down gives to its input" in saw


@pytest.mark.parametrize(
    ("factor", "words"),
    [
        (2.0, "2 times the reference's on all 4 ranks: summed over dp_replicate=2 again"),
        (0.25, "1/4 of the reference's on all 4 ranks: averaged over all ranks=4"),
        (1.3, "1.3 times"),
        (None, "by no common factor"),
    ],
)
def test_a_wrong_sum_of_all_gradients_is_told_by_its_factor(factor: float | None, words: str) -> None:
    both = [d for name in WATCHED.parameters for d in differ("gradient", name, factor=factor)]
    code, where, saw = explain(both, observe())
    assert (code, where) == ("PL703", "1, the sum of gradients")
    assert words in saw
    code, where, _ = explain(differ("gradient", "block.up.weight", factor=factor), observe())
    assert (code, where) == ("PL707", "1, block.up"), "one module's gradients are no matter of the sum"


@pytest.mark.parametrize(
    ("differences", "code", "where"),
    [
        (differ("norm", factor=0.7), "PL708", "1, the global norm"),
        (differ("buffer", "norm.mean", ranks=(1,)), "PL710", "1, norm.mean"),
        (differ("weight", "block.up.weight"), "PL709", "1, block.up.weight"),
        (differ("weight", "head.weight"), "PL711", "1, head.weight"),
        (differ("gradient", "embed.weight"), "PL711", "1, embed.weight"),
        (differ("gradient", "block.up.weight", factor=2.0), "PL707", "1, block.up"),
        (differ("gradient", "block.up.weight", rounded_to="bf16"), "PL712", "1, the sum of gradients"),
        (differ("optimizer", "block.up.weight exp_avg", factor=0.25), "PL709", "1, block.up.weight"),
        (differ("loss", factor=2.0), "PL718", "1, the loss"),
        (differ("weight of the batch"), "PL718", "1, the loss"),
        (differ("weight", "block.up.weight", size=1e-14), "PL715", "1, block.up.weight"),
        (differ("weight", "x", step=3) + differ("norm", step=2), "PL708", "2, the global norm"),
    ],
)
def test_what_differs_when_all_outputs_agree(differences: list[Difference], code: str, where: str) -> None:
    assert explain(differences, observe())[:2] == (code, where)


def test_the_loss_function_is_distinguished_from_the_sum_of_losses() -> None:
    right = explain(differ("loss"), observe())[2]
    assert "Every microbatch's loss agrees" in right
    wrong = observe()
    wrong[1].losses[1] = (4.0, 4.0)
    assert "result of the loss function for microbatch 1" in explain(differ("loss"), wrong)[2]


def test_a_start_that_differs_needs_no_second_look() -> None:
    case = Case(LAYOUT, "fp64", FACTS, differ("initial", "block.up.weight", ranks=(2,), step=0))
    finding = diagnose(case)
    assert finding.code == "PL700"
    assert finding.where == "dp_replicate=2 tp=2, before step 1, block.up.weight"
    assert "on rank 2 only" in finding.saw


def test_lost_and_repeated_microbatches() -> None:
    lost = observe()
    for observed in lost[2:]:
        observed.ran = [2]
    assert "Microbatch 3 of 4 ran on no rank" in explain(differ("loss"), lost)[2]
    twice = observe()
    for observed in twice[2:]:
        observed.ran = [1, 2, 3]
    assert "Microbatch 1 of 4 ran more than once" in explain(differ("loss"), twice)[2]


def test_a_tolerance_is_the_larger_of_noise_and_last_bit() -> None:
    assert Noise(1e-14, 1.0, 2e-16, 100.0).tolerance == pytest.approx(1e-12)
    assert Noise(0.0, 1.0, 2e-16, 100.0).tolerance == pytest.approx(2e-14)
    assert Noise(0.0, 0.0, 0.0, 100.0).tolerance == 0


def test_a_weight_that_a_forward_changes_is_named() -> None:
    watched = replace(WATCHED, changed=["block.up.weight"])
    case = Case(
        LAYOUT, "fp64", replace(FACTS, watched=watched), differ("weight", "block.up.weight"), observe()
    )
    finding = diagnose(case)
    assert (finding.code, "block.up.weight" in finding.where) == ("PL723", True)


def test_a_layout_whose_watched_run_fails_is_reported_all_the_same() -> None:
    case = Case(LAYOUT, "fp64", FACTS, differ("loss", size=0.5) + differ("weight", "block.up.weight"))
    finding = _describe_unexplained(case, PacelineError("PL432", saw="no memory.", rule="", fix=""))
    assert finding.code == "PL726"
    assert "on all 4 ranks" in finding.saw
    assert "no memory." in finding.saw
