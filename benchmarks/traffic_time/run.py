"""Compare the predicted seconds of a step's communication with measured ones, on nodes and on one machine.

The nodes are network namespaces of this machine with process ids of their own. It needs root.

python benchmarks/traffic_time/run.py [SETTING ...]     all by default; `table` only writes the table
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.by_node.run import run_on_nodes  # noqa: E402
from tests.launching.nodes import why_no_nodes  # noqa: E402

RESULTS = HERE / "results"
NUM_STEPS = 5
KINDS = ("dp_replicate=2:fast", "dp_replicate=2:exact", "dp_shard=2:fast")
# Name: each rank's node, Mbit/s of each node's link (0: as it is), layouts with the reduction.
SETTINGS: dict[str, tuple[tuple[int, ...], float, tuple[str, ...]]] = {
    "2-nodes": ((0, 1), 100, KINDS),
    "one-machine": ((0, 0), 0, KINDS),
    "2x2": (
        (0, 0, 1, 1),
        100,
        ("dp_replicate=2 tp=2:fast", "dp_replicate=2 dp_shard=2:fast", "dp_replicate=4:exact"),
    ),
}


def measure(name: str) -> None:
    places, rate_mbit, kinds = SETTINGS[name]
    words = [sys.executable, "-W", "ignore", str(HERE / "steps.py"), str(NUM_STEPS), *kinds]
    load = os.getloadavg()[0]
    out = run_on_nodes(places, rate_mbit, words)
    *_, last = (line for line in out.splitlines() if line.startswith("{"))
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps({"load": load, **json.loads(last)}) + "\n")


def write_table() -> str:
    lines = []
    for name, (places, rate_mbit, _) in SETTINGS.items():
        path = RESULTS / f"{name}.json"
        if path.exists():
            found = json.loads(path.read_text())
            rate = f"{rate_mbit:g} Mbit/s" if rate_mbit else "no limit"
            lines.append(f"{name}: {len(places)} ranks, {rate}; load {found['load']:.1f}")
            head = ("step", "alone", "measured", "predicted", "ratio")
            lines.append(f"{'seconds':34}" + "".join(f"{each:>11}" for each in head) + "  by axis")
            lines += [_format_kind(kind, values) for kind, values in found["kinds"].items()]
            lines.append("")
    return "\n".join(lines)


def _format_kind(kind: str, values: dict[str, Any]) -> str:
    alone_s = statistics.median(values["alone_s"])
    measured = [step_s - alone_s for step_s in values["step_s"]]
    predicted_s = sum(values["predicted_s"].values())
    cells = [statistics.median(values["step_s"]), alone_s, statistics.median(measured), predicted_s]
    ratio = statistics.median(measured) / predicted_s
    axes = ", ".join(f"{axis} {seconds:.4f}" for axis, seconds in values["predicted_s"].items())
    return f"{kind:34}" + "".join(f"{each:>11.4f}" for each in cells) + f"{ratio:>11.2f}  {axes}"


def main(words: list[str]) -> None:
    if words != ["table"]:
        if reason := why_no_nodes():
            raise SystemExit(f"nodes cannot be made here: {reason}")
        for name in words or SETTINGS:
            measure(name)
    RESULTS.mkdir(exist_ok=True)
    table = write_table()
    (RESULTS / "table.txt").write_text(table)
    print(table)


if __name__ == "__main__":
    main(sys.argv[1:])
