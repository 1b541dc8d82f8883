"""Classes of the script itself in DataLoader workers (fork and spawn) and through pickle."""

import multiprocessing
import os
import pickle
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, DistributedSampler, get_worker_info


@dataclass
class Sample:
    index: int
    value: torch.Tensor
    worker: int


class Squares(Dataset):
    def __init__(self, size: int) -> None:
        self.size = size
        self.reads = 0

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Sample:
        self.reads += 1
        info = get_worker_info()
        return Sample(index, torch.tensor(float(index)) ** 2 + self.reads * 1000, info.id if info else -1)


def collate(samples: list[Sample]) -> tuple[list[int], torch.Tensor, set[int]]:
    values = torch.stack([sample.value for sample in samples])
    return [sample.index for sample in samples], values, {sample.worker for sample in samples}


def seed_worker(worker: int) -> None:
    torch.manual_seed(worker)


def square(number: int) -> tuple[int, str]:
    return number * number, multiprocessing.current_process().name.split("-")[0]


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for method in ("fork", "spawn"):
        dataset = Squares(16)
        loader = DataLoader(
            dataset,
            batch_size=4,
            sampler=DistributedSampler(dataset, shuffle=False),
            num_workers=1,
            collate_fn=collate,
            worker_init_fn=seed_worker,
            multiprocessing_context=method,
            persistent_workers=True,
        )
        for epoch in range(2):
            for indices, values, workers in loader:
                print(f"[{rank}] {method} {epoch} {indices} {values.tolist()} by {workers}")

    sample = Sample(3, torch.ones(2), rank)
    again = pickle.loads(pickle.dumps(sample))
    print(f"[{rank}] {type(again) is Sample} {type(again).__module__} {again}")
    objects: list[Sample | None] = [None] * dist.get_world_size()
    dist.all_gather_object(objects, sample)
    print(f"[{rank}] gathered {[each.worker for each in objects if each]}")
    with multiprocessing.get_context("fork").Pool(1) as pool:
        print(f"[{rank}] pool {pool.map(square, range(4))} from {multiprocessing.current_process().name}")
    print(f"[{rank}] parent {multiprocessing.parent_process()}, children see RANK {os.environ['RANK']}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
