"""Plays a simulator whose C library is called through ctypes."""

import ctypes

import torch
import torch.distributed as dist
from torch import nn

# The library isn't thread-safe: it is called with the interpreter's lock held.
libc = ctypes.PyDLL(None)


class Simulator:
    def __init__(self, rank):
        self.rank = rank
        self.steps = 0

    def reset(self):
        self.steps = 0
        return torch.zeros(4)

    def step(self, action):
        self.steps += 1
        self.settle(0 if self.rank == 0 or self.steps < 25 else 600)
        return torch.tanh(action + 0.1 * self.steps), -action.abs().sum()

    def settle(self, seconds):
        libc.sleep(seconds)  # CAUSE


def rollout(policy, simulator, length):
    state, total = simulator.reset(), 0.0
    for _ in range(length):
        state, reward = simulator.step(policy(state))
        total = total + reward
    return total


def update(policy, optimizer, reward):
    optimizer.zero_grad()
    (-reward).backward()
    for parameter in policy.parameters():
        dist.all_reduce(parameter.grad)  # WAITS
    optimizer.step()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    policy = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(policy.parameters(), lr=1e-3)
    simulator = Simulator(rank)
    for episode in range(30):
        reward = rollout(policy, simulator, length=20 + episode)
        update(policy, optimizer, reward)
        if rank == 0 and episode % 10 == 0:
            print(f"episode {episode}: {reward.item():.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
