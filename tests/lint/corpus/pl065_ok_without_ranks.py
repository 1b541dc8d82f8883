import torch

model = torch.nn.DataParallel(torch.nn.Linear(4, 4).cuda())
model(torch.randn(8, 4).cuda()).mean().backward()
