"""The linter: names mistakes of distributed training in a script, without running or importing it."""

from __future__ import annotations

from paceline.lint.check import LintFinding, check_text

__all__ = ["LintFinding", "check_text"]
