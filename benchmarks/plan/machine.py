"""Compares plans with measured steps on this machine: probes it, then trains each legal layout; needs root.

    python benchmarks/plan/machine.py                  # measures the cases that machine.jsonl lacks
    python benchmarks/plan/machine.py --limit 400      # begins no case after so many seconds
    python benchmarks/plan/machine.py --report         # plans all measured cases anew, and prints the table
    python benchmarks/plan/machine.py --report --write # also the interval of probed clusters, residuals.csv

A case is a model on 2, 4 or 8 ranks, on one node or on two with a link of 1 Gbit/s or 100 Mbit/s. Nodes
are network namespaces. All legal layouts (one schedule, no recompute) are built in one start and take
turns of a few steps, forwards and backwards through the list, so what else the machine does meets all of
them. A case's row is added to machine.jsonl when it is complete; a rerun skips it. `paceline probe`
measures the machine once for each number of ranks and link, just before its first case.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT), str(HERE)]

from evaluate import draw  # noqa: E402
from quantiles import find_quantiles, write_residuals  # noqa: E402

from paceline.plan.cluster import read_file  # noqa: E402
from paceline.plan.fit import load_constants  # noqa: E402
from paceline.plan.recipe_costs import of_recipe  # noqa: E402
from paceline.plan.search import find_tie  # noqa: E402
from paceline.plan.step import StepModel  # noqa: E402
from paceline.recipe import Layout, Recipe, Rules, load_recipe  # noqa: E402

MODELS = {
    "small": ["model.layers=4"],
    "wide": ["model.layers=4", "model.hidden=256", "model.heads=8"],
    "deep": ["model.layers=8", "model.hidden=128", "model.heads=8", "train.microbatch_size=2"],
}
LINKS = {"one node": (1, 0.0), "1 Gbit/s": (2, 1000.0), "100 Mbit/s": (2, 100.0)}
RANKS = (2, 4, 8)
RECIPE = ROOT / "recipes" / "gpt-stdlib.toml"
ROWS, TARGET = HERE / "machine.jsonl", ROOT / "src" / "paceline" / "plan" / "fitted.json"
STEPS, TURN_LIMIT_S = 2, 110.0
LEVELS = (0.5, 0.8, 0.9)


@dataclass(frozen=True)
class Case:
    """A model on ranks and links."""

    model: str
    ranks: int
    link: str

    @property
    def cluster_file(self) -> Path:
        return HERE / "machine" / f"{self.ranks}-ranks-{self.link.replace(' ', '-').replace('/', '')}.toml"

    def load(self, layout: str = "") -> Recipe:
        words = [f"layout.{quote_setting(pair)}" for pair in layout.split()]
        return load_recipe(str(RECIPE), [*MODELS[self.model], "train.device='cpu'", *words])

    def list_layouts(self) -> list[str]:
        return [str(layout) for layout in Rules.of(self.load()).enumerate(self.ranks)[0]]


def quote_setting(pair: str) -> str:
    """Return a word of a layout as a setting."""
    name, _, value = pair.partition("=")
    return pair if value.isdigit() or value in ("true", "false") else f'{name}="{value}"'


def train(case: Case) -> None:
    """Train all layouts in turns, as one rank; rank 0 prints the seconds of a step by layout and turn."""
    import torch
    import torch.distributed as dist

    import paceline
    from paceline.data.task import build_data
    from paceline.train.run import build_loader, build_trainer

    with paceline.start(device="cpu", threads_per_rank=1) as world:
        steps, data = {}, build_data(case.load())
        for layout in case.list_layouts():
            recipe = case.load(layout)
            trainer = build_trainer(recipe, data, 10_000)
            steps[layout] = trainer.step, iter(build_loader(recipe, trainer, data.train, train=True))
        times: dict[str, list[float]] = {layout: [] for layout in steps}
        began_s = time.perf_counter()
        for turn in itertools.count():
            turn_s = time.perf_counter()
            for layout in steps if turn % 2 else list(steps)[::-1]:
                step, batches = steps[layout]
                dist.barrier()
                start_s = time.perf_counter()
                for _ in range(STEPS):
                    step(next(batches))
                dist.barrier()
                if turn:  # the first one allocates
                    times[layout].append((time.perf_counter() - start_s) / STEPS)
            now_s = time.perf_counter()
            spent = torch.tensor(now_s - began_s + 1.1 * (now_s - turn_s))
            dist.all_reduce(spent, dist.ReduceOp.MAX)
            if turn and float(spent) > TURN_LIMIT_S:
                break
        if world.is_main:
            print(json.dumps(times), flush=True)


def measure(limit_s: float) -> None:
    """Measure the cases that have no row yet."""
    from tests.launching.nodes import why_no_nodes
    from tests.launching.on_nodes import run_on_nodes

    if reason := why_no_nodes():
        raise SystemExit(f"nodes cannot be made here: {reason}")
    began_s, done = time.perf_counter(), {case for case, _ in read_rows()}
    for ranks, link, model in itertools.product(RANKS, LINKS, MODELS):
        case, (nodes, mbit) = Case(model, ranks, link), LINKS[link]
        if time.perf_counter() - began_s > limit_s:
            return
        places = tuple(rank * nodes // ranks for rank in range(ranks))
        file = case.cluster_file
        if not file.exists() or "complete = true" not in file.read_text():
            file.parent.mkdir(exist_ok=True)
            print(run_on_nodes(places, mbit, [*PACELINE, "probe", "--device", "cpu", "--out", str(file)]))
        if case in done:
            continue
        load = os.getloadavg()[0]
        words = [sys.executable, "-W", "ignore", __file__, "--rank", json.dumps([model, ranks, link])]
        out = run_on_nodes(places, mbit, words)
        found = [line for line in out.splitlines() if line.startswith("{")]
        if not found:
            print(f"{case}: no result\n{out[-2000:]}", flush=True)
            continue
        row = {"model": model, "ranks": ranks, "link": link, "load": load, "step_s": json.loads(found[-1])}
        with ROWS.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(row) + "\n")
        print(f"{case} in {time.perf_counter() - began_s:.0f} s", flush=True)


PACELINE = (sys.executable, "-m", "paceline")


def read_rows() -> list[tuple[Case, dict[str, Any]]]:
    """Return the measured cases with their rows."""
    if not ROWS.exists():
        return []
    rows = map(json.loads, ROWS.read_text(encoding="utf-8").splitlines())
    return [(Case(row["model"], row["ranks"], row["link"]), row) for row in rows]


def report(*, writes: bool) -> None:
    """Plan each measured case, and print residuals and picks."""
    fit, residuals, names = load_constants(), [], []
    over, bests = [], dict[str, float]()
    print(f"{'case':<24}{'layouts':>8}{'turns':>6}{'ratio':>7}{'range of ratios':>17}{'pick':>7}  pick; best")
    for case, row in read_rows():
        if not case.cluster_file.exists():
            print(f"{case.model} {case.ranks} {case.link}: not probed")
            continue
        model = StepModel(of_recipe(case.load()), read_file(case.cluster_file), fit)
        times = {Layout.parse(text).resolve(case.ranks): taken for text, taken in row["step_s"].items()}
        planned = {layout: model.time(layout).total for layout in times}
        taken = {layout: statistics.median(each) for layout, each in times.items()}
        pick, best = min(planned, key=planned.__getitem__), min(taken, key=taken.__getitem__)
        # Within a turn both met the same machine.
        more = statistics.median(a / b for a, b in zip(times[pick], times[best], strict=True)) - 1
        over.append(max(0.0, more))
        ratios = sorted(taken[layout] / planned[layout] for layout in times)
        words = f"{case.model} {case.ranks} {case.link}"
        residuals += [math.log(ratio) for ratio in ratios]
        names += [words] * len(ratios)
        bests[words] = math.log(taken[best] / planned[best])
        spread = f"{ratios[0]:.2f} to {ratios[-1]:.2f}"
        turns = len(times[best])
        print(
            f"{words:<24}{len(times):>8}{turns:>6}{statistics.median(ratios):>7.2f}{spread:>17}{more:>+7.0%}"
            f"  {pick}; {'the same' if pick == best else best}"
        )
    if not over:
        return
    errors = [abs(math.exp(-each) - 1) for each in residuals]
    held = 0
    for case, best in bests.items():
        others = [(each, name) for each, name in zip(residuals, names, strict=True) if name != case]
        low, high = find_quantiles(*zip(*others, strict=True), 0.8)
        held += low <= best <= high
    near, close = (sum(each <= limit for each in over) for limit in (0.05, 0.15))
    print(f"\n{len(over)} cases: the pick is within 5% of the best in {near}, within 15% in {close},")
    print(f"at worst {max(over):.0%} off; the best is inside of the interval of the other cases in {held}")
    median = statistics.median(errors)
    print(f"{len(errors)} layouts: median error of the step {median:.0%}; a tie is {find_tie():.0%}")
    print("\nmeasured over planned, layouts\n" + "\n".join(draw(residuals)))
    if writes:
        table = json.loads(TARGET.read_text())
        ends = {f"{level:g}": find_quantiles(residuals, names, level) for level in LEVELS}
        table["bars"]["probed"] = {key: [round(end, 4) for end in each] for key, each in ends.items()}
        TARGET.write_text(json.dumps(table, indent=1) + "\n")
        write_residuals("machine", ((name, -each) for name, each in zip(names, residuals, strict=True)))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--limit", type=float, default=math.inf)
    parser.add_argument("--report", action="store_true")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        train(Case(*json.loads(args.rank)))
    elif args.report:
        report(writes=args.write)
    else:
        measure(args.limit)


if __name__ == "__main__":
    main()
