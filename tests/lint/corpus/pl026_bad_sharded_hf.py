import torch.distributed as dist
from datasets import load_dataset
from torch.utils.data import DataLoader, DistributedSampler


def build():
    data = load_dataset("imdb", split="train")
    data = data.shard(num_shards=dist.get_world_size(), index=dist.get_rank())
    sampler = DistributedSampler(data, shuffle=False)  # PL026
    return DataLoader(data, batch_size=8, sampler=sampler)


dist.init_process_group("gloo")
build()
