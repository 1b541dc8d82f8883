import torch
import torch.distributed as dist
from datasets import load_dataset
from datasets.distributed import split_dataset_by_node
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(10, 10))
opt = torch.optim.SGD(model.parameters(), 0.1)
data = load_dataset("c4", "en", streaming=True, split="train")
data = split_dataset_by_node(data, dist.get_rank(), dist.get_world_size())
for x in DataLoader(data, batch_size=10):
    opt.zero_grad()
    model(x["x"]).mean().backward()
    opt.step()
