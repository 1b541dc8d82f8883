"""Measure the exact reduction on nodes with limited links, and compare hashes of training there.

The nodes are network namespaces of this machine with process ids of their own. It needs root.

python benchmarks/by_node/run.py [sums] [steps] [start] [hashes]     all by default; `table` only writes
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT))

from paceline.bench.spread import Spread  # noqa: E402
from tests.launching.nodes import Nodes, why_no_nodes  # noqa: E402
from tests.launching.wan import Wan  # noqa: E402

_LIMIT_S = 580
SIZES = (1_000_000, 8_000_000, 25_000_000)
ROUND_TRIP_MS = 50.0
# Each rank's node.
BLOCK, ROUND_ROBIN = (0, 0, 1, 1), (0, 1, 0, 1)
# Name: nodes of the ranks, Mbit/s of each node's link, turns.
SETTINGS = {
    "2 x 2, 100 Mbit/s": (BLOCK, 100, 7),
    "2 x 2, 1 Gbit/s": (BLOCK, 1000, 21),
    "2 x 2 round-robin, 100 Mbit/s": (ROUND_ROBIN, 100, 7),
    "2 + 1, 100 Mbit/s": ((0, 0, 1), 100, 7),
}
# Ranks by node; the first two run on this machine as it is.
PLACES: dict[str, tuple[int, ...] | int] = {
    "1 rank": 1,
    "4 ranks of one machine": 4,
    "2 x 2": BLOCK,
    "2 x 2 round-robin": ROUND_ROBIN,
    "2 + 1": (0, 0, 1),
    "1 + 3": (0, 1, 1, 1),
    "3 nodes: 2 + 1 + 1": (0, 0, 1, 2),
}
TRAIN = ("recipes/gpt-stdlib.toml", "--set", "train.steps=12", "--set", "train.global_batch_size=14")
LAYOUTS = {"dp_replicate": (), "dp_shard": ("--set", "layout.dp_shard={world}")}


def run_on_nodes(
    places: tuple[int, ...], rate_mbit: float, words: list[str], round_trip_ms: float = 0
) -> str:
    """Run a program as one rank per place, and return what rank 0 prints."""
    with ExitStack() as stack:
        nodes = stack.enter_context(Nodes(max(places) + 1))
        interface, address = "eth0", nodes.address(0)
        if round_trip_ms:
            names = [nodes.namespace(node) for node in range(max(places) + 1)]
            stack.enter_context(Wan(names, round_trip_ms / 2, rate_mbit))
            interface, address = "wan0", "10.78.0.10"
        elif rate_mbit:
            for node in range(max(places) + 1):
                nodes.limit(node, rate_mbit)
        # One shell per node starts its ranks: they share process ids, and so memory.
        started = []
        for node in range(max(places) + 1):
            ranks = [rank for rank, at in enumerate(places) if at == node]
            script = ""
            for local, rank in enumerate(ranks):
                place = f"RANK={rank} LOCAL_RANK={local} LOCAL_WORLD_SIZE={len(ranks)}"
                script += f'{place} "$@" & '
            env = {
                **os.environ,
                "WORLD_SIZE": str(len(places)),
                "MASTER_ADDR": address,
                "MASTER_PORT": "29500",
                "GLOO_SOCKET_IFNAME": interface,
                "OMP_NUM_THREADS": "1",
            }
            command = nodes.powered(nodes.command(node, ["sh", "-c", script + "wait", "sh", *words]))
            started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env, cwd=ROOT))
            stack.callback(_end, started[-1])
        out, _ = started[0].communicate(timeout=_LIMIT_S)
        for process in started[1:]:
            process.communicate(timeout=60)
        return out


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def measure_sums() -> None:
    for name, (places, rate_mbit, turns) in SETTINGS.items():
        words = [sys.executable, "-W", "ignore", str(HERE / "sums.py"), ",".join(map(str, SIZES))]
        out = run_on_nodes(places, rate_mbit, [*words, str(turns), "eth0"])
        line = next(line for line in out.splitlines() if line.startswith("{"))
        path = HERE / "results" / ("".join(c if c.isalnum() else "-" for c in name) + ".json")
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({"setting": name, "load": os.getloadavg()[0], **json.loads(line)}) + "\n")
        print(f"{name}: done", flush=True)


def time_steps() -> None:
    words = [sys.executable, "-W", "ignore", str(HERE / "steps.py"), "30"]
    out = run_on_nodes((0, 1, 2, 3), 100, words, ROUND_TRIP_MS)
    found = json.loads(next(line for line in out.splitlines() if line.startswith("{")))
    lines = [f"4 nodes, 100 Mbit/s, round trip of {ROUND_TRIP_MS:g} ms; round trips: median (95% interval)"]
    for name, times in found.items():
        cells = [
            f"{part} {_interval(Spread.of(1e3 * value / ROUND_TRIP_MS for value in values), '.2f')}"
            for part, values in times.items()
            if values
        ]
        lines.append(f"{name:24}" + "   ".join(cells))
    (HERE / "results" / "steps.txt").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


def count_start() -> None:
    words = [sys.executable, "-W", "ignore", str(HERE / "start.py"), "wan0"]
    out = run_on_nodes((0, 1), 100, words, ROUND_TRIP_MS)
    found = json.loads(next(line for line in out.splitlines() if line.startswith("{")))
    lines = [f"2 nodes, 100 Mbit/s, round trip of {ROUND_TRIP_MS:g} ms; bytes sent while a trainer is built"]
    for reduction, row in found.items():
        times = row["sent_bytes"] / row["model_bytes"]
        lines.append(f"{reduction:8}{times:.2f} times the model   {row['seconds']:.2f} s")
    (HERE / "results" / "start.txt").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


def compare_hashes() -> None:
    lines = [f"{'ranks':28}" + "".join(f"{name:20}" for name in LAYOUTS)]
    for name, places in PLACES.items():
        hashes = []
        for words in LAYOUTS.values():
            world = places if isinstance(places, int) else len(places)
            folder = tempfile.mkdtemp(prefix="paceline-by-node-")
            layout = [word.format(world=world) for word in words] if world > 1 else []
            train = [sys.executable, "-W", "ignore", "-m", "paceline", "train", *TRAIN, *layout, "--out"]
            try:
                if isinstance(places, int):
                    done = subprocess.run(
                        [*train, folder, "--nproc", str(places)], cwd=ROOT, capture_output=True, text=True
                    )
                    if done.returncode:
                        raise RuntimeError(done.stderr)
                else:
                    run_on_nodes(places, 0, [*train, folder])
                hashes.append(_hash(folder))
            finally:
                shutil.rmtree(folder, ignore_errors=True)
        lines.append(f"{name:28}" + "".join(f"{found[:16]:20}" for found in hashes))
        print(lines[-1], flush=True)
    (HERE / "results" / "hashes.txt").write_text("\n".join(map(str.rstrip, lines)) + "\n")


def _hash(folder: str) -> str:
    words = [sys.executable, "-m", "paceline", "checkpoint", "hash", folder]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()[-1]


def write_table() -> str:
    """Return the table of all results of sums."""
    columns = "".join(f"{kind + ', ms':>22}{'S out':>7}  " for kind in ("gloo", "by rank", "by node"))
    lines = [
        "exact sums on nodes, fp32; median (95% interval); S out: bytes out of a node / bytes of the vector",
        f"{'setting':31}{'load':>5}{'MB':>4}  {columns}{'by node / gloo':>18}",
    ]
    for name in SETTINGS:
        path = HERE / "results" / ("".join(c if c.isalnum() else "-" for c in name) + ".json")
        if not path.exists():
            continue
        found = json.loads(path.read_text())
        for row in found["rows"]:
            start = f"{name:31}{found['load']:>5.0f}{row['num_bytes'] / 1e6:>4.0f}"
            lines.append(f"{start}  {_format_row(row)}")
    return "\n".join(lines) + "\n"


def _format_row(row: dict[str, Any]) -> str:
    cells = []
    for kind in ("gloo", "by rank", "by node"):
        spread = Spread.of(1e3 * value for value in row["times_s"][kind])
        cells.append(f"{_interval(spread, '.0f'):>22}{Spread.of(row['sent'][kind]).median:>7.2f}")
    pairs = zip(row["times_s"]["by node"], row["times_s"]["gloo"], strict=True)
    cells.append(f"{_interval(Spread.of(own / plain for own, plain in pairs), '.2f'):>18}")
    return "  ".join(cells)


def _interval(spread: Spread, digits: str) -> str:
    return f"{spread.median:{digits}} ({spread.low:{digits}}-{spread.high:{digits}})"


def main(parts: list[str]) -> None:
    if {"sums", "steps", "start", "hashes"} & set(parts) and (reason := why_no_nodes()):
        raise SystemExit(f"nodes cannot be made here: {reason}")
    if "sums" in parts:
        measure_sums()
    if "steps" in parts:
        time_steps()
    if "start" in parts:
        count_start()
    if "hashes" in parts:
        compare_hashes()
    table = write_table()
    (HERE / "results" / "table.txt").write_text(table)
    print(table)


if __name__ == "__main__":
    main(sys.argv[1:] or ["sums", "steps", "start", "hashes"])
