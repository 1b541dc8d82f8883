import torch
import torch.distributed as dist


def collect(loss):
    rank = dist.get_rank()
    if rank == 0:
        everyone = [torch.zeros_like(loss) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, loss)  # PL002
        return torch.stack(everyone).mean()
    else:
        dist.all_reduce(loss)
        return loss / dist.get_world_size()


dist.init_process_group("nccl")
collect(torch.ones(1).cuda())
dist.destroy_process_group()
