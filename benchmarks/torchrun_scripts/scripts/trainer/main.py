"""Entry point of the package: relative imports, a data file of the package, DDP."""

import json
import sys
from importlib import resources

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from . import VERSION
from .model import Regressor


def main(argv: list[str]) -> int:
    config = json.loads(resources.files(__package__).joinpath("config.json").read_text())
    config |= dict(word.removeprefix("--").split("=") for word in argv)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    print(f"[{rank}] version {VERSION}, config {config}")
    print(f"[{rank}] __name__ {__name__}, __package__ {__package__}, __spec__.name {__spec__.name}")
    print(f"[{rank}] parent {__spec__.parent}, __file__ {__file__}, argv {sys.argv}, path {sys.path[0]!r}")
    print(f"[{rank}] modules {sorted(name for name in sys.modules if name.startswith('trainer'))}")
    torch.manual_seed(int(config["seed"]))
    model = DistributedDataParallel(Regressor(int(config["width"])))
    optimizer = torch.optim.AdamW(model.parameters(), lr=float(config["lr"]))
    generator = torch.Generator().manual_seed(rank)
    for step in range(int(config["steps"])):
        x = torch.randn(32, 2, generator=generator)
        loss = (model(x) - x.prod(dim=1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 5 == 0:
            print(f"[{rank}] step {step}: loss {loss.item():.4f}")
    dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
