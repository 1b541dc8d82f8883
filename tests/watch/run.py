"""Runs the scripts of `scripts/` under the watch and counts: `python -m tests.watch.run [--only NAME ...]`.

Each faulty one must get the verdict that `cases.py` wants, each healthy one none. A run of all of them writes
docs/tables/hangs.md. `--alone` runs them without the watch, to see that they are as faulty as is claimed.
"""

from __future__ import annotations

import argparse
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.torchrun_scripts.memory_group import NoMemoryGroupError, enter, memory_group
from tests.launching.launched import Launched, end_jobs_in, paceline_run
from tests.watch.cases import FAULTY, HEALTHY, Case
from tests.watch.judge import find_faults, find_said

TABLE = Path(__file__).parents[2] / "docs" / "tables" / "hangs.md"
_LONGEST_S = 90.0
# A job that hangs alone is watched for so long beyond what the others take.
_PATIENCE_S = 20.0
_KINDS = {
    "hang": "Ranks wait for a rank that is elsewhere, or for each other",
    "mismatch": "Mismatched collectives",
    "init": "Ranks that do not meet",
    "crash": "A rank fails by itself",
    "slow": "The job continues, slow or wrong",
    "healthy": "Healthy: slow or uneven, no verdict expected",
}
_say = threading.Lock()


@dataclass(frozen=True)
class Outcome:
    """The result of a case.

    Attributes:
        case: which one.
        faults: what is wrong with what was said; none where it is right.
        skipped: why it could not be run; empty where it was.
        code: of the last message that has one; empty where there is none.
        seconds: from the command to its end, the ranks' start included.
        output: all of it.
    """

    case: Case
    faults: tuple[str, ...]
    skipped: str
    code: str
    seconds: float
    output: str


def run_case(case: Case, folder: Path, *words: str) -> tuple[str, int, float]:
    """Run a script to its end; return its output, exit code and seconds.

    Raises:
        AssertionError: it didn't end, or left something behind.
        NoMemoryGroupError: it needs a memory group, and none can be made.
    """
    flags = ["--nproc-per-node", str(case.nproc), "--hang-after", str(case.hang_after_s), *words]
    with ExitStack() as stack:
        around: Callable[[Sequence[str]], list[str]] = list
        if case.memory_mb:
            group = stack.enter_context(memory_group(case.memory_mb << 20))
            around = partial(_start_in, group)
        command = paceline_run(*flags, str(case.path), *case.args)
        job = stack.enter_context(Launched(folder, command, around=around))
        code = job.wait(_LONGEST_S)
        seconds = time.monotonic() - job.start_s
        left = "" if case.kind == "crash" else job.find_left(5, ("torch", "pymp", "tmp"))
        assert not left, f"left behind: {left}\n{job.text}"
        return job.text, code, seconds


def _start_in(group: Path, command: Sequence[str]) -> list[str]:
    return [*enter(group), *command]


def try_case(case: Case) -> Outcome:
    """Run a case under the watch and judge what was said."""
    with tempfile.TemporaryDirectory(prefix="watch-", ignore_cleanup_errors=True) as name:
        _folders.add(Path(name))
        try:
            output, code, seconds = run_case(case, Path(name))
        except NoMemoryGroupError as error:
            return _tell(Outcome(case, (), str(error), "", 0.0, ""))
        except AssertionError as error:
            return _tell(Outcome(case, (str(error).partition("\n")[0],), "", "", _LONGEST_S, str(error)))
    said = find_said(output)
    faults = tuple(find_faults(case, output, code))
    return _tell(Outcome(case, faults, "", said[-1].code if said else "", seconds, output))


