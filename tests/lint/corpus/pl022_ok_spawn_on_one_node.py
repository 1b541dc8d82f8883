import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.utils.data import DistributedSampler, TensorDataset


def work(local_rank, world_size):
    dist.init_process_group(
        "nccl", init_method="tcp://127.0.0.1:29501", rank=local_rank, world_size=world_size
    )
    DistributedSampler(TensorDataset(torch.randn(100, 4)), world_size, local_rank)


if __name__ == "__main__":
    count = torch.cuda.device_count()
    mp.spawn(work, args=(count,), nprocs=count)
