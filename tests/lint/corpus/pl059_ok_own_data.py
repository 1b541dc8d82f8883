import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset, random_split

dist.init_process_group("gloo")
dataset = TensorDataset(torch.load(f"{dist.get_rank()}.pt", map_location="cpu"))
train, valid = random_split(dataset, [80, 20])
loader = DataLoader(train, batch_size=8, shuffle=True)
