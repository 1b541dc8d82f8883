from __future__ import annotations

import argparse
import json

import pytest

from paceline.cli import plan
from paceline.errors import PacelineError


def run(*words: object) -> int:
    parser = argparse.ArgumentParser()
    plan.register(parser.add_subparsers())
    args = parser.parse_args(["plan", *map(str, words)])
    code: int = args.run(args)
    return code


def test_all_schedules_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("schedule") == 0
    rows = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines()[3:9]}
    assert rows["gpipe"][1:] == ["1", "27.3%", "8.0"]
    assert rows["interleaved"][1:3] == ["2", "15.8%"]
    assert rows["zbv"][2] == "5.9%"


def test_one_schedule_is_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("schedule", "1f1b", "--ranks", 2, "--microbatches", 4) == 0
    out = capsys.readouterr().out
    assert "rank 0" in out
    assert "idle: 20.0% of the ranks' time (25.0% of their work)" in out
    assert "keeps at once: 2, 1" in out


def test_costs_change_the_idle_share(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("schedule", "zero_bubble", "--ranks", 2, "--microbatches", 4, "--json")
    shares = []
    for costs in ("1,1,1", "1,2,0"):
        assert run(*words, "--costs", costs) == 0
        shares.append(json.loads(capsys.readouterr().out)["idle_share"])
    assert shares[0] < shares[1]


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("1f1",), "PL474"),
        (("own.txt",), "PL474"),
        (("--ranks", "0"), "PL476"),
        (("--microbatches", "100000"), "PL476"),
        (("--costs", "1,1"), "PL476"),
        (("--costs", "0,0,0"), "PL476"),
    ],
)
def test_bad_input_is_refused(words: tuple[str, ...], code: str) -> None:
    with pytest.raises(PacelineError) as caught:
        run("schedule", *words)
    assert caught.value.code == code
