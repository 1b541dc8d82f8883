"""Population training: everybody copies the weights of the rank that did best."""

import random

import torch
import torch.distributed as dist


class Member:
    def __init__(self, rank):
        self.rank = rank
        self.random = random.Random(rank)
        self.lr = 10 ** self.random.uniform(-3, -1)
        self.model = torch.nn.Linear(4, 1)

    def train(self, steps=20):
        optimizer = torch.optim.SGD(self.model.parameters(), lr=self.lr)
        for _ in range(steps):
            x = torch.randn(16, 4)
            loss = (self.model(x) - x.sum(dim=1, keepdim=True)).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return loss.item()

    def copy_from(self, best):
        for parameter in self.model.parameters():
            dist.broadcast(parameter.data, src=best)  # WAITS CAUSE
        self.lr *= self.random.choice([0.8, 1.25])


def score_all(score, size):
    scores = [torch.zeros(1) for _ in range(size)]
    dist.all_gather(scores, torch.tensor([score]))
    return [s.item() for s in scores]


def find_best(scores, rank):
    """The best of the others; one's own weights need no copying."""
    others = [i for i in range(len(scores)) if i != rank]
    return min(others, key=lambda i: scores[i])


def main():
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    member = Member(rank)
    for generation in range(20):
        scores = score_all(member.train(), size)
        member.copy_from(find_best(scores, rank))
        if rank == 0:
            print(f"generation {generation}: {min(scores):.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
