import os

import numpy as np
import torch
import torch.distributed as dist


def main():
    os.environ["OMP_NUM_THREADS"] = "1"  # PL064
    os.environ["MKL_NUM_THREADS"] = "1"  # PL064
    dist.init_process_group("gloo")
    total = torch.tensor(np.ones(3))
    dist.all_reduce(total)


if __name__ == "__main__":
    main()
