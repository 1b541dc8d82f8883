import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def work(rank, world_size):
    dist.init_process_group("nccl", init_method="tcp://localhost:23456", rank=rank, world_size=world_size)
    x = torch.ones(1, device=f"cuda:{rank}")
    dist.all_reduce(x)
    x /= world_size


if __name__ == "__main__":
    mp.spawn(work, args=(torch.cuda.device_count(),), nprocs=torch.cuda.device_count())
