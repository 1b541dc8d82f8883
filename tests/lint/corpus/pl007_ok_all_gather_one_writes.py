"""All ranks gather the sharded weights; one writes them."""

import os

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard

dist.init_process_group("nccl")
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
model = GPT().cuda()
for block in model.blocks:
    fully_shard(block)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
for step, tokens in enumerate(batches(dist.get_rank())):
    model(tokens.cuda()).backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 5000 == 0:
        state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if dist.get_rank() == 0:
            torch.save(state, f"model_{step}.pt")
        dist.barrier()
