import torch
import torch.distributed as dist
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp


def run(rank, size):
    if rank == 3:
        rpc.init_rpc("server", rank=rank, world_size=size)
    else:
        dist.init_process_group("gloo", "tcp://localhost:29500", rank=rank, world_size=3)
        rpc.init_rpc(f"trainer{rank}", rank=rank, world_size=size)
        dist.all_reduce(torch.ones(1))
    rpc.shutdown()


if __name__ == "__main__":
    mp.spawn(run, args=(4,), nprocs=4)
