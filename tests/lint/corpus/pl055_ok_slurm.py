"""The same function for SLURM and torchrun."""

import os

import torch
import torch.distributed as dist


def init_distributed_mode(args):
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        args.rank = int(os.environ["RANK"])
        args.world_size = int(os.environ["WORLD_SIZE"])
        args.gpu = int(os.environ["LOCAL_RANK"])
    elif "SLURM_PROCID" in os.environ:
        args.rank = int(os.environ["SLURM_PROCID"])
        args.gpu = args.rank % torch.cuda.device_count()
    torch.cuda.set_device(args.gpu)
    dist.init_process_group("nccl", init_method=args.dist_url, world_size=args.world_size, rank=args.rank)
    dist.barrier(device_ids=[args.gpu])


def main(args):
    init_distributed_mode(args)
    model = torch.nn.parallel.DistributedDataParallel(build_model(args).cuda(), device_ids=[args.gpu])
    train(model, args)


if __name__ == "__main__":
    main(parse_arguments())
