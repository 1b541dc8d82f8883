"""Measure links and training steps, and predict the steps' communication; a rank of run.py's nodes.

python benchmarks/traffic_time/steps.py NUM_STEPS LAYOUT:REDUCTION ...

Rank 0 prints one JSON line: for each kind the seconds of whole steps, those of steps without communication,
and the predicted seconds by axis. A step begins after a barrier and lasts until the last rank's end.
"""

from __future__ import annotations

import json
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch.distributed as dist

import paceline
from paceline.comm.links import measure_links
from paceline.plan.links_file import MeasuredLinks
from paceline.plan.traffic_table import plan_recipe_traffic
from paceline.plan.traffic_time import time_recipe_traffic
from paceline.recipe import Layout, load_recipe, settle_recipe
from paceline.train.run import build_data, build_loader, build_trainer

RECIPE = Path(__file__).parent / "recipe.toml"
WARM_UP = 2


def main(num_steps: int, kinds: list[str]) -> None:
    began_s = time.perf_counter()
    with paceline.start(device="cpu", threads_per_rank=1) as world:

        def note(text: str) -> None:
            if world.is_main:
                print(f"{time.perf_counter() - began_s:6.1f} s  {text}", file=sys.stderr, flush=True)

        links = measure_links(world)
        note(f"links measured in {links.took_s:.1f} s")
        found = {}
        for kind in kinds:
            found[kind] = measure_kind(kind, num_steps, links)
            note(f"{kind}: {found[kind]}")
        if world.is_main:
            print(json.dumps({"nodes": links.nodes, "links_s": links.took_s, "kinds": found}), flush=True)


def measure_kind(kind: str, num_steps: int, links: MeasuredLinks) -> dict[str, Any]:
    words, _, reduction = kind.partition(":")
    settings = [f"layout.{word}" for word in words.split()]
    # One microbatch of two samples per data rank.
    settings.append(f"train.global_batch_size={2 * Layout.parse(words).close().dp}")
    settled = settle_recipe(
        load_recipe(RECIPE, [*settings, f"train.reduction={reduction}"]), len(links.nodes)
    )
    rows = plan_recipe_traffic(settled.recipe, settled.layout)
    timed = time_recipe_traffic(rows, settled.recipe, settled.layout, links)
    data = build_data(settled.recipe)
    trainer = build_trainer(settled.recipe, data, 100)
    shares = iter(build_loader(settled.recipe, trainer, data.train, train=True))
    steps: dict[bool, list[float]] = {True: [], False: []}
    for talks in (True, False):
        with nullcontext() if talks else trainer.without_communication():
            for number in range(WARM_UP + num_steps):
                share = next(shares)
                dist.barrier()
                start_s = time.perf_counter()
                trainer.step(share)
                if talks:
                    dist.barrier()
                if number >= WARM_UP:
                    steps[talks].append(time.perf_counter() - start_s)
    trainer.close()
    return {
        "step_s": steps[True],
        "alone_s": steps[False],
        "bytes": {each.traffic.axis: each.traffic.num_bytes for each in timed},
        "predicted_s": {each.traffic.axis: each.time_s for each in timed},
        "calls": {each.traffic.axis: sum(call.times for call in each.traffic.calls) for each in timed},
    }


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
