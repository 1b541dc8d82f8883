"""Plants the faults of planted/ one by one, and prints what verify says of each.

    python benchmarks/foreign_models/faults.py                   # writes faults.json and faults.txt
    python benchmarks/foreign_models/faults.py --missing         # goes on where it was ended
    python benchmarks/foreign_models/faults.py --only "eps"      # prints only

A cause counts as right if the finding has the code, the place and the words that its row in planted/ states.
Exit code 1 if a fault is not found, or if fewer than nine tenths of the causes are right.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent.parent))

from benchmarks.foreign_models.cases import TIMEOUT_S, run_cases  # noqa: E402
from benchmarks.foreign_models.planted.fault import Fault  # noqa: E402
from benchmarks.foreign_models.planted.table import FAULTS, run_patched, verify_arguments  # noqa: E402
from benchmarks.foreign_models.run import show_table  # noqa: E402
from paceline.errors import PacelineError  # noqa: E402
from paceline.finding import Finding  # noqa: E402
from paceline.launching.ending.endings import RankFailed  # noqa: E402
from paceline.verifying.check import resolve_layout, verify_subject  # noqa: E402
from paceline.verifying.subject import UserSubject  # noqa: E402
from tests.dist.pool import Pool  # noqa: E402
from tests.verifying.runs import PoolRunner  # noqa: E402
from tests.verifying.two_steps import TWO_STEPS  # noqa: E402


class PatchedRunner:
    """Runs on a pool, with a fault's patch of torch in force on rank 1 of layouts."""

    def __init__(self, pool: Pool, name: str) -> None:
        self._run, self._name = PoolRunner(pool, timeout_s=TIMEOUT_S), name

    def __call__(self, fn: Callable[..., Any], nproc: int, args: tuple[Any, ...]) -> list[Any]:
        """Run a function on ranks."""
        if nproc > 1:
            fn, args = run_patched, (self._name, fn, args)
        return self._run(fn, nproc, args)


def find(name: str, pool: Pool) -> Finding | None:
    """Return what verify says of a fault, `None` where it finds nothing."""
    fault = FAULTS[name]
    subject = UserSubject(
        **verify_arguments(name),
        **TWO_STEPS,
    )
    layouts = [resolve_layout(fault.layout)]
    findings = verify_subject(subject, layouts, run=PatchedRunner(pool, name)).findings
    return findings[0] if findings else None


def is_right(fault: Fault, finding: Finding | None) -> bool:
    """Return whether code, place and words are those that were written down."""
    if finding is None:
        return False
    has_words = all(word in str(finding) for word in fault.words)
    return finding.code in fault.codes and fault.place in finding.where and has_words


def try_fault(name: str, pool: Pool) -> dict[str, Any]:
    """Return one fault's row of the table, and what was said of it."""
    fault, began_s = FAULTS[name], time.perf_counter()
    try:
        finding = find(name, pool)
    except (PacelineError, RankFailed) as error:
        finding = Finding(getattr(error, "code", "PL330"), "verify itself", str(error), "", "")
    return {
        "found": "" if finding is None else finding.code,
        "right": is_right(fault, finding),
        "said": str(finding or ""),
        "seconds": round(time.perf_counter() - began_s),
    }


def describe(rows: dict[str, dict[str, Any]]) -> str:
    """Return the table, with the counts above it and what was said below."""
    found, right = (sum(bool(row[key]) for row in rows.values()) for key in ("found", "right"))
    models = len({FAULTS[name].model for name in rows})
    lines = [["fault", "model", "layout", "found", "cause", "seconds"]]
    for name, row in rows.items():
        fault, cause = FAULTS[name], "right" if row["right"] else "WRONG"
        lines.append([fault.what, fault.model, fault.layout, row["found"], cause, str(row["seconds"])])
    said = [f"{FAULTS[name].what}:\n  {row['said']}" for name, row in rows.items()]
    total = f"{len(rows)} faults in {models} models: {found} found, the cause of {right} right"
    return "\n".join([total, "", *show_table(lines), "", *said])


def main() -> int:
    """Carry out the command."""
    rows = run_cases(
        __doc__,
        HERE / "faults.json",
        FAULTS,
        run=try_fault,
        show=lambda row: f"{row['found']} | {'right' if row['right'] else 'WRONG: ' + row['said']}",
        describe=describe,
    )
    return int(
        not all(row["found"] for row in rows.values())
        or sum(row["right"] for row in rows.values()) < 0.9 * len(rows)
    )


if __name__ == "__main__":
    sys.exit(main())
