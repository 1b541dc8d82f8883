import functools

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy
from torch.nn.utils import clip_grad_norm_


def train_step(model, optimizer, x, max_norm):
    loss = model(x).float().logsumexp(-1).mean()
    loss.backward()
    if max_norm > 0:
        clip_grad_norm_(model.parameters(), max_norm)  # PL035
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss


def main():
    dist.init_process_group("gloo")
    policy = functools.partial(size_based_auto_wrap_policy, min_num_params=1000)
    model = FullyShardedDataParallel(
        nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32)),
        auto_wrap_policy=policy,
        sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(10):
        train_step(model, optimizer, torch.randn(8, 32), 1.0)


if __name__ == "__main__":
    main()
