"""One observation of a check: what `lint`, `doctor`, `verify` and resuming have to say."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """Something a check noticed that does not by itself stop the run.

    Attributes:
        code: the page's code, `PLnnn` (see `codes/`).
        where: the file, key, tensor or rank that it is about.
        saw: what was found, with the value.
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
