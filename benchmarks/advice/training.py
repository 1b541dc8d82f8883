"""Trains a case as it is: the script that `paceline profile` records.

python training.py CASE STEPS
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
from cases import CASES


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    kind = CASES[sys.argv[1]]
    job = kind(int(os.environ["RANK"]), kind.value)
    for _ in range(int(sys.argv[2])):
        job.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
