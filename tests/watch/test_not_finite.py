"""The report on the first gradient that is not finite, for made-up ranks and for real launches."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from paceline.watch.protocol.report import Beat, NotFinite
from paceline.watch.protocol.wire import Unpacker, pack
from paceline.watch.reasoning.not_finite import FirstNotFinite, explain_not_finite
from paceline.watch.reasoning.render import render
from tests.launching.launched import Launched, paceline_run
from tests.watch.situations import user

SCRIPT = str(Path(__file__).parent / "scripts" / "own" / "gradients.py")
BACKWARD = 1 + next(n for n, line in enumerate(Path(SCRIPT).read_text().splitlines()) if "# BACKWARD" in line)
FRAMES = (user(45, text="loss.backward()"),)
FOUND = NotFinite(41, 1.0, "applied", "body.scale.weight", "Linear", False, FRAMES)
INHERITED = replace(FOUND, number=42, effect="inherited")
_END_S = 120.0


# ---- words


def test_the_rank_the_pass_the_module_and_the_line_are_named():
    verdict = explain_not_finite({1: FOUND, 0: INHERITED, 2: INHERITED})
    assert verdict.headline == (
        "rank 1 had the first gradient that is not finite, in backward pass 41; "
        "it began in body.scale (Linear)"
    )
    (place,) = verdict.places
    assert (place.ranks, place.frames) == ((1,), FRAMES)
    text = render(verdict)
    assert "body.scale.weight, and none in what comes after it" in text
    assert "train.py:45" in text
    assert "loss itself" not in text


def test_ranks_of_the_same_pass_are_reported_together():
    other = replace(FOUND, parameter="head.bias", kind="Head", is_at_end=True)
    verdict = explain_not_finite({3: FOUND, 1: other, 2: FOUND, 0: replace(INHERITED, number=41)})
    assert verdict.headline.startswith("ranks 1-3 had the first gradient")
    assert verdict.headline.endswith("it began in body.scale (Linear) and head (Head)")
    assert [place.ranks for place in verdict.places] == [(1,), (2, 3)]
    assert "ranks 2 and 3 have it in body.scale.weight" in render(verdict)


def test_the_end_of_the_model_points_to_the_loss():
    text = render(explain_not_finite({1: replace(FOUND, is_at_end=True)}))
    assert "the loss itself" in text
    assert "comes after" not in text


def test_a_parameter_of_the_model_itself_has_its_own_name():
    headline = explain_not_finite({0: replace(FOUND, parameter="gain", kind="Net")}).headline
    assert headline.endswith("it began in gain (Net)")


def test_an_unknown_module_is_not_named():
    verdict = explain_not_finite({0: replace(FOUND, parameter="", kind="")})
    assert verdict.headline.endswith("in backward pass 41")
    assert "rank 0 went through backward" in render(verdict)


def test_weights_that_were_so_before():
    verdict = explain_not_finite({0: INHERITED, 1: INHERITED})
    assert verdict.headline == (
        "ranks 0 and 1 have weights that are not finite in body.scale (Linear), since before backward pass 42"
    )
    assert "have it in body.scale.weight" in render(verdict)


def test_steps_that_are_skipped_again_and_again():
    verdict = explain_not_finite({1: replace(FOUND, effect="skipped")})
    assert "rank 1 has had gradients that are not finite, again and again since backward pass 41" in (
        verdict.headline
    )


def test_steps_that_an_exception_has_ended():
    verdict = explain_not_finite({1: replace(FOUND, effect="raised")})
    assert verdict.headline.startswith(
        "rank 1 had the first gradient that is not finite, in backward pass 41"
    )


# ---- when


def test_it_is_reported_once_when_all_have_had_time_to_report():
    first = FirstNotFinite()
    assert first.read(100.0) is None
    first.note(0, INHERITED, 100.0)
    assert first.read(100.5) is None
    first.note(1, FOUND, 101.2)
    first.note(0, INHERITED, 102.0)
    assert first.read(102.4) is None
    verdict = first.read(102.6)
    assert verdict is not None
    assert verdict.headline.startswith("rank 1 had")
    assert first.read(200.0) is None


def test_at_the_end_nothing_is_waited_for():
    first = FirstNotFinite()
    first.note(1, FOUND, 100.0)
    assert first.read(100.1, is_last=True) is not None
    assert first.read(100.1, is_last=True) is None


def test_it_comes_with_a_beat():
    beat = Beat(1, 2.0, "running", {}, {}, 7, False, FOUND)
    assert list(Unpacker().feed(pack(beat))) == [beat]


# ---- launches


def run(folder: Path, how: str, num_steps: int, *flags: str) -> Launched:
    return Launched(folder, paceline_run("--nproc-per-node", "2", *flags, SCRIPT, how, str(num_steps)))


@pytest.mark.timeout(240)
def test_a_gradient_of_the_last_step_is_reported_with_its_line(tmp_path: Path) -> None:
    with run(tmp_path, "accumulate", 6) as job:
        assert job.wait(_END_S) == 0
        assert "rank 0 weights not finite" in job.text
        told = "rank 1 had the first gradient that is not finite, in backward pass 11; it began in spread"
        assert f"paceline: {told} (Linear) [PL821]" in job.text
        assert f"gradients.py:{BACKWARD} in main" in job.text
        assert job.text.count("[PL821]") == 1


@pytest.mark.timeout(240)
@pytest.mark.parametrize("how", ["fail", "clip"])
def test_it_is_reported_before_what_ends_the_job(tmp_path: Path, how: str) -> None:
    with run(tmp_path, how, 6) as job:
        assert job.wait(_END_S) == 1
        assert job.text.index("rank 1 had the first gradient") < job.text.index("[PL330]")


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("how", "flags"), [("scaled", ()), ("accumulate", ("--no-watch",))])
def test_nothing_is_reported(tmp_path: Path, how: str, flags: tuple[str, ...]) -> None:
    with run(tmp_path, how, 40, *flags) as job:
        assert job.wait(_END_S) == 0
        assert f"rank 0 weights {'not finite' if flags else 'finite'}" in job.text
        assert "PL8" not in job.text
