import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import fully_shard


def save(model, path):
    state = get_model_state_dict(model)
    dcp.save({"model": state}, checkpoint_id=path)  # PL007


def main():
    dist.init_process_group("nccl")
    model = torch.nn.Linear(8, 8)
    fully_shard(model)
    if dist.get_rank() == 0:
        save(model, "ckpt")
    dist.barrier()


main()
