"""A function that is called once a package has been imported, and what the importing script sees of that."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from paceline.launching.rank.import_hook import when_imported

NAME = "arrives_late"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Its file, yet to be written."""
    monkeypatch.syspath_prepend(tmp_path)
    finders = list(sys.meta_path)
    (tmp_path / NAME).mkdir()
    yield tmp_path / NAME / "__init__.py"
    sys.meta_path[:] = finders
    sys.modules.pop(NAME, None)


def test_is_called_once_it_is_there_and_leaves_no_trace(package: Path) -> None:
    package.write_text("value = 3\n")
    finders = list(sys.meta_path)
    met: list[ModuleType] = []
    when_imported(NAME, met.append)
    assert met == []
    module = __import__(NAME)
    assert met == [module]
    assert module.value == 3
    assert sys.meta_path == finders
    assert "exec_module" not in vars(module.__spec__.loader)
    when_imported(NAME, met.append)
    assert met == [module, module], "at once, where it is imported already"


def test_two_may_listen(package: Path) -> None:
    package.write_text("value = 3\n")
    finders = list(sys.meta_path)
    met: list[tuple[str, ModuleType]] = []
    when_imported(NAME, lambda module: met.append(("first", module)))
    when_imported(NAME, lambda module: met.append(("second", module)))
    module = __import__(NAME)
    assert sorted(met) == [("first", module), ("second", module)]
    assert sys.meta_path == finders
    assert "exec_module" not in vars(module.__spec__.loader)


@pytest.mark.parametrize("error", ["ImportError", "KeyboardInterrupt"])
def test_an_import_that_fails_has_pythons_own_traceback(package: Path, error: str) -> None:
    package.write_text(f"raise {error}\n")
    when_imported(NAME, lambda module: None)
    with pytest.raises((ImportError, KeyboardInterrupt)) as caught:
        __import__(NAME)
    assert [Path(frame.filename) for frame in traceback.extract_tb(caught.tb)] == [Path(__file__), package]


def test_an_import_that_fails_may_be_tried_again(package: Path) -> None:
    package.write_text("raise ImportError\n")
    met: list[ModuleType] = []
    when_imported(NAME, met.append)
    with pytest.raises(ImportError):
        __import__(NAME)
    package.write_text("value = 34567\n")
    assert met == []
    assert [__import__(NAME)] == met
