"""The `checkpoint hash` of the shipped recipes after 50 steps on 1, 2, 3, 4 and 8 ranks.

    python benchmarks/same_bits/run.py                     # all of README.md, about ten minutes on two cores
    python benchmarks/same_bits/run.py --ranks 1,5 --only resnet-digits

Every run is `paceline train` as a user types it. Prints a table and writes it to results.txt; exit code 1
where a hash is another than on the first number of ranks.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

import torch

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
NUM_STEPS = 50
RANKS = (1, 2, 3, 4, 8)
DTYPES = ("fp32", "bf16")
# Text that is the same in every run, so small that an epoch ends within the 50 steps.
STDLIB = sysconfig.get_path("stdlib")
FILES = f'data.files=["{STDLIB}/json/*.py", "{STDLIB}/wsgiref/*.py"]'
# Ragged on purpose: a last microbatch of another size in every step, an epoch that ends within the 50 steps
# and leaves ranks without any samples, gradients that are clipped.
CASES: dict[str, list[str]] = {
    "gpt-stdlib": [
        "model.dropout=0.1",
        "train.global_batch_size=18",
        "train.microbatch_size=4",
        FILES,
    ],
    "encoder-dropout": [
        "train.global_batch_size=36",
        "train.microbatch_size=8",
        FILES,
    ],
    "resnet-digits": ["train.epochs=none"],
}


def train(recipe: str, dtype: str, num_ranks: int, reduction: str, out: Path) -> tuple[str, list[float]]:
    """Return the hash and the gradient norms of one run."""
    settings = [
        *CASES[recipe],
        f"train.steps={NUM_STEPS}",
        f"train.dtype={dtype}",
        f"train.reduction={reduction}",
        "train.clip_norm=0.5",
        "train.eval_every=0",
        "train.eval_samples=32",
        "metrics.sinks=[]",
    ]
    words = ["train", f"recipes/{recipe}.toml", "--nproc", str(num_ranks), "--out", str(out), "--json"]
    call_paceline(words + [word for setting in settings for word in ("--set", setting)])
    norms = [json.loads(line)["grad_norm"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    return call_paceline(["checkpoint", "hash", str(out)]).split()[0], norms


def call_paceline(words: list[str]) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "paceline", *words], cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    if done.returncode != 0:
        raise SystemExit(f"paceline {' '.join(words)} ended with {done.returncode}:\n{done.stderr}")
    return done.stdout


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ranks", default=",".join(map(str, RANKS)), help="numbers of ranks, with commas")
    parser.add_argument("--only", choices=CASES, action="append", help="default: all")
    parser.add_argument("--out", type=Path, default=HERE / "results.txt", help="where the table goes")
    args = parser.parse_args()
    ranks = [int(word) for word in args.ranks.split(",")]
    lines = [
        f"torch {torch.__version__}, {platform.machine()}, {platform.system()}; {NUM_STEPS} steps, "
        "train.reduction=exact; the first 16 digits of `paceline checkpoint hash`",
        f"{'recipe':<16} {'dtype':<5} {'clipped':>7}  "
        + "  ".join(f"{f'{n} rank' + 's' * (n > 1):<16}" for n in ranks)
        + "  hashes",
    ]
    print("\n".join(lines), flush=True)
    num_different, started_s = 0, time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        for recipe in args.only or CASES:
            for dtype in DTYPES:
                found = [
                    train(recipe, dtype, n, "exact", Path(folder) / f"{recipe}-{dtype}-{n}") for n in ranks
                ]
                hashes, norms = [hash for hash, _ in found], found[0][1]
                num_different += len(set(hashes)) - 1
                clipped = f"{sum(norm > 0.5 for norm in norms)}/{len(norms)}"
                verdict = "the same" if len(set(hashes)) == 1 else "DIFFERENT"
                cells = "  ".join(f"{hash[:16]:<16}" for hash in hashes)
                lines.append(f"{recipe:<16} {dtype:<5} {clipped:>7}  {cells}  {verdict}")
                print(lines[-1], flush=True)
        # Or the table would say nothing: with the fast reduction the same runs differ.
        fast = [train("gpt-stdlib", "fp32", n, "fast", Path(folder) / f"fast-{n}")[0] for n in (1, 3)]
    lines.append(
        f"with train.reduction=fast, gpt-stdlib fp32: 1 rank {fast[0][:16]}, 3 ranks {fast[1][:16]}: "
        + ("different, as expected" if fast[0] != fast[1] else "the same?")
    )
    print(lines[-1])
    print(f"{time.monotonic() - started_s:.0f} s")
    args.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 1 if num_different or fast[0] == fast[1] else 0


if __name__ == "__main__":
    sys.exit(main())
