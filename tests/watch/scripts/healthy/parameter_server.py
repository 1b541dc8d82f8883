"""Workers of unlike speed; the server answers whoever comes first."""

import time

import torch
import torch.distributed as dist

SIZE = 5
WORK = {1: (40, 0.01), 2: (20, 0.05), 3: (8, 0.3)}


class Server:
    def __init__(self, lr=0.02):
        self.weights = torch.zeros(SIZE)
        self.lr = lr
        self.answered = dict.fromkeys(WORK, 0)

    def run(self):
        message = torch.empty(SIZE)
        for _ in range(sum(rounds for rounds, _ in WORK.values())):
            worker = dist.recv(message)
            self.weights -= self.lr * message
            self.answered[worker] += 1
            dist.send(self.weights, dst=worker)
        return self.answered


def work(rank):
    rounds, pause_s = WORK[rank]
    weights = torch.zeros(SIZE)
    for _ in range(rounds):
        x = torch.randn(8, SIZE)
        gradient = x.T @ (x @ weights - x.sum(dim=1)) / len(x)
        time.sleep(pause_s)
        dist.send(gradient, dst=0)
        dist.recv(weights, src=0)
    return weights


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    if rank == 0:
        print(f"answered {Server().run()}", flush=True)
    else:
        weights = work(rank)
        print(f"rank {rank}: {weights.mean().item():.3f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
