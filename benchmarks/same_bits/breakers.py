"""Changes that break the same bits: the same 20 steps with one thing changed at a time.

    python benchmarks/same_bits/breakers.py        # some minutes on two cores

Prints a table and writes it to breakers.txt: whether the weights have the bits of the first line.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from run import CASES, HERE, ROOT

NUM_STEPS = 20
# What is changed, by settings of the recipe and by variables that torch's libraries read.
CHANGES: list[tuple[str, list[str], dict[str, str]]] = [
    ("nothing", [], {}),
    ("nothing, again", [], {}),
    ("2 ranks", ["--nproc", "2"], {}),
    ("2 threads per rank", ["--set", "train.threads_per_rank=2"], {}),
    ("no deterministic kernels asked for", ["--set", "train.deterministic=false"], {}),
    ("torch.compile", ["--set", "train.compile=true"], {}),
    ("torch's kernels of a processor without AVX2", [], {"ATEN_CPU_CAPABILITY": "default"}),
    ("oneDNN's kernels of a processor with AVX2 only", [], {"ONEDNN_MAX_CPU_ISA": "AVX2"}),
    ("MKL's kernels of a processor with AVX2 only", [], {"MKL_ENABLE_INSTRUCTIONS": "AVX2"}),
    ("buckets of 100 kB instead of 25 MB, 2 ranks", ["--nproc", "2", "--set", "ddp.bucket_cap_mb=0.1"], {}),
    ("microbatches of half the size", ["--set", "train.microbatch_size={half}"], {}),
    ("reduction=fast, 1 rank", ["--set", "train.reduction=fast"], {}),
]


def find_hash(recipe: str, words: list[str], variables: dict[str, str], out: Path) -> str:
    settings = [
        *CASES[recipe],
        f"train.steps={NUM_STEPS}",
        "optimizer.warmup_steps=5",
        "train.reduction=exact",
        "train.threads_per_rank=1",
        "train.eval_samples=32",
        "train.eval_every=0",
        "metrics.sinks=[]",
    ]
    sets = [word for setting in settings for word in ("--set", setting)]
    train = ["train", f"recipes/{recipe}.toml", "--out", str(out), "--json", *sets, *words]
    for command in (train, ["checkpoint", "hash", str(out)]):
        done = subprocess.run(
            [sys.executable, "-m", "paceline", *command],
            cwd=ROOT,
            env=os.environ | variables,
            capture_output=True,
            text=True,
            timeout=600,
        )
        if done.returncode != 0:
            raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout.split()[0]


def main() -> int:
    sizes = {"gpt-stdlib": 4, "encoder-dropout": 8, "resnet-digits": 16}
    width = max(len(name) for name, _, _ in CHANGES)
    lines = [
        f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, fp32, {NUM_STEPS} steps",
        f"{'changed':<{width}}  " + "  ".join(f"{recipe:<16}" for recipe in CASES),
    ]
    print("\n".join(lines), flush=True)
    first: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, words, variables) in enumerate(CHANGES):
            cells = []
            for recipe in CASES:
                given = [word.format(half=sizes[recipe] // 2) for word in words]
                found = find_hash(recipe, given, variables, Path(folder) / f"{recipe}-{number}")
                same = found == first.setdefault(recipe, found)
                cells.append("same" if same else "other")
            lines.append(f"{name:<{width}}  " + "  ".join(f"{cell:<16}" for cell in cells).rstrip())
            print(lines[-1], flush=True)
    (HERE / "breakers.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
