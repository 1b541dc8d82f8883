import paceline
import torch
from torch.utils.data import DataLoader, TensorDataset

with paceline.start() as world:
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loop = paceline.Loop(model, optimizer, microbatch_size=2)
    for step in loop.loader(DataLoader(TensorDataset(torch.randn(64, 4)), batch_size=8), epochs=1):
        for (x,) in step:
            loss = model(x).square().mean()
            if loss > 100:
                continue
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step.number % 10 == 0 and world.rank == 0:
            print(step.grad_norm)
