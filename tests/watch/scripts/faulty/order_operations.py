import torch
import torch.distributed as dist
from torch import nn


class Trainer:
    def __init__(self, model, lr):
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        self.scale = torch.ones(1)
        self.seen = torch.zeros(1)

    def share_weights(self):
        for tensor in self.model.state_dict().values():
            dist.broadcast(tensor, src=0)

    def step(self, x, y):
        loss = nn.functional.mse_loss(self.model(x), y)
        self.optimizer.zero_grad()
        loss.backward()
        for parameter in self.model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= self.world_size
        self.optimizer.step()
        self.seen += len(x)
        return loss.item()

    def share_scale(self):
        dist.broadcast(self.scale, src=0)  # CAUSE

    def total_seen(self):
        total = self.seen.clone()
        dist.all_reduce(total)  # WAITS
        return int(total.item())

    def end_epoch(self, epoch):
        if self.rank == 0:
            self.scale *= 0.9
            self.share_scale()
            print(f"epoch {epoch}: {self.total_seen()} samples", flush=True)
        else:
            total = self.total_seen()
            self.share_scale()
            assert total % self.world_size == 0
        for group in self.optimizer.param_groups:
            group["lr"] *= self.scale.item()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    trainer = Trainer(nn.Linear(6, 2), lr=0.05)
    trainer.share_weights()
    for epoch in range(10):
        for _ in range(20):
            x = torch.randn(8, 6)
            trainer.step(x, x[:, :2] * 2)
        trainer.end_epoch(epoch)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
