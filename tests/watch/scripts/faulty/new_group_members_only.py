"""Two ranks train, the others test; in the end all compare notes in a group of their own."""

import torch
import torch.distributed as dist

TRAINERS = [0, 1]


def build():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(5, 10), torch.nn.ReLU(), torch.nn.Linear(10, 1))


def train(steps=40):
    group = dist.new_group(TRAINERS)
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(steps):
        loss = model(torch.randn(8, 5)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, group=group)
        optimizer.step()
    return loss.detach()


def try_out(batches=20):
    model = build()
    with torch.no_grad():
        losses = [model(torch.randn(64, 5)).pow(2).mean() for _ in range(batches)]
    return torch.stack(losses).mean()


def compare(value):
    notes = dist.new_group(group_desc="notes")  # WAITS CAUSE
    values = [torch.zeros(()) for _ in range(dist.get_world_size())]
    dist.all_gather(values, value, group=notes)  # CAUSE
    return [round(v.item(), 4) for v in values]


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    value = train() if rank in TRAINERS else try_out()
    values = compare(value)
    if rank == 0:
        print(f"trained: {values[:2]}, tested: {values[2:]}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
