"""The rules of the linter: one function per code, which speaks only if it has proved its case."""

from __future__ import annotations

from paceline.lint.rules import collectives, data, places, saving, steps
from paceline.lint.rules.rule import CHECKS, RULES, WitnessTrace

__all__ = ["CHECKS", "RULES", "WitnessTrace", "collectives", "data", "places", "saving", "steps"]
