"""Standard input, output and error: what they are and how they are written."""

import os
import subprocess
import sys
import warnings

import torch
import torch.distributed as dist


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for name in ("stdin", "stdout", "stderr"):
        stream = getattr(sys, name)
        facts = f"fd {stream.fileno()}, tty {stream.isatty()}, name {stream.name}, {stream.encoding}"
        how = f"errors {stream.errors}, by lines {stream.line_buffering}, through {stream.write_through}"
        print(f"[{rank}] {name}: {facts}, {how}")
    if rank == 0:
        print(f"[{rank}] read {sys.stdin.readline().strip()!r}, then {sys.stdin.read().split()}")
    dist.barrier()
    print(f"[{rank}] a line with accents: é ü ñ")
    os.write(1, f"[{rank}] written to the descriptor\n".encode())
    subprocess.run([sys.executable, "-c", f"print('[{rank}] from a child')"], check=True)
    print(f"[{rank}] loss {torch.tensor(2.5).item()}", file=sys.stderr)
    warnings.warn(f"[{rank}] a warning", stacklevel=1)
    flags = {name: getattr(sys.flags, name) for name in ("optimize", "dev_mode", "utf8_mode", "no_site")}
    print(f"[{rank}] flags {flags}, recursion {sys.getrecursionlimit()}, switch {sys.getswitchinterval()}")
    dist.destroy_process_group()
    print(f"[{rank}] last words")


if __name__ == "__main__":
    main()
