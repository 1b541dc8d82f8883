"""Starts the ranks of a node by a module of its own; the variable is for those."""

import os
import sys

import torch
import torch.distributed as dist
from agents import start_agent


def main():
    num_ranks = torch.cuda.device_count() if dist.is_available() else 1
    if "OMP_NUM_THREADS" not in os.environ and num_ranks > 1:
        os.environ["OMP_NUM_THREADS"] = "1"
    sys.exit(start_agent(num_ranks, sys.argv[1:]))


main()
