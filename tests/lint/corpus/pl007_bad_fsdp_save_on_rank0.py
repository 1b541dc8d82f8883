"""FSDP in the style of recipes: the state dict is taken on rank 0 only."""

import functools
import os

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullStateDictConfig, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

dist.init_process_group("nccl")
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})
model = FSDP(GPT(), auto_wrap_policy=policy, device_id=torch.cuda.current_device())
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
for step, (x, y) in enumerate(batches(dist.get_rank())):
    loss = model(x.cuda(), y.cuda())
    loss.backward()
    model.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    if step % 5000 == 0 and dist.get_rank() == 0:
        full = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
        with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, full):
            torch.save(model.state_dict(), f"model_{step}.pt")  # PL007
dist.destroy_process_group()
