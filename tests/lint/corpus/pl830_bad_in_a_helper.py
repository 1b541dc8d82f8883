import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import os


def resume(path, model):
    state = torch.load(path, map_location="cpu", weights_only=True)
    model.load_state_dict(state["model"])
    torch.random.set_rng_state(state["torch_rng"])  # PL830
    return state["epoch"]


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(100 + int(os.environ["RANK"]))
    model = DDP(nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(resume("run/last.pt", model), 10):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).pow(2).mean().backward()
        optimizer.step()


main()
