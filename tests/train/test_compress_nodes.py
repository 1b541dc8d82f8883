"""Compressed gradients and islands over two nodes: training ends, with the bits of one process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launching.nodes import why_no_nodes
from tests.launching.on_nodes import run_on_nodes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

KINDS = ("bf16", "int8", "int4", "islands-none", "islands-int4")
LAYOUTS = ("dp_replicate",)
PROGRAM = [sys.executable, "-W", "ignore", str(Path(__file__).parent / "compressed_steps.py")]


@pytest.fixture(autouse=True, scope="module")
def _nodes_can_be_made() -> None:
    if reason := why_no_nodes():
        pytest.skip(reason)


@pytest.fixture(scope="module")
def alone() -> dict[tuple[str, str], str]:
    words = [*PROGRAM, ",".join(KINDS), "dp_replicate"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return read_hashes(done.stdout)


def read_hashes(out: str) -> dict[tuple[str, str], str]:
    rows = [json.loads(line) for line in out.splitlines() if line.startswith("[")]
    return {(kind, layout): found for kind, layout, found, _ in rows}


# Each rank's node, and the link: Mbit/s and milliseconds there and back.
SETTINGS = {
    "1 + 1": ((0, 1), 100.0, 0.0),
    "2 + 2": ((0, 0, 1, 1), 100.0, 0.0),
    "1 + 1, long link": ((0, 1), 100.0, 50.0),
}


@pytest.mark.parametrize("setting", list(SETTINGS))
def test_two_nodes_have_the_bits_of_one_process(alone: dict[tuple[str, str], str], setting: str) -> None:
    places, rate_mbit, round_trip_ms = SETTINGS[setting]
    words = [*PROGRAM, ",".join(KINDS), ",".join(LAYOUTS)]
    found = read_hashes(run_on_nodes(places, rate_mbit, words, round_trip_ms))
    expected = {(kind, layout): alone[kind, "dp_replicate"] for kind in KINDS for layout in LAYOUTS}
    assert found == expected
