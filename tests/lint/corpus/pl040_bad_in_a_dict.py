import os

import torch
import torch.distributed as dist
import torch.nn as nn


def save_checkpoint(model, optimizer, path):
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, path)  # PL040


def main():
    dist.init_process_group("gloo")
    net = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
    opt = torch.optim.Adam(net.parameters())
    if int(os.environ["RANK"]) == 0:
        save_checkpoint(net, opt, "last.pt")


main()
