"""Sharded training with torch.distributed.checkpoint."""

import argparse

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--folder", default="checkpoint")
    return parser.parse_args()


def build(mesh):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 12))
    fully_shard(model, mesh=mesh)
    return model


def save(model, optimizer, folder):
    weights, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": optimizer_state}, checkpoint_id=folder)  # WAITS


def train_step(model, optimizer):
    x = torch.randn(6, 12)
    loss = (model(x) - x).pow(2).mean()  # CAUSE
    optimizer.zero_grad()
    loss.backward()  # CAUSE
    optimizer.step()
    return loss.item()


def main():
    args = parse()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))
    model = build(mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(1, args.steps + 1):
        loss = train_step(model, optimizer)
        if step % args.save_every == 0 and rank == 0:
            save(model, optimizer, f"{args.folder}/{step}")
            print(f"step {step}: saved, loss {loss:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
