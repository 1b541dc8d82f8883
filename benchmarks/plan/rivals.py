"""Compares plans and torch's FSDPMemTracker with the storages that `storages.py` measured, under FSDP.

    python benchmarks/plan/rivals.py > benchmarks/plan/rivals.txt

torchtitan's estimation (scripts/estimate) is this tracker around two steps on tensors without numbers and
ranks that do not exist. It estimates FSDP alone: of the 24 layouts of two ranks, these four and zero=1.
"""

from __future__ import annotations

import json
import time
from typing import Any

import torch
import torch.distributed as dist
from storages import CLUSTER, MICROBATCHES, MODELS, ROWS, SAMPLES, Model, describe, load_own
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._composable.checkpoint_activation import checkpoint
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from paceline.models.gpt import Gpt
from paceline.parallel.blocks import find_blocks
from paceline.plan.demand import Demands
from paceline.recipe import Layout

LAYOUTS = {
    f"dp_replicate=1 dp_shard=2{zero}{again}": (not zero, bool(again))
    for zero in ("", " zero=2")
    for again in ("", " recompute=block")
}


class Own(Model):
    """The own gpt of `storages.py`."""

    def make_batch(self, samples: int) -> dict[str, Tensor]:
        return {"input_ids": torch.randint(256, (samples, 256))}

    def forward(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        logits: Tensor = model(batch["input_ids"])
        return logits


def _build_own() -> nn.Module:
    section: Any = load_own("gpt").model
    return Gpt(section, 256, 256)


def estimate(model: Model, *, reshards: bool, recomputes: bool) -> float:
    """Return the tracker's peak of the second step, in bytes."""
    mesh = init_device_mesh("cpu", (2,))
    with FakeTensorMode():
        built: nn.Module = model.build()
        for name, block in find_blocks(built):
            if name:
                if recomputes:
                    checkpoint(block)
                fully_shard(block, mesh=mesh, reshard_after_forward=reshards)
        fully_shard(built, mesh=mesh, reshard_after_forward=reshards)
        optimizer = torch.optim.AdamW(built.parameters(), fused=True)
        batch = model.make_batch(SAMPLES)
        tracker: Any = FSDPMemTracker(built, optimizer)
        tracker.track_inputs((batch,))
        with tracker:
            for _ in range(2):
                for _ in range(MICROBATCHES):
                    model.find_loss(model.forward(built, batch), batch).backward()
                    tracker.reset_mod_stats()  # it refuses a second call otherwise
                optimizer.step()
                optimizer.zero_grad()
        return float(tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"])


def main() -> None:
    """Print a line for each model and layout."""
    rows = [json.loads(line) for line in ROWS.read_text().splitlines()]
    measured = {(row["model"], row["layout"]): row["bytes"] for row in rows if row["ranks"] == 2}
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    print(f"{'model':<8}{'measured':>10}{'plan':>8}{'tracker':>9}{'its time':>10}  layout")
    for name, model in [("gpt", Own(_build_own)), *MODELS.items()]:
        if (name, next(iter(LAYOUTS))) not in measured:
            continue
        demands = Demands(describe(name, 2)[0], CLUSTER)
        for layout, (reshards, recomputes) in LAYOUTS.items():
            truth, demand = measured[name, layout], demands.count(Layout.parse(layout).resolve(2))
            begin_s = time.perf_counter()
            try:
                other = f"{estimate(model, reshards=reshards, recomputes=recomputes) / truth - 1:+.1%}"
            except Exception as error:
                other = type(error).__name__
            took_s, own = (
                time.perf_counter() - begin_s,
                (demand.total - demand.terms["libraries"]) / truth - 1,
            )
            print(f"{name:<8}{truth / 1e6:>7.1f} MB{own:>+8.1%}{other:>9}{took_s:>8.1f} s  {layout}")


if __name__ == "__main__":
    main()
