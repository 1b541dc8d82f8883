import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def train(model, optimizer, steps):
    model.train()
    optimizer.zero_grad()
    for _ in range(steps):
        loss = model(torch.randn(8, 4)).pow(2).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()  # PL030


def main():
    dist.init_process_group("gloo")
    model = DDP(torch.nn.Linear(4, 1))
    train(model, torch.optim.AdamW(model.parameters()), 100)


main()
