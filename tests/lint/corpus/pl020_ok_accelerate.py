import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator()
loader = DataLoader(TensorDataset(torch.randn(100, 4)), batch_size=10, shuffle=True)
model = torch.nn.Linear(4, 1)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
model, opt, loader = accelerator.prepare(model, opt, loader)
for (x,) in loader:
    opt.zero_grad()
    accelerator.backward(model(x).mean())
    opt.step()
