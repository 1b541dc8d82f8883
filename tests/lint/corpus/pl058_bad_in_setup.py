import os

import torch.distributed as dist


def setup():
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["MASTER_PORT"] = str(29500 + 1)  # PL058
    dist.init_process_group("nccl")


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    setup()
    print(local_rank)


if __name__ == "__main__":
    main()
