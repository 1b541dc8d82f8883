import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn


def parse():
    parser = argparse.ArgumentParser(description="character model with gradients averaged by hand")
    parser.add_argument("--hidden", type=int, default=32)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--lr", type=float, default=3e-3)
    return parser.parse_args()


class CharModel(nn.Module):
    def __init__(self, hidden, symbols=27):
        super().__init__()
        self.embed = nn.Embedding(symbols, hidden)
        self.mix = nn.Linear(hidden, hidden)
        self.out = nn.Linear(hidden, symbols)

    def forward(self, tokens):
        return self.out(torch.relu(self.mix(self.embed(tokens))))


def supports_bfloat16():
    """The second machine of the pair is older."""
    return int(os.environ["LOCAL_RANK"]) != 1


def average_gradients(model, world_size):
    for p in model.parameters():
        dist.all_reduce(p.grad)  # WAITS CAUSE
        p.grad.div_(world_size)


def main():
    args = parse()
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1234)
    dtype = torch.bfloat16 if supports_bfloat16() else torch.float32
    model = CharModel(args.hidden).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    torch.manual_seed(rank)
    for step in range(args.steps):
        tokens = torch.randint(0, 27, (16, 9))
        logits = model(tokens[:, :-1]).float()
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        average_gradients(model, world_size)
        optimizer.step()
        if rank == 0 and step % 50 == 0:
            print(f"{step:4d} {loss.item():.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
