"""Measure steps with compressed gradients over a slow link, and what compression costs in loss.

python benchmarks/compression/run.py [wan] [slow] [loss] [encoder]     all by default; `table` only writes

The nodes of `wan` and `slow` are network namespaces of this machine with process ids of their own; they need
root.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT))

from paceline.bench.spread import Spread  # noqa: E402
from tests.launching.nodes import why_no_nodes  # noqa: E402
from tests.launching.on_nodes import run_on_nodes  # noqa: E402

RESULTS = HERE / "results"
# Name: Mbit/s, round trip in ms, turns.
LINKS = {"wan": (100, 50.0, 7), "slow": (100, 0.0, 7)}
# No turn begins that would probably end later; a turn takes about half a minute on idle cores.
LIMIT_S = 420
# Settings of [compress] by name.
KINDS: dict[str, dict[str, object]] = {
    "none": {},
    **{kind: {"kind": kind} for kind in ("bf16", "int8", "int4")},
}
SEEDS = range(5)
# Name of a measurement of losses: recipe, steps.
RECIPES = {"loss": ("recipes/gpt-stdlib.toml", 1000), "encoder": ("recipes/encoder-dropout.toml", 300)}


def time_steps(name: str) -> None:
    rate_mbit, round_trip_ms, turns = LINKS[name]
    interface = "wan0" if round_trip_ms else "eth0"
    words = [sys.executable, "-W", "ignore", str(HERE / "steps.py"), str(turns), str(LIMIT_S), interface]
    out = run_on_nodes((0, 1), rate_mbit, words, round_trip_ms)
    *_, last = (line for line in out.splitlines() if line.startswith("{"))
    found = json.loads(last)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps({"load": os.getloadavg()[0], **found}) + "\n")


def measure_losses(name: str, num_steps: int, seeds: range) -> None:
    """Train each kind with each seed, and keep the losses; goes on where it was ended."""
    path = RESULTS / f"{name}-{num_steps}.json"
    found: dict[str, dict[str, float]] = json.loads(path.read_text()) if path.exists() else {}
    for kind, settings in KINDS.items():
        for seed in seeds:
            if str(seed) in found.get(kind, {}):
                continue
            words = [sys.executable, "-m", "paceline", "train", RECIPES[name][0], "--nproc", "1", "--json"]
            words += ["--set", f"train.seed={seed}", "--set", f"train.steps={num_steps}"]
            for key, value in {**settings, "slots": 4}.items() if settings else ():
                words += ["--set", f"compress.{key}={value}"]
            with tempfile.TemporaryDirectory(prefix="paceline-compression-") as folder:
                subprocess.run([*words, "--out", folder], cwd=ROOT, check=True, capture_output=True)
                rows = (Path(folder) / "evaluations.jsonl").read_text().splitlines()
            found.setdefault(kind, {})[str(seed)] = json.loads(rows[-1])["loss"]
            RESULTS.mkdir(exist_ok=True)
            path.write_text(json.dumps(found) + "\n")
            print(f"{kind} seed {seed}: {found[kind][str(seed)]:.4f}", flush=True)


def write_table() -> str:
    """Return the tables of all results."""
    lines = []
    for name, (rate_mbit, round_trip_ms, _) in LINKS.items():
        path = RESULTS / f"{name}.json"
        if path.exists():
            found = json.loads(path.read_text())
            lines += [
                f"2 nodes, {rate_mbit} Mbit/s, round trip of {round_trip_ms:g} ms, "
                f"{found['parameters'] / 1e6:.1f} million parameters; load {found['load']:.0f}",
                *_format_steps(found),
                "",
            ]
    for name in RECIPES:
        for path in sorted(RESULTS.glob(f"{name}-*.json")):
            lines += [*_format_losses(name, path), ""]
    return "\n".join(map(str.rstrip, lines)) + "\n"


def _format_steps(found: dict[str, Any]) -> list[str]:
    alone = Spread.of(found["alone"])
    lines = [f"{'':10}{'step, s (95% interval)':28}{'of fast':22}{'MB sent':>8}"]
    lines.append(f"{'alone':10}{_interval(alone):28}")
    plain = found["times"]["fast"]
    for kind, times in found["times"].items():
        ratios = Spread.of(own / other for own, other in zip(times, plain, strict=True))
        sent = statistics.median(found["sent"][kind]) / 1e6
        lines.append(f"{kind:10}{_interval(Spread.of(times)):28}{_interval(ratios):22}{sent:>8.1f}")
    return lines


def _format_losses(name: str, path: Path) -> list[str]:
    found: dict[str, dict[str, float]] = json.loads(path.read_text())
    lines = [f"{path.stem.removeprefix(f'{name}-')} steps of {RECIPES[name][0]}, 4 slots: valid loss"]
    for kind, by_seed in found.items():
        shared = [seed for seed in by_seed if seed in found["none"]]
        changes = [100 * (by_seed[seed] / found["none"][seed] - 1) for seed in shared]
        mean = statistics.mean(by_seed.values())
        half = _half_width(changes)
        change = "" if kind == "none" else f"{statistics.mean(changes):+.2f}% of none, 95% +- {half}"
        seeds = f"{len(by_seed)} seed" + ("s" if len(by_seed) > 1 else "")
        lines.append(f"{kind:10}{mean:.4f} over {seeds}   {change}")
    return lines


def _half_width(values: list[float]) -> str:
    """Return the half width of Student's interval of the mean."""
    quantiles = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45}
    if len(values) not in quantiles:
        return "unknown"
    return f"{quantiles[len(values)] * statistics.stdev(values) / len(values) ** 0.5:.2f}%"


def _interval(spread: Spread) -> str:
    return f"{spread.median:.2f} ({spread.low:.2f}-{spread.high:.2f})"


def main(words: list[str]) -> None:
    parts = words or [*LINKS, *RECIPES]
    if set(LINKS) & set(parts) and (reason := why_no_nodes()):
        raise SystemExit(f"nodes cannot be made here: {reason}")
    for name in LINKS:
        if name in parts:
            time_steps(name)
    for part in parts:
        # A recipe, or loss:STEPS:SEEDS for a part of it.
        name, *numbers = part.split(":")
        if name in RECIPES:
            steps, seeds = (int(numbers[0]), range(int(numbers[1]))) if numbers else (RECIPES[name][1], SEEDS)
            measure_losses(name, steps, seeds)
    table = write_table()
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "table.txt").write_text(table)
    print(table)


if __name__ == "__main__":
    main(sys.argv[1:])
