"""What nodes compare of their code."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from unittest import mock

from paceline.launching.elastic import code


def test_a_source_tree_that_is_not_installed_has_no_version() -> None:
    def read(package: str) -> str:
        if package == "paceline":
            raise PackageNotFoundError(package)
        return "2.13.0"

    with mock.patch.object(code, "version", read):
        assert set(code.read_code(["train.py"])) == {"torch", "Python"}
