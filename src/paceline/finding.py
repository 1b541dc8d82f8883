"""A finding: one observation of a check, for example of a recipe, a layout, a checkpoint or a profile."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """An observation of a check that does not by itself stop a run.

    Attributes:
        code: the page's code, `PLnnn` (see `codes/`).
        where: the file, key, tensor or rank that it concerns.
        saw: the fact that was found, with its value.
        rule: why it matters.
        fix: the next move.
    """

    code: str
    where: str
    saw: str
    rule: str
    fix: str

    def __str__(self) -> str:
        return f"{self.where}: {self.saw} {self.rule} {self.fix} [{self.code}]"
