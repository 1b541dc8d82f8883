import torch
import torch.distributed as dist

dist.init_process_group("gloo")
if dist.get_rank() == 0:
    torch.save(torch.ones(1), "first.pt")
    print(torch.load("first.pt", map_location="cpu"))
dist.barrier()
