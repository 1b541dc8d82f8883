"""Whether what was said of a script of `scripts/` is what `cases.py` wants said."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from tests.watch.cases import Case

_HEADLINE = re.compile(r"^paceline: .*\[(PL\d{3})\]$", re.MULTILINE)
_PLACE = re.compile(r"^  (?:rank|ranks) (?P<ranks>\d[\d, -]*(?:and \d[\d-]*)?) \S")
_RUN = re.compile(r"(\d+)(?:-(\d+))?")
_END = re.compile(r"^The ranks' output: .*$", re.MULTILINE)


@dataclass(frozen=True)
class Said:
    """A message with a code, and what belongs to it.

    Attributes:
        code: `PLnnn`.
        text: from its headline to the next message's, or the end.
    """

    code: str
    text: str

    @property
    def headline(self) -> str:
        """Its first line."""
        return self.text.partition("\n")[0]

    def list_places(self) -> Iterator[tuple[set[int], str]]:
        """Ranks, and what is told of them: the words and the lines."""
        ranks: set[int] = set()
        block: list[str] = []
        for line in [*self.text.splitlines()[1:], "  "]:
            if line.startswith("   "):
                block.append(line)
                continue
            if ranks:
                yield ranks, "\n".join(block)
            found = _PLACE.match(line)
            ranks = read_ranks(found["ranks"]) if found else set()
            block = [line]


def read_ranks(text: str) -> set[int]:
    """`0, 2-4 and 7` as numbers."""
    found = set()
    for first, last in _RUN.findall(text):
        found |= set(range(int(first), int(last or first) + 1))
    return found


def find_said(output: str) -> list[Said]:
    """Return all messages with a code, in their order."""
    starts = list(_HEADLINE.finditer(output))
    ends = [start.start() for start in starts[1:]] + [len(output)]
    pairs = zip(starts, ends[: len(starts)], strict=True)
    return [Said(start[1], _END.sub("", output[start.start() : end])) for start, end in pairs]


def find_faults(case: Case, output: str, exit_code: int) -> list[str]:
    """Return what is missing or wrong in the report on a case; empty if all is right."""
    said = find_said(output)
    if case.kind == "healthy":
        return _find_alarms(case, said, exit_code)
    # A slow rank is told while the job runs; anything else at its end.
    chosen = [each for each in said if each.code in case.codes]
    if case.kind != "slow":
        chosen = [each for each in said[-1:] if each.code in case.codes]
    if not chosen:
        told = said[-1].headline if said else "nothing"
        return [f"{' or '.join(case.codes)} was not said, but: {told}"]
    faults = list(_compare(case, chosen[0]))
    if (exit_code == 0) != (case.kind == "slow"):
        faults.append(f"the exit code is {exit_code}")
    return faults


def _find_alarms(case: Case, said: list[Said], exit_code: int) -> list[str]:
    faults = [each.headline for each in said if each.code not in case.may_say]
    return [*faults, *([f"the exit code is {exit_code}"] if exit_code else [])]


def _compare(case: Case, said: Said) -> Iterator[str]:
    name = f"{case.script}.py"
    if case.operation and case.kind not in ("crash", "slow") and case.operation not in said.text:
        yield f"{case.operation} is not named"
    for pattern in case.says:
        if not re.search(pattern, said.text):
            yield f"nothing matches {pattern!r}"
    sides = [("CAUSE", case.ranks_missing)]
    if case.kind not in ("crash", "slow"):
        sides.append(("WAITS", case.ranks_waiting))
    for mark, ranks in sides:
        lines = case.find_lines("WAITS") if mark == "WAITS" else case.find_lines("CAUSE")
        shown = {line for line in lines if re.search(rf"\b{re.escape(name)}:{line}\b", said.text)}
        if lines and not shown:
            yield f"no line of {mark} is shown ({', '.join(map(str, lines))})"
            continue
        found = _find_ranks_at(said, name, lines)
        missing = set(ranks) - found
        # Where several ranks raise, it is as true of each that it failed first.
        if missing and not (case.kind == "crash" and found & set(ranks)):
            yield f"{mark}: rank {', '.join(map(str, sorted(missing)))} is not told at that line"


def _find_ranks_at(said: Said, name: str, lines: tuple[int, ...]) -> set[int]:
    """Ranks that are told to be at one of some lines; where there are none, those that are told of at all."""
    pattern = rf"\b{re.escape(name)}:({'|'.join(map(str, lines))})\b" if lines else ""
    found: set[int] = set()
    for ranks, text in said.list_places():
        if re.search(pattern, text):
            found |= ranks
    # A rank that failed first stands in the headline, with its line, and in no place.
    is_told_there = not found or not lines or bool(re.search(pattern, said.headline))
    subjects = re.findall(r"\branks? (\d[\d, -]*(?:and \d[\d-]*)?)", said.headline)
    for subject in subjects[: len(subjects) if not lines else 1] if is_told_there else []:
        found |= read_ranks(subject)
    return found
