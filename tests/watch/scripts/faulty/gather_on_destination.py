import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def get_data():
    x = torch.randn(96, 8, generator=torch.Generator().manual_seed(5))
    return TensorDataset(x, (x[:, 0] > 0).long())


class Evaluator:
    def __init__(self, model, loader, destination=0):
        self.model = model
        self.loader = loader
        self.destination = destination

    @torch.no_grad()
    def scores(self):
        parts = [self.model.module(x).softmax(dim=1)[:, 1] for x, _ in self.loader]
        return torch.cat(parts)

    def collect(self, scores):
        rows = [torch.empty_like(scores) for _ in range(dist.get_world_size())]
        dist.gather(scores, rows, dst=self.destination)  # WAITS
        return torch.cat(rows)


def train(model, loader, optimizer):
    for x, y in loader:
        loss = torch.nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    dataset = get_data()
    loader = DataLoader(dataset, batch_size=8, sampler=DistributedSampler(dataset))
    model = DDP(torch.nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    evaluator = Evaluator(model, loader)
    for epoch in range(3):
        train(model, loader, optimizer)
        scores = evaluator.scores()
        if rank == evaluator.destination:
            everyone = evaluator.collect(scores)
            print(f"epoch {epoch}: {len(everyone)} scores, mean {everyone.mean():.3f}", flush=True)
        dist.barrier()  # CAUSE
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
