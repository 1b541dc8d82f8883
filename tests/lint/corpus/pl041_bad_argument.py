import argparse

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def save(model, folder):
    torch.save({"model": model.module.state_dict()}, folder + "/last.pt")  # PL041


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="out")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    save(model, args.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
