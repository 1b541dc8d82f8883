import torch
import torch.distributed as dist


def gather(x):
    out = [torch.zeros_like(x) for _ in range(torch.cuda.device_count())]
    dist.all_gather(out, x)  # PL012
    return torch.cat(out)


dist.init_process_group("nccl")
gather(torch.ones(3, device="cuda"))
