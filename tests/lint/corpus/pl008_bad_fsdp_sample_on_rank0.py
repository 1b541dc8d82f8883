import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

dist.init_process_group("nccl")
model = FSDP(torch.nn.Linear(64, 64), device_id=dist.get_rank() % 8)
model.eval()
if dist.get_rank() == 0:
    with torch.no_grad():
        print(model(torch.randn(1, 64)).argmax())  # PL008
