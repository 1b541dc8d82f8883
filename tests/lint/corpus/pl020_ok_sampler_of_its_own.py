"""A sampler that repeats samples and takes this rank's part, as detection codebases write it."""

import itertools

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Sampler
from torchvision.datasets import CocoDetection


class TrainingSampler(Sampler):
    """An endless stream of shuffled indices."""

    def __init__(self, size, seed=0):
        self._size = size
        self._seed = seed
        self._rank = dist.get_rank()
        self._world_size = dist.get_world_size()

    def __iter__(self):
        yield from itertools.islice(self._infinite_indices(), self._rank, None, self._world_size)

    def _infinite_indices(self):
        g = torch.Generator()
        g.manual_seed(self._seed)
        while True:
            yield from torch.randperm(self._size, generator=g).tolist()


def main():
    dist.init_process_group("nccl")
    torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    dataset = CocoDetection("images", "instances.json")
    loader = DataLoader(dataset, batch_size=2, sampler=TrainingSampler(len(dataset)), collate_fn=list)
    model = DDP(build_detector().cuda())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    for iteration, batch in zip(range(90000), loader):
        losses = model(batch)
        loss = sum(losses.values())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
