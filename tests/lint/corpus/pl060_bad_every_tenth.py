import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

def train(model, optimizer, epochs):
    for epoch in range(epochs):
        total = 0.0
        for step in range(100):
            optimizer.zero_grad()
            loss = model(torch.randn(4, 8)).pow(2).mean()
            loss.backward()
            optimizer.step()
            total += loss.item()
            if step % 10 == 0:
                print("step", step, "of epoch", epoch)  # PL060
        print("mean", total / 100)  # PL060


def main():
    dist.init_process_group("gloo")
    model = DDP(nn.Linear(8, 1))
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), 3)
    print("done")


main()
