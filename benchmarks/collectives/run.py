"""Run `paceline bench collectives` on one machine and on nodes with limited links, and write the table.

The nodes are network namespaces of this machine with process ids of their own. It needs root. Each setting's
result is kept in results/ as JSON, and docs/tables/collectives.md is made from them.

python benchmarks/collectives/run.py [SETTING ...]      all settings by default; `table` only writes the table
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT))

from paceline.plan.call_sizes import fit_line  # noqa: E402
from tests.launching.nodes import Nodes, why_no_nodes  # noqa: E402
from tests.launching.wan import Wan  # noqa: E402

_LIMIT_S = 900
_NEAR = 0.15


@dataclass(frozen=True)
class Setting:
    """Nodes and the link of each.

    Attributes:
        nodes: number; 0 for this machine as it is.
        local: ranks per node.
        rate_mbit: of each node's link, both ways.
        round_trip_ms: added.
        words: further arguments of the command.
    """

    nodes: int
    local: int
    rate_mbit: float = 0
    round_trip_ms: float = 0
    words: tuple[str, ...] = ()


_FEW = ("--sizes", "64,16KB,64KB,256KB,1MB", "--repeats", "9")
SETTINGS = {
    "one machine": Setting(0, 2),
    # By the relay: a token bucket lets through at once what takes no time on the wire then, here 125 kB.
    "1 Gbit/s": Setting(4, 1, 1000, 0.2, words=_FEW),
    "100 Mbit/s": Setting(4, 1, 100, words=_FEW),
    "100 Mbit/s, 20 ms": Setting(4, 1, 100, 20, words=_FEW),
    "100 Mbit/s, 50 ms": Setting(4, 1, 100, 50, words=_FEW),
    "2 x 2, 100 Mbit/s": Setting(2, 2, 100, words=_FEW),
}


def measure(setting: Setting, *words: str) -> dict[str, Any]:
    """Run the command on the setting's ranks, and return its JSON."""
    command = [sys.executable, "-W", "ignore", "-m", "paceline", "bench", "collectives", "--json", *words]
    if setting.nodes == 0:
        return _read(_start([*command, "--nproc", str(setting.local)], {}))
    with ExitStack() as stack:
        nodes = stack.enter_context(Nodes(setting.nodes))
        interface, address = "eth0", nodes.address(0)
        if setting.round_trip_ms:
            names = [nodes.namespace(node) for node in range(setting.nodes)]
            stack.enter_context(Wan(names, setting.round_trip_ms / 2, setting.rate_mbit))
            interface, address = "wan0", "10.78.0.10"
        else:
            for node in range(setting.nodes):
                nodes.limit(node, setting.rate_mbit)
        ranks = []
        for rank in range(setting.nodes * setting.local):
            node, local = divmod(rank, setting.local)
            place = {
                "RANK": rank,
                "WORLD_SIZE": setting.nodes * setting.local,
                "LOCAL_RANK": local,
                "LOCAL_WORLD_SIZE": setting.local,
                "MASTER_ADDR": address,
                "MASTER_PORT": 29500,
                "GLOO_SOCKET_IFNAME": interface,
            }
            ranks.append(_start(nodes.powered(nodes.command(node, command)), place))
            stack.callback(_end, ranks[-1])
        return _read(ranks[0])


def _start(words: list[str], place: dict[str, object]) -> subprocess.Popen[str]:
    env = {**os.environ, **{name: str(value) for name, value in place.items()}, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=env, cwd=ROOT)


def _read(rank: subprocess.Popen[str]) -> dict[str, Any]:
    out, _ = rank.communicate(timeout=_LIMIT_S)
    found: dict[str, Any] = json.loads(out)
    if "error" in found:
        raise RuntimeError(found["error"])
    return found


def _end(rank: subprocess.Popen[str]) -> None:
    rank.kill()
    rank.communicate()


def write_table() -> str:
    """Return the table of all results."""
    lines = [
        f"`python benchmarks/collectives/run.py` on {os.cpu_count()} cores: median time of a call, and in",
        "brackets how far the line through the smallest and the largest size is off.",
        "",
    ]
    found = {name: json.loads(path.read_text()) for name in SETTINGS if (path := _path(name)).exists()}
    lines.append("| operation | size | " + " | ".join(found) + " |")
    lines.append("|---|--:|" + "--:|" * len(found))
    cells = {
        name: {(c["operation"], c["num_bytes"]): c for c in table["cells"]} for name, table in found.items()
    }
    errors = {name: find_errors(table) for name, table in found.items()}
    operations = list(dict.fromkeys(c["operation"] for table in found.values() for c in table["cells"]))
    keys = {key for table in cells.values() for key in table}
    for operation, size in sorted(keys, key=lambda key: (operations.index(key[0]), key[1])):
        row = [
            _cell(cells[name].get((operation, size)), errors[name].get((operation, size))) for name in found
        ]
        lines.append(f"| {operation} | {size or '-'} | " + " | ".join(row) + " |")
    lines.append("| **median error, within 15%** | | " + " | ".join(map(summarise, found.values())) + " |")
    return "\n".join(lines) + "\n"


def summarise(table: dict[str, Any]) -> str:
    """Return the median error of the sizes between, and the share of them within 15%."""
    errors = [abs(error) for error in find_errors(table).values()]
    return f"{median(errors):.0%}, {sum(error <= _NEAR for error in errors) / len(errors):.0%}"


def find_errors(table: dict[str, Any]) -> dict[tuple[str, int], float]:
    """Return predicted over median time, less 1, by operation and size between the others."""
    found = {}
    for operation in {cell["operation"] for cell in table["cells"]} - {"barrier"}:
        own = [cell for cell in table["cells"] if cell["operation"] == operation]
        seconds = {cell["num_bytes"]: cell["time_s"]["median"] for cell in own}
        empty_s, rate = fit_line(seconds, 1.0)
        for size in sorted(seconds)[1:-1]:
            found[operation, size] = (empty_s + size / rate) / seconds[size] - 1
    return found


def _cell(cell: dict[str, Any] | None, error: float | None) -> str:
    if cell is None:
        return "-"
    return f"{cell['time_s']['median'] * 1e3:.3g} ms" + ("" if error is None else f" ({error:+.0%})")


def _path(name: str) -> Path:
    return HERE / "results" / ("".join(c if c.isalnum() else "-" for c in name) + ".json")


def main(names: list[str]) -> None:
    if any(SETTINGS[name].nodes for name in names) and (reason := why_no_nodes()):
        raise SystemExit(f"nodes cannot be made here: {reason}")
    for name in names:
        found = measure(SETTINGS[name], *SETTINGS[name].words)
        _path(name).parent.mkdir(exist_ok=True)
        _path(name).write_text(json.dumps(found, indent=1) + "\n")
        print(f"{name}: median error, within 15%: {summarise(found)}")
    (ROOT / "docs" / "tables" / "collectives.md").write_text(write_table())


if __name__ == "__main__":
    main([] if sys.argv[1:] == ["table"] else sys.argv[1:] or list(SETTINGS))
