"""`paceline run` on unmodified scripts gives what torchrun gave: benchmarks/torchrun_scripts/expected/."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

RUN = Path(__file__).parents[2] / "benchmarks" / "torchrun_scripts" / "run.py"
# Fast ones without floats that a processor may round otherwise. The rest is in the benchmark.
NAMES = (
    "argparse_cli",
    "main_class",
    "fails_on_rank1",
    "lifecycle",
    "exit_code",
    "streams",
    "random_state",
    "restarts",
)


@pytest.fixture(scope="module")
def scripts() -> ModuleType:
    """The benchmark's run.py."""
    spec = importlib.util.spec_from_file_location("torchrun_scripts_run", RUN)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    module.TIME_LIMIT_S = 60  # below the limit of a test
    return module


@pytest.mark.parametrize("name", NAMES)
def test_a_script_gives_what_torchrun_gave(scripts: ModuleType, tmp_path: Path, name: str) -> None:
    case = next(case for case in scripts.CASES if case.name == name)
    folder = tmp_path / "work"
    outcome = scripts.run_case(case, "paceline", folder)
    expected = scripts.read_expected(case, folder)
    assert outcome.describe() == expected, outcome.stderr


def test_a_lost_line_is_a_difference(scripts: ModuleType) -> None:
    expected = ["exit code 0", "> [0] loss 1.5", "> [1] loss 1.5"]
    assert scripts.find_difference(expected, expected, ("a", "b")) == ""
    assert "-> [1] loss 1.5" in scripts.find_difference(expected, expected[:2], ("a", "b"))


def test_lines_of_two_ranks_that_ran_together_are_cut(scripts: ModuleType) -> None:
    assert scripts.split_lines("[0] one[1] one\n\n[0] x [1, 2]\n") == ["[0] one", "[1] one", "[0] x [1, 2]"]
