import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP


def main():
    dist.init_process_group("nccl")
    torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    model = torch.nn.Linear(8, 8).cuda()
    opt = torch.optim.Adam(model.parameters())  # PL052
    model = FSDP(model)
    for _ in range(10):
        opt.zero_grad()
        model(torch.randn(4, 8).cuda()).mean().backward()
        opt.step()


main()
