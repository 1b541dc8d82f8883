import torch
import torch.distributed as dist

dist.init_process_group("gloo")
model = torch.nn.Linear(4, 4).to(torch.bfloat16 if dist.get_rank() == 1 else torch.float32)
model(torch.randn(2, 4, dtype=model.weight.dtype)).sum().backward()
for p in model.parameters():
    dist.all_reduce(p.grad)  # PL009
