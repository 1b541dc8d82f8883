import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

DEFAULTS = {"width": 16, "depth": 2, "steps": 30}


def write_local_config(rank):
    """Machines keep their own settings; the first one was changed last week."""
    config = dict(DEFAULTS)
    if rank == 0:
        config["depth"] = 3
    folder = Path(f"node-{rank}")
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder / "config.json"


def build(config):
    layers = []
    for _ in range(config["depth"]):
        layers += [torch.nn.Linear(config["width"], config["width"]), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers)


def train(model, config):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(config["steps"]):
        loss = model(torch.randn(4, config["width"])).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


def main():
    rank = int(os.environ["RANK"])
    config = json.loads(write_local_config(rank).read_text())
    dist.init_process_group("gloo")
    model = DDP(build(config))  # CAUSE
    print(f"rank {rank}: {train(model, config):.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
