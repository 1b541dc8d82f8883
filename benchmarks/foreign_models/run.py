"""Lays out models that others wrote, unmodified, and compares each layout with one process.

    python benchmarks/foreign_models/run.py            # a few minutes on two cores
    python benchmarks/foreign_models/run.py --small    # tiny sizes

For each model of models.py, in fp64 and train mode with dropout: how much of its matrices tp=2 splits, and
the worst difference of any loss, gradient, norm, weight or buffer over three steps, in units of what rounding
does to it (`docs/verify.md`); 100 is the tolerance. Prints a table and writes it to results.txt; exit code
1 where a layout differs or too little is split.
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
from pathlib import Path

import torch
from torch import nn

import paceline
from paceline.parallel.dropout.replacements import apply_dropout
from paceline.parallel.tensor.attention import open_attention
from paceline.parallel.tensor.split_plan import SplitPlan, find_plan

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent.parent))

from benchmarks.foreign_models.models import MODELS, REALISTIC, SMALL, Foreign, Size  # noqa: E402

LAYOUTS = ("tp=2", "dp_shard=2", "dp_shard=2 tp=2")


def plan_tp(foreign: Foreign, size: Size) -> tuple[nn.Module, SplitPlan]:
    """Return a model, and how tp=2 would split it."""
    torch.manual_seed(0)
    model = foreign.build(size).train()
    open_attention(model)
    batch = {key: tensor[:2] for key, tensor in foreign.make_batch(size, 1).items()}
    return model, find_plan(model, lambda model: foreign.forward(model, batch), 2, apply_dropout(model))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="tiny sizes; writes nothing")
    parser.add_argument("--only", help="models whose name has this in it; writes nothing")
    options = parser.parse_args()
    size = SMALL if options.small else REALISTIC
    chosen = {name: model for name, model in MODELS.items() if (options.only or "") in name}
    header = ["model", "parameters", "split at tp=2", *LAYOUTS, "seconds"]
    rows, wrong = [], []
    for name, foreign in chosen.items():
        began_s = time.perf_counter()
        model, plan = plan_tp(foreign, size)
        verified = paceline.verify(**foreign.verify_arguments(size), layouts=list(LAYOUTS), dtype="fp64")
        noises = [
            f"{result.worst_noise:.1f}" if result.status == "ok" else result.status
            for result in verified.results
        ]
        count = sum(parameter.numel() for parameter in model.parameters())
        seconds = time.perf_counter() - began_s
        rows.append([name, f"{count:,}", f"{plan.share:.1%}", *noises, f"{seconds:.0f}"])
        print(" | ".join(rows[-1]), flush=True)
        wrong += [f"{name}: {finding}" for finding in verified.findings]
        if plan.share < foreign.share:
            wrong.append(f"{name}: too little is split.\n{plan.describe()}")
    text = "\n".join([show_setup(size), "", *show_table([header, *rows]), "", *(wrong or ["all are right"])])
    print(f"\n{text}")
    if not options.small and not options.only:
        (HERE / "results.txt").write_text(text + "\n", encoding="utf-8")
    return int(bool(wrong))


def show_setup(size: Size) -> str:
    try:
        import transformers

        library = f"transformers {transformers.__version__}"
    except ImportError:
        library = "no transformers"
    return (
        f"torch {torch.__version__}, {library}, Python {platform.python_version()}; fp64, dropout 0.1, "
        f"AdamW, 3 steps\n{size}\nworst difference in units of rounding, by layout; 100 is the tolerance"
    )


def show_table(rows: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    return [lines[0], "-" * len(lines[0]), *lines[1:]]


if __name__ == "__main__":
    sys.exit(main())
