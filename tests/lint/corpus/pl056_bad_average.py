import torch
import torch.distributed as dist

dist.init_process_group("nccl")
torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
loss = torch.ones(1, device="cuda")
dist.all_reduce(loss)
loss /= torch.cuda.device_count()  # PL056
print(loss.item())