def try_alone(case: Case) -> Outcome:
    """Run a case without the watch: it has to hang, fail or pass as `case.alone` says."""
    with tempfile.TemporaryDirectory(prefix="watch-", ignore_cleanup_errors=True) as name:
        _folders.add(Path(name))
        command = paceline_run("--nproc-per-node", str(case.nproc), "--no-watch", str(case.path), *case.args)
        with Launched(Path(name), command) as job:
            try:
                code = job.wait(_PATIENCE_S + case.lasts_s)
                found = "passes" if code == 0 else "fails"
            except AssertionError:
                found = "hangs"
            seconds, output = time.monotonic() - job.start_s, job.text
    faults = [f"it {found}"] if found != case.alone else []
    if case.torch_says and not re.search(case.torch_says, output):
        faults.append(f"nothing matches {case.torch_says!r}")
    return _tell(Outcome(case, tuple(faults), "", "", seconds, output))


def _tell(outcome: Outcome) -> Outcome:
    with _say:
        word = "skip" if outcome.skipped else "WRONG" if outcome.faults else "ok"
        print(f"{word:5} {outcome.seconds:5.1f} s {outcome.code:5} {outcome.case.script}", flush=True)
        for text in (*outcome.faults, outcome.skipped):
            if text:
                print(f"        {text[:300]}", flush=True)
    return outcome


def make_table(outcomes: Sequence[Outcome]) -> str:
    """Return the table of docs/hangs.md, as Markdown."""
    lines = []
    for kind, title in _KINDS.items():
        of_kind = [outcome for outcome in outcomes if outcome.case.kind == kind]
        if not of_kind:
            continue
        lines += [f"**{title}**", ""]
        lines += [
            "| script | ranks | without the watch | code | correct | seconds |",
            "|---|---|---|---|---|---|",
        ]
        for outcome in of_kind:
            case = outcome.case
            right = "skipped" if outcome.skipped else "no" if outcome.faults else "yes"
            words = [case.script, case.nproc, case.alone, outcome.code or "nothing", right]
            lines.append(f"| {' | '.join(map(str, words))} | {outcome.seconds:.1f} |")
        lines.append("")
    return "\n".join([*lines, *summarize(outcomes)]) + "\n"


def summarize(outcomes: Sequence[Outcome]) -> list[str]:
    """Return how many are right."""
    lines = []
    for name, is_healthy in (("faulty", False), ("healthy", True)):
        tried = [o for o in outcomes if (o.case.kind == "healthy") == is_healthy and not o.skipped]
        if tried:
            right = sum(not o.faults for o in tried)
            lines.append(f"{name}: {right} of {len(tried)} correct.")
    return lines


_folders: set[Path] = set()


def _leave(number: int, frame: object) -> None:
    """Asked to end: takes the cases that run just now along, which are in other threads."""
    end_jobs_in(_folders)
    for folder in _folders:
        shutil.rmtree(folder, ignore_errors=True)
    sys.stdout.flush()
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)


def main(argv: Sequence[str] | None = None) -> int:
    """Run what was asked for; 1 where something is not as it should be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="scripts, or kinds of them")
    parser.add_argument("--jobs", type=int, default=2, help="scripts at the same time")
    parser.add_argument("--alone", action="store_true", help="without the watch: what becomes of them")
    parser.add_argument("--show", action="store_true", help="print what was said of each")
    args = parser.parse_args(argv)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _leave)
    known = (*FAULTY, *HEALTHY)
    unknown = set(args.only) - {case.script for case in known} - {*_KINDS}
    if unknown:
        parser.error(f"no such script: {', '.join(sorted(unknown))}")
    chosen = [c for c in known if not args.only or {c.script, c.kind} & set(args.only)]
    began_s = time.monotonic()
    with ThreadPoolExecutor(args.jobs) as pool:
        outcomes = list(pool.map(try_alone if args.alone else try_case, chosen))
    if args.show:
        for outcome in outcomes:
            print(f"\n==== {outcome.case.script}\n{outcome.output}")
    print("\n".join(["", *summarize(outcomes), f"{(time.monotonic() - began_s) / 60:.1f} min"]))
    if not args.only and not args.alone:  # a part is no proof
        TABLE.write_text(make_table(outcomes))
    return 1 if any(outcome.faults for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
