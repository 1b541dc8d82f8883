"""A training as people write them, which knows nothing of Paceline: DDP and AdamW, and a clock.

Trains a byte-level transformer of 0.13M parameters on bytes of its own making, in blocks of steps. Before
each of them every rank waits for a line from its pipe, GATE/go-RANK, so that none waits for another there;
after it rank 0 writes one to GATE/done, in JSON: the seconds that the timed steps took on the slowest rank,
and the seconds that all ranks computed meanwhile.
"""

import argparse
import json
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

VOCABULARY, WIDTH, HEADS, LAYERS, FFN = 256, 64, 4, 2, 208
SEQ_LEN, BATCH_SIZE = 96, 4


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Embedding(SEQ_LEN, WIDTH)
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, FFN, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(SEQ_LEN))

    def forward(self, x):
        h = self.tokens(x) + self.places(torch.arange(x.shape[1]))
        return self.head(self.norm(self.layers(h, mask=self.mask, is_causal=True)))


def batches(rank):
    generator = torch.Generator().manual_seed(rank)
    data = torch.randint(VOCABULARY, (100_000,), generator=generator)
    while True:
        starts = torch.randint(len(data) - SEQ_LEN - 1, (BATCH_SIZE, 1), generator=generator)
        rows = data[starts + torch.arange(SEQ_LEN + 1)]
        yield rows[:, :-1], rows[:, 1:]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--blocks", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True, help="timed ones of a block")
    parser.add_argument("--warm-up", type=int, required=True, help="steps before these")
    parser.add_argument("--gate", type=Path, required=True)
    args = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(Model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    loss_of = nn.CrossEntropyLoss()
    data = batches(dist.get_rank())
    for _ in range(args.blocks):
        (args.gate / f"go-{dist.get_rank()}").read_text()
        found = run_block(model, optimizer, loss_of, data, args)
        if dist.get_rank() == 0:
            (args.gate / "done").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def run_block(model, optimizer, loss_of, data, args):
    for step in range(args.warm_up + args.steps):
        if step == args.warm_up:
            dist.barrier()
            start_s, start_cpu_s = time.perf_counter(), time.process_time()
        x, y = next(data)
        optimizer.zero_grad()
        loss = loss_of(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        optimizer.step()
    took = torch.tensor([time.perf_counter() - start_s], dtype=torch.float64)
    computed = torch.tensor([time.process_time() - start_cpu_s], dtype=torch.float64)
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    dist.all_reduce(computed)
    return {
        "num_parameters": sum(p.numel() for p in model.parameters()),
        "took_s": took.item(),
        "computed_s": computed.item(),
        "loss": loss.item(),
    }


if __name__ == "__main__":
    main()
