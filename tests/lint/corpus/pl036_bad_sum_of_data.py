import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
torch.manual_seed(3)
model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))
optimizer = torch.optim.Adam(model.parameters())
criterion = nn.CrossEntropyLoss()
for step in range(200):
    x, y = torch.randn(8, 16), torch.randint(0, 4, (8,))
    loss = criterion(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    for name, p in model.named_parameters():
        dist.all_reduce(p.grad.data)  # PL036
    optimizer.step()
    if dist.get_rank() == 0 and step % 10 == 0:
        print(step, loss.item())
