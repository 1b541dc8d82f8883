import torch.distributed as dist


class Run:
    def __init__(self):
        dist.init_process_group("gloo")
        self.rank = dist.get_rank()

    def agree(self, names):
        found = [None] * dist.get_world_size()
        dist.all_gather_object(found, names)  # PL001
        return found

    def check(self, names):
        return self.rank == 0 and len(self.agree(names)) > 1


Run().check(["a"])
