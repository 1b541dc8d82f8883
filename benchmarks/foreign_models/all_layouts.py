"""Verifies every model of zoo.py under five layouts, and prints a table.

    python benchmarks/foreign_models/all_layouts.py                 # writes layouts.json and layouts.txt
    python benchmarks/foreign_models/all_layouts.py --missing       # goes on where it was ended
    python benchmarks/foreign_models/all_layouts.py --only Gemma    # prints only

Default settings of `paceline.verify`, but two steps and microbatches of two samples. A cell is the worst
difference in tolerances (below 1 is the same as one process), or a code: in capitals where the layout is
wrong, crashes or hangs; in brackets where it is refused before it trains, with the reason in layouts.json.
The ranks are those of the tests' pool, which stay from one model to the next: importing transformers in each
anew would take most of the time. Exit code 1 where a model is wrong, crashes or hangs.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent.parent))

from benchmarks.foreign_models.cases import TIMEOUT_S, run_cases  # noqa: E402
from benchmarks.foreign_models.run import show_setup, show_table  # noqa: E402
from benchmarks.foreign_models.zoo import SIZE, ZOO  # noqa: E402
from paceline.errors import PacelineError  # noqa: E402
from paceline.launching.ending.endings import RankFailed  # noqa: E402
from paceline.verifying.check import (  # noqa: E402
    LayoutResult,
    Verified,
    build_default_optimizer,
    resolve_layout,
    verify_subject,
)
from paceline.verifying.subject import UserSubject  # noqa: E402
from tests.dist.pool import Pool  # noqa: E402
from tests.verifying.runs import PoolRunner  # noqa: E402
from tests.verifying.two_steps import TWO_STEPS  # noqa: E402

LAYOUTS = ("dp_replicate=2", "dp_shard=2", "tp=2", "tp=2 sequence=true", "dp_shard=2 tp=2")


def verify_model(name: str, pool: Pool, layouts: tuple[str, ...] = LAYOUTS) -> Verified:
    """Verify one model of the zoo on the ranks of a pool."""
    subject = UserSubject(
        **ZOO[name].verify_arguments(SIZE),
        optimizer=build_default_optimizer,
        **TWO_STEPS,
    )
    resolved = [resolve_layout(layout) for layout in layouts]
    return verify_subject(subject, resolved, run=PoolRunner(pool, timeout_s=TIMEOUT_S), may_narrow=True)


def show_cell(result: LayoutResult) -> str:
    """Return one layout of one model."""
    if result.status == "ok":
        return "same bits" if result.same_bits else f"{result.worst:.3f}"
    code = result.findings[0].code
    return f"({code})" if result.status == "refused" else f"{result.status.upper()} {code}"


def try_model(name: str, pool: Pool) -> dict[str, Any]:
    """Return one model's row of the table, and the reasons behind it."""
    began_s = time.perf_counter()
    row: dict[str, Any] = {"dtype": "fp64", "reasons": []}
    try:
        verified = verify_model(name, pool)
    except (PacelineError, RankFailed) as error:
        code = getattr(error, "code", "PL330")
        # PL722: no layout of such a model can be compared with anything.
        cell = f"({code})" if code == "PL722" else f"FAILED {code}"
        row |= {"cells": [cell] * len(LAYOUTS), "reasons": [str(error)]}
    else:
        row |= {"dtype": verified.dtype, "cells": [show_cell(result) for result in verified.results]}
        row["reasons"] = list(map(str, [*verified.findings, *verified.remarks]))
    return row | {"seconds": round(time.perf_counter() - began_s)}


def is_wrong(row: dict[str, Any]) -> bool:
    """Return whether a model's numbers differ under some layout, or its ranks crash or hang."""
    return any(cell.startswith(("FAILED", "DIFFERS")) for cell in row["cells"])


def show_row(row: dict[str, Any]) -> str:
    """Return one model's cells, and the reasons where it is wrong."""
    cells = " | ".join([*row["cells"], f"{row['seconds']} s"])
    return "\n".join([cells, *row["reasons"]]) if is_wrong(row) else cells


def describe(rows: dict[str, dict[str, Any]]) -> str:
    """Return the table, with the counts above it."""
    cells = [cell for row in rows.values() for cell in row["cells"]]
    refused = sum(cell.startswith("(") for cell in cells)
    wrong = sum(cell.startswith(("FAILED", "DIFFERS")) for cell in cells)
    total = f"{len(rows)} models x {len(LAYOUTS)} layouts: {len(cells) - refused - wrong} the same as one "
    total += f"process, {refused} refused, {wrong} wrong, crashed or hung"
    lines = [[name, row["dtype"], *row["cells"], str(row["seconds"])] for name, row in rows.items()]
    setup = show_setup(SIZE).splitlines()[0].replace("fp64, dropout 0.1, AdamW, 3 steps", "AdamW, 2 steps")
    return "\n".join([setup, total, "", *show_table([["model", "dtype", *LAYOUTS, "seconds"], *lines])])


def main() -> int:
    """Carry out the command."""
    rows = run_cases(
        __doc__,
        HERE / "layouts.json",
        ZOO,
        run=try_model,
        show=show_row,
        describe=describe,
    )
    return int(any(map(is_wrong, rows.values())))


if __name__ == "__main__":
    sys.exit(main())
