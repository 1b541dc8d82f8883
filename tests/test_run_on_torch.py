"""The tool that runs the tests on another version of torch: its pins and its table."""

from __future__ import annotations

import importlib.util
import platform
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("run_on_torch", ROOT / "tools" / "run_on_torch.py")
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    return tool


def test_older_versions_get_the_setuptools_that_they_allow(tool: ModuleType) -> None:
    assert tool.list_pins("2.11.0") == ["torch==2.11.0", "setuptools==81.0.0"]
    assert tool.list_pins("2.12.1") == ["torch==2.12.1", "setuptools==81.0.0"]
    assert tool.list_pins("2.13.0") == ["torch==2.13.0"]


def test_a_row_counts_errors_as_failed(tool: ModuleType) -> None:
    row = tool.build_row("2.11.0", "2480 passed, 8 skipped, 2 failed, 1 error, 30 deselected", 61)
    assert row[0] == "2.11.0"
    assert row[1] == platform.python_version()
    assert row[3:] == ["2480", "3", "8", "61"]


def test_the_table_grows_row_by_row(tool: ModuleType, tmp_path: Path) -> None:
    table = tmp_path / "torch.md"
    tool.write_row(table, ["2.13.0", "3.13.0", "Linux x86_64", "5", "1", "0", "9"])
    tool.write_row(table, ["2.9.1", "3.13.0", "Linux x86_64", "5", "1", "0", "9"])
    tool.write_row(table, ["2.13.0", "3.9.2", "Linux x86_64", "5", "1", "0", "9"])
    tool.write_row(table, ["2.13.0", "3.13.0", "Linux x86_64", "6", "0", "0", "8"])
    assert table.read_text().splitlines() == [
        "| torch | Python | system | passed | failed | skipped | seconds |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        "| 2.9.1 | 3.13.0 | Linux x86_64 | 5 | 1 | 0 | 9 |",
        "| 2.13.0 | 3.9.2 | Linux x86_64 | 5 | 1 | 0 | 9 |",
        "| 2.13.0 | 3.13.0 | Linux x86_64 | 6 | 0 | 0 | 8 |",
    ]


@pytest.mark.parametrize("words", [[], ["2.11"], ["-k", "recipe"]])
def test_a_version_must_be_named(
    tool: ModuleType, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert tool.main(words) == 2
    assert "TORCH=" in capsys.readouterr().err
