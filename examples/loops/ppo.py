"""PPO: a rollout that all ranks have whole, minibatches of it, and an early stop by the KL divergence.

python examples/loops/ppo.py
torchrun --nproc-per-node 2 examples/loops/ppo.py "dp_shard=2"
"""

import sys

import torch
from torch import nn
from torch.distributions import Categorical

import paceline

NUM_ENVIRONMENTS, LENGTH = 8, 12


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 32), nn.Tanh())
        self.actor, self.critic = nn.Linear(32, 3), nn.Linear(32, 1)

    def forward(self, states):
        features = self.body(states)
        return self.actor(features), self.critic(features).squeeze(-1)


@torch.no_grad()
def roll_out(model):
    """Play in a small world: a point is pushed back and forth and is to stay near zero."""
    states, rows = torch.randn(NUM_ENVIRONMENTS, 4), []
    for _ in range(LENGTH):
        logits, values = model(states)
        actions = Categorical(logits=logits).sample()
        following = states.roll(1, 1) * 0.8 + (actions - 1).unsqueeze(1) * 0.3
        rewards = -following.square().mean(1)
        rows.append((states, actions, Categorical(logits=logits).log_prob(actions), rewards, values))
        states = following
    states, actions, log_probs, rewards, values = (torch.stack(each) for each in zip(*rows, strict=True))
    returns = rewards.flip(0).cumsum(0).flip(0)
    columns = (states, actions, log_probs, returns, returns - values)
    return [column.flatten(0, 1) for column in columns]


def train(layout="", folder="runs/ppo", num_rollouts=4):
    torch.manual_seed(4)
    model = ActorCritic()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    loop = paceline.Loop(model, optimizer, layout=layout, microbatch_size=8, means=["kl"])
    done = loop.resume(folder)
    for rollout in range(num_rollouts):
        torch.manual_seed(100 + rollout)  # a rollout is the same on every rank and in every start
        if done > 6 * rollout:
            continue
        columns, stops = roll_out(model), False
        for _ in range(2):
            for rows in torch.randperm(NUM_ENVIRONMENTS * LENGTH).split(32):
                step = loop.split([column[rows] for column in columns])
                for states, actions, before, returns, advantages in step:
                    logits, values = model(states)
                    chosen = Categorical(logits=logits)
                    change = chosen.log_prob(actions) - before
                    ratio = change.exp()
                    clipped = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
                    loss = -clipped + 0.5 * (values - returns).square() - 0.01 * chosen.entropy()
                    step.mean("kl", (ratio - 1 - change).mean())
                    step.backward(loss.mean())
                stops = stops or step.means["kl"] > 0.5  # of the whole minibatch, so all ranks stop together
                if not stops:
                    step.clip_grad_norm_(0.5)
                    optimizer.step()
                optimizer.zero_grad()
        loop.save()
        if loop.world.is_main:
            print(f"step {loop.step_number}: loss {step.loss:.6f}")
    return loop


if __name__ == "__main__":
    with paceline.start():
        train(*sys.argv[1:])
