import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard

dist.init_process_group("nccl")
model = torch.nn.Linear(8, 8)
fully_shard(model)
options = StateDictOptions(full_state_dict=True, cpu_offload=True)
state = get_model_state_dict(model, options=options)
if dist.get_rank() == 0:
    torch.save(state, "model.pt")
