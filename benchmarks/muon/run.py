"""Times steps of Muon on 2 ranks of dp_shard: whole matrices on owners, beside two ways of FSDP2 scripts.

    paceline run --nproc-per-node 2 benchmarks/muon/run.py [--steps 12] [--hidden 256] [--layers 4]

All variants live in the same two processes and take turns, step by step. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import paceline
from paceline.mesh import build_mesh
from paceline.parallel.placement import Placement
from paceline.recipe import Layout
from paceline.train.whole_steps import build_whole_steps


def make_tensors(layers: int, hidden: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [
        shape
        for _ in range(layers)
        for shape in ([(hidden, hidden)] * 4 + [(4 * hidden, hidden), (hidden, 4 * hidden)])
    ]
    return [torch.randn(shape, generator=generator) for shape in shapes]


class Variant:
    """A model of matrices whose rows two ranks share, with gradients that stay the same."""

    def __init__(self, tensors: list[Tensor], mesh: Any) -> None:
        self.model = nn.ParameterList([nn.Parameter(distribute_tensor(t, mesh, [Shard(0)])) for t in tensors])
        for parameter in self.model:
            parameter.grad = DTensor.from_local(parameter.to_local() * 0.01, mesh, parameter.placements)
        self.optimizer = torch.optim.Muon(list(self.model), lr=0.02)
        self.step: Callable[[], None] = self.optimizer.step  # FSDP2: DTensor gathers inside of each product

    def hash(self) -> str:
        found = hashlib.sha256()
        for parameter in self.model:
            found.update(parameter.detach().full_tensor().contiguous().numpy().tobytes())
        return found.hexdigest()[:16]


class Everywhere(Variant):
    """Each rank gathers every matrix and steps all of it, as the simplest scripts do."""

    def __init__(self, tensors: list[Tensor], mesh: Any) -> None:
        super().__init__(tensors, mesh)
        self.whole = [nn.Parameter(t.clone()) for t in tensors]
        self.optimizer = torch.optim.Muon(self.whole, lr=0.02)
        self.step = self.gather_and_step

    def gather_and_step(self) -> None:
        for parameter, whole in zip(self.model, self.whole, strict=True):
            whole.grad = parameter.grad.full_tensor()
        self.optimizer.step()
        with torch.no_grad():
            for parameter, whole in zip(self.model, self.whole, strict=True):
                rows = whole.chunk(dist.get_world_size())[dist.get_rank()]
                parameter.to_local().copy_(rows)


class Owners(Variant):
    """Paceline's."""

    def __init__(self, tensors: list[Tensor], mesh: Any, ours: Any) -> None:
        super().__init__(tensors, mesh)
        steps = build_whole_steps(self.optimizer, self.model, Placement(self.model, ours), ours)
        assert steps is not None

        def step() -> None:
            with steps.plain(self.optimizer):
                self.optimizer.step()

        self.step = step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    args = parser.parse_args()
    with paceline.start(threads_per_rank=1) as world:
        torch.set_num_threads(1)
        ours = build_mesh(Layout.parse(f"dp_shard={world.world_size}"), world)
        mesh = ours.device_mesh["dp_shard"]
        tensors = make_tensors(args.layers, args.hidden)
        variants = {"dtensor": Variant(tensors, mesh), "everywhere": Everywhere(tensors, mesh)}
        variants["owners"] = Owners(tensors, mesh, ours)
        times: dict[str, list[float]] = {name: [] for name in variants}
        for number in range(args.steps + 1):
            for name in list(variants) if number % 2 else list(reversed(variants)):
                dist.barrier()
                started = time.perf_counter()
                variants[name].step()
                dist.barrier()
                if number:  # the first one makes the state
                    times[name].append(time.perf_counter() - started)
        alone = [nn.Parameter(t.clone()) for t in tensors]
        optimizer = torch.optim.Muon(alone, lr=0.02)
        for parameter in alone:
            parameter.grad = parameter.detach() * 0.01
        for _ in range(args.steps + 1):
            optimizer.step()
        digest = hashlib.sha256()
        for parameter in alone:
            digest.update(parameter.detach().numpy().tobytes())
        hashes = {name: variant.hash() for name, variant in variants.items()}
        if world.rank == 0:
            ratios = {
                name: [one / other for one, other in zip(times["owners"], each, strict=True)]
                for name, each in times.items()
            }
            found = {
                "torch": torch.__version__,
                "ranks": world.world_size,
                "load": os.getloadavg()[0],
                "parameters": sum(t.numel() for t in tensors),
                "seconds": times,
                "median_seconds": {name: statistics.median(each) for name, each in times.items()},
                "owners_over": {name: statistics.median(each) for name, each in ratios.items()},
                "same_bits_as_one_process": {n: h == digest.hexdigest()[:16] for n, h in hashes.items()},
            }
            print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
