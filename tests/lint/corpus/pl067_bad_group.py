import torch.distributed as dist

TIMEOUT = 30.0
dist.init_process_group("nccl")
group = dist.new_group(backend="gloo", timeout=TIMEOUT)  # PL067
