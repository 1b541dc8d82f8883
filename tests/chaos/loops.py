"""Kills the loops of examples/loops at random instants, and compares the bits.

    python -m tests.chaos.loops [--kills 10] [--seed 0] [NAME ...]

Each loop runs once in one process without a kill. Then it starts again and again in another folder, each time
on another number of ranks and layout, until it has ended by itself. Most starts are killed at a random
instant: the launcher, or one of the processes below it. At the end both must have the same weights.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
_LOOPS = ROOT / "examples" / "loops"
_LAYOUTS = [(3, "dp_replicate=3"), (2, "dp_shard=2"), (1, ""), (2, "dp_replicate=2")]
_LONGEST_S = 300.0


def start(name: str, ranks: int, layout: str, folder: Path) -> subprocess.Popen[bytes]:
    """Start a loop on some ranks."""
    words = ["run", "--nproc-per-node", str(ranks), str(_LOOPS / f"{name}.py"), layout, str(folder)]
    log = (folder.parent / f"{folder.name}.log").open("ab")
    with log:
        return subprocess.Popen([sys.executable, "-m", "paceline", *words], stdout=log, stderr=log)


def list_below(pid: int) -> list[int]:
    """Return the processes below one."""
    parents: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(path.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        parents.setdefault(parent, []).append(int(path.parent.name))
    found, ahead = [], [pid]
    while ahead:
        below = parents.get(ahead.pop(), [])
        found += below
        ahead += below
    return found


def hash_of(folder: Path) -> str:
    """Return the hash of a run's newest checkpoint."""
    words = [sys.executable, "-m", "paceline", "checkpoint", "hash", str(folder)]
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip()


def try_loop(name: str, num_kills: int, draws: random.Random) -> bool:
    """Kill one loop, and compare it with itself."""
    layouts = [each for each in _LAYOUTS if name != "gan" or "shard" not in each[1]]
    with tempfile.TemporaryDirectory(prefix="loops-", ignore_cleanup_errors=True) as scratch:
        whole, killed = Path(scratch) / "whole", Path(scratch) / "killed"
        began_s = time.monotonic()
        assert start(name, 1, "", whole).wait(_LONGEST_S) == 0, (Path(scratch) / "whole.log").read_text()
        lasts_s = time.monotonic() - began_s
        done = starts = 0
        code: int | None = None
        while code != 0:
            began_s = time.monotonic()
            job = start(name, *layouts[starts % len(layouts)], killed)
            starts += 1
            try:
                code = job.wait(draws.uniform(0.3, 1.2) * lasts_s if done < num_kills else _LONGEST_S)
            except subprocess.TimeoutExpired:
                victim = draws.choice([job.pid, *list_below(job.pid)])
                try:
                    os.kill(victim, signal.SIGKILL)
                    done += 1
                except ProcessLookupError:  # it has just ended
                    pass
                code = job.wait(_LONGEST_S)
            if code == 0 and done < num_kills:  # it ended too early to be killed: once more from the start
                assert hash_of(killed) == hash_of(whole)
                lasts_s = min(lasts_s, time.monotonic() - began_s)
                killed, code = Path(scratch) / f"killed-{starts}", None
        is_same = hash_of(killed) == hash_of(whole)
        print(
            f"{name}: {done} kills, {starts} starts, {'the same bits' if is_same else 'OTHER BITS'}",
            flush=True,
        )
        return is_same


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all")
    parser.add_argument("--kills", type=int, default=10, help="of each loop")
    parser.add_argument("--seed", type=int, default=0, help="of the instants")
    args = parser.parse_args()
    names = args.names or sorted(path.stem for path in _LOOPS.glob("*.py") if path.stem != "__init__")
    found = [try_loop(name, args.kills, random.Random(args.seed)) for name in names]
    return 0 if all(found) else 1


if __name__ == "__main__":
    sys.exit(main())
