import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def step(model, optimizer, batch):
    optimizer.zero_grad(set_to_none=True)
    try:
        loss = model(batch).sum()
        loss.backward()
    except torch.cuda.OutOfMemoryError:  # PL005
        torch.cuda.empty_cache()
        return None
    optimizer.step()
    return loss


def main():
    dist.init_process_group("nccl")
    device = dist.get_rank() % torch.cuda.device_count()
    torch.cuda.set_device(device)
    model = DistributedDataParallel(nn.Linear(8, 8).to(device), device_ids=[device])
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(100):
        step(model, optimizer, torch.randn(4, 8, device=device))


main()
