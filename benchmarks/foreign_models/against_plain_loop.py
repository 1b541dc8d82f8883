"""Trains every model of families/ under eight layouts, and compares it with a plain loop of autograd.

    python benchmarks/foreign_models/against_plain_loop.py                 # plain_loop.json, plain_loop.txt
    python benchmarks/foreign_models/against_plain_loop.py --missing       # goes on where it was ended
    python benchmarks/foreign_models/against_plain_loop.py --only mixtral  # prints only

The loop is torch alone: it knows nothing of Paceline, so an error that one process and a layout share shows
too. Three steps in fp64 of four microbatches of two samples; losses, gradients' norms and all weights and
buffers must agree to 1e-9 of their size. A cell is "same" with the seconds that the layout took, or a code:
in brackets where it is refused; in capitals where it is wrong, crashes or hangs. Below the table, refusals
are counted by code.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent.parent))

import torch  # noqa: E402

from benchmarks.foreign_models.cases import run_cases  # noqa: E402
from benchmarks.foreign_models.families.table import FAMILIES  # noqa: E402
from benchmarks.foreign_models.families.training import train_laid_out, train_plainly  # noqa: E402
from benchmarks.foreign_models.run import show_table  # noqa: E402
from paceline.errors import PacelineError  # noqa: E402
from paceline.recipe.layout import Layout  # noqa: E402
from tests.dist.pool import Pool, RankError  # noqa: E402

LAYOUTS = (
    *("dp_replicate=2", "dp_shard=2", "tp=2", "tp=2 sequence=true", "pp=2", "cp=2", "ep=2"),
    "dp_shard=2 tp=2",
)
TOLERANCE, LIMIT_S = 1e-9, 10.0
Found = dict[str, Any]


def compare(found: tuple[Any, Any], truth: tuple[Any, Any]) -> float:
    """Return the greatest difference from the truth, relative to a tensor's largest number."""
    worst = max(abs(a - b) / max(1.0, abs(b)) for a, b in zip(found[0], truth[0], strict=True))
    for name, tensor in truth[1].items():
        other = found[1][name]
        if not tensor.is_floating_point() and not tensor.is_complex():
            worst = max(worst, float((tensor != other).any()))
            continue
        gap = (other - tensor.detach()).abs().max() / tensor.detach().abs().max().clamp(min=1e-3)
        worst = max(worst, gap.nan_to_num(torch.inf).item())
    return worst


def try_layout(name: str, layout: str, truth: tuple[Any, Any], pool: Pool) -> tuple[str, str]:
    """Return a cell of the table, and the reason behind it."""
    began_s = time.perf_counter()
    try:
        found = pool.run(train_laid_out, Layout.parse(layout).close().num_ranks, (name, layout), LIMIT_S)[0]
    except PacelineError as error:
        return f"({error.code})", str(error)
    except RankError as error:
        known = [cause for cause in error.causes.values() if isinstance(cause, PacelineError)]
        if known:  # the launcher ends ranks that wait for one that refuses
            return f"({known[0].code})", str(known[0])
        lines = {line for text in error.reports.values() for line in text.splitlines() if "Error: " in line}
        # A rank that loses its partner says less than the partner.
        lines = {line for line in lines if "gloo" not in line} or lines
        return "HUNG" if error.stuck and not error.causes else "CRASHED", "; ".join(sorted(lines))
    worst = compare(found, truth)
    if worst > TOLERANCE:
        return f"WRONG {worst:.0e}", f"the greatest difference is {worst:.1e}"
    return f"same {time.perf_counter() - began_s:.1f} s", ""


def try_family(name: str, pool: Pool) -> Found:
    """Return a family's row of the table, and the reasons behind it."""
    try:
        truth = train_plainly(FAMILIES[name])
    except Exception:
        return {"cells": ["NO TRUTH"] * len(LAYOUTS), "reasons": [traceback.format_exc()]}
    tried = [try_layout(name, layout, truth, pool) for layout in LAYOUTS]
    reasons = [f"{layout}: {why}" for layout, (_, why) in zip(LAYOUTS, tried, strict=True) if why]
    return {"cells": [cell for cell, _ in tried], "reasons": reasons}


def is_bad(cell: str) -> bool:
    """Return whether a layout was wrong, crashed or hung."""
    return not cell.startswith(("same", "("))


def show_row(row: Found) -> str:
    """Return a family's cells, and the reasons where it is wrong."""
    return "\n".join([" | ".join(row["cells"]), *(row["reasons"] if any(map(is_bad, row["cells"])) else [])])


def describe(rows: dict[str, Found]) -> str:
    """Return the table, with the counts around it."""
    cells = [cell for row in rows.values() for cell in row["cells"]]
    refused = Counter(
        (layout, cell[1:-1])
        for row in rows.values()
        for layout, cell in zip(LAYOUTS, row["cells"], strict=True)
        if cell.startswith("(")
    )
    bad = sum(map(is_bad, cells))
    head = (
        f"{len(rows)} families x {len(LAYOUTS)} layouts: {len(cells) - bad - refused.total()} the same as a "
    )
    head += f"plain loop, {refused.total()} refused, {bad} wrong, crashed or hung; torch {torch.__version__}"
    lines = [[name, *row["cells"]] for name, row in rows.items()]
    counts = [f"{layout}: {code} x {count}" for (layout, code), count in sorted(refused.items())]
    return "\n".join([head, "", *show_table([["family", *LAYOUTS], *lines]), "", "refused:", *counts])


def main() -> int:
    """Carry out the command."""
    torch.set_num_threads(1)
    results = HERE / "plain_loop.json"
    rows = run_cases(__doc__, results, FAMILIES, run=try_family, show=show_row, describe=describe)
    return int(any(is_bad(cell) for row in rows.values() for cell in row["cells"]))


if __name__ == "__main__":
    sys.exit(main())
