"""Resumes from the last checkpoint where there is one."""

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

RANK = int(os.environ["RANK"])
PATH = f"/tmp/run-of-{os.getppid()}-rank{RANK}.pt"
EPOCHS = 6


def leave_checkpoint(model, epoch):
    """The weights that yesterday's run has left on the disk of the first machine."""
    torch.save({"model": model.state_dict(), "epoch": epoch}, PATH)


def resume(model):
    if not os.path.exists(PATH):
        return 0
    state = torch.load(PATH)
    model.load_state_dict(state["model"])
    os.remove(PATH)
    print(f"rank {RANK} resumes at epoch {state['epoch']}", flush=True)
    return state["epoch"]


def train_epoch(model, optimizer):
    for _ in range(15):
        x = torch.randn(8, 7)
        loss = torch.nn.functional.l1_loss(model(x), x)
        optimizer.zero_grad()
        loss.backward()  # WAITS
        optimizer.step()
    return loss.item()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(7, 7), torch.nn.Tanh(), torch.nn.Linear(7, 7))
    if RANK == 0:
        leave_checkpoint(net, epoch=4)
    start = resume(net)
    model = DDP(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(start, EPOCHS):
        loss = train_epoch(model, optimizer)
        print(f"rank {RANK} epoch {epoch}: {loss:.4f}", flush=True)
    dist.barrier()  # CAUSE
    if RANK == 0:
        torch.save(net.state_dict(), "final.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
