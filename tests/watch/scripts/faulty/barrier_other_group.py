"""Two teams train a generator each; at the end of a round all meet."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


class Team:
    def __init__(self, number, ranks, group):
        self.number = number
        self.ranks = ranks
        self.group = group
        self.leader = ranks[0]

    @property
    def is_leader(self):
        return dist.get_rank() == self.leader


def make_teams():
    half = dist.get_world_size() // 2
    members = [list(range(half)), list(range(half, 2 * half))]
    groups = [dist.new_group(ranks, group_desc=f"team{i}") for i, ranks in enumerate(members)]
    number = 0 if dist.get_rank() < half else 1
    return Team(number, members[number], groups[number])


def train_round(model, optimizer):
    for _ in range(10):
        loss = model(torch.randn(4, 8)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


def save_round(team, model, number):
    if team.is_leader:
        torch.save(model.module.state_dict(), f"team{team.number}-{number}.pt")
        dist.barrier(group=team.group)  # CAUSE
    else:
        dist.barrier()  # WAITS


def main():
    dist.init_process_group("gloo")
    team = make_teams()
    model = DDP(torch.nn.Linear(8, 8), process_group=team.group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(5):
        loss = train_round(model, optimizer)
        save_round(team, model, number)
        print(f"rank {dist.get_rank()} round {number}: {loss:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
