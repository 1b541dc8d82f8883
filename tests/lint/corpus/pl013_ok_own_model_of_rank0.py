import torch
import torch.distributed as dist

dist.init_process_group("gloo")
if dist.get_rank() == 0:
    probe = torch.nn.Linear(4, 1)
    opt = torch.optim.SGD(probe.parameters(), 0.1)
    for _ in range(10):
        opt.zero_grad()
        probe(torch.randn(4, 4)).sum().backward()
        opt.step()
dist.barrier()
