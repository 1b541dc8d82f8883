"""All ranks save and load a sharded checkpoint together."""

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard


def build():
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(10, 30), nn.ReLU(), nn.Linear(30, 10))
    fully_shard(model[0])
    fully_shard(model[2])
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def train(model, optimizer, steps):
    torch.manual_seed(dist.get_rank())  # samples of its own
    for _ in range(steps):
        x = torch.randn(8, 10)
        loss = (model(x) - x).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


def save(model, optimizer, folder):
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder)


def load(model, optimizer, folder):
    weights, state = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)


def main():
    dist.init_process_group("gloo")
    model, optimizer = build()
    train(model, optimizer, steps=10)
    save(model, optimizer, "checkpoint")
    again, again_optimizer = build()
    load(again, again_optimizer, "checkpoint")
    loss = train(again, again_optimizer, steps=10)
    if dist.get_rank() == 0:
        print(f"resumed, loss {loss:.4f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
