import itertools

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class Stream(IterableDataset):
    def __iter__(self):
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        for i in itertools.count(first, step):
            yield torch.full((10,), float(i))


def main():
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(10, 10))
    opt = torch.optim.SGD(model.parameters(), 0.1)
    loader = DataLoader(Stream(), batch_size=8, num_workers=2)  # PL021
    for step, x in zip(range(100), loader):
        opt.zero_grad()
        model(x).mean().backward()
        opt.step()


main()
