import logging
import os
import time

import torch
import torch.distributed as dist
from torch import nn

logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
log = logging.getLogger("train")


def average(value):
    tensor = torch.tensor([value], dtype=torch.float32)
    dist.all_reduce(tensor, op=dist.ReduceOp.SUM)  # WAITS
    return tensor.item() / dist.get_world_size()


def log_metrics(step, loss, started):
    speed = step / (time.time() - started)
    log.info("step %d loss %.4f, %.1f steps/s", step, average(loss), speed)


def sync_gradients(model):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)  # CAUSE
        parameter.grad /= dist.get_world_size()


class Net(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.inner = nn.Linear(10, width)
        self.outer = nn.Linear(width, 3)

    def forward(self, x):
        return self.outer(torch.tanh(self.inner(x)))


def main():
    dist.init_process_group(backend="gloo")
    is_main = int(os.environ["RANK"]) == 0
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    torch.manual_seed(dist.get_rank())
    started = time.time()
    for step in range(1, 201):
        x, y = torch.randn(8, 10), torch.randint(0, 3, (8,))
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        sync_gradients(model)
        optimizer.step()
        if is_main and step % 20 == 0:
            log_metrics(step, loss.item(), started)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
