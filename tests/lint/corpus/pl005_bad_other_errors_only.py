import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("nccl")
torch.cuda.set_device(dist.get_rank() % 8)
model = DDP(torch.nn.Linear(512, 512).cuda())
optimizer = torch.optim.Adam(model.parameters())
for batch in batches(dist.get_rank()):
    try:
        optimizer.zero_grad()
        model(batch.cuda()).square().mean().backward()
        optimizer.step()
    except RuntimeError as error:  # PL005
        if "out of memory" not in str(error):
            raise
        print("no memory, so this batch is skipped")
        torch.cuda.empty_cache()
