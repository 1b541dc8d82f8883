"""init_distributed_mode in the style of the reference scripts, with the wrong number for the device."""

import os

import torch
import torch.distributed as dist


def init_distributed_mode(args):
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        args.rank = int(os.environ["RANK"])
        args.world_size = int(os.environ["WORLD_SIZE"])
    else:
        print("Not using distributed mode")
        args.distributed = False
        return
    args.distributed = True
    args.gpu = args.rank
    torch.cuda.set_device(args.gpu)  # PL055
    dist.init_process_group(backend="nccl", init_method="env://", world_size=args.world_size, rank=args.rank)
    dist.barrier()


def main(args):
    init_distributed_mode(args)
    model = build_model(args).cuda()
    if args.distributed:
        model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[args.gpu])
    train(model, args)


if __name__ == "__main__":
    main(parse_arguments())
