"""Actor and critic under DDP; the critic's gradients pile up."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def rollout(policy, steps=128):
    observations = torch.randn(steps, 24)
    actions = policy(observations)
    return observations, actions, torch.randn(steps, 1)


def main():
    dist.init_process_group("gloo")
    actor = DDP(torch.nn.Sequential(torch.nn.Linear(24, 64), torch.nn.Tanh(), torch.nn.Linear(64, 4)))
    critic = DDP(torch.nn.Sequential(torch.nn.Linear(24, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1)))
    actor_optimizer = torch.optim.Adam(actor.parameters(), lr=3e-4)
    critic_optimizer = torch.optim.Adam(critic.parameters(), lr=1e-3)
    for iteration in range(500):
        observations, actions, returns = rollout(actor)
        values = critic(observations)
        value_loss = (values - returns).pow(2).mean()
        value_loss.backward()
        critic_optimizer.step()  # PL030
        advantage = returns - values.detach()
        policy_loss = -(actions.log_softmax(-1).max(dim=-1, keepdim=True).values * advantage).mean()
        actor_optimizer.zero_grad()
        policy_loss.backward()
        actor_optimizer.step()


if __name__ == "__main__":
    main()
