import argparse

import torch
import torch.distributed as dist


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", default="tcp://localhost:58472")
    args = parser.parse_args()
    args.ngpus = torch.cuda.device_count()
    args.world_size = args.ngpus
    torch.multiprocessing.spawn(worker, (args,), args.ngpus)


def worker(gpu, args):
    dist.init_process_group("nccl", init_method=args.url, world_size=args.world_size, rank=gpu)
    found = [None] * args.world_size
    dist.all_gather_object(found, gpu)
    sampler = torch.utils.data.DistributedSampler(range(100), num_replicas=args.world_size, rank=gpu)
    print(found, len(sampler))


if __name__ == "__main__":
    main()
