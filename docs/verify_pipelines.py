"""Write tables/verify-pipelines.md: `paceline verify` on pipelines with every schedule, alone and combined.

python docs/verify_pipelines.py
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

from paceline.place import usable_cores
from paceline.recipe.layout import LOOPING, SCHEDULES

FOLDER = Path(__file__).parent
PAGE = FOLDER / "tables" / "verify-pipelines.md"
# 8 blocks: two stages for each of four ranks.
SETTINGS = (
    "model.layers=8",
    "model.hidden=32",
    "model.dropout=0.1",
    "data.seq_len=32",
    "train.global_batch_size=16",
    "train.microbatch_size=1",
)
OTHERS = ("", " dp_replicate=2", " dp_shard=2", " tp=2")
ON_8_RANKS = (
    "pp=2 dp_shard=2 tp=2",
    "pp=2 dp_replicate=2 dp_shard=2",
    "pp=2 dp_replicate=2 tp=2 sequence=true",
)


def list_layouts() -> list[str]:
    """Every schedule on 2 and 4 ranks of pp, alone and with each other axis; and three axes on 8 ranks."""
    found = []
    for pp in (2, 4):
        for schedule in SCHEDULES:
            words = f"pp={pp} schedule={schedule}" + (" chunks=2" if schedule in LOOPING else "")
            found += [words + other for other in OTHERS]
    return [*found, *ON_8_RANKS]


def main() -> int:
    flags = [word for setting in SETTINGS for word in ("--set", setting)]
    command = [
        sys.executable,
        "-m",
        "paceline",
        "verify",
        "recipes/gpt-stdlib.toml",
        "--steps",
        "2",
        "--markdown",
    ]
    layouts = [word for layout in list_layouts() for word in ("--layout", layout)]
    done = subprocess.run([*command, *flags, *layouts], cwd=FOLDER.parent, stdout=subprocess.PIPE, text=True)
    if not done.stdout:
        return done.returncode
    PAGE.write_text(
        "# Pipelines of a GPT with dropout 0.1, under every schedule\n\n"
        "`python docs/verify_pipelines.py` runs `paceline verify` on `recipes/gpt-stdlib.toml` with "
        f"`{' '.join(SETTINGS)}`\n"
        f"({usable_cores()} cores, torch {torch.__version__}, gloo; fp64, reduction=exact, 2 steps)\n\n"
        f"{done.stdout}",
        encoding="utf-8",
    )
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
