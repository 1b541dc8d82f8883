import torch
import torch.distributed as dist

PATH = "/tmp/model.checkpoint"


def write(model):
    torch.save(model.state_dict(), PATH)


def read(model):
    model.load_state_dict(torch.load(PATH, map_location="cpu"))  # PL042


def main():
    dist.init_process_group("gloo")
    dist.barrier()
    model = torch.nn.Linear(4, 1)
    if dist.get_rank() == 0:
        write(model)
    read(model)


main()
