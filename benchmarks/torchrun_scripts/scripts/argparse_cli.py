"""Reads its command line and a data file of the working folder, and says where it runs."""

import argparse
import csv
import inspect
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from neighbour import scale


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("extra", nargs="*")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument(
        "--local-rank", "--local_rank", type=int, default=int(os.environ.get("LOCAL_RANK", -1))
    )
    parser.add_argument("--nproc-per-node", type=int, default=0, help="also a flag of the launcher")
    parser.add_argument("-m", "--message", default="")
    parser.add_argument("--verbose", action="store_true")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    print(f"[{rank}] args {args}")
    print(f"[{rank}] argv {sys.argv}")
    print(f"[{rank}] __file__ {__file__}, __name__ {__name__}, spec {__spec__}, package {__package__!r}")
    print(f"[{rank}] first path {sys.path[0]}, cwd {os.getcwd()}, main {sys.modules['__main__'].__file__}")
    print(f"[{rank}] doc {__doc__!r}, annotations {'__annotations__' in globals()}, cached {__cached__!r}")
    print(f"[{rank}] names {sorted(name for name in globals() if name.startswith('__'))}")
    print(
        f"[{rank}] source {inspect.getsource(parse_args).splitlines()[0]}, line {inspect.stack()[0].lineno}"
    )
    caller = inspect.stack()[1]
    print(f"[{rank}] called by {caller.function} in {caller.filename}, {caller.code_context}")
    with args.data.open(newline="") as file:
        rows = list(csv.DictReader(file))
    values = torch.tensor([float(row["value"]) for row in rows[rank :: dist.get_world_size()]])
    total = scale(values, args.lr).sum()
    dist.all_reduce(total)
    print(f"[{rank}] {len(rows)} rows, total {total.item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
