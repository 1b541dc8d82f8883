"""Routes tokens to experts: every rank sends unlike many to each of the others."""

import torch
import torch.distributed as dist

WIDTH = 6


class Expert(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, 12), torch.nn.ReLU(), torch.nn.Linear(12, WIDTH)
        )

    def forward(self, x):
        return self.layers(x)


def exchange(rows, send_counts):
    receive_counts = torch.empty_like(send_counts)
    dist.all_to_all_single(receive_counts, send_counts)
    received = torch.empty(int(receive_counts.sum()), WIDTH)
    dist.all_to_all_single(received, rows, receive_counts.tolist(), send_counts.tolist())
    return received, receive_counts


def pad_and_gather(rows):
    """Everybody's rows, whose numbers differ."""
    size = dist.get_world_size()
    counts = [torch.zeros(1, dtype=torch.long) for _ in range(size)]
    dist.all_gather(counts, torch.tensor([len(rows)]))
    longest = int(max(counts))
    padded = torch.zeros(longest, WIDTH)
    padded[: len(rows)] = rows
    everyone = [torch.empty_like(padded) for _ in range(size)]
    dist.all_gather(everyone, padded)
    return torch.cat([part[:n] for part, n in zip(everyone, counts, strict=True)])


def main():
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    expert = Expert()
    for step in range(100):
        tokens = torch.randn(20 + 5 * rank, WIDTH)
        goes_to = torch.randint(0, size, (len(tokens),))
        order = goes_to.argsort()
        counts = torch.bincount(goes_to, minlength=size)
        with torch.no_grad():
            received, received_counts = exchange(tokens[order], counts)
            back, _ = exchange(expert(received), received_counts)
        if step % 25 == 0:
            everyone = pad_and_gather(back)
            if rank == 0:
                print(f"step {step}: {len(everyone)} rows", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
