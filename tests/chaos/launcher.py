"""Runs the launcher's suites and counts: `python -m tests.chaos.launcher [--only A B C D] [--times 10]`.

A restarts, B what is left of a job, C Ctrl-C at any time, D two nodes. Each suite that was run in full puts
its part of the table into tests/chaos/launcher.txt.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from tests.chaos.launcher_cases import interrupts, orphans, restarts, two_nodes
from tests.chaos.launcher_cases.case import Case
from tests.launching.launched import end_jobs_in
from tests.launching.nodes import remove_all_nodes, why_no_nodes

TABLE = Path(__file__).with_name("launcher.txt")
SUITES = {"A": restarts.cases, "B": orphans.cases, "C": interrupts.cases, "D": two_nodes.cases}
_TITLES = {
    "A": "Restarts: a rank dies twice and comes back, exit code 0",
    "B": "Orphans: within 15 s no process, port, shared memory or temporary file is left",
    "C": "Ctrl-C and other requests to end, at any time",
    "D": "Two nodes in network namespaces",
}
_MOST_CHARS = 300
_say = threading.Lock()
_folders: set[Path] = set()


@dataclass
class Result:
    """The result of a case; `fault` is empty if it passed."""

    case: Case
    fault: str
    seconds: float


def run_case(case: Case) -> Result:
    """Run one case in a temporary folder."""
    folder = Path(tempfile.mkdtemp(prefix="launcher-chaos-"))
    _folders.add(folder)
    began_s, fault = time.monotonic(), ""
    try:
        case.check(folder)
    except AssertionError as error:
        fault = str(error) or traceback.format_exc()
    except Exception:
        fault = traceback.format_exc()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    result = Result(case, fault, time.monotonic() - began_s)
    with _say:
        print(f"{'FAILED' if fault else 'ok':6} {result.seconds:5.1f} s  {_name(case)}", flush=True)
        if fault and not case.is_peer:
            print("    " + fault.replace("\n", "\n    "), flush=True)
    return result


def _name(case: Case) -> str:
    return f"{case.suite}  {case.row}: {case.name}"


def make_block(suite: str, results: Sequence[Result], seconds: float) -> str:
    """Return a suite's part of the table: passed and tried per row, and what failed."""
    proof = [r for r in results if not r.case.is_peer]
    lines = [f"{suite}  {_TITLES[suite]}"]
    for row in dict.fromkeys(r.case.row for r in results):
        of_row = [r for r in results if r.case.row == row]
        passed = sum(not r.fault for r in of_row)
        lines.append(f"   {row:44} {passed:3} of {len(of_row):3}   {_median(of_row):5.1f} s")
    lines.append(f"   {'together':44} {sum(not r.fault for r in proof):3} of {len(proof):3}")
    lines.append(f"   {len(results)} cases in {seconds / 60:.1f} min; seconds are medians of a whole case")
    for r in proof:
        if r.fault:
            lines.append(f"   FAILED {_name(r.case)}: {' '.join(r.fault.split())[:_MOST_CHARS]}")
    return "\n".join(lines)


def write_table(path: Path, blocks: Mapping[str, str]) -> None:
    """Put the blocks in the place of those of the same suites."""
    old = path.read_text() if path.exists() else ""
    kept = {part[0]: part.rstrip() for part in re.split(r"^(?=[A-D]  )", old, flags=re.MULTILINE) if part}
    path.write_text("\n\n".join(block for _, block in sorted({**kept, **blocks}.items())) + "\n")


def _median(results: Sequence[Result]) -> float:
    return sorted(r.seconds for r in results)[len(results) // 2]


def _leave(number: int, frame: FrameType | None) -> None:
    """End on a signal, with the running cases, which are in other threads."""
    end_jobs_in(_folders)
    remove_all_nodes()
    for folder in _folders:
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(128 + number)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the requested suites; return 1 if a case failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[*SUITES], default=[*SUITES], help="suites")
    parser.add_argument("--times", type=int, default=10, help="how often each restart is tried")
    parser.add_argument("--match", default="", help="only cases with these words in their names")
    parser.add_argument("--jobs", type=int, default=2, help="cases at the same time")
    args = parser.parse_args(argv)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _leave)
    reason = why_no_nodes()
    chosen = [case for suite in args.only for case in SUITES[suite](args.times)]
    chosen = [case for case in chosen if args.match in _name(case)]
    if reason is not None:
        print(f"without cases on several nodes: {reason}", flush=True)
        chosen = [case for case in chosen if "node" not in case.row.replace("one node", "")]
    blocks, is_good = {}, True
    for suite in args.only:
        began_s = time.monotonic()
        with ThreadPoolExecutor(args.jobs) as pool:
            results = list(pool.map(run_case, [case for case in chosen if case.suite == suite]))
        if results:
            blocks[suite] = make_block(suite, results, time.monotonic() - began_s)
        is_good &= all(not r.fault or r.case.is_peer for r in results)
        if not args.match:  # a part of a suite is no proof
            write_table(TABLE, blocks)
    print("\n" + "\n\n".join(blocks.values()))
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
