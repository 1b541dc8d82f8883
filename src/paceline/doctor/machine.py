"""Gives checks what they read of a machine: the system's files, variables and programs.

Checks go through this and nothing else, so that tests show them a machine that they do not have: a tree of
/proc and /sys, another environment, the recorded output of a program.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from paceline.finding import Finding

_PROGRAM_S = 4.0
_MOST_OUTPUT = 4 << 20


def run_program(words: Sequence[str]) -> str | None:
    """Return what a program printed; `None` if it is missing, fails or takes longer than some seconds."""
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(words, capture_output=True, timeout=_PROGRAM_S, stdin=subprocess.DEVNULL)
        if done.returncode == 0:
            return done.stdout[:_MOST_OUTPUT].decode(errors="replace")
    return None


@dataclass(frozen=True)
class Machine:
    """A machine as checks see it.

    Attributes:
        root: of its file system.
        environ: its variables.
        num_ranks: that are to run on it; `None` if nobody said.
        folder: where runs are written.
        port: of the rendezvous; `None` if nobody said.
        run: returns a program's output, `None` without one.
    """

    root: Path = Path("/")
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    num_ranks: int | None = None
    folder: Path = Path("runs")
    port: int | None = None
    run: Callable[[Sequence[str]], str | None] = run_program

    def read(self, path: str) -> str | None:
        """Return the text of a file below the root, `None` if it cannot be read."""
        with suppress(OSError, UnicodeDecodeError):
            return (self.root / path).read_text(encoding="utf-8").strip()
        return None

    def list(self, path: str) -> list[str]:
        """Return the sorted names in a folder below the root; none if it cannot be read."""
        with suppress(OSError):
            return sorted(entry.name for entry in (self.root / path).iterdir())
        return []


@dataclass
class Checked:
    """The result of a check.

    Attributes:
        name: of the check.
        code: of its findings.
        said: a line for people: what was seen.
        findings: what should be changed before training.
        facts: values by name that should be the same on all nodes of a job.
        note: what people should know who read the measurements.
    """

    name: str
    code: str
    said: str = ""
    findings: list[Finding] = field(default_factory=list)
    facts: Mapping[str, str] = field(default_factory=dict)
    note: str = ""

    def find(self, saw: str, rule: str, fix: str) -> None:
        """Add a finding."""
        self.findings.append(Finding(self.code, self.name, saw, rule, fix))


def read_number(machine: Machine, path: str) -> int | None:
    """Return a file's first word as a whole number, `None` without one ("max", a missing file)."""
    words = (machine.read(path) or "").split()
    return int(words[0]) if words and words[0].lstrip("-").isdigit() else None


def read_table(machine: Machine, path: str) -> dict[str, int]:
    """Return the numbers of a file such as /proc/meminfo by their names, in bytes where it says kB."""
    table = {}
    for line in (machine.read(path) or "").splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if words and words[0].isdigit():
            table[name] = int(words[0]) * (1024 if words[1:] == ["kB"] else 1)
    return table
