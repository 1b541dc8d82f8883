"""A parameter server: workers send gradients to rank 0 and get weights back."""

import torch
import torch.distributed as dist

ROUNDS = 40
SIZE = 6


class Server:
    def __init__(self, num_workers, lr=0.05):
        self.weights = torch.zeros(SIZE)
        self.num_workers = num_workers
        self.lr = lr

    def serve(self, rounds):
        gradient = torch.empty(SIZE)
        for _ in range(rounds):
            for worker in range(1, self.num_workers + 1):
                dist.recv(gradient, src=worker)
                self.weights -= self.lr * gradient / self.num_workers
            dist.broadcast(self.weights, src=0)  # CAUSE


class Worker:
    def __init__(self, rank):
        self.rank = rank
        self.weights = torch.zeros(SIZE)

    def gradient(self):
        x = torch.randn(8, SIZE)
        residual = x @ self.weights - x.sum(dim=1)
        return x.T @ residual / len(x)

    def work(self, rounds):
        for number in range(rounds):
            dist.send(self.gradient(), dst=0)
            if self.rank == 2 and number % 10 == 9:
                # A second gradient now and then: this worker has the larger part of the data.
                dist.send(self.gradient(), dst=0)  # WAITS
            dist.broadcast(self.weights, src=0)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    if rank == 0:
        server = Server(dist.get_world_size() - 1)
        server.serve(ROUNDS)
        print(f"weights {server.weights.tolist()}", flush=True)
    else:
        Worker(rank).work(ROUNDS)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
