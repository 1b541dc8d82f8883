"""`paceline plan links`: beside measured steps, and its pick."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest

from paceline.cli.main import main
from paceline.plan.links import list_choices, pick, read_link

MEASURED = Path(__file__).parents[2] / "benchmarks/islands/link.jsonl"
# As benchmarks/islands/link.py names what it measures.
NAMES = {"fast": "plain", "exact": "plain", "int4": "compress int4"}
NUM_PARAMETERS = 18 * (1024 * 1024 + 1024)


def test_predictions_are_near_what_was_measured() -> None:
    errors = []
    for line in MEASURED.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        link = row.get("mbit", 100) * 1e6 / 8, row.get("round_trip_ms", 50) / 1e3
        times = {kind: statistics.median(each) for kind, each in row["times"].items()}
        step_s = times.pop("alone")
        for kind, seconds in times.items():
            every = int(kind.split("every=")[1].split()[0]) if "every=" in kind else 1
            choices = list_choices(NUM_PARAMETERS, 2, step_s, link, (every,))
            [found] = [each for each in choices if each.name == NAMES.get(kind, kind)]
            errors.append(abs(found.step_s / seconds - 1))
    assert len(errors) >= 6
    assert statistics.median(errors) < 0.1
    assert max(errors) < 0.2, errors


def test_the_gentlest_that_is_fast_enough_is_picked() -> None:
    def find(link: str, nodes: int = 2) -> str:
        return pick(list_choices(19_000_000, nodes, 0.3, read_link(link))).name

    assert find("100gbit,0.1ms") == "plain"
    assert find("10gbit/s, 1ms") == "islands every=10"  # a codec takes a CPU longer than this link
    assert find("100mbit,50ms") == "islands every=50 int4"
    assert find("1kbit,50ms") == "islands every=200 int4"  # none is fast enough


@pytest.mark.parametrize("link", ["100mbit", "0mbit,50ms", "100mbit,-1ms", "1.2.3mbit,5ms", "fast"])
def test_a_link_that_cannot_be_read(capsys: pytest.CaptureFixture[str], link: str) -> None:
    assert main(["plan", "links", "gpt-islands", "--link", link, "--step", "0.3"]) == 2
    assert "[PL930]" in capsys.readouterr().err


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "links", "gpt-islands", "--link", "1mbit,50ms", "--step", "0.05"]
    assert main(words) == 0
    assert "--set islands.every=" in capsys.readouterr().out
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["pick"].startswith("islands")
    assert main([*words, "--nodes", "0"]) == 2
