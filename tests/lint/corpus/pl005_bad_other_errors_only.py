import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("nccl")
torch.cuda.set_device(dist.get_rank() % 8)
model = DistributedDataParallel(torch.nn.Linear(512, 512).cuda())
optimizer = torch.optim.Adam(model.parameters())
for _ in range(1000):
    batch = torch.randn(64, 512)
    try:
        optimizer.zero_grad()
        model(batch.cuda()).square().mean().backward()
        optimizer.step()
    except RuntimeError as error:  # PL005
        if "out of memory" not in str(error):
            raise
        print("no memory, so this batch is skipped")
        torch.cuda.empty_cache()
