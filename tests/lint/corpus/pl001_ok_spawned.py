import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def worker(rank, world_size, address):
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world_size)
    torch.cuda.set_device(rank)
    x = torch.ones(1, device="cuda")
    dist.all_reduce(x)
    if rank == world_size - 1:
        print(x)
    dist.barrier()
    dist.destroy_process_group()


def main(world_size, address="tcp://127.0.0.1:29500"):
    mp.spawn(worker, args=(world_size, address), nprocs=world_size)


if __name__ == "__main__":
    main(torch.cuda.device_count())
