"""A coordinator hands out parameters, collects scores and reduces statistics to itself."""

import time

import torch
import torch.distributed as dist


def propose(size, generation):
    centre = 1.0 / (1 + generation)
    return [torch.tensor([centre * (i + 1), 0.1 * i]) for i in range(size)]


def evaluate(parameters):
    x = torch.linspace(-1, 1, 200)
    time.sleep(0.1 * float(parameters[1]))
    return ((parameters[0] * x - x.sin()) ** 2).mean().reshape(1)


def hand_out(rank, size, generation):
    mine = torch.empty(2)
    dist.scatter(mine, propose(size, generation) if rank == 0 else None, src=0)
    return mine


def collect(score, rank, size):
    scores = [torch.empty(1) for _ in range(size)] if rank == 0 else None
    dist.gather(score, scores, dst=0)
    return scores


def main():
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    best = float("inf")
    for generation in range(40):
        parameters = hand_out(rank, size, generation)
        score = evaluate(parameters)
        scores = collect(score, rank, size)
        total = score.clone()
        dist.reduce(total, dst=0, op=dist.ReduceOp.SUM)
        stop = torch.zeros(1, dtype=torch.uint8)
        if rank == 0:
            best = min(best, min(s.item() for s in scores))
            stop[0] = best < 1e-4
            if generation % 10 == 0:
                print(f"generation {generation}: {best:.5f}, sum {total.item():.4f}", flush=True)
        dist.broadcast(stop, src=0)
        if stop.item():
            break
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
