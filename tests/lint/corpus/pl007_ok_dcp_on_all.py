import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import fully_shard

dist.init_process_group("nccl")
model = torch.nn.Linear(8, 8)
fully_shard(model)
dcp.save({"model": model.state_dict()}, checkpoint_id="ckpt")
if dist.get_rank() == 0:
    print("saved")
